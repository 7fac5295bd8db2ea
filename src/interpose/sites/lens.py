"""What a site may carry besides its module: how its value lies in the module's own, and what must be on for it.

A **lens** shows a value inside a larger one (the heads of a projection, one part of a fused one) and
writes it back. A **switch** turns on what makes a site's value flow at all, such as attention that
computes its scores. The engine knows only these two protocols; `models/reach/lenses.py` has the lenses.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Lens(Protocol):
    """A view of a module's value, both ways."""

    @property
    def in_place(self) -> bool:
        """Whether a new value is written into the old tensor, so that all who hold it see it."""

    @property
    def needs_call(self) -> bool:
        """Whether it looks at more of the call than the value itself."""

    def read(self, raw: Tensor, call: Any) -> Tensor:
        """The site's value, given the module's."""

    def write(self, raw: Tensor, value: Tensor, call: Any) -> Tensor | None:
        """The module's value with the site's replaced; None if that was done in place."""


class Switch(Protocol):
    """Counts who needs it, and is on while anyone does."""

    def on(self) -> None:
        """One more needs it."""

    def off(self) -> None:
        """One less."""
