"""A norm's formula, found by running it: what it multiplies with and adds, and whether it takes off the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A norm as ``factor * straight(x) / scale + summand``.

    Attributes:
        factor: [d_model], in float32 at least.
        summand: likewise.
        centred: whether it takes off the mean.
    """

    factor: Tensor
    summand: Tensor
    centred: bool

    @classmethod
    @torch.no_grad()
    def of(cls, part: Any, like: Tensor) -> Norm:
        """Measured, for a norm's weight is not always its factor (gemma adds 1). No hook hears of it.

        Args:
            part: the norm: a module, or a part of a model such as ``model.ln_final``.
            like: a value or weight that has the stream's width in its last axis.
        """
        module = getattr(part, "module", part)
        own = next(module.parameters(), like)
        signs = torch.ones(like.shape[-1], device=own.device, dtype=own.dtype)
        signs[1::2] = -1
        # Ten is so large that epsilon is nothing beside it, and small enough for 16 bits.
        up, down, raised = (
            wide(module.forward(x[None, None])[0, 0])
            for x in (10 * signs, -10 * signs, 10 * signs + 10)
        )
        centred = bool((raised - up).abs().max() < 0.1 * (up - down).abs().max())
        core = wide(signs) - wide(signs).mean() if centred else wide(signs)
        factor = (up - down) / 2 / core * core.square().mean().sqrt()
        return cls(factor, (up + down) / 2, centred)

    def straight(self, x: Tensor) -> Tensor:
        """Without its mean, where the norm takes that off."""
        return x - x.mean(-1, keepdim=True) if self.centred else x


def wide(value: Tensor) -> Tensor:
    """In float32 at least."""
    return value if value.dtype == torch.float64 else value.float()
