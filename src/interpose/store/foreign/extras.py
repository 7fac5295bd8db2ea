"""Packages that only exporting and importing need."""

from __future__ import annotations

import importlib
from typing import Any

from interpose.errors import Unsupported


def needed(package: str, what: str) -> Any:
    """A package, or an error that says how to install it.

    Args:
        package: its name.
        what: what needs it.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise Unsupported(
            f"{what} needs {package.partition('.')[0]}: pip install 'interpose[tables]'."
        ) from None
