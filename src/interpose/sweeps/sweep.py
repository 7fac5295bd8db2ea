"""`ip.sweep`: one experiment at many places of a model, and how much each place matters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.edits.attention import knockout
from interpose.edits.edit import Edit
from interpose.errors import Cancelled, Unsupported
from interpose.jobs.job import must_be_engine, must_travel, run
from interpose.models.discovery.anatomy import Tower
from interpose.models.selection import Some
from interpose.progress import Progress, ShowProgress
from interpose.sweeps.answers import others_look
from interpose.sweeps.cells import Cell
from interpose.sweeps.examples_job import BatchesJob
from interpose.sweeps.execution import PLANS, Task
from interpose.sweeps.extent import Extent
from interpose.sweeps.metrics import Metric, as_metric, kept_by, label
from interpose.sweeps.planning import Sizes, Tally
from interpose.sweeps.prompts import Batch, batches
from interpose.sweeps.proof import others_listen, prove, tower_of
from interpose.sweeps.result import SweepResult

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel


@torch.no_grad()
def sweep(
    model: TransformerModel,
    clean: Any,
    corrupt: Any = None,
    *,
    site: str | tuple[str, int] | Sequence[str] = "resid_pre",
    over: str | Sequence[str] = ("layer", "pos"),
    metric: Metric | Callable[[Tensor], Any] | Mapping[str, Any],
    edit: Callable[..., Any] | None = None,
    patch: str = "clean",
    layer: Some = None,
    head: Some = None,
    neuron: Some = None,
    pos: Some = None,
    plan: str = "auto",
    align: str | None = None,
    prepend_bos: bool | None = None,
    batch_size: int = 16,
    max_rows: int | None = None,
    engine: str = "local",
    workers: int | None = None,
    progress: ShowProgress = True,
) -> SweepResult:
    """Change a model at one place after another, and measure each time.

    ```python
    result = ip.sweep(
        model,
        clean="When Mary and John went to the store, John gave a drink to",
        corrupt="When Mary and John went to the store, Mary gave a drink to",
        over=("layer", "pos"),
        metric=ip.metrics.logit_difference(" Mary", " John"),
    )
    result.values            # [layer, pos]; result.tally is what it took
    ```

    Args:
        model: a model of transformers, in eval mode.
        clean: a text, several, tokens (a tensor or lists), or a mapping of what the module takes for each token, such
            as a tokenizer returns; padding is taken off.
        corrupt: the texts to compare with, token by token; None for an edit that needs none.
        site: the kind of site (``resid_pre``, ``z``, ...), one (``("z", 5)``), or several for ``over="site"``.
        over: which axes to go through, of ``site``, ``layer``, ``head``, ``neuron`` and ``pos``.
        metric: one of `ip.metrics`, a function of logits [batch, pos, d_vocab] that gives a number for each
            example, or several by name.
        edit: what to do at each place instead of patching: a class of edit (``ip.zero``), or a function that makes
            one, called with the site's name and ``head=``, ``neuron=``, ``pos=`` as they apply.
        patch: which run's values go into the other: ``clean`` ones into corrupted runs, or ``corrupt`` ones into clean.
        layer: which: a number, several, a slice; by default all that have the site.
        head: which; all by default. A single layer, head, neuron or position need not be an axis.
        neuron: which features of the site's last axis.
        pos: which positions.
        plan: ``wavefront``, ``batches`` or ``one per cell``, to insist; by default the cheapest that is proven.
        align: ``end`` pads the shorter text of a pair (over positions: of all) at the left; by default it is refused.
        prepend_bos: as in ``to_tokens``, for texts.
        batch_size: how many examples run together, at most: of long texts as many as fit in memory.
        max_rows: how many rows, at most; by default as many as fit in memory. A place's examples stay together.
        engine: ``local`` for this process, or ``ray`` for a cluster (or all cores of this machine), whose processes
            share the batches of examples: see docs/scale.md.
        workers: how many processes hold the model, with ``ray``.
        progress: True for a bar; or a function of how many rows are done of how many: False ends with `Cancelled`,
            whose ``result`` has the places that are done, and NaN for the others.
    """
    must_be_engine(engine, workers)
    if engine != "local":
        must_travel(model, "Take them off; edit=... makes the sweep's own.")
    task = _Sweep(
        model=model,
        extent=Extent(
            model=model,
            sites=site,
            over=(over,) if isinstance(over, str) else tuple(over),
            chosen={"layer": layer, "head": head, "neuron": neuron, "pos": pos},
        ),
        metrics=dict(metric) if isinstance(metric, Mapping) else {"metric": metric},
        edit=edit,
        patch=patch,
        plan=plan,
        max_rows=max_rows,
    )
    parts = batches(
        model,
        clean,
        corrupt,
        size=_together(model, batch_size),
        fit=task.fit,
        prepend_bos=prepend_bos,
        align=align,
        together=task.extent.by_position,
    )
    return task.run(
        parts, progress, several=isinstance(metric, Mapping), engine=engine, workers=workers
    )


@dataclass(slots=True, kw_only=True)
class _Sweep:
    """What is to be done, whatever the examples."""

    model: TransformerModel
    extent: Extent
    metrics: dict[str, Any]
    edit: Callable[..., Any] | None
    patch: str
    plan: str
    max_rows: int | None

    def __post_init__(self) -> None:
        if self.plan not in PLANS:
            raise ValueError(f"plan is one of {', '.join(PLANS)}; got {self.plan!r}")
        if self.patch not in ("clean", "corrupt"):
            raise ValueError(f"patch is 'clean' or 'corrupt'; got {self.patch!r}")
        if self.model.training:
            raise Unsupported(
                "a sweep compares runs that differ in one place alone, but the model is in training mode. Call "
                "model.eval() first."
            )
        if not self.metrics:
            raise ValueError("metric is an empty mapping; give at least one, by its name.")
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"max_rows is at least 1; got {self.max_rows}")
        if self.edit is not None and not callable(self.edit):
            raise TypeError(
                "edit is a class of edit, such as ip.zero, or a function that makes one at each place; got "
                f"{self.edit!r}."
            )
        if self.edit is knockout:
            raise TypeError(
                "ip.knockout cuts edges, and a place is none: give a function, such as lambda site, **part: "
                "ip.knockout(site=site, key=0, **part)."
            )
        self.metrics = {name: as_metric(metric) for name, metric in self.metrics.items()}

    # Runs.

    def run(
        self,
        parts: Sequence[Batch],
        progress: ShowProgress,
        *,
        several: bool,
        engine: str,
        workers: int | None,
    ) -> SweepResult:
        """Run all batches of examples."""
        tower = self._tower()
        lengths = sorted({part.length for part in parts})
        if len(lengths) > 1 and self.extent.by_position:
            raise ValueError(
                f"the texts have {lengths[0]} to {lengths[-1]} tokens, so that positions are not the same places. "
                "Sweep over other axes, give texts of one length, or let them end together: align='end'."
            )
        axes = self.extent.axes(lengths[0])
        fixed = self.extent.fixed(lengths[0])
        cells = self.extent.cells(axes, fixed)
        total = sum(len(part.numbers) for part in parts)
        job = BatchesJob(self._task(tower, cells, total), parts)
        with Progress(progress, len(cells) * total, keeps=True) as bar:
            run(job, engine=engine, workers=workers, step=functools.partial(_goes_on, bar, job))
        found = list(job.found.values())
        numbers = [number for place in job.found for number in parts[place].numbers]

        def of_all(name: str, missing: float = torch.nan) -> Tensor:
            some = torch.cat([getattr(one, name) for one in found], -1)
            whole = some.new_full((*some.shape[:-1], total), missing)
            whole[..., numbers] = some
            return whole

        each, clean, corrupt = map(of_all, ("values", "clean", "corrupt"))
        noise = of_all("noise", torch.inf)
        shape = (len(self.metrics), *(len(entries) for entries in axes.values()), total)
        shown, *own = (
            SweepResult(
                axes={name: list(entries) for name, entries in axes.items()},
                metrics=tuple(self.metrics),
                several=several,
                each=each[at].reshape(shape),
                clean=clean[at],
                corrupt=None if parts[0].corrupt is None else corrupt[at],
                patch=self.patch,
                tally=job.tally,
                noise=noise[at],
                tokens=self._tokens(parts),
                sites=tuple(self.extent.sites),
                fixed=fixed,
                measured=tuple(map(label, self.metrics.values())),
                edit="" if self.edit is None else type(_edit_at(self.edit, cells[0])).__name__,
                logits=logits,
            )
            for at, logits in enumerate(found[0].logits)
        )
        return bar.whole(replace(shown, own=own[0]) if own else shown)

    def fit(self, length: int) -> int:
        """How many examples of a length fit in memory together."""
        whole = kept_by(list(self.metrics.values())) is None
        logits = length * (self.model.cfg.d_vocab or 0) if whole else 0
        return Sizes.of(self.model).most_examples(length=length, logits=logits)

    def _tower(self) -> Tower:
        found = tower_of(self.model)
        if found is None:
            why = prove(self.model).batches
            raise Unsupported(f"no sweep can run on {self.model.tree.label}: {why}.")
        return found

    def _task(self, tower: Tower, cells: list[Cell], total: int) -> Task:
        return Task(
            model=self.model,
            tower=tower,
            cells=cells,
            metrics=list(self.metrics.values()),
            edit=None if self.edit is None else functools.partial(_edit_at, self.edit),
            patch=self.patch,
            plan=self.plan,
            max_rows=self.max_rows,
            total=total,
            tally=Tally(),
            sizes=Sizes.of(self.model),
            whole_logits=others_listen(self.model)
            or others_look(self.model, {cell.site for cell in cells}),
        )

    def _tokens(self, parts: Sequence[Batch]) -> list[str] | None:
        """The tokens of the clean text, if there is one alone."""
        if len(parts) > 1 or len(parts[0].numbers) > 1 or self.model._tokenizer_or_none() is None:
            return None
        row = parts[0].clean["input_ids"][0].tolist()
        return [self.model.to_single_str_token(token) for token in row]


def _goes_on(bar: Progress, job: BatchesJob, count: int) -> bool:
    """Tell how many more rows are done; whether the sweep is to go on."""
    try:
        bar.step(count)
    except Cancelled as error:
        if error is not bar.ended:
            raise
    job.ended = bar.ended is not None
    return not job.ended


def _together(model: TransformerModel, size: int) -> int:
    """How many examples run together: one, where rows of a batch are not independent."""
    alone = tower_of(model) is not None and bool(prove(model).batches)
    return min(size, 1) if alone else size


def _edit_at(make: Callable[..., Any], cell: Cell) -> Any:
    """The edit of a cell."""
    fields = {"head": cell.head, "neuron": cell.neuron, "pos": cell.pos}
    made = make(cell.site, **{name: value for name, value in fields.items() if value is not None})
    if not isinstance(made, Edit):
        raise TypeError(f"edit=... is to make an edit, such as ip.zero(site); it made {made!r}.")
    return made
