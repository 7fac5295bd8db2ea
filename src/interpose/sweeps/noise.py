"""How far rounding alone moves a metric: runs that change nothing but the last place of the numbers in them.

Every step of a model in 16 bits rounds, and a run that is changed somewhere rounds otherwise from there on. What that
does to a metric is seen by letting it happen: before every block the numbers of the stream are off by as much as one
rounding may make them, at random, and at the end the logits are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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


@dataclass(slots=True, kw_only=True)
class Rounding:
    """Runs that differ from one as it is in how they round, at random; always the same draws.

    Attributes:
        model: the model, in eval mode.
        layers: how many blocks it has.
        grain: how far its numbers are off, as a share of each.
        device: where its numbers are.
        first: the position from which on the stream is blurred.
        hooks: what else is live in the runs.
    """

    model: TransformerModel
    layers: int
    grain: float
    device: torch.device
    first: int = 0
    hooks: Sequence[Any] = ()
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)

    def runs(
        self, inputs: Mapping[str, Tensor], kept: Kept | None, *, draws: int, together: int
    ) -> Iterator[Tensor]:
        """The logits [draw and example, kept, d_vocab] of passes in which the stream is blurred before every block.

        Args:
            inputs: what the module takes, each [example, pos].
            kept: which positions' logits are wanted; None for all.
            draws: how many.
            together: how many run in a pass, at most.
        """

        def blur(value: Tensor, hook: HookPoint) -> Tensor:  # noqa: ARG001
            value[:, self.first :] = blurred(value[:, self.first :], self.grain, self.generator)
            return value

        blurs = [(f"blocks.{layer}.hook_resid_pre", blur) for layer in range(self.layers)]
        for at in range(0, draws, max(1, together)):
            times = min(max(1, together), draws - at)
            given = {name: value.repeat(times, 1) for name, value in inputs.items()}
            with self.model.hooks(self.hooks, fwd_hooks=blurs):
                output = self.model.module(
                    **given, **wanted_logits(self.model, kept), **no_cache(self.model)
                )
            logits = first_tensor(output)
            yield logits if kept is None else kept.taken(logits)

    def last(self, logits: Tensor) -> Tensor:
        """Logits that are off as well: two runs are compared, each with logits that are rounded."""
        return blurred(logits, 2 * self.grain, self.generator)


def floor(noise: Tensor) -> float:
    """How far a mean over examples moved in the draw where it went furthest, of [draw, example]; 0 without draws."""
    moved = noise.mean(-1).abs().nan_to_num(0.0, torch.inf)
    return float(moved.max()) if len(moved) else 0.0
