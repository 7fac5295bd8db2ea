"""Hooks of a ``with model.hooks()`` block, as hook points list them and `reset_hooks` removes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from interpose.engine.hooks import Hook
from interpose.engine.points import Handle


class LentHook(Handle):
    """A hook that ends with its block, or before: with `remove`."""

    def __init__(
        self, hook: Hook, user_hook: Any, dir: str, at: frozenset[str], level: int
    ) -> None:
        self.hook = hook
        self.bindings = []
        self.direction = dir
        self.is_permanent = False
        self.level = level
        self._user_hook = user_hook
        self._at = at

    @property
    def canonicals(self) -> frozenset[str]:
        """The sites it is at, by canonical name."""
        return self._at

    @property
    def user_hook(self) -> Any:
        """The function that was given."""
        return self._user_hook

    def remove(self) -> None:
        """Let it be heard no more; doing so twice is no error."""
        self.hook.disable()


@dataclass
class Block:
    """A ``with model.hooks()`` block: what it lends, and what was added to the model inside it."""

    lent: list[LentHook] = field(default_factory=list)
    added: list[Handle] = field(default_factory=list)

    def heard(self) -> list[LentHook]:
        """What it still lends."""
        return [each for each in self.lent if each.hook.enabled]
