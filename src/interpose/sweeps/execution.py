"""A sweep on one batch of examples: reference runs, then rows, by the cheapest plan that is proven."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from interpose.errors import Unsupported
from interpose.models.discovery.anatomy import Tower
from interpose.sweeps import noise
from interpose.sweeps.answers import Kept, only, unembedding
from interpose.sweeps.cells import Cell, Change, Changes, Row, acted, patch, sent
from interpose.sweeps.measurement import Measurement, precisions
from interpose.sweeps.metrics import Examples, Metric, all_looked_at, function, kept_by
from interpose.sweeps.narrowing import Filled, Looks, looked_at, together
from interpose.sweeps.planning import Group, Sizes, Tally, groups
from interpose.sweeps.prompts import Batch
from interpose.sweeps.proof import Proof, may_begin_late, others_listen, prove, strangers
from interpose.sweeps.reference import Reference, refer
from interpose.sweeps.wavefront import run_rows

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

PLANS = ("auto", "wavefront", "batches", "one per cell")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is done, whatever the examples.

    Attributes:
        model: the model, in eval mode; gradients off.
        tower: its blocks.
        cells: where.
        metrics: what is measured.
        edit: what makes the edit of a cell; None to patch.
        patch: which run's values go into the other: ``clean`` or ``corrupt``.
        plan: one of `PLANS`.
        max_rows: how many rows run together; None for as many as fit.
        total: how many examples the dataset has.
        tally: what is counted on.
        sizes: the model's.
        whole_logits: whether every logit is computed, since others than metrics look at the unembedding, or may.
    """

    model: TransformerModel
    tower: Tower
    cells: Sequence[Cell]
    metrics: Sequence[Metric]
    edit: Callable[[Cell], Any] | None
    patch: str
    plan: str
    max_rows: int | None
    total: int
    tally: Tally
    sizes: Sizes
    whole_logits: bool

    @property
    def open(self) -> list[function]:
        """Functions of which it is not known what they look at."""
        some = [metric for metric in self.metrics if isinstance(metric, function)]
        return [] if self.whole_logits else [metric for metric in some if metric.is_open]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a batch of examples gave, by each precision of its logits: first the one that is shown.

    Attributes:
        values: [precision, metric, cell, example]; NaN for cells that were not run when the sweep was ended.
        clean: [precision, metric, example].
        corrupt: the same; as clean if there is nothing corrupted.
        noise: how far rounding alone moved each metric, [precision, metric, draw, example]; no draws in 32 bits.
            Infinite if the sweep was ended before it was measured.
        logits: the dtype of logits, by precision.
    """

    values: Tensor
    clean: Tensor
    corrupt: Tensor
    noise: Tensor
    logits: tuple[str, ...]


def run(task: Task, batch: Batch, step: Callable[[int], bool]) -> Found:
    """Run a sweep on one batch.

    Args:
        task: what to do.
        batch: the examples.
        step: told how many rows are done; False ends the sweep.
    """
    backwards = task.patch == "clean" and batch.corrupt is not None
    given, other = (batch.corrupt, batch.clean) if backwards else (batch.clean, batch.corrupt)
    assert given is not None
    proof = prove(task.model)
    plan, why = plan_of(task.model, task.cells, task.plan, proof)
    examples = Examples(
        model=task.model, tokens=given["input_ids"], numbers=batch.numbers, total=task.total
    )
    kept = columns = filled = None
    if not task.whole_logits and not task.open:
        kept = Kept.last(kept_by(task.metrics), picked=not proof.answers)
        columns = None if proof.answers else all_looked_at(task.metrics, examples)
    with ExitStack() as stack:
        stack.enter_context(only(task.model, columns, kept=kept, finer=not proof.finer))
        base = refer(
            task.model,
            task.tower,
            given,
            kept,
            other=other,
            sites=list(dict.fromkeys(cell.site for cell in task.cells)),
            cached=plan == "wavefront" and not proof.prefix,
            apart=bool(proof.batches) or others_listen(task.model) or strangers(task.model),
            behind=others_listen(task.model),
        )
        task.tally.plan, task.tally.why = plan, why
        runs = 1 if other is None else 2
        task.tally.add(base.forwards, runs * base.batch * base.length * len(task.tower.blocks))
        first = batch.first if task.edit is None else 0
        looks = _looks(task, base, proof, examples) if task.open else None
        if looks is not None and _hold(task, base, looks, examples, first):
            columns, filled = looks.columns, Filled(looks, *base.logits.shape[1:])
            base.see(looks, picked=not proof.answers)
            stack.enter_context(only(task.model, columns, kept=base.kept))
        examples = replace(
            examples,
            columns=columns,
            filled=filled,
            clean=base.other if backwards else base.logits,
            mask=given.get("attention_mask"),
        )
        own = base.logits.dtype if columns is None else unembedding(task.model).weight.dtype
        ends = [_End.of(task, given, examples, base.logits, own)]
        if other is not None:
            mask = other.get("attention_mask")
            theirs = replace(examples, tokens=other["input_ids"], mask=mask)
            ends.append(_End.of(task, other, theirs, base.other, own))
        found = _rows(task, base, ends, proof, first, step)
        lost = found.values.isnan() & ~found.base[:, :, None].isnan()
        if filled is not None and not found.ended and bool(lost.any()):
            stack.close()  # a row in which some function looks elsewhere
            return run(replace(task, whole_logits=True), batch, lambda _: True)
        second = ends[-1].metrics[:, :, 0].cpu()
        sides = (second, found.base) if backwards else (found.base, second)
        parts = precisions(base.logits, columns, own)
        return Found(
            values=found.values,
            clean=sides[0],
            corrupt=sides[1],
            noise=found.noise,
            logits=tuple(str(part.dtype).removeprefix("torch.") for part in parts),
        )


def _looks(task: Task, base: Reference, proof: Proof, examples: Examples) -> Looks | None:
    """What metrics look at in the reference runs, some of which are functions; None for all logits."""
    runs = [base.logits] if base.other is base.logits else [base.logits, base.other]
    found = [looked_at(one.of, runs) for one in task.open]
    others = [one for one in task.metrics if one not in task.open]
    last = Kept.last(kept_by(others)) if others else None
    if None in found or (others and last is None):
        return None
    looks = together([one for one in found if one is not None])
    places, columns = looks.positions, looks.columns
    if last is not None:  # these count positions from the end
        places = tuple(range(min(places[0], last.positions[0]), 0))
        theirs = all_looked_at(others, examples)
        both = columns is not None and theirs is not None
        columns = torch.cat([columns, theirs]).unique() if both else None  # type: ignore[list-item]
    if proof.answers or base.logits.dtype.itemsize == 2:
        columns = None
    return Looks(places, columns)


def _hold(task: Task, base: Reference, looks: Looks, examples: Examples, first: int) -> bool:
    """Whether functions look at no more in rows of some cells, which are run with all logits."""
    order = [n for n, cell in enumerate(task.cells) if cell.pos is None or cell.pos >= first]
    if not order:
        return True
    cells = sorted({order[len(order) // 2], order[-1]})
    cells = cells[:1] if task.tally.plan == "one per cell" else cells
    rows = [Row(cell, example) for cell in cells for example in range(base.batch)]
    logits = _pass(task, base, task.cells, rows, _change(task, base), 0)
    filled = Filled(looks, *logits.shape[1:])
    numbers = torch.arange(base.batch, device=logits.device)
    for one in task.open:
        whole, part = one.bind(examples), one.bind(replace(examples, filled=filled))
        for some in logits.split(base.batch):
            said, again = whole(some, numbers), part(looks.of(some), numbers)
            if not bool(((said == again) | (said.isnan() & again.isnan())).all()):
                return False
    return True


@dataclass(frozen=True, slots=True)
class _End:
    """One of the two runs that a sweep goes between: what the module takes, what reads it, and its metrics."""

    inputs: Mapping[str, Tensor]
    read: Measurement
    metrics: Tensor
    """[precision, metric, 1, example]."""

    @staticmethod
    def of(
        task: Task,
        inputs: Mapping[str, Tensor],
        examples: Examples,
        logits: Tensor,
        own: torch.dtype,
    ) -> _End:
        _must_look_at_text(task.metrics, examples)
        read = Measurement.of(task.metrics, examples, own)
        return _End(inputs, read, read(logits))


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
    """What the rows gave, by precision: see `Found`; and the unchanged run's metrics."""

    values: Tensor
    base: Tensor
    noise: Tensor
    ended: bool


