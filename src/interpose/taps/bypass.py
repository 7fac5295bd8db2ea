"""Stand before a module's forward: to skip it, or to run it inside something.

torch binds ``module.forward`` before it runs pre-hooks, so no hook can skip a forward, nor be sure
to clean up after one that raises. While someone may want that, a bypass sits in the module's own
``forward`` slot; calls from outside the scope pass straight through it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from interpose.taps import tap


class Bypasser(Protocol):
    """A wish to stand before a module's forward."""

    def is_wanted(self) -> bool:
        """Whether it means this call."""

    def output(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the module returns; ``forward`` is the rest of the way."""


class Bypass:
    """Stands in a module's ``forward`` slot and asks its bypassers first."""

    def __init__(self, module: nn.Module) -> None:
        self.original = module.forward
        self.__wrapped__ = module.forward  # for inspect.signature
        self.was_own = "forward" in vars(module)
        self.bypassers: tuple[Bypasser, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # An unpickled module gets its plain bound forward.
        owner = getattr(self.original, "__self__", None)
        return getattr, (owner, "forward") if owner is not None else (self.original, "__call__")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Let the bypassers decide, the last to come first; the module's own forward is last."""
        forward = self.original
        for bypasser in self.bypassers:
            if bypasser.is_wanted():
                forward = functools.partial(_through, bypasser, forward)
        return forward(*args, **kwargs)


def _through(bypasser: Bypasser, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return bypasser.output(forward, args, kwargs)


def bypass(module: nn.Module, bypasser: Bypasser) -> None:
    """Let a bypasser decide about a module's forward."""
    with tap._LOCK:
        slot = vars(module).get("forward")
        if not isinstance(slot, Bypass):
            slot = Bypass(module)
            module.forward = slot
        slot.bypassers = (*slot.bypassers, bypasser)


def unbypass(module: nn.Module, bypasser: Bypasser) -> None:
    """Undo `bypass`; the last one out puts the module's forward back as it was."""
    with tap._LOCK:
        slot = vars(module).get("forward")
        if not isinstance(slot, Bypass):
            return
        slot.bypassers = tuple(other for other in slot.bypassers if other is not bypasser)
        if not slot.bypassers:
            if slot.was_own:
                module.forward = slot.original
            else:
                del module.forward
