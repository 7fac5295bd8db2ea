"""What units do, from weights alone: the logits that they raise and lower, and which of them write alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from interpose.errors import Unsupported
from interpose.models.transformer import TransformerModel
from interpose.precision import wide

_CHUNK = 2**25  # so many numbers are made at once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Effects:
    """What a unit of one adds to logits by itself, where the final norm divides by one, and its likes.

    Attributes:
        up: the tokens whose logits it raises most, [unit, k].
        up_by: by how much, [unit, k].
        down: those that it lowers most, [unit, k].
        down_by: by how much, [unit, k].
        norms: of what each writes, [unit].
        alike: the units that write in the most similar direction, [unit, n].
        cosines: how similar, [unit, n].
    """

    up: Tensor
    up_by: Tensor
    down: Tensor
    down_by: Tensor
    norms: Tensor
    alike: Tensor
    cosines: Tensor


@torch.no_grad()
def effects_of(model: TransformerModel, rows: Tensor, k: int = 10) -> Effects:
    """The effects of units that write these rows into the residual stream.

    Args:
        model: a language model.
        rows: what each writes when its value is one, [unit, d_model].
        k: how many to name.
    """
    unembedding = wide(model.W_U)
    rows = wide(rows.detach()).to(unembedding.device)
    stream = model.stream
    times = 1.0 if stream.logit_multiplier is None else stream.logit_multiplier
    if rows.shape[1] != unembedding.shape[0]:
        raise Unsupported(
            f"units that write {rows.shape[1]} numbers do not write into the stream, which has {unembedding.shape[0]}."
        )
    through = stream.end.through(rows)
    ups, downs = [], []
    for some in through.split(max(1, _CHUNK // unembedding.shape[1])):
        logits = times * (some @ unembedding)
        ups.append(logits.topk(min(k, logits.shape[1])))
        downs.append(logits.topk(min(k, logits.shape[1]), largest=False))
    alike, cosines = likes(rows, k)
    return Effects(
        up=torch.cat([one.indices for one in ups]).cpu(),
        up_by=torch.cat([one.values for one in ups]).float().cpu(),
        down=torch.cat([one.indices for one in downs]).cpu(),
        down_by=torch.cat([one.values for one in downs]).float().cpu(),
        norms=rows.norm(dim=1).float().cpu(),
        alike=alike,
        cosines=cosines,
    )


@torch.no_grad()
def likes(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The rows in the most similar directions, [unit, k], and the cosines.

    Args:
        rows: [unit, d].
        k: how many to name.
    """
    units = len(rows)
    straight = torch.nn.functional.normalize(rows.float(), dim=1)
    which, cosines = [], []
    for first in range(0, units, step := max(1, _CHUNK // units)):
        some = straight[first : first + step] @ straight.T
        at = torch.arange(len(some), device=some.device)
        some[at, at + first] = -torch.inf
        best = some.topk(min(k, max(units - 1, 0)), dim=1)
        which.append(best.indices.cpu())
        cosines.append(best.values.cpu())
    return torch.cat(which), torch.cat(cosines)
