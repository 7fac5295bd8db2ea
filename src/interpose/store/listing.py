"""Which stores there are in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interpose.render.text import human_bytes, table
from interpose.store.records import ABOUT
from interpose.store.store import open_store

_HEAD = ("store", "model", "sites", "rows", "tokens", "size", "state")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StoreList:
    """What `list_stores` returns: it prints as a table.

    Attributes:
        folder: where the stores are.
        stores: of each its path in there, the model, and how much it holds.
    """

    folder: str
    stores: tuple[dict[str, Any], ...]

    def _title(self) -> str:
        count = len(self.stores)
        return f"{count} {'store' if count == 1 else 'stores'} in {self.folder!r}"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                one["store"],
                one["model"],
                f"{one['sites']:,}",
                f"{one['rows']:,}",
                f"{one['tokens']:,}",
                human_bytes(one["nbytes"]),
                "complete" if one["complete"] else "not complete",
            )
            for one in self.stores
        ]

    def __repr__(self) -> str:
        return table(_HEAD, self._rows(), title=self._title())

    def _repr_html_(self) -> str:
        from interpose.render.html import html_table

        return html_table(_HEAD, self._rows(), title=self._title())


def list_stores(folder: str | Path = ".") -> StoreList:
    """Every store in a folder, however deep.

    Args:
        folder: where to look.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"there is no folder {str(folder)!r}.")
    found = []
    for file in sorted(Path(folder).rglob(ABOUT)):
        store = open_store(file.parent, verify=False)
        found.append(
            {
                "store": str(file.parent.relative_to(folder)),
                "model": store.about.model.name or store.about.model.kind,
                "sites": len(store.sites),
                "rows": len(store),
                "tokens": store.tokens,
                "nbytes": store.nbytes,
                "complete": store.complete,
            }
        )
    return StoreList(folder=str(folder), stores=tuple(found))
