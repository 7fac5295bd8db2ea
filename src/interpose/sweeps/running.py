"""Running rows: together in plain batches, or as a wavefront."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from interpose.engine.points import HookPoint
from interpose.models.discovery.anatomy import Tower
from interpose.models.running.trial import first_tensor
from interpose.sweeps.cells import Cell, Change, Row, in_order, sent, spans
from interpose.sweeps.reference import Reference, no_cache, wanted_logits
from interpose.sweeps.wavefront import Wavefront


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The logits of some rows, [row, kept, d_vocab], and what they cost."""

    logits: Tensor
    token_layers: int


def plain(
    model: Any,
    base: Reference,
    cells: Sequence[Cell],
    rows: Sequence[Row],
    change: Change,
    keep: int | None,
) -> Tensor:
    """The logits of rows that run together from the first layer and position on.

    Args:
        model: the model, in eval mode.
        base: the run that rows change something of.
        cells: by number.
        rows: in any order.
        change: what each row's cell does at its site.
        keep: how many logits from the end are wanted; None for all.
    """
    order = in_order(cells, rows)
    rows = [rows[number] for number in order]
    prepared = change(rows, base.logits.device)

    def at(first: int, end: int) -> Any:
        def hook(value: Tensor, hook: HookPoint) -> Tensor:
            value[first:end] = prepared(value[first:end], first, end, hook)
            return value

        return hook

    examples = sent([row.example for row in rows], base.logits.device)
    given = {name: value[examples] for name, value in base.inputs.items()}
    with model.hooks(fwd_hooks=[(site, at(*span)) for site, span in spans(cells, rows).items()]):
        output = model.module(**given, **wanted_logits(model, keep), **no_cache(model))
    logits = _back(first_tensor(output), order)
    return logits if keep is None else logits[:, -keep:]


def wavefront(
    model: Any,
    tower: Tower,
    base: Reference,
    cells: Sequence[Cell],
    rows: Sequence[Row],
    change: Change,
    keep: int | None,
    *,
    start: int,
) -> Ran:
    """The logits of rows that join at their layers, in the order they are given; see `Wavefront`."""
    order = in_order(cells, rows)
    ordered = [rows[number] for number in order]
    front = Wavefront(model, tower, base, cells, ordered, start=start, change=change, keep=keep)
    logits = front.run()
    return Ran(logits=_back(logits, order), token_layers=front.token_layers)


def _back(logits: Tensor, order: Sequence[int]) -> Tensor:
    """Logits of rows in the order in which they were given."""
    if list(order) == list(range(len(order))):
        return logits
    return logits[sent(order, logits.device).argsort()]
