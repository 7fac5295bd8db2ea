"""The stamp: what is known of a module rests on it, and it is compared when a hooked run begins.

Names, call counts and what discovery found hold as long as the same parts of the same classes sit at
the same places, with the same forwards, and parameters of the same kinds and sizes (not the same
parameters: offloading puts others in with every run). Parts are held weakly: an id may be another
object's by now, and a stamp keeps nothing alive. The comparison runs in C as far as it can.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, filterfalse, repeat
from operator import attrgetter, call, is_
from typing import Any

import torch
from torch import Tensor, nn

from interpose.taps.bypass import Bypass

_CHILDREN, _PARAMETERS = attrgetter("_modules"), attrgetter("_parameters")
_IS_NONE = partial(is_, None)
_GET: Callable[[Any, str], Any] = dict.get


class Stamp:
    """How a module and everything below it is built, at one moment."""

    __slots__ = ("_children", "_forwards", "_holders", "_kinds", "_parameters", "_wholes")

    def __init__(self, root: nn.Module) -> None:
        modules = [m for m in root.modules() if not isinstance(m, torch.jit.ScriptModule)]
        wholes = [module for module in modules if module._modules]
        holders = [module for module in modules if module._parameters]
        self._wholes = list(map(weak, wholes))
        self._holders = list(map(weak, holders))
        self._children = list(map(weak, _inside(_CHILDREN, wholes)))
        self._kinds = list(map(type, [*wholes, *holders]))
        self._forwards = [weak(_without_bypass(forward)) for forward in _forwards(wholes)]
        self._parameters = _sizes(holders)

    def holds(self) -> bool:
        """Whether the module is built as it was."""
        wholes, holders = list(map(call, self._wholes)), list(map(call, self._holders))
        try:
            return (
                same(self._children, _inside(_CHILDREN, wholes))
                and _sizes(holders) == self._parameters
                and list(map(type, wholes + holders)) == self._kinds
                and (
                    same(self._forwards, _forwards(wholes))
                    or same(self._forwards, map(_without_bypass, _forwards(wholes)))
                )
            )
        except AttributeError:  # one of them is gone, and None in its place
            return False


def weak(found: Any) -> Callable[[], Any]:
    """A weak reference, also to nothing; a strong one to what takes no weak ones."""
    try:
        return _NOTHING if found is None else weakref.ref(found)
    except TypeError:
        return lambda: found


def same(references: Sequence[Callable[[], Any]], objects: Iterable[Any]) -> bool:
    """Whether references are to just these objects, in this order."""
    return all(map(is_, chain(objects, _END), chain(map(call, references), _END)))


_NOTHING: Callable[[], Any] = weakref.ref(set())  # dead already, and so quick to call
_END = (object(),)


def _inside(table: Callable[[Any], Any], modules: Iterable[nn.Module]) -> Iterable[Any]:
    return chain.from_iterable(map(dict.values, map(table, modules)))


def _sizes(holders: Iterable[nn.Module]) -> list[list[Any]]:
    """Of every parameter its class, and how many numbers of how many bytes it has."""
    found = list(filterfalse(_IS_NONE, _inside(_PARAMETERS, holders)))
    return [list(map(of, found)) for of in (type, Tensor.numel, Tensor.element_size)]


def _forwards(modules: Iterable[nn.Module]) -> Iterable[Any]:
    """What stands in modules' own forward slots; mostly nothing."""
    return map(_GET, map(vars, modules), repeat("forward"))


def _without_bypass(forward: Any) -> Any:
    """A module's own forward slot as it is without us."""
    if isinstance(forward, Bypass):
        return forward.original if forward.was_own else None
    return forward
