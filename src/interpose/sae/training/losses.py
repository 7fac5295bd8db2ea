"""What each architecture makes as small as it can, for one batch.

All have the squared error, summed over features, a mean over vectors. What keeps latents few, and alive, differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interpose.precision import wide
from interpose.sae.matching_pursuit import MatchingPursuitSAE
from interpose.sae.relu import GatedSAE, JumpReLUSAE, passes
from interpose.sae.sae import SAE
from interpose.sae.topk import AbsTopKSAE, MatryoshkaSAE
from interpose.sae.training.recipe import SAERecipe
from interpose.sae.training.sparse import Entries


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Losses:
    """What one batch gave; all but the loss is without gradients.

    Attributes:
        loss: what is made small.
        wanted: what the output should be, [vector, d_out].
        out: what it is.
        fired: at how many vectors each latent fires, [latent].
    """

    loss: Tensor
    wanted: Tensor
    out: Tensor
    fired: Tensor


def losses(
    sae: SAE, x: Tensor, y: Tensor, *, recipe: SAERecipe, cost: Any, dead: Tensor | None
) -> Losses:
    """The loss of an autoencoder at some vectors, with what is said of it.

    Args:
        sae: in training mode.
        x: vectors, [vector, d_in].
        y: what a transcoder's output should be, [vector, d_out]; of others ``x``.
        recipe: what counts how much.
        cost: what firing costs, now.
        dead: the numbers of dead latents; None for none.
    """
    skipped = 0 if sae.W_skip is None else x.to(sae.W_skip) @ sae.W_skip.T
    x, _ = sae.normalised(x)
    wanted = y.to(x) if sae.is_transcoder else x
    base = sae.b_dec + skipped
    if sae.dense_training:
        codes, more = _dense(sae, x, wanted, base, cost)
        out = codes @ sae.rows + base
        loss = _error(out, wanted) + more
        fired = (codes.detach() != 0).sum(0)
    else:
        entries, pre = Entries.of(sae, x)
        outs = _outputs(sae, entries, base)
        out = outs[:, -1]
        loss = wide(outs - wanted[:, None]).pow(2).sum(-1).mean(0).sum()
        if dead is not None and recipe.aux:
            loss = loss + recipe.aux * _dead_error(sae, x, (wanted - out).detach(), dead, recipe)
        fired = entries.codes.fired
        del pre
    return Losses(loss=loss, wanted=wanted.detach(), out=out.detach(), fired=fired)


def _error(out: Tensor, wanted: Tensor) -> Tensor:
    return wide(out - wanted).pow(2).sum(-1).mean()


def _dense(
    sae: SAE, x: Tensor, wanted: Tensor, base: Tensor, cost: Any
) -> tuple[Tensor, Tensor | float]:
    """Codes, and what is added to the squared error; for latents that have gradients though they do not fire."""
    if isinstance(sae, MatchingPursuitSAE):
        return sae.pursued(x), 0.0
    if isinstance(sae, GatedSAE):
        pre = _given(sae, x, sae.b_gate)
        opened = pre.relu()
        alone = opened @ sae.rows.detach() + base.detach()
        return sae.activated(pre), cost * (opened * sae.costs()).sum(-1).mean() + _error(
            alone, wanted
        )
    pre = _given(sae, x, sae.b_enc)
    codes = sae.activated(pre)
    if isinstance(sae, JumpReLUSAE):
        return codes, cost * passes(pre.relu(), sae.threshold, sae.bandwidth).sum(-1).mean()
    return codes, cost * (codes * sae.costs()).sum(-1).mean()


def _given(sae: SAE, x: Tensor, bias: Tensor) -> Tensor:
    """What each latent is given, of vectors that are normalised already."""
    x = x - sae.b_dec if sae.subtract_bias else x
    return sae.weighed(x @ sae.W_enc + bias)


def _outputs(sae: SAE, entries: Entries, base: Tensor) -> Tensor:
    """The output of the first latents, for each of a Matryoshka autoencoder's widths: [vector, width, d_out]."""
    if isinstance(sae, MatryoshkaSAE):
        base = base.expand(len(entries.codes.starts) - 1, -1)
        return entries.times_each(sae.rows, sae.widths) + base[:, None]
    return (entries.times(sae.rows) + base)[:, None]


def _dead_error(sae: SAE, x: Tensor, residual: Tensor, dead: Tensor, recipe: SAERecipe) -> Tensor:
    """How badly dead latents explain what is left: those k of them that are given the most at each vector.

    Of Gao et al. (2024). It counts less the fewer they are.
    """
    most = recipe.aux_k or max(1, sae.d_in // 2)
    k = min(most, len(dead))
    x = x - sae.b_dec if sae.subtract_bias else x
    pre = x @ sae.W_enc[:, dead] + sae.b_enc[dead]
    if sae.by_norm:
        pre = pre * sae.W_dec[dead].norm(dim=-1)
    size = pre.abs() if isinstance(sae, AbsTopKSAE) else pre
    which = size.topk(k, dim=-1, sorted=False).indices
    values = pre.gather(-1, which)
    values = values if isinstance(sae, AbsTopKSAE) else values.relu()
    codes = torch.zeros_like(pre).scatter(-1, which, values)
    return min(len(dead) / most, 1.0) * _error(codes @ sae.rows[dead], residual)
