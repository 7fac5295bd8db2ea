"""The stamp: what is known of a module rests on it, and it is compared when a hooked run begins.

Names, call counts and what discovery found hold as long as the same modules of the same kind sit at
the same places, with parameters of the same kind, shape and dtype. Objects are held weakly: an id
may be another object's by now, and a stamp keeps no weights alive. The comparison runs in C as far
as it can, since every hooked run makes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, call, is_
from typing import Any

import torch
from torch import nn

from interpose.taps.bypass import Bypass

_INSIDE = attrgetter("_modules", "_parameters")
_LOOK = attrgetter("dtype", "shape")
_OWN: Callable[[Any, str], Any] = dict.get


class Stamp:
    """How a module and everything below it is built, at one moment."""

    __slots__ = (
        "_children", "_forwards", "_kinds", "_looks", "_modules", "_own_forwards", "_parameters",
        "_parts", "_root",
    )  # fmt: skip

    def __init__(self, root: nn.Module) -> None:
        # A part without parameters and parts of its own is what the module around it has there.
        modules = [
            module
            for module in root.modules()
            if not isinstance(module, torch.jit.ScriptModule) and any(_INSIDE(module))
        ]
        children = [child for m in modules for child in m._modules.values()]
        parts = [part for m in modules for table in _INSIDE(m) for part in table.values()]
        parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        forwards = [vars(module).get("forward") for module in modules]
        self._root = weak(root)
        self._modules = list(map(weak, modules))
        self._children = list(map(weak, children))
        self._kinds = list(map(type, [*modules, *parameters]))
        self._forwards = list(map(weak, forwards))
        self._own_forwards = [weak(_without_bypass(forward)) for forward in forwards]
        self._parts = list(map(weak, parts))
        self._parameters = list(map(weak, parameters))
        self._looks = list(map(_LOOK, parameters))

    def holds(self) -> bool:
        """Whether the module is built as it was."""
        modules = list(map(call, self._modules))
        try:
            tables = chain.from_iterable(map(_INSIDE, modules))
            return (
                same(self._parts, chain.from_iterable(map(dict.values, tables)))
                and list(map(_LOOK, map(call, self._parameters))) == self._looks
                and list(map(type, modules)) == self._kinds[: len(modules)]
                and same(self._forwards, map(_OWN, map(vars, modules), repeat("forward")))
            ) or self._holds_in_substance()
        except AttributeError:  # one of them is gone
            return False

    def _holds_in_substance(self) -> bool:
        """Whether only parameters were exchanged for others of their kind (offloading does), or a bypass is ours."""
        now = Stamp(self._root())
        if not (
            self._kinds == now._kinds
            and self._looks == now._looks
            and same(self._children, map(call, now._children))
            and same(self._own_forwards, map(call, now._own_forwards))
        ):
            return False
        for name in self.__slots__:
            setattr(self, name, getattr(now, name))
        return True


_END = object()
_NOTHING: Callable[[], Any] = weakref.ref(set())  # dead already, and so quick to call


def weak(found: Any) -> Callable[[], Any]:
    """A weak reference, also to nothing; a strong one to what takes no weak ones."""
    try:
        return _NOTHING if found is None else weakref.ref(found)
    except TypeError:
        return lambda: found


def same(references: Sequence[Callable[[], Any]], objects: Iterable[Any]) -> bool:
    """Whether references are to just these objects, in this order."""
    return all(map(is_, chain(objects, (_END,)), chain(map(call, references), (_END,))))


def _without_bypass(forward: Any) -> Any:
    """A module's own forward slot as it is without us."""
    if isinstance(forward, Bypass):
        return forward.original if forward.was_own else None
    return forward
