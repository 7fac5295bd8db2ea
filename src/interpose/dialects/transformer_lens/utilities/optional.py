"""Libraries that interpose does without until a function is called that is about them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def is_library_available(name: str) -> bool:
    """Whether a library is installed."""
    return importlib.util.find_spec(name) is not None


def needs(library: str, function: str) -> Any:
    """A library; an error with the line that installs it if it is not there."""
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library:  # it is there, and something that it needs is not
            raise
        raise ModuleNotFoundError(
            f"{function} needs {library}, which is not installed: pip install {library}",
            name=library,
        ) from None
