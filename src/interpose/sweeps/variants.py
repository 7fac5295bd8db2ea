"""Many runs of the same inputs that differ in a few changes each: together, each from the first layer it changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interpose.sweeps.cells import Act, Row, acted
from interpose.sweeps.planning import Sizes
from interpose.sweeps.proof import others_listen, prove, tower_of
from interpose.sweeps.reference import refer
from interpose.sweeps.wavefront import run_rows


@dataclass(frozen=True, slots=True)
class Variant:
    """What makes a run differ: a few changes, each a site and an edit or a function ``fn(value, hook)``.

    Attributes:
        changes: pairs of a site and what is done there, at any layers.
        example: the one row of the inputs that it is of; None for all.
    """

    changes: tuple[tuple[str, Act], ...]
    example: int | None = None


@dataclass(frozen=True, slots=True)
class _Placed:
    """A variant whose sites are known: the first block it changes, and its acts by site."""

    layer: int
    acts: dict[str, list[Act]]

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(self.acts)


@torch.no_grad()
def run_variants(
    model: Any,
    inputs: Mapping[str, Tensor],
    variants: Sequence[Variant],
    *,
    max_rows: int | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """The number and the logits [example, pos, d_vocab] of each variant's run, in any order.

    Args:
        model: the model, in eval mode.
        inputs: what the module takes, each [example, pos].
        variants: how the runs differ.
        max_rows: how many rows run together, at most; by default as many as fit. Those of a variant always do.
    """
    tower, proof = tower_of(model), prove(model)
    placed = [_placed(model, variant) for variant in variants]
    if tower is None or proof.batches or others_listen(model):
        for number, variant in enumerate(variants):
            pick = slice(None) if variant.example is None else [variant.example]
            own = {name: value[pick] for name, value in inputs.items()}
            with model.hooks(fwd_hooks=list(variant.changes)):
                yield number, model(own, return_type="logits")
        return
    base = refer(model, tower, inputs, None)
    change = acted(lambda number, site: placed[number].acts[site], base.inputs)
    joins = not proof.wavefront and all(variant.layer >= 0 for variant in placed)
    if max_rows is None:
        max_rows = Sizes.of(model).most_rows(
            positions=base.length, length=base.length, logits=base.logits[0].numel()
        )
    order = sorted(range(len(placed)), key=lambda number: placed[number].layer)
    size = max(1, max_rows // base.batch)
    for at in range(0, len(order), size):
        chosen = order[at : at + size]
        of = [_examples(variants[number], base.batch) for number in chosen]
        rows = [Row(number, one) for number, some in zip(chosen, of) for one in some]
        start = 0 if joins else None
        ran = run_rows(model, tower, base, placed, rows, change, None, start=start)
        yield from zip(chosen, ran.logits.split([len(some) for some in of]))


def _examples(variant: Variant, batch: int) -> Sequence[int]:
    return range(batch) if variant.example is None else [variant.example]


def _placed(model: Any, variant: Variant) -> _Placed:
    acts: dict[str, list[Act]] = {}
    layers = []
    for name, act in variant.changes:
        site = model.tree.site(name)
        acts.setdefault(site.canonical, []).append(act)
        layers.append(-1 if site.layer is None else site.layer)
    return _Placed(min(layers, default=0), acts)
