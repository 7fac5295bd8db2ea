"""`ip.run_variants`: many runs of the same texts that differ in a few changes each, all together.

Rows of a batch run side by side, each from the first layer that its own changes touch. Where that is not proven for a
model, whole runs stand side by side, or come one after another, and give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from interpose.engine.cache import Cache
from interpose.errors import Cancelled, Unsupported
from interpose.models.running.masks import remember
from interpose.progress import Progress, ShowProgress
from interpose.sweeps import noise, prompts
from interpose.sweeps.answers import Kept, only, others_look
from interpose.sweeps.cells import Row, acted
from interpose.sweeps.execution import plan_of
from interpose.sweeps.metrics import Examples, Measure, Metric, as_metric, function
from interpose.sweeps.narrowing import Filled, Looks, looked_at
from interpose.sweeps.placed import Placed, SiteAct, acts_of, by_itself
from interpose.sweeps.planning import Sizes, Tally
from interpose.sweeps.proof import others_listen, prove, tower_of
from interpose.sweeps.reference import refer, wanted_logits
from interpose.sweeps.wavefront import Ran, Reader, Reads, run_rows

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

_FEW = 8  # of fewer variants it is not asked what a function looks at, which takes two of them


@dataclass(frozen=True, slots=True)
class Variant:
    """What makes a run differ: a few changes, at any sites and layers.

    ```python
    ip.Variant([ip.zero("z", layer=3, head=1), (("mlp_out", 5), lambda value, hook: value / 2)])
    ```

    Attributes:
        changes: edits, or pairs of a site and a function ``fn(value, hook)``, as in ``hooks=``.
        example: the number of the one text that it is of; None for all that run.
    """

    changes: Sequence[Any]
    example: int | None = None


class VariantRun(NamedTuple):
    """What one variant gave.

    ``number`` is its place among the variants (-1: the run as it is), ``logits`` [example, kept, d_vocab] are those
    that a metric of `ip.metrics` looks at, or all (none with ``return_type=None``); ``cache`` has what
    ``names_filter`` asked for, and ``measured`` is the metric [example], empty without one.
    """

    number: int
    logits: Tensor
    cache: Cache
    measured: Tensor


def run_variants(
    model: TransformerModel,
    texts: Any,
    variants: Sequence[Variant],
    *,
    metric: Metric | Callable[[Tensor], Any] | None = None,
    names_filter: Any = (),
    return_type: str | None = "logits",
    hooks: Sequence[Any] = (),
    clean_logits: Tensor | None = None,
    prepend_bos: bool | None = None,
    max_rows: int | None = None,
    progress: ShowProgress | Progress = True,
) -> VariantRuns:
    """Run texts once for each variant, many variants together, each from the first layer that it changes.

    ```python
    heads = [ip.Variant([ip.zero("z", layer=3, head=h), ip.zero("z", layer=4, head=h)]) for h in range(6)]
    runs = ip.run_variants(model, "The Eiffel Tower is in", heads, metric=ip.metrics.probability(" Paris"))
    runs.measured() - runs.base.measured     # [variant, example]
    print(runs)                              # what it took
    ```

    The run as it is comes first, and is ``runs.base``. Iterating gives a `VariantRun` for each variant, those that
    begin early first; ``runs.measured()`` measures all of them.

    Args:
        model: a model of transformers, in eval mode.
        texts: texts of one length, their tokens, or a batch of `ip.batches`.
        variants: how the runs differ.
        metric: one of `ip.metrics`, or a function of logits that gives a number for each example.
        names_filter: sites whose values are kept of each variant, as in ``run_with_cache``.
        return_type: None if no logits are wanted. With a metric, no more of them are computed than it looks at, of a
            function too; without one, runs end after the last of the sites.
        hooks: changes that all runs have, the one as it is too. Functions get the rows of one variant at a time.
        clean_logits: what metrics that compare with a run compare with (`ip.metrics.kl`); by default the run as it is.
        prepend_bos: as in ``to_tokens``, for texts.
        max_rows: how many rows run together, at most; as many as fit by default. Those of a variant always do.
        progress: as in `ip.sweep`; or a bar that is open already.
    """
    if getattr(model, "training", False):
        raise Unsupported(
            "variants are compared by their changes alone, but the model is in training mode. Call model.eval() first."
        )
    if hasattr(texts, "numbers"):
        tokens, numbers, total = remember(texts.clean), texts.numbers, texts.total
        inputs = model.prepare(tokens)
    else:
        parts = prompts.batches(
            model, texts, None, size=1 << 30, prepend_bos=prepend_bos, align=None
        )
        if len(parts) > 1:
            raise ValueError(
                f"the texts have {parts[0].length} to {parts[-1].length} tokens, and variants are of texts of one "
                "length. Take them batch by batch: for batch in ip.batches(model, texts): ip.run_variants(model, "
                "batch, ...)"
            )
        inputs, numbers = parts[0].clean, parts[0].numbers
        total = len(numbers)
    return VariantRuns(
        model,
        inputs,
        variants,
        metric=metric,
        names_filter=names_filter,
        shows=return_type is not None,
        hooks=hooks,
        clean_logits=clean_logits,
        max_rows=max_rows,
        progress=progress,
        numbers=numbers,
        total=total,
    )


class VariantRuns:
    """Many runs that differ in a few changes: made by `run_variants`. Iterate over it once, or call `measured`.

    Attributes:
        base: the run as it is.
        layers: how many blocks the model has.
        grain: in 16 bits, how far apart the numbers are that the model computes with, as a share of them; else None.
        tally: what was computed until now; it prints as the plan.
    """

    def __init__(
        self,
        model: TransformerModel,
        inputs: Mapping[str, Tensor],
        variants: Sequence[Variant],
        *,
        metric: Any = None,
        names_filter: Any = (),
        shows: bool = True,
        hooks: Sequence[Any] = (),
        clean_logits: Tensor | None = None,
        max_rows: int | None = None,
        progress: ShowProgress | Progress = False,
        numbers: Sequence[int] | None = None,
        total: int | None = None,
    ) -> None:
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows is at least 1; got {max_rows}")
        self.model, self.inputs, self.variants = model, dict(inputs), list(variants)
        self.batch, self.length = next(iter(inputs.values())).shape[:2]
        self.max_rows, self.progress = max_rows, progress
        self.sites = [site for site, _ in model.select(names_filter)] if names_filter != () else []
        self.shows, self.stop = shows, metric is None and not shows
        if self.stop and not self.sites:
            raise ValueError(
                "nothing is wanted: return_type=None goes with names_filter=..., with metric=..., or with both."
            )
        self.metric = None if metric is None else as_metric(metric)
        self.kept = Kept.last(self.metric.keep if self.metric else 1 if self.stop else None)
        self.tower = tower_of(model)
        self.layers = len(self.tower.blocks) if self.tower else model.cfg.n_layers or 1
        self._hooks = list(hooks)
        shared = [act for item in hooks for act in acts_of(model, item)]
        own = list(map(self._acts_of, self.variants))
        firsts = [min((act.layer for act in acts), default=self.layers - 1) for acts in own]
        cells = [Placed.of(*pair) for pair in zip(firsts, own)]
        plan, why = by_itself([shared, *own]) or plan_of(model, cells, "auto", prove(model))
        outside = [site.name for site in self.sites if site.layer is None]
        if plan == "wavefront":
            plan, why = ("batches", f"{outside[0]} is in no block") if outside else (plan, "")
        self.tally = Tally(plan=plan, why=why)
        self.tally.one_per_cell = sum(map(len, map(self._examples, range(len(self))))) * (
            self.length * self.layers
        )
        # Behind the variants stand those that change nothing, and begin at each layer.
        own, firsts = [*own, *[[]] * self.layers], [*firsts, *range(self.layers)]
        earlier = plan != "wavefront"
        self._placed = [Placed.of(*pair, shared, earlier=earlier) for pair in zip(firsts, own)]
        self._looks: Looks | None = None
        self._idle: list[Tensor] = []
        with torch.no_grad():
            self._begin(numbers, total, clean_logits)

    # What there is.

    def __len__(self) -> int:
        return len(self.variants)

    def __repr__(self) -> str:
        return f"{len(self)} variants of {self.batch} x {self.length} tokens\n  {self.tally}"

    def measured(self) -> Tensor:
        """The metric of every variant, [variant, example]; NaN for examples that a variant is not of.

        Ended by `progress`, it gives the variants that are done, and NaN for the others, as the `Cancelled`'s result.
        """
        if self.metric is None:
            raise ValueError("there is no metric: give metric=... to run_variants.")
        found = self.base.measured.new_full((len(self), self.batch), torch.nan)
        try:
            for run in self._all(shows=False):
                found[run.number, self._examples(run.number)] = run.measured
        except Cancelled as error:
            error.result = found.cpu()
            raise
        return found.cpu()

    @torch.no_grad()
    def noise(self) -> Tensor:
        """In 16 bits, how far rounding alone moves the metric, [draw, example]; no draws in 32 bits.

        The first is of variants that change nothing and ran beside the others until now: the one that moved furthest.
        The others are the run as it is with numbers that are off by as much as one rounding may make them.
        """
        unchanged = self.base.measured
        if self.grain is None or self.tower is None:  # nor is there any without a metric
            return torch.zeros(0, self.batch, device="cpu")
        rounding = noise.Rounding(
            model=self.model,
            layers=self.layers,
            grain=self.grain,
            device=unchanged.device,
            hooks=self._hooks,
        )
        alone = self._hooks or self.tally.plan == "one per cell"  # hooks may be of so many rows
        together = 1 if alone else self._most_rows // self.batch
        still = [torch.zeros_like(unchanged), *self._idle]
        found = [max(still, key=lambda moved: float(moved.mean().abs().nan_to_num()))]
        for logits in rounding.runs(self.inputs, self.kept, draws=noise.DRAWS, together=together):
            of = [range(self.batch)] * (len(logits) // self.batch)
            again = self._measured(self._measure, rounding.last(logits), of)
            found += [one - unchanged for one in again]
            self.tally.add(1, len(logits) * self.length * self.layers)
        return torch.stack(found).cpu()

    def __iter__(self) -> Iterator[VariantRun]:
        return self._all(shows=self.shows)

    # Running.

    @torch.no_grad()
    def _all(self, *, shows: bool) -> Iterator[VariantRun]:
        order = sorted(
            range(len(self)), key=lambda n: (self._placed[n].layer, self._placed[n].sites)
        )
        together = self.tally.plan != "one per cell"
        self._looks = None if shows else self._looked_at(order)
        with _opened(self.progress, sum(map(len, map(self._examples, order)))) as bar:
            for some in self._passes(order) if together else ([number] for number in order):
                for run in self._together(some) if together else [self._alone(some[0])]:
                    yield run if shows else run._replace(logits=run.logits.new_empty(0, 0, 0))
                    bar.step(len(self._examples(run.number)))

    def _begin(
        self, numbers: Sequence[int] | None, total: int | None, clean: Tensor | None
    ) -> None:
        """The run as it is."""
        names = [site.canonical for site in self.sites]
        if self.tally.plan == "one per cell":
            logits, cache = self._whole(self.inputs, self._hooks)
        else:
            assert self.tower is not None
            reader = Reader(names)
            with self.model.hooks(hooks=[*self._hooks, reader] if names else self._hooks):
                self._reference = refer(self.model, self.tower, self.inputs, self.kept)
            logits, cache = self._reference.logits, self._cache(reader.values)
            self._reads = Reads(
                sites={site.canonical: site.layer or 0 for site in self.sites},
                base=reader.values,
                stop=self.stop,
            )
            placed = self._placed
            self._change = acted(lambda number, site: placed[number].acts[site], self.inputs)
        self.tally.add(1, self.batch * self.length * self.layers)
        self._asked = self._measure = None
        self.grain: float | None = None
        if self.metric is not None:
            self.grain = noise.grain(self.model, logits)
            self._asked = Examples(
                model=self.model,
                tokens=self.inputs["input_ids"],
                numbers=range(self.batch) if numbers is None else numbers,
                total=total or self.batch,
                clean=logits if clean is None else clean,
                mask=self.inputs.get("attention_mask"),
            )
            self._measure = self.metric.bind(self._asked)
        measured = self._measured(self._measure, logits, [range(self.batch)])
        self.base = VariantRun(-1, logits, cache, *measured)

    def _passes(self, order: Sequence[int]) -> Iterator[list[int]]:
        """Variants that run together, in order: as many as their rows fit."""
        most = self._most_rows - self.batch * self._idles
        some: list[int] = []
        rows = 0
        for number in order:
            more = len(self._examples(number))
            if some and rows + more > most:
                yield some
                some, rows = [], 0
            some.append(number)
            rows += more
        if some:
            yield some

    @property
    def _idles(self) -> bool:
        """Whether a variant that changes nothing runs beside the others, to see what running together does."""
        return self.grain is not None and self._most_rows >= 2 * self.batch

    @property
    def _most_rows(self) -> int:
        """How many rows run together, at most."""
        if self.max_rows is not None:
            return self.max_rows
        logits = 0 if self.stop else self.base.logits[0].numel()
        if self._looks is not None:
            logits //= self.length // len(self._looks.positions)
        sizes = Sizes.of(self.model)
        return sizes.most_rows(positions=self.length, length=self.length, logits=logits)

    def _looked_at(self, order: Sequence[int]) -> Looks | None:
        """What a function looks at in the run as it is and in two variants; None where all logits are computed."""
        sites = {site for placed in self._placed for site in placed.acts}
        sites |= {site.canonical for site in self.sites}
        if not isinstance(self.metric, function) or not self.metric.is_open or len(order) < _FEW:
            return None
        if self.tally.plan == "one per cell" or others_listen(self.model):
            return None
        if others_look(self.model, sites):
            return None
        tried = [order[len(order) // 2], order[-1]]
        of = [len(self._examples(number)) for number in tried]
        logits = self._rows(tried, None).logits
        found = looked_at(self.metric.of, [self.base.logits, *logits.split(of)])
        if found is not None and (prove(self.model).answers or logits.dtype.itemsize == 2):
            return Looks(found.positions, None)
        return found

    def _rows(self, some: Sequence[int], looks: Looks | None) -> Ran:
        """Variants as rows of one pass, of whose logits only those are computed that are looked at."""
        assert self.tower is not None
        picked = looks is not None and not prove(self.model).answers
        kept = self.kept if looks is None else Kept(looks.positions, picked)
        with only(self.model, looks.columns if looks else None, kept=kept if looks else None):
            ran = run_rows(
                self.model,
                self.tower,
                self._reference,
                self._placed,
                [Row(number, example) for number in some for example in self._examples(number)],
                self._change,
                kept,
                start=0 if self.tally.plan == "wavefront" else None,
                reads=self._reads,
            )
        self.tally.add(1, ran.token_layers)
        return ran

    def _together(self, some: Sequence[int]) -> Iterator[VariantRun]:
        """Variants of one pass."""
        if self._idles:
            some = [*some, len(self) + max(0, self._placed[some[0]].layer)]
        of = list(map(self._examples, some))
        ran, measure = self._rows(some, self._looks), self._measure
        if self._looks is not None:
            assert self.metric is not None
            assert self._asked is not None
            filled = Filled(self._looks, *self.base.logits.shape[1:])
            measure = self.metric.bind(replace(self._asked, filled=filled))
        measured = self._measured(measure, ran.logits, of)
        if self._looks is not None and bool(torch.cat(measured).isnan().any()):
            self._looks = None  # in some row the function looks elsewhere
            ran = self._rows(some, None)
            measured = self._measured(self._measure, ran.logits, of)
        sizes = [len(examples) for examples in of]
        logits = [ran.logits] * len(of) if self.stop else ran.logits.split(sizes)
        values = {site: value.split(sizes) for site, value in ran.values.items()}
        for place, number in enumerate(some):
            if number >= len(self):
                self._idle.append(measured[place] - self.base.measured)
                return
            own = self._cache({site: parts[place] for site, parts in values.items()})
            yield VariantRun(number, logits[place], own, measured[place])

    def _alone(self, number: int) -> VariantRun:
        """One variant, by itself."""
        variant = self.variants[number]
        examples = self._examples(number)
        given = {name: value[examples] for name, value in self.inputs.items()}
        logits, cache = self._whole(given, [*self._hooks, *variant.changes])
        self.tally.add(1, len(examples) * self.length * self.layers)
        return VariantRun(number, logits, cache, *self._measured(self._measure, logits, [examples]))

    def _whole(self, given: Mapping[str, Tensor], hooks: list[Any]) -> tuple[Tensor, Cache]:
        """The logits of a run by itself, and the values asked for."""
        extra = wanted_logits(self.model, self.kept)
        extra["return_type"] = None if self.stop else "logits"
        if not self.sites:
            logits = self.model.run_with_hooks(given, hooks=hooks, **extra)
            cache = Cache({})
        else:
            names = [site.name for site in self.sites]
            logits, cache = self.model.run_with_cache(
                given, names_filter=names, hooks=hooks, **extra
            )
        if logits is None:
            return torch.empty(0, 0, 0), cache
        return (logits if self.kept is None else self.kept.taken(logits)), cache

    def _cache(self, found: Mapping[str, Tensor]) -> Cache:
        """Values as `run_with_cache` has them: by any name of their sites."""
        aliases = {
            other: site.name for site in self.sites for other in (site.canonical, *site.aliases)
        }
        values = {site.name: found[site.canonical] for site in self.sites}
        return Cache(values, aliases=aliases, spelling=self.model.tree.spelling)

    def _measured(
        self, measure: Measure | None, logits: Tensor, of: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """The metric of variants, each of some examples, whose logits stand one after another."""
        if measure is None or self.metric is None:
            return [torch.empty(0)] * len(of)
        sizes = [len(examples) for examples in of]
        rows = [torch.tensor(list(examples), device=logits.device) for examples in of]
        if self.metric.by_batch:
            return [measure(*pair) for pair in zip(logits.split(sizes), rows)]
        return list(measure(logits, torch.cat(rows)).split(sizes))

    def _acts_of(self, variant: Variant) -> list[SiteAct]:
        if variant.example is not None and not 0 <= variant.example < self.batch:
            raise IndexError(f"a variant is of example {variant.example}, and {self.batch} run.")
        return [act for item in variant.changes for act in acts_of(self.model, item)]

    def _examples(self, number: int) -> Sequence[int]:
        """Those of a variant; all of one that changes nothing."""
        one = self.variants[number].example if number < len(self) else None
        return range(self.batch) if one is None else [one]


def _opened(progress: ShowProgress | Progress, total: int) -> AbstractContextManager[Progress]:
    """A bar, or the one that is open already."""
    if isinstance(progress, Progress):
        return nullcontext(progress)
    return Progress(progress, total, "row")
