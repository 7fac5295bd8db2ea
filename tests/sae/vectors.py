"""Vectors to learn from: sums of few of some directions, away from zero."""

from __future__ import annotations

import torch
from torch import Tensor


def mixed(count: int, features: int = 20, width: int = 8, seed: int = 0) -> Tensor:
    """So many vectors; the directions are the same for every seed."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.nn.functional.normalize(
        torch.randn(features, width, generator=torch.Generator().manual_seed(99)), dim=-1
    )
    some = torch.rand(count, features, generator=draw) < 0.08
    return (torch.rand(count, features, generator=draw) + 0.5) * some @ rows + 0.5