def _rows(
    task: Task,
    base: Reference,
    ends: Sequence[_End],
    proof: Proof,
    first: int,
    step: Callable[[int], bool],
) -> _Changed:
    """Run the rows, once the reference runs are there."""
    change, read = _change(task, base), ends[0].read
    unchanged = ends[0].metrics
    grain = noise.grain(task.model, base.streams[0], base.logits)
    values = unchanged.repeat(1, 1, len(task.cells), 1)
    rest, idle, ended = set(range(len(task.cells))), [], False
    for ran in _passes(task, base, change, proof, first, idle=grain is not None):
        found = read(ran.logits)
        values[:, :, sent(ran.cells, values.device)] = found[:, :, : len(ran.cells)]
        idle.append(found[:, :, len(ran.cells) :] - unchanged)
        rest -= set(ran.cells)
        if ended := not step(len(ran.cells) * base.batch):
            break
    if ended:
        values[:, :, sent(sorted(rest), values.device)] = torch.nan
    else:
        ended = not step(len(rest) * base.batch)  # the rest changes nothing
    draws = 0 if grain is None else 1 + noise.DRAWS
    moved = torch.zeros_like(unchanged).expand(-1, -1, draws, -1)
    if grain is not None and ended:
        moved = moved + torch.inf  # not known
    elif grain is not None and idle:
        moved = torch.cat([_furthest(idle), _blurred(task, base, ends, first, grain)], dim=2)
    # Until here nothing waits for the device.
    return _Changed(
        values=values.cpu(), base=unchanged[:, :, 0].cpu(), noise=moved.cpu(), ended=ended
    )


