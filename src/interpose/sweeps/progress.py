"""How far a long job is: a bar, or a function that may end it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from interpose.errors import Cancelled


class Progress:
    """A ``with`` block around a job that says how far it is.

    Args:
        how: True for a bar, False for nothing, or a function of what is done and of the whole; it ends the job by
            returning False.
        total: the whole.
    """

    def __init__(self, how: bool | Callable[[int, int], Any], total: int) -> None:
        self.how = how
        self.total = total
        self.done = 0
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self.how is True:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=self.total, desc="sweep", unit="row", leave=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, count: int) -> None:
        """Some more is done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif callable(self.how) and self.how(self.done, self.total) is False:
            raise Cancelled(f"ended after {self.done} of {self.total} rows.")
