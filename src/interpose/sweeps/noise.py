"""How far rounding alone moves a metric: runs that change nothing but the last place of the numbers in them.

Every step of a model in 16 bits rounds, and a run that is changed somewhere rounds otherwise from there on. What that
does to a metric is seen by letting it happen: before every block the numbers of the stream are off by as much as one
rounding may make them, at random, and at the end the logits are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interpose.engine.points import HookPoint
from interpose.models.running.trial import first_tensor
from interpose.sweeps.answers import Kept
from interpose.sweeps.reference import no_cache, wanted_logits

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

DRAWS = 16


def grain(model: TransformerModel, *values: Tensor) -> float | None:
    """The distance from 1 to the next number that a model computes with, where that is far; None in 32 bits.

    Args:
        model: whose parameters are looked at.
        *values: what a run gave: its stream, its logits.
    """
    dtypes = {value.dtype for value in (*values, *model.module.parameters())}
    short = [torch.finfo(one).eps for one in dtypes if one.is_floating_point and one.itemsize == 2]
    rough = torch.get_float32_matmul_precision() != "highest"
    if rough and any(value.device.type == "cuda" for value in values):
        short.append(torch.finfo(torch.float16).eps)  # TF32 has as many digits
    return max(short, default=None)


def blurred(value: Tensor, grain: float, generator: torch.Generator) -> Tensor:
    """A value whose numbers are off by as much as one rounding may make them, half the grain, up or down."""
    part = torch.rand(value.shape, generator=generator, device=value.device)
    return (value.float() * (1 + grain * (part - 0.5))).to(value.dtype)


def blurred_logits(
    model: TransformerModel,
    layers: int,
    inputs: Mapping[str, Tensor],
    kept: Kept | None,
    *,
    times: int,
    first: int,
    grain: float,
    generator: torch.Generator,
) -> Tensor:
    """The logits [draw and example, kept, d_vocab] of runs in which the stream is blurred before every block.

    Args:
        model: the model, in eval mode.
        layers: how many blocks it has.
        inputs: what the module takes, each [example, pos].
        kept: which positions' logits are wanted; None for all.
        times: how many draws, which run together.
        first: the position from which on the stream is blurred.
        grain: by how much, as a share of each number.
        generator: what draws.
    """

    def blur(value: Tensor, hook: HookPoint) -> Tensor:  # noqa: ARG001
        value[:, first:] = blurred(value[:, first:], grain, generator)
        return value

    sites = [f"blocks.{layer}.hook_resid_pre" for layer in range(layers)]
    given = {name: value.repeat(times, 1) for name, value in inputs.items()}
    with model.hooks(fwd_hooks=[(site, blur) for site in sites]):
        output = model.module(**given, **wanted_logits(model, kept), **no_cache(model))
    logits = first_tensor(output)
    return logits if kept is None else kept.taken(logits)
