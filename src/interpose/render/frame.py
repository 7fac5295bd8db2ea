"""Records as tables for other programs: CSV, and pandas data frames, which are no dependency."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from interpose.render import escape


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


def csv_text(records: Iterable[Mapping[str, Any]]) -> str:
    """A line for each record below one of their names; no spreadsheet takes a text of them for a formula."""
    rows = list(records)
    head = list(dict.fromkeys(name for row in rows for name in row))
    lines = [head, *([row.get(name, "") for name in head] for row in rows)]
    return "".join(f"{','.join(map(escape.csv, line))}\n" for line in lines)
