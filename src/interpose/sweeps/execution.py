"""A sweep on one batch of examples: reference runs, then rows, by the cheapest plan that is proven."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from interpose.edits.basic import add, clamp, fill, scale, zero
from interpose.edits.subspace import project_cap, project_out
from interpose.errors import Unsupported
from interpose.models.discovery.anatomy import Tower
from interpose.models.running.trial import first_tensor
from interpose.sweeps.answers import only
from interpose.sweeps.cells import Cell, Change, Row, edited, patch, sent
from interpose.sweeps.metrics import Examples, Measure, Metric, all_looked_at, kept_by
from interpose.sweeps.planning import Group, Sizes, Tally, groups
from interpose.sweeps.prompts import Batch
from interpose.sweeps.proof import Proof, others_listen, prove, strangers
from interpose.sweeps.reference import Reference, no_cache, refer, wanted_logits
from interpose.sweeps.running import plain, wavefront

PLANS = ("auto", "wavefront", "batches", "one per cell")
_FOR_FLOOR = 8  # times as large a batch, that the noise floor is measured with, if it fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is done, whatever the examples.

    Attributes:
        model: the model, in eval mode; gradients off.
        tower: its blocks.
        cells: where.
        metrics: what is measured.
        edit: what makes the edit of a cell; None to patch.
        denoise: whether clean values go into corrupted runs, rather than the other way round.
        plan: one of `PLANS`.
        max_rows: how many rows run together; None for as many as fit.
        total: how many examples the dataset has.
        tally: what is counted on.
        sizes: the model's.
        whole_logits: whether every logit is computed, since others than metrics look at the unembedding, or may.
    """

    model: Any
    tower: Tower
    cells: Sequence[Cell]
    metrics: Sequence[Metric]
    edit: Callable[[Cell], Any] | None
    denoise: bool
    plan: str
    max_rows: int | None
    total: int
    tally: Tally
    sizes: Sizes
    whole_logits: bool

    @property
    def keep(self) -> int | None:
        """How many logits from the end are computed; None for all."""
        return None if self.whole_logits else kept_by(self.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a batch of examples gave.

    Attributes:
        values: [metric, cell, example].
        clean: [metric, example].
        corrupt: the same; as clean if there is nothing corrupted.
        floors: in 16 bits, how far the size of a batch alone moves each metric, [metric]; else 0.
    """

    values: Tensor
    clean: Tensor
    corrupt: Tensor
    floors: Tensor


def run(task: Task, batch: Batch, step: Callable[[int], None]) -> Found:
    """Run a sweep on one batch.

    Args:
        task: what to do.
        batch: the examples.
        step: told how many rows are done.
    """
    backwards = task.denoise and batch.corrupt is not None
    given, other = (batch.corrupt, batch.clean) if backwards else (batch.clean, batch.corrupt)
    assert given is not None
    proof = prove(task.model)
    plan, why = plan_of(task, proof)
    examples = Examples(
        model=task.model, tokens=given["input_ids"], numbers=batch.numbers, total=task.total
    )
    columns = None
    if not proof.answers and not task.whole_logits:
        columns = all_looked_at(task.metrics, examples)
    with only(task.model, columns):
        base = refer(
            task.model,
            task.tower,
            given,
            task.keep,
            other=other,
            sites=list(dict.fromkeys(cell.site for cell in task.cells)),
            cached=plan == "wavefront" and not proof.prefix,
            apart=bool(proof.batches) or others_listen(task.model) or strangers(task.model),
        )
        task.tally.plan, task.tally.why = plan, why
        runs = 1 if other is None else 2
        task.tally.add(base.forwards, runs * base.batch * base.length * len(task.tower.blocks))
        clean = base.other if backwards else base.logits
        mine = replace(examples, columns=columns, clean=clean, mask=given.get("attention_mask"))
        theirs = mine
        if other is not None:
            mask = other.get("attention_mask")
            theirs = replace(mine, tokens=other["input_ids"], mask=mask)
        for examples in (mine, theirs):
            _must_look_at_text(task.metrics, examples)
        first = batch.first if task.edit is None else 0
        found = _rows(task, base, mine, proof, first, step)
        measures = [metric.bind(theirs) for metric in task.metrics]
        second = _measured(task, measures, base.other, base.batch)[:, 0].cpu()
        ends = (second, found.base) if backwards else (found.base, second)
        return Found(values=found.values, clean=ends[0], corrupt=ends[1], floors=found.floors)


def _must_look_at_text(metrics: Sequence[Metric], examples: Examples) -> None:
    """Refuse metrics at a position that is padding in some text: positions count columns where texts end together."""
    mask = examples.mask
    for metric in metrics:
        if mask is None or not -mask.shape[1] <= metric.pos < mask.shape[1]:
            continue
        masked = (mask[:, metric.pos] == 0).nonzero()
        if len(masked):
            raise ValueError(
                f"{metric!r} looks at position {metric.pos} of {mask.shape[1]}, which is masked in text "
                f"{examples.numbers[int(masked[0])]}. Negative positions count from where texts end together."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changed:
    """What the rows gave: values [metric, cell, example], the unchanged run's [metric, example], noise floors."""

    values: Tensor
    base: Tensor
    floors: Tensor


def _rows(
    task: Task,
    base: Reference,
    examples: Examples,
    proof: Proof,
    first: int,
    step: Callable[[int], None],
) -> _Changed:
    """Run the rows, once the reference runs are there."""
    measures = [metric.bind(examples) for metric in task.metrics]
    change = _change(task, base)
    unchanged = _measured(task, measures, base.logits, base.batch)
    values = unchanged.repeat(1, len(task.cells), 1)
    todo = len(task.cells)
    for cells, logits in _passes(task, base, change, proof, first):
        values[:, sent(cells, values.device)] = _measured(task, measures, logits, base.batch)
        todo -= len(cells)
        step(len(cells) * base.batch)
    step(todo * base.batch)  # the rest changes nothing
    floors = _noise_floors(task, base, measures, unchanged)
    # Until here nothing waits for the device.
    return _Changed(values=values.cpu(), base=unchanged[:, 0].cpu(), floors=floors.cpu())


def _change(task: Task, base: Reference) -> Change:
    if task.edit is not None:
        return edited(task.edit, task.cells, base.inputs)
    if not base.source:
        raise ValueError("patching needs a second text: give corrupt=..., or edit=ip.zero.")
    return patch(task.cells, base.source.__getitem__)


def _measured(task: Task, measures: Sequence[Measure], logits: Tensor, batch: int) -> Tensor:
    """What metrics say of the rows of some cells, [metric, cell, example]."""
    rows = torch.arange(len(logits), device=logits.device) % batch
    found = []
    for metric, measure in zip(task.metrics, measures):
        if metric.by_batch:
            parts = zip(logits.split(batch), rows.split(batch))
            found.append(torch.cat([measure(*part) for part in parts]))
        else:
            found.append(measure(logits, rows))
    each: Tensor = torch.stack(found).float().unflatten(1, (-1, batch))
    return each


def _noise_floors(
    task: Task, base: Reference, measures: Sequence[Measure], unchanged: Tensor
) -> Tensor:
    """In 16 bits, how far each metric moves when examples run in a larger batch, [metric]; else 0."""
    if base.logits.dtype.itemsize > 2:
        return torch.zeros(len(task.metrics))
    times = min(_FOR_FLOOR, max(2, _most_rows(task, base, 0) // base.batch))
    rows = torch.arange(times * base.batch) % base.batch
    given = {name: value[rows.to(value.device)] for name, value in base.inputs.items()}
    extra = {**wanted_logits(task.model, task.keep), **no_cache(task.model)}
    logits = first_tensor(task.model.module(**given, **extra))[: base.batch]
    task.tally.add(1, len(rows) * base.length * len(task.tower.blocks))
    logits = logits if task.keep is None else logits[:, -task.keep :]
    again = _measured(task, measures, logits, base.batch)
    return (again - unchanged).abs().amax((1, 2))


# Plans.


def plan_of(task: Task, proof: Proof) -> tuple[str, str]:
    """The plan, and why no faster one."""
    outside = next((cell.site for cell in task.cells if cell.layer < 0), None)
    why = f"{outside} is in no block" if outside is not None else proof.wavefront
    alone = "other hooks are on the model" if others_listen(task.model) else proof.batches
    refused = {"wavefront": alone or why, "batches": alone}.get(task.plan)
    if refused:
        raise Unsupported(f"plan={task.plan!r} cannot run on {task.model.tree.label}: {refused}.")
    if task.plan != "auto":
        return task.plan, "as asked"
    if not alone and strangers(task.model):
        alone = "hooks of torch are on the model, and may count on its batch and positions"
    if alone:
        return "one per cell", alone
    if why:
        return "batches", why
    return "wavefront", f"without KV cache, since {proof.prefix}" if proof.prefix else ""


def _passes(
    task: Task, base: Reference, change: Change, proof: Proof, first: int
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Cells that ran together, and the logits of their rows, [cell and example, kept, d_vocab]."""
    plan, layers = task.tally.plan, len(task.tower.blocks)
    task.tally.one_per_cell += len(task.cells) * base.batch * base.length * layers
    if plan == "wavefront":
        yield from _wavefronts(task, base, change, first=first, cached=not proof.prefix)
        return
    most = 1 if plan == "one per cell" else max(1, _most_rows(task, base, 0) // base.batch)
    for cells in _chunks(range(len(task.cells)), most):
        rows = [Row(cell, example) for cell in cells for example in range(base.batch)]
        task.tally.add(1, len(rows) * base.length * layers)
        yield cells, plain(task.model, base, task.cells, rows, change, task.keep)


def _wavefronts(
    task: Task, base: Reference, change: Change, *, first: int, cached: bool
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """All passes of the wavefront plan: group by group, each in as many as fit in memory."""
    layers = len(task.tower.blocks)
    for group in _groups(task, base, first=first, cached=cached):
        most = _most_rows(task, base, group.start) // base.batch
        order = sorted(group.cells, key=lambda number: task.cells[number].layer)
        if group.start and not base.grows:
            task.tally.add(1, base.batch * group.start * layers)
        for cells in _chunks(order, max(1, most)):
            rows = [Row(cell, example) for cell in cells for example in range(base.batch)]
            ran = wavefront(
                task.model,
                task.tower,
                base,
                task.cells,
                rows,
                change,
                task.keep,
                start=group.start,
            )
            task.tally.add(1, ran.token_layers)
            yield cells, _whole(base, ran.logits, rows)
        base.forget(group.start)


_PLACELESS = (zero, fill, add, scale, clamp, project_out, project_cap)
"""Edits that make the same of a value whatever stands before it."""
_NUMBERS = ("value", "by", "min", "max", "low", "high")
_OVER_KEYS = ("attn_scores", "pattern")


def _may_begin_late(task: Task, base: Reference) -> bool:
    """Whether a cell's position is the first that it changes, and values at later ones can be told by their places."""
    kinds = {task.model.tree.site(cell.site).kind for cell in task.cells}
    if kinds & set(_OVER_KEYS) and not base.grows:
        return False  # a sliding window shows other keys
    if task.edit is None:
        return True
    if "rot_k" in kinds:
        return False  # keys of all positions come there
    return all(_is_placeless(task.edit(cell), cell) for cell in task.cells)


def _is_placeless(edit: Any, cell: Cell) -> bool:
    """Whether an edit is at its cell's position alone, and tells nothing by the places of others."""
    if type(edit) not in _PLACELESS or not isinstance(edit.pos, int) or edit.pos != cell.pos:
        return False
    given = [getattr(edit, name, None) for name in _NUMBERS]
    # A tensor of several axes may have one of positions, of which fewer come.
    return not any(isinstance(one, Mapping) or getattr(one, "ndim", 0) > 1 for one in given)


def _groups(task: Task, base: Reference, *, first: int, cached: bool) -> list[Group]:
    cached = cached and _may_begin_late(task, base)
    found = groups(
        task.cells,
        first=first,
        length=base.length,
        layers=len(task.tower.blocks),
        batch=base.batch,
        least=task.sizes.least_tokens if cached else base.length**3,
    )
    last = base.length - 1  # a start there would leave nothing to unembed
    found = [group for group in found if group.cells and group.start <= last]
    if cached and task.tower.blocks:
        return found
    return [Group(start=0, cells=group.cells) for group in found]


def _most_rows(task: Task, base: Reference, start: int) -> int:
    """How many rows may run together from a position on."""
    if task.max_rows is not None:
        return task.max_rows
    return task.sizes.most_rows(
        positions=base.length - start, length=base.length, logits=base.logits[0].numel()
    )


def _whole(base: Reference, logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits with those of positions before the start, which are the base's."""
    missing = base.logits.shape[1] - logits.shape[1]
    if not missing:
        return logits
    examples = sent([row.example for row in rows], logits.device)
    return torch.cat([base.logits[examples, :missing], logits], dim=1)


def _chunks(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (numbers[at : at + size] for at in range(0, len(numbers), size))
