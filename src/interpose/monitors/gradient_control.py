"""Hooks that take a hand in the backward pass of an ordinary training loop: clip, scale, add noise.

A gradient changed at a site is what every earlier layer, and its parameters, are trained with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from interpose.engine.hooks import Controller
from interpose.engine.points import HookPoint
from interpose.sites.tree import Filter


@dataclass(frozen=True, repr=False)
class clip_grad(Controller):
    """Shorten the gradient at a site to at most this L2 norm, over the whole tensor.

    Example:
        ``with model.hooks([ip.clip_grad("encoder", 1.0)]): loss(model(x), y).backward()``

    Args:
        site: where.
        max_norm: the longest norm that passes.
    """

    site: Filter
    max_norm: float

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ValueError(f"max_norm must be above 0; got {self.max_norm}.")

    def change_grad(self, grad: Tensor, hook: HookPoint) -> Tensor:  # noqa: ARG002 - a hook's signature
        """The gradient, shortened on the device without waiting for it."""
        # Norms of half-precision gradients overflow, so they are taken in float32 at least.
        wide = torch.promote_types(grad.dtype, torch.float32)
        norm: Tensor = torch.linalg.vector_norm(grad, dtype=wide)
        shorter = grad.to(wide) * torch.clamp(self.max_norm / norm, max=1.0)
        return _toward_zero(shorter, grad.dtype)


def _toward_zero(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A value with fewer bits, no element of it larger than it was: a bound still holds."""
    if value.dtype == dtype:
        return value
    found = value.to(dtype)
    # Floats of 16 bits, read as integers, count up with their magnitude.
    lower = (found.view(torch.int16) - 1).view(dtype)
    return torch.where(found.to(value.dtype).abs() > value.abs(), lower, found)


@dataclass(frozen=True, repr=False)
class scale_grad(Controller):
    """Multiply the gradient at a site: 0 freezes what comes before it, -1 reverses it.

    Example:
        ``ip.scale_grad("features", -1.0)`` trains the features against the loss.

    Args:
        site: where.
        factor: what to multiply with.
    """

    site: Filter
    factor: float

    def change_grad(self, grad: Tensor, hook: HookPoint) -> Tensor:  # noqa: ARG002
        """The gradient times the factor."""
        return grad * self.factor


@dataclass(frozen=True, repr=False)
class noise_grad(Controller):
    """Add normal noise to the gradient at a site.

    Args:
        site: where.
        std: the standard deviation of the noise.
        seed: makes the noise repeatable and leaves PyTorch's own random numbers alone; each new
            ``noise_grad`` with a seed begins its series anew. None draws from PyTorch's generator.
    """

    site: Filter
    std: float
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.std >= 0:
            raise ValueError(f"std must be 0 or above; got {self.std}.")

    def change_grad(self, grad: Tensor, hook: HookPoint) -> Tensor:  # noqa: ARG002
        """The gradient with noise."""
        noise = torch.empty_like(grad).normal_(
            0.0, self.std, generator=self._generator(grad.device)
        )
        return grad + noise

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if self.seed is None:
            return None
        known: dict[torch.device, torch.Generator] = vars(self).setdefault("_generators", {})
        if device not in known:
            known[device] = torch.Generator(device).manual_seed(self.seed)
        return known[device]
