"""The stamp: what is known of a module rests on it, and it is compared when a hooked run begins.

Names, call counts and what discovery found hold as long as the same parts of the same classes sit at
the same places, with the same forwards (their classes' and their own), and parameters of the same
kinds, shapes and dtypes. Not the same parameters: offloading puts others in with every run, and a
stamp keeps no weights alive. Parts are held, for the id of one that is gone may be another's.

Every hooked run compares, in C as far as that goes: all parts, and the parameters and own forwards of
those modules whose sites it asks for. What looks at weights compares those of all modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from interpose.taps.bypass import Bypass

_CHILDREN, _PARAMETERS = attrgetter("_modules"), attrgetter("_parameters")
_FORWARD = attrgetter("forward")
_LOOK = attrgetter("__class__", "dtype", "shape")
_GET: Callable[[Any, str], Any] = dict.get


class Stamp:
    """How a module and everything below it is built, at one moment."""

    def __init__(self, root: nn.Module) -> None:
        modules = [m for m in root.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._wholes = [module for module in modules if module._modules]
        self._leaves = [module for module in modules if not module._modules]
        self._holders = [module for module in modules if module._parameters]
        self._children = self._parts()
        self._kinds = list(map(type, self._wholes + self._holders))
        self._classes = list(dict.fromkeys(map(type, modules)))
        self._written = list(map(_FORWARD, self._classes))
        self._forwards = list(map(_without_bypass, self._own_forwards()))
        self._counts = list(map(len, map(_PARAMETERS, self._holders)))
        self._modules = modules
        self._looks = {id(module): _looks([module]) for module in modules}
        self._all = _looks(modules)

    def _parts(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, map(_CHILDREN, self._wholes))))

    def _own_forwards(self) -> list[Any]:
        """What stands in the own forward slots of modules with parts; mostly nothing."""
        return list(map(_GET, map(vars, self._wholes), repeat("forward")))

    def holds(self) -> bool:
        """Whether the same parts are there."""
        return (
            self._parts() == self._children
            and not any(map(_CHILDREN, self._leaves))
            and list(map(type, self._wholes + self._holders)) == self._kinds
            and list(map(len, map(_PARAMETERS, self._holders))) == self._counts
            and list(map(_FORWARD, self._classes)) == self._written
            and (
                (now := self._own_forwards()) == self._forwards
                or list(map(_without_bypass, now)) == self._forwards
            )
        )

    def holds_for(self, modules: Iterable[nn.Module] | None = None) -> bool:
        """Whether the parameters and own forwards of some modules look the same; by default of all that `holds`."""
        if modules is None:
            return _looks(self._modules) == self._all
        return all(_looks([m]) == self._looks[id(m)] for m in modules if id(m) in self._looks)


def _looks(modules: Sequence[nn.Module]) -> list[Any]:
    """Classes of modules, how many parts they have, their own forwards, and the kinds of their parameters."""
    held, parts = list(map(_PARAMETERS, modules)), map(_CHILDREN, modules)
    forwards = list(map(_without_bypass, map(_GET, map(vars, modules), repeat("forward"))))
    kinds = [p if p is None else _LOOK(p) for p in chain.from_iterable(map(dict.values, held))]
    return [*map(type, modules), *map(len, parts), *map(len, held), forwards, kinds]


def _without_bypass(forward: Any) -> Any:
    """A module's own forward slot as it is without us."""
    if isinstance(forward, Bypass):
        return forward.original if forward.was_own else None
    return forward
