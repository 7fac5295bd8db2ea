"""The edits that need nothing but the value itself.

Each is a small frozen dataclass with one method: what it makes of a value. ``at`` narrows it to a
part of the value, written as an index: ``at=(slice(None), 3)`` is ``value[:, 3]``. Tensors move to
the value's device and dtype by themselves. The same edit gives the same result each time, so that
activation checkpointing may repeat it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from interpose.engine.hooks import Controller
from interpose.engine.points import HookPoint
from interpose.sites.tree import Filter

Value = float | Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Edit(Controller):
    """A controller that is plain data: what it does is its fields."""

    sites: Filter
    at: Any = field(default=..., kw_only=True)

    @property
    def label(self) -> str:
        """What errors call it: itself."""
        return repr(self)

    def new(self, part: Tensor, hook: HookPoint) -> Value:
        """What takes the place of the selected part."""
        raise NotImplementedError

    def change(self, value: Tensor, hook: HookPoint) -> Tensor:
        """Replace the selected part and leave the rest."""
        part = value[self.at]
        if part.numel() == 0:
            raise ValueError(
                f"{self!r} selects nothing of {hook.name!r}, which is {tuple(value.shape)}."
            )
        value[self.at] = self.new(part, hook)
        return value


def _like(what: Value, part: Tensor) -> Value:
    if isinstance(what, Tensor):
        return what.to(device=part.device, dtype=part.dtype)
    if not isinstance(what, (int, float, complex)):
        raise TypeError(f"an edit takes a number or a tensor; got {type(what).__name__}.")
    return what


@dataclass(frozen=True, eq=False, repr=False)
class zero(Edit):
    """Set values to zero: ``ip.zero("layer2")``, or one channel with ``at=(slice(None), 3)``."""

    def new(self, part: Tensor, hook: HookPoint) -> Value:  # noqa: ARG002
        """Zero."""
        return 0


@dataclass(frozen=True, eq=False, repr=False)
class fill(Edit):
    """Set values to a number, or to a tensor that broadcasts to them: ``ip.fill("fc1", mean)``."""

    value: Value

    def new(self, part: Tensor, hook: HookPoint) -> Value:  # noqa: ARG002
        """The given value."""
        return _like(self.value, part)


@dataclass(frozen=True, eq=False, repr=False)
class add(Edit):
    """Add a number or a tensor: ``ip.add("fc1", direction)``."""

    value: Value

    def new(self, part: Tensor, hook: HookPoint) -> Value:  # noqa: ARG002
        """The sum."""
        return part + _like(self.value, part)


@dataclass(frozen=True, eq=False, repr=False)
class scale(Edit):
    """Multiply by a number or a tensor: ``ip.scale("fc1", 0.5)``."""

    by: Value

    def new(self, part: Tensor, hook: HookPoint) -> Value:  # noqa: ARG002
        """The product."""
        return part * _like(self.by, part)


@dataclass(frozen=True, eq=False, repr=False)
class noise(Edit):
    """Add Gaussian noise: ``ip.noise("fc1", 0.1, seed=0)``.

    With a seed, each site gets noise of its own, the same in every run. Without one it is drawn
    from torch's random state.
    """

    std: float
    seed: int | None = field(default=None, kw_only=True)

    def new(self, part: Tensor, hook: HookPoint) -> Value:
        """The value plus noise."""
        generator = None
        if self.seed is not None:
            generator = torch.Generator(part.device)
            generator.manual_seed(self.seed + zlib.crc32(hook.canonical.encode()))
        drawn = torch.randn(part.shape, generator=generator, device=part.device, dtype=part.dtype)
        return part + self.std * drawn