def _change(task: Task, base: Reference) -> Change:
    if task.edit is not None:
        make, cells = task.edit, task.cells
        return acted(lambda number, _: (make(cells[number]),), base.inputs)
    if not base.source:
        raise ValueError("patching needs a second text: give corrupt=..., or edit=ip.zero.")
    idle = [replace(cell, site="") for cell in task.cells[:1]]  # rows of it are never asked for
    return patch([*task.cells, *idle], base.source.__getitem__)


def _furthest(idle: Sequence[Tensor]) -> Tensor:
    """Of passes in which a row changed nothing, how far each metric moved where it moved most, [..., 1, example]."""
    each = torch.cat(list(idle), dim=2)  # [precision, metric, pass, example]
    most = each.mean(-1, keepdim=True).abs().nan_to_num().argmax(2, keepdim=True)
    return each.gather(2, most.expand(-1, -1, 1, each.shape[-1]))


def _blurred(task: Task, base: Reference, ends: Sequence[_End], first: int, grain: float) -> Tensor:
    """How far each metric moves when both runs round otherwise, [precision, metric, draw, example]."""
    layers = len(task.tower.blocks)
    rounding = noise.Rounding(
        model=task.model, layers=layers, grain=grain, device=base.logits.device, first=first
    )
    together = 1 if task.tally.plan == "one per cell" else _most_rows(task, base, 0) // base.batch
    found = []
    for end in ends:
        for logits in rounding.runs(
            end.inputs, base.kept, draws=noise.DRAWS // len(ends), together=together
        ):
            found.append(end.read(logits, rounding.last) - end.metrics)
            task.tally.add(1, found[-1].shape[2] * base.batch * base.length * layers)
    return torch.cat(found, dim=2)


# Plans.


def plan_of(
    model: TransformerModel, cells: Sequence[Changes], asked: str, proof: Proof
) -> tuple[str, str]:
    """The plan, and why no faster one."""
    outside = next((cell.sites[0] for cell in cells if cell.layer < 0), None)
    why = f"{outside} is in no block" if outside is not None else proof.wavefront
    alone = "other hooks are on the model" if others_listen(model) else proof.batches
    refused = {"wavefront": alone or why, "batches": alone}.get(asked)
    if refused:
        raise Unsupported(f"plan={asked!r} cannot run on {model.tree.label}: {refused}.")
    if asked != "auto":
        return asked, "as asked"
    if not alone and strangers(model):
        alone = "hooks of torch are on the model, and may count on its batch and positions"
    if alone:
        return "one per cell", alone
    if why:
        return "batches", why
    return "wavefront", f"without KV cache, since {proof.prefix}" if proof.prefix else ""


class _Ran(NamedTuple):
    """Cells that ran together, and the logits of their rows and of those that changed nothing."""

    cells: Sequence[int]
    logits: Tensor
    """[cell and example, kept, d_vocab]."""


def _passes(
    task: Task, base: Reference, change: Change, proof: Proof, first: int, *, idle: bool
) -> Iterator[_Ran]:
    """All cells; with ``idle``, passes have rows besides that change nothing."""
    plan, layers = task.tally.plan, len(task.tower.blocks)
    task.tally.one_per_cell += len(task.cells) * base.batch * base.length * layers
    if plan == "wavefront":
        found = _groups(task, base, first=first, cached=not proof.prefix)
    else:
        found = [Group(start=0, cells=tuple(range(len(task.cells))))]
    for group in found:
        most = _most_rows(task, base, group.start) // base.batch
        most = 1 if plan == "one per cell" else max(1, most)
        order = sorted(group.cells, key=lambda number: task.cells[number].layer)
        if group.start and not base.grows:
            task.tally.add(1, base.batch * group.start * layers)
        beside = int(idle and most > 1)
        chunks = [(cells, beside) for cells in _chunks(order, most - beside)]
        if idle and not beside and order:
            chunks.append(([], 1))
        for cells, more in chunks:
            known, numbers = task.cells, cells
            if (
                more
            ):  # a cell that begins where the first of them does, and goes through as many blocks
                still = replace(task.cells[[*cells, *order][0]], site="")
                known, numbers = [*task.cells, still], [*cells, len(task.cells)]
            rows = [Row(cell, example) for cell in numbers for example in range(base.batch)]
            yield _Ran(cells, _pass(task, base, known, rows, change, group.start))
        base.forget(group.start)


def _pass(
    task: Task,
    base: Reference,
    cells: Sequence[Cell],
    rows: Sequence[Row],
    change: Change,
    start: int,
) -> Tensor:
    """One pass of the plan, counted: the logits of its rows."""
    begin = start if task.tally.plan == "wavefront" else None
    ran = run_rows(task.model, task.tower, base, cells, rows, change, base.kept, start=begin)
    task.tally.add(1, ran.token_layers)
    return _whole(base, ran.logits, rows)


def _groups(task: Task, base: Reference, *, first: int, cached: bool) -> list[Group]:
    cached = cached and may_begin_late(task.model, task.cells, task.edit, grows=base.grows)
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
