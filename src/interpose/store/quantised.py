"""Vectors in eight bits: whole numbers from -127 to 127, and a scale for each vector."""

from __future__ import annotations

import torch
from torch import Tensor

from interpose.errors import NonFinite


def quantised(values: Tensor, site: str) -> tuple[Tensor, Tensor]:
    """Whole numbers [vector, ...] in int8, and scales [vector] in bfloat16, so that their product is the nearest.

    Args:
        values: [vector, ...].
        site: what errors call it.
    """
    flat = values.flatten(1).float()
    most = flat.abs().amax(1)
    if not bool(most.isfinite().all()):
        raise NonFinite(f"{site!r} has NaN or Inf, which int8 cannot hold. Choose another dtype.")
    # A scale that was rounded down would cut the largest numbers off.
    scales = (most / 127 * (1 + 2**-7)).bfloat16()
    scales[scales == 0] = 1
    rounded = (flat / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return rounded.view(values.shape), scales


def restored(rounded: Tensor, scales: Tensor) -> Tensor:
    """What `quantised` was given, as near as eight bits come, in float32."""
    return rounded.float() * scales.float().view(-1, *[1] * (rounded.ndim - 1))
