"""What the results of analyses have in common: they print, show and save themselves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interpose.render.html import html_table, page, write
from interpose.render.text import table


class TableResult:
    """A result that is a table: text in a terminal, HTML in a notebook, a page or JSON on disk."""

    @property
    def title(self) -> str:
        """One line that says what this is."""
        raise NotImplementedError

    def head(self) -> tuple[str, ...]:
        """The names of the columns."""
        raise NotImplementedError

    def cells(self) -> list[tuple[str, ...]]:
        """The rows as they are printed."""
        raise NotImplementedError

    def html_cells(self) -> Sequence[tuple[str, ...]]:
        """The rows as they are shown in HTML; as they are printed unless it can do better."""
        return self.cells()

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain lists and dictionaries, for JSON."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return table(self.head(), self.cells(), title=self.title)

    def html(self) -> str:
        """The table as HTML."""
        return html_table(self.head(), self.html_cells(), title=self.title)

    def _repr_html_(self) -> str:
        return self.html()

    def save(self, path: str | Path) -> Path:
        """Write a page (``x.html``) or the numbers (``x.json``), and return where it is."""
        if Path(path).suffix == ".json":
            return write(path, json.dumps(self.to_dict(), indent=1))
        if Path(path).suffix == ".html":
            return write(path, page(self.title, html_table(self.head(), self.html_cells())))
        raise ValueError(f"save writes .html or .json; got {str(path)!r}.")


def number(value: float) -> str:
    """A number in four digits at most: ``0.1235``, ``12.35``, ``1.23e-07``."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:.3g}"
