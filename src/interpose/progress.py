"""How far a long job is: a bar, or a function that may end it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, Self, TypeVar

from interpose.errors import Cancelled

Item = TypeVar("Item")
ShowProgress = bool | Callable[[int, int | None], Any]
"""True for a bar, False for nothing, or a function of what is done and of the whole, None where that is not known."""

_MANY = 10_000
"""From so many on a bar counts in thousands."""


class Progress:
    """A ``with`` block around a job that says how far it is.

    Args:
        how: True for a bar (where there is a terminal or a notebook), False for nothing, or a function of what is done
            and of the whole; it ends the job by returning False.
        total: the whole, None where that is not known.
        unit: what is counted, one of it.
        note: what else a bar says of so much that is done.
        keeps: whether a job that is told to end leaves the block quietly, so that `whole` can hand over what is done.
    """

    def __init__(
        self,
        how: ShowProgress,
        total: int | None,
        unit: str = "row",
        *,
        note: Callable[[int], str] | None = None,
        keeps: bool = False,
    ) -> None:
        self.how = how
        self.total = total
        self.unit = unit
        self.note = note
        self.keeps = keeps
        self.ended: Cancelled | None = None
        self.done = 0
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self.how is True and has_screen():
            from tqdm.auto import tqdm

            many = self.total is not None and self.total >= _MANY
            unit = f" {self.unit}s" if many else self.unit
            self._bar = tqdm(total=self.total, unit=unit, unit_scale=many, leave=False)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        if self._bar is not None:
            self._bar.close()
        return self.keeps and error is not None and error is self.ended

    def whole(self, result: Item) -> Item:
        """A result, if the job has come to its end; else the error that ended it, which carries what is done."""
        if self.ended is not None:
            self.ended.result = result
            raise self.ended
        return result

    def step(self, count: int = 1) -> None:
        """Some more is done."""
        self.done += count
        if self._bar is not None:
            if self.note is not None:
                self._bar.set_postfix_str(self.note(self.done), refresh=False)
            self._bar.update(count)
        elif callable(self.how) and self.how(self.done, self.total) is False:
            whole = "" if self.total is None else f" of {self.total}"
            more = " What is done is the error's result." if self.keeps else ""
            self.ended = Cancelled(f"ended after {self.unit} {self.done}{whole}.{more}")
            raise self.ended


def has_screen() -> bool:
    """Whether a bar would be seen: in a terminal, or in a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def count(items: Iterable[Any]) -> int | None:
    """How many there are, where that is known beforehand."""
    return len(items) if isinstance(items, Sized) else None


def tracked(
    items: Sequence[Item],
    how: ShowProgress,
    unit: str = "text",
    size: Callable[[Item], int] = len,  # type: ignore[assignment]
) -> Iterator[Item]:
    """Items one by one, telling after each how far the job is.

    Args:
        items: batches, usually.
        how: as in `Progress`.
        unit: what is counted.
        size: how many of it an item has.
    """
    with Progress(how, sum(map(size, items)), unit) as progress:
        for item in items:
            yield item
            progress.step(size(item))
