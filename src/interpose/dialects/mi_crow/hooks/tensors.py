"""What hooks are given: arguments by place and by name, and the one tensor of a value that hooks are about."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from interpose.taps import values


class Inputs(tuple[Any, ...]):
    """What a module was called with: arguments by place, or where it got none by place, those by name.

    ``by_name`` has every argument under its name in ``forward``, those given by keyword too.
    """

    by_name: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
        """The arguments of a call."""
        made = cls(args or kwargs.values())
        try:
            bound = inspect.signature(module.forward).bind(*args, **kwargs)
        except (TypeError, ValueError):  # a forward that tells nothing of its arguments
            made.by_name = dict(kwargs)
            return made
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            named |= dict(value) if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        made.by_name = named
        return made

    def twin(self) -> Inputs:
        """The same with copies of all tensors."""
        by_place, named = values.mapped((tuple(self), self.by_name), values.twin)
        made = Inputs(by_place)
        made.by_name = named
        return made


def main_leaf(value: Any) -> values.Leaf | None:
    """Where in a value the tensor is that hooks are about: ``last_hidden_state``, else the first; None if none is."""
    found = [leaf for leaf, _ in values.leaves(value)]
    return ("last_hidden_state",) if ("last_hidden_state",) in found else next(iter(found), None)


def main_tensor(value: Any) -> Tensor | None:
    """That tensor."""
    leaf = main_leaf(value)
    own = getattr(value, "last_hidden_state", None)  # of an object that is no container
    found: Tensor | None = None if leaf is None else values.element(value, leaf)
    return found if found is not None else own if isinstance(own, Tensor) else None


def extract_tensor_from_input(input: Any) -> Tensor | None:
    """The first tensor among a module's arguments; None if there is none."""
    return main_tensor(input)


def extract_tensor_from_output(output: Any) -> Tensor | None:
    """The tensor that a module returned: itself, the first of a container, or ``last_hidden_state``."""
    return main_tensor(output)


def with_tensor(value: Any, new: Tensor) -> Any:
    """A value with another tensor in the place of the one that hooks are about."""
    leaf = main_leaf(value)
    if leaf is None:
        raise TypeError(f"a {type(value).__name__} holds no tensor that could be replaced.")
    return values.swap(value, leaf, new)
