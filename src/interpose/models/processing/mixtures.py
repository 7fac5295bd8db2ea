"""Modules that read a norm with weights of their own: routers, and experts kept in one tensor.

No name says along which axis such a weight reads. But where a feature is zero, what is along the axis
that reads it does not matter; along any other axis it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interpose.errors import Unsupported
from interpose.models.discovery.record import Event, Value
from interpose.models.processing import observed
from interpose.models.processing.linear import put, wide
from interpose.models.transformer import TransformerModel
from interpose.taps import values
from interpose.taps.tap import given_arguments, named_arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWeight:
    """A weight that reads the stream along one of its axes."""

    path: str
    module: nn.Module
    name: str
    axis: int


def own_weights(model: TransformerModel, event: Event, value: Value) -> list[OwnWeight]:
    """The weights of a module, not of its parts, with which it reads a value."""
    module, width = event.module, value.shape[-1]
    axes = [
        (name, axis)
        for name, weight in module._parameters.items()
        if weight is not None and weight.ndim > 1
        for axis in range(weight.ndim)
        if weight.shape[axis] == width
    ]
    if not axes:
        return []
    for name in {name for name, _ in axes}:
        _check_plain(event.path, module, name)
    args, kwargs = observed.arguments(model, module)
    named = named_arguments(module, args, kwargs)
    given = named.get(str(value.leaf[0]))
    if not isinstance(given, Tensor):
        return []
    without = given.clone()
    without[..., 0] = 0

    def run() -> list[Tensor]:
        new = given_arguments(module, args, kwargs, {**named, str(value.leaf[0]): without})
        with torch.no_grad(), torch.random.fork_rng():
            made = type(module).forward(module, *new[0], **new[1])
        return [tensor.clone() for _, tensor in values.leaves(made)]

    found = [
        OwnWeight(path=event.path, module=module, name=name, axis=axis)
        for name, axis in axes
        if _ignores(module._parameters[name], axis, run)
    ]
    names = [own.name for own in found]
    if len(names) != len(set(names)):
        raise Unsupported(
            f"it is not known along which axis {event.path} ({type(module).__name__}) reads with "
            f"its {', '.join(sorted(set(names)))}."
        )
    return found


def _check_plain(path: str, module: nn.Module, name: str) -> None:
    weight = module._parameters[name]
    if weight is None or weight.is_meta or not weight.is_floating_point() or weight.itemsize == 1:
        raise Unsupported(
            f"the {name} of {path} ({type(module).__name__}) is quantised, or not here."
        )


def _ignores(weight: Any, axis: int, run: Callable[[], list[Tensor]]) -> bool:
    """Whether a run stays as it is when the first slice of a weight along an axis is another."""
    first = weight.detach().select(axis, 0)
    before, kept = run(), first.clone()
    try:
        put(first, kept.flip(0) + 1)
        after = run()
    finally:
        put(first, kept)
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def fold_into(own: OwnWeight, factor: Tensor, *, centred: bool) -> None:
    """Let a weight multiply with what the norm before it did; the mean of what is centred reads nothing."""
    weight = own.module._parameters[own.name]
    assert weight is not None
    moved = wide(weight).movedim(own.axis, -1)
    moved = moved * factor.to(moved)
    moved = moved - moved.mean(-1, keepdim=True) if centred else moved
    put(weight, moved.movedim(-1, own.axis))
