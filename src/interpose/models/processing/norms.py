"""Norms that can be folded: which ones, what each multiplies with and adds, and how it is made to do neither."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from interpose.errors import Unsupported
from interpose.models.discovery.anatomy import Anatomy, Norm
from interpose.models.processing.linear import put, wide
from interpose.models.weights import views
from interpose.models.weights.norms import affine


def norms_before_branches(anatomy: Anatomy) -> Iterator[tuple[str, Norm]]:
    """Norms that stand before attention, an MLP or a mixer, by name."""
    for tower in anatomy.towers:
        for block in tower.blocks:
            for name, norm in block.norms.items():
                if not norm.reads_sum:
                    yield f"{tower.prefix}blocks.{block.index}.{name}", norm


def final_norms(anatomy: Anatomy) -> Iterator[tuple[str, Norm]]:
    """The norms at the ends of towers, by name."""
    for tower in anatomy.towers:
        if tower.final_norm is not None:
            yield f"{tower.prefix}ln_final", tower.final_norm


@torch.no_grad()
def takes_off_the_mean(norm: Norm) -> bool:
    """Whether a norm leaves out what all features have in common, found by running it."""
    module, width = norm.place.module, norm.place.shape[-1]
    like = next(module.parameters(), torch.empty(0))
    made = torch.linspace(-1, 1, width, dtype=torch.float64).square()
    x = made.to(like.device, like.dtype).reshape(1, 1, width)
    far = float((module.forward(x + 1) - module.forward(x)).abs().max())
    return far <= 1e-2 * float(module.forward(x).abs().max())


def factor_and_summand(norm: Norm) -> tuple[Tensor, Tensor]:
    """What a norm multiplies with and adds, each ``[d_model]``, wide."""
    module, width = norm.place.module, norm.place.shape[-1]
    if not list(module.parameters()):
        ones = torch.ones(width, dtype=torch.float64)
        return ones, torch.zeros_like(ones)
    near, added = (wide(found) for found in affine(norm, width))
    weight, bias = (views.parameter(norm.place, name) for name in ("weight", "bias"))
    close = 1e-5 if near.dtype == torch.float64 and _is_single(module) else 1e-2
    candidates = [torch.ones_like(near)]
    if weight is not None:
        candidates = [wide(weight).reshape(-1), 1 + wide(weight).reshape(-1)]
    factor = next((c for c in candidates if _alike(c, near, close)), None)
    summand = torch.zeros_like(near) if bias is None else wide(bias).reshape(-1)
    if factor is None or not _alike(summand, added, close):
        raise Unsupported(
            f"{norm.place.path} ({type(module).__name__}) does something else with its parameters "
            "than multiply with its weight (or 1 + weight) and add its bias."
        )
    return factor, summand


def _is_single(module: torch.nn.Module) -> bool:
    return all(p.dtype in (torch.float32, torch.float64) for p in module.parameters())


def _alike(a: Tensor, b: Tensor, close: float) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= close * (1 + b.abs().max()))


def neutralise(norm: Norm) -> None:
    """Make a norm multiply with 1 and add 0."""
    weight, bias = (views.parameter(norm.place, name) for name in ("weight", "bias"))
    factor, _ = factor_and_summand(norm)
    if weight is not None:
        offset = factor - wide(weight).reshape(-1)  # 0, or 1 where the module adds it
        put(weight, (1 - offset.round()).reshape(weight.shape))
    if bias is not None:
        put(bias, torch.zeros_like(bias))
