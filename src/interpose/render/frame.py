"""Records as a pandas data frame, which is not a dependency."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any


def data_frame(records: Iterable[Mapping[str, Any]]) -> Any:
    """A row for each record, or the line that installs pandas."""
    try:
        pandas = importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "to_pandas makes a pandas data frame: pip install pandas. Without it, `records()` has the same rows as "
            "dictionaries.",
            name="pandas",
        ) from error
    return pandas.DataFrame(list(records))
