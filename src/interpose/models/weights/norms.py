"""What a norm multiplies with and adds, found by running it: its weight is not always its factor (gemma adds 1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interpose.errors import Unsupported
from interpose.models.discovery.anatomy import Norm
from interpose.taps import context

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel


def norm_at(model: TransformerModel, path: str) -> Norm | None:
    """The norm of a name: ``ln_final``, ``blocks.3.ln1``; None if there is none."""
    for tower in model.anatomy.towers:
        if path == f"{tower.prefix}ln_final":
            return tower.final_norm
        for block in tower.blocks:
            at = f"{tower.prefix}blocks.{block.index}."
            if path.startswith(at):
                return block.norms.get(path[len(at) :])
    return None


@contextmanager
def unheard() -> Iterator[None]:
    """A ``with`` block in which the model's hooks hear nothing."""
    token = context.stand_down()
    try:
        yield
    finally:
        context.stand_up(token)


@torch.no_grad()
def affine(norm: Norm, width: int) -> tuple[Tensor, Tensor]:
    """The factor and the summand of a norm, each [width]: it returns ``factor * x / scale + summand``.

    Args:
        norm: whose formula is known.
        width: how many features it takes.
    """
    if norm.why_not:
        raise Unsupported(f"{norm.place.path} is no norm of the usual formula: {norm.why_not}.")
    module = norm.place.module
    like = next(module.parameters(), torch.empty(0))
    signs = torch.ones(1, 1, width, device=like.device, dtype=like.dtype)
    signs[..., 1::2] = -1
    core = signs - signs.mean() if norm.centred else signs
    core = core / (core.square().mean() + norm.eps).sqrt()
    with unheard():
        up, down = module.forward(signs), module.forward(-signs)
    return ((up - down) / (2 * core))[0, 0], ((up + down) / 2)[0, 0]
