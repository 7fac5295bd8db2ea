"""Many runs of the same texts that differ in one hook each: together, each from the layer of its hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from interpose.engine.points import HookPoint
from interpose.sweeps.cells import Cell, Change, Row, RowChange, by_cell, must_have_rows
from interpose.sweeps.planning import Sizes
from interpose.sweeps.proof import others_listen, prove, tower_of
from interpose.sweeps.reference import refer
from interpose.sweeps.running import plain, wavefront

Hook = Callable[..., Tensor | None]
"""``fn(value, hook)`` with the value of its own texts; what it returns or leaves there takes the value's place."""


@torch.no_grad()
def run_each(
    model: Any, inputs: Mapping[str, Tensor], hooks: Sequence[tuple[str, Hook]]
) -> Iterator[tuple[int, Tensor]]:
    """The number and the logits [batch, pos, d_vocab] of a run for each hook, in any order.

    Args:
        model: the model, in eval mode.
        inputs: what the module takes, each [batch, pos].
        hooks: for each run a site and a function.
    """
    tower, proof = tower_of(model), prove(model)
    sites = [model.tree.site(name) for name, _ in hooks]
    cells = [
        Cell(site=site.canonical, layer=-1 if site.layer is None else site.layer) for site in sites
    ]
    alone = tower is None or bool(proof.batches) or others_listen(model)
    if alone or tower is None:
        for number, hook in enumerate(hooks):
            with model.hooks(fwd_hooks=[hook]):
                yield number, model(dict(inputs), return_type="logits")
        return
    base = refer(model, tower, inputs, None)
    change = each_of([function for _, function in hooks])
    in_blocks = all(cell.layer >= 0 for cell in cells)
    length, logits = base.length, base.logits[0].numel()
    room = Sizes.of(model).most_rows(positions=length, length=length, logits=logits)
    order = sorted(range(len(cells)), key=lambda number: cells[number].layer)
    size = max(1, room // base.batch)
    for at in range(0, len(order), size):
        chosen = order[at : at + size]
        rows = [Row(number, example) for number in chosen for example in range(base.batch)]
        if in_blocks and not proof.wavefront:
            found = wavefront(model, tower, base, cells, rows, change, None, start=0).logits
        else:
            found = plain(model, base, cells, rows, change, None)
        yield from zip(chosen, found.split(base.batch))


def each_of(functions: Sequence[Hook]) -> Change:
    """The change that calls a function of its own with the rows of each cell.

    Args:
        functions: by the numbers of cells.
    """

    def prepare(rows: Sequence[Row], device: torch.device) -> RowChange:  # noqa: ARG001
        def change(value: Tensor, first: int, end: int, hook: HookPoint) -> Tensor:
            must_have_rows(value, end - first, hook)
            value = value.clone()
            for cell, start, stop in by_cell(rows, first, end):
                part = value[start - first : stop - first]
                made = functions[cell](part, hook=hook)
                if made is not None and made is not part:
                    value[start - first : stop - first] = made
            return value

        return change

    return prepare
