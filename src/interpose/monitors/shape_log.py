"""What passes through a model: every shape, dtype and device, in the order the model makes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from interpose.engine.hooks import Detector
from interpose.engine.points import HookPoint
from interpose.results.result import Result
from interpose.sites.tree import Filter


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRow:
    """One value that passed by."""

    site: str
    call: int | None
    shape: tuple[int, ...]
    dtype: str
    device: str


class ShapeLog(Result, Detector):
    """Writes down what passes through each site, as it happens. It prints as a table.

    ```python
    log = ip.ShapeLog()
    model.run_with_hooks(x, hooks=[log])
    print(log)
    ```

    A module returns after the modules inside it, so a block stands below its parts.

    Args:
        site: where; None for the output of every module.
        rows: what it begins with.
    """

    def __init__(self, site: Filter = None, *, rows: Iterable[ShapeRow] = ()) -> None:
        super().__init__(site, copies=False)
        self.rows: list[ShapeRow] = list(rows)

    def read(self, value: Tensor, hook: HookPoint) -> None:
        """Write a line."""
        dtype = str(value.dtype).removeprefix("torch.")
        self.rows.append(
            ShapeRow(
                site=hook.name,
                call=hook.call,
                shape=tuple(value.shape),
                dtype=dtype,
                device=str(value.device),
            )
        )

    def clear(self) -> None:
        """Begin again with an empty log."""
        self.rows.clear()

    @property
    def title(self) -> str:
        """One line that says what this is."""
        return f"Shape log of {len(self.rows)} values"

    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return ("site", "call", "shape", "dtype", "device")

    def cells(self) -> list[tuple[str, ...]]:
        """One row per value."""
        return [
            (
                row.site,
                "-" if row.call is None else str(row.call),
                str(row.shape),
                row.dtype,
                row.device,
            )
            for row in self.rows
        ]

    def records(self) -> Iterator[dict[str, Any]]:
        """Every value that passed by as a dictionary; its value is how many elements it had."""
        for row in self.rows:
            yield {**asdict(row), "value": math.prod(row.shape)}

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """All it is made of: the annotation of each part, by its name."""
        return {"rows": list[ShapeRow]}
