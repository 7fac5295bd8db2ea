"""Skip a module: its hooks run, its forward does not, and a replacement is returned instead.

torch binds ``module.forward`` before it runs pre-hooks, so no hook can skip a forward. While
someone may skip a module, a bypass sits in the module's own ``forward`` slot; calls from outside
the scope pass straight through it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from interpose.taps import tap
from interpose.taps.context import current, graph_task, in_autograd_thread, is_heard


class Skipper(Protocol):
    """A wish to skip a module."""

    scope: object | None

    def wants_to_skip(self) -> bool:
        """Whether it means it now."""

    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns instead."""


class Bypass:
    """Stands in a module's ``forward`` slot and asks its skippers first."""

    def __init__(self, module: nn.Module) -> None:
        self.original = module.forward
        self.__wrapped__ = module.forward  # for inspect.signature
        self.was_own = "forward" in vars(module)
        self.skippers: tuple[Skipper, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # An unpickled module gets its plain bound forward.
        owner = getattr(self.original, "__self__", None)
        return getattr, (owner, "forward") if owner is not None else (self.original, "__call__")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a skipper's replacement, or what the module's own forward returns."""
        # Autograd's threads have no context: a recomputation there is everybody's.
        anyone = graph_task() != -1 and in_autograd_thread()
        here = current()
        for skipper in reversed(self.skippers):
            if (anyone or is_heard(skipper.scope, here)) and skipper.wants_to_skip():
                return skipper.output(args, kwargs)
        return self.original(*args, **kwargs)


def skip(module: nn.Module, skipper: Skipper) -> None:
    """Let a skipper decide about a module's forward."""
    with tap._LOCK:
        bypass = vars(module).get("forward")
        if not isinstance(bypass, Bypass):
            bypass = Bypass(module)
            module.forward = bypass
        bypass.skippers = (*bypass.skippers, skipper)


def unskip(module: nn.Module, skipper: Skipper) -> None:
    """Undo `skip`; the last one out puts the module's forward back as it was."""
    with tap._LOCK:
        bypass = vars(module).get("forward")
        if not isinstance(bypass, Bypass):
            return
        bypass.skippers = tuple(other for other in bypass.skippers if other is not skipper)
        if not bypass.skippers:
            if bypass.was_own:
                module.forward = bypass.original
            else:
                del module.forward
