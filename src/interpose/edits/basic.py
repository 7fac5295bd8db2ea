"""The edits that need nothing but the value itself and numbers.

Each is a small frozen dataclass with one method: what it makes of the selected part. The same edit
gives the same result each time, so that activation checkpointing may repeat it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from interpose.edits.edit import Edit, Spot, Value


@dataclass(frozen=True, eq=False, repr=False)
class zero(Edit):
    """Set values to zero: ``ip.zero("layer2")``, or one head with ``ip.zero("z", layer=3, head=5)``."""

    def new(self, part: Tensor, spot: Spot) -> Any:  # noqa: ARG002
        """Zero."""
        return 0


@dataclass(frozen=True, eq=False, repr=False)
class fill(Edit):
    """Set values to a number, or to a tensor that broadcasts to them: ``ip.fill("fc1", mean)``."""

    value: Value

    def new(self, part: Tensor, spot: Spot) -> Any:  # noqa: ARG002
        """The given value."""
        return spot.given(self.value)


@dataclass(frozen=True, eq=False, repr=False)
class add(Edit):
    """Add a number or a tensor: ``ip.add("resid_post", direction, layer=4)``.

    A mapping from site names to tensors adds to each site its own.
    """

    value: Value

    def new(self, part: Tensor, spot: Spot) -> Any:
        """The sum."""
        return part + spot.given(self.value)


@dataclass(frozen=True, eq=False, repr=False)
class scale(Edit):
    """Multiply by a number or a tensor: ``ip.scale("fc1", 0.5)``."""

    by: Value

    def new(self, part: Tensor, spot: Spot) -> Any:
        """The product."""
        return part * spot.given(self.by)


@dataclass(frozen=True, eq=False, repr=False)
class clamp(Edit):
    """Keep values between two bounds, of which one may be missing: ``ip.clamp("post", max=3.0)``."""

    min: Value | None = None
    max: Value | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min is None and self.max is None:
            raise TypeError(f"{self!r}: say min, max or both.")

    def new(self, part: Tensor, spot: Spot) -> Any:
        """The value, or the bound that it would pass."""
        bounds = [None if bound is None else spot.given(bound) for bound in (self.min, self.max)]
        if any(isinstance(bound, Tensor) for bound in bounds):
            bounds = [
                bound if bound is None else torch.as_tensor(bound, dtype=part.dtype).to(part.device)
                for bound in bounds
            ]
        return torch.clamp(part, *bounds)


@dataclass(frozen=True, eq=False, repr=False)
class noise(Edit):
    """Add Gaussian noise: ``ip.noise("fc1", 0.1, seed=0)``.

    With a seed, each site gets noise of its own, the same in every run. Without one it is drawn
    from torch's random state. While text is generated each position has noise of its own, the same with
    and without a KV cache.
    """

    std: float
    seed: int | None = field(default=None, kw_only=True)

    def new(self, part: Tensor, spot: Spot) -> Any:
        """The value plus noise."""
        if self.seed is None:
            drawn = torch.randn(part.shape, device=part.device, dtype=part.dtype)
            return part + self.std * drawn
        seed = self.seed + zlib.crc32(spot.hook.canonical.encode())
        hook, axis = spot.hook, spot.block.pos
        window = None if axis is None else hook.window(spot.whole.shape, axis)
        if axis is None or window is None or window.is_all:
            return part + self.std * _drawn(part.shape, seed, part)
        sizes = list(spot.whole.shape)
        length = sizes.pop(axis)
        lines = [
            _drawn(sizes, seed + 1_000_003 * (window.first + place), part)
            for place in range(length)
        ]
        return part + self.std * spot.cut(torch.stack(lines, axis))


def _drawn(shape: Any, seed: int, like: Tensor) -> Tensor:
    generator = torch.Generator(like.device)
    generator.manual_seed(seed)
    return torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)
