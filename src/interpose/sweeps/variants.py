"""`ip.run_variants`: many runs of the same texts that differ in a few changes each, all together.

Rows of a batch run side by side, each from the first layer that its own changes touch. Where that is not proven for a
model, whole runs stand side by side, or come one after another, and give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from interpose.engine.cache import Cache
from interpose.engine.hook_calls import call_hook
from interpose.engine.hooks import Hook, TorchHook, as_hook, skip
from interpose.engine.points import HookPoint
from interpose.errors import Cancelled, Unsupported
from interpose.models.running.masks import remember
from interpose.progress import Progress, ShowProgress
from interpose.sites.tree import Site
from interpose.sweeps import prompts
from interpose.sweeps.answers import Kept
from interpose.sweeps.cells import Row, acted
from interpose.sweeps.execution import plan_of
from interpose.sweeps.metrics import Examples, Metric, as_metric
from interpose.sweeps.planning import Sizes, Tally
from interpose.sweeps.proof import prove, tower_of
from interpose.sweeps.reference import refer, wanted_logits
from interpose.sweeps.wavefront import Reader, Reads, run_rows

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel


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
    that the metric looks at, or all (none with ``return_type=None``); ``cache`` has what ``names_filter`` asked for,
    and ``measured`` is the metric [example], empty without one.
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
        return_type: None if only these are wanted: runs end after the last of them.
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
        stop=return_type is None,
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
        stop: bool = False,
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
        self.stop = stop
        if stop and (metric is not None or not self.sites):
            raise ValueError("return_type=None goes with names_filter=..., and without a metric.")
        self.metric = None if metric is None else as_metric(metric)
        self.kept = Kept.last(self.metric.keep if self.metric else 1 if stop else None)
        self.tower = tower_of(model)
        self.layers = len(self.tower.blocks) if self.tower else model.cfg.n_layers or 1
        self._hooks = list(hooks)
        shared = [act for item in hooks for act in _acts(model, item)]
        self._placed = [self._place(variant, shared) for variant in variants]
        plan, why = plan_of(model, self._placed, "auto", prove(model))
        outside = [site.name for site in self.sites if site.layer is None]
        if plan == "wavefront":
            plan, why = ("batches", f"{outside[0]} is in no block") if outside else (plan, "")
        if looks := [
            act.hook for one in self._placed for act in one.all() if _looks_elsewhere(act)
        ]:
            plan, why = "one per cell", f"{looks[0]!r} looks at another site of its own run"
        self.tally = Tally(plan=plan, why=why)
        self.tally.one_per_cell = sum(map(len, map(self._examples, self.variants))) * (
            self.length * self.layers
        )
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
            for run in self:
                found[run.number, self._examples(self.variants[run.number])] = run.measured
        except Cancelled as error:
            error.result = found.cpu()
            raise
        return found.cpu()

    @torch.no_grad()
    def __iter__(self) -> Iterator[VariantRun]:
        order = sorted(
            range(len(self)), key=lambda n: (self._placed[n].layer, self._placed[n].sites)
        )
        together = self.tally.plan != "one per cell"
        with _opened(self.progress, sum(len(self._examples(one)) for one in self.variants)) as bar:
            for some in self._passes(order) if together else ([number] for number in order):
                for run in self._together(some) if together else [self._alone(some[0])]:
                    yield run
                    bar.step(len(self._examples(self.variants[run.number])))

    # Running.

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
        self._measure = None
        if self.metric is not None:
            examples = Examples(
                model=self.model,
                tokens=self.inputs["input_ids"],
                numbers=range(self.batch) if numbers is None else numbers,
                total=total or self.batch,
                clean=logits if clean is None else clean,
                mask=self.inputs.get("attention_mask"),
            )
            self._measure = self.metric.bind(examples)
        measured = self._measured(logits, [range(self.batch)])
        self.base = VariantRun(-1, logits, cache, *measured)

    def _passes(self, order: Sequence[int]) -> Iterator[list[int]]:
        """Variants that run together, in order: as many as their rows fit."""
        most = self.max_rows
        if most is None:
            logits = 0 if self.stop else self._reference.logits[0].numel()
            sizes = Sizes.of(self.model)
            most = sizes.most_rows(positions=self.length, length=self.length, logits=logits)
        some: list[int] = []
        rows = 0
        for number in order:
            more = len(self._examples(self.variants[number]))
            if some and rows + more > most:
                yield some
                some, rows = [], 0
            some.append(number)
            rows += more
        if some:
            yield some

    def _together(self, some: Sequence[int]) -> Iterator[VariantRun]:
        """Variants as rows of one pass."""
        assert self.tower is not None
        of = [self._examples(self.variants[number]) for number in some]
        ran = run_rows(
            self.model,
            self.tower,
            self._reference,
            self._placed,
            [Row(number, one) for number, examples in zip(some, of) for one in examples],
            self._change,
            self.kept,
            start=0 if self.tally.plan == "wavefront" else None,
            reads=self._reads,
        )
        self.tally.add(1, ran.token_layers)
        sizes = [len(examples) for examples in of]
        logits = [ran.logits] * len(of) if self.stop else ran.logits.split(sizes)
        values = {site: value.split(sizes) for site, value in ran.values.items()}
        measured = self._measured(ran.logits, of)
        for place, number in enumerate(some):
            own = self._cache({site: parts[place] for site, parts in values.items()})
            yield VariantRun(number, logits[place], own, measured[place])

    def _alone(self, number: int) -> VariantRun:
        """One variant, by itself."""
        variant = self.variants[number]
        examples = self._examples(variant)
        given = {name: value[examples] for name, value in self.inputs.items()}
        logits, cache = self._whole(given, [*self._hooks, *variant.changes])
        self.tally.add(1, len(examples) * self.length * self.layers)
        return VariantRun(number, logits, cache, *self._measured(logits, [examples]))

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

    def _measured(self, logits: Tensor, of: Sequence[Sequence[int]]) -> list[Tensor]:
        """The metric of variants, each of some examples, whose logits stand one after another."""
        if self._measure is None or self.metric is None:
            return [torch.empty(0)] * len(of)
        sizes = [len(examples) for examples in of]
        rows = [torch.tensor(list(examples), device=logits.device) for examples in of]
        if self.metric.by_batch:
            return [self._measure(*pair) for pair in zip(logits.split(sizes), rows)]
        return list(self._measure(logits, torch.cat(rows)).split(sizes))

    def _place(self, variant: Variant, shared: Sequence[_Act]) -> _Placed:
        if variant.example is not None and not 0 <= variant.example < self.batch:
            raise IndexError(f"a variant is of example {variant.example}, and {self.batch} run.")
        own = [act for item in variant.changes for act in _acts(self.model, item)]
        layer = min((act.layer for act in own), default=self.layers - 1)
        acts: dict[str, list[_Act]] = {}
        for act in (*shared, *own):
            # What all runs have in earlier blocks is in the stream that a row begins with.
            if act.layer < 0 or act.layer >= layer:
                acts.setdefault(act.site.canonical, []).append(act)
        return _Placed(layer, acts)

    def _examples(self, variant: Variant) -> Sequence[int]:
        return range(self.batch) if variant.example is None else [variant.example]


# Variants whose sites are known.


@dataclass(frozen=True, slots=True)
class _Act:
    """What is done at a site."""

    hook: Hook
    site: Site

    @property
    def layer(self) -> int:
        return -1 if self.site.layer is None else self.site.layer

    def on_value(self, value: Tensor, hook: HookPoint) -> Tensor | None:
        hook.name, hook.part = self.site.name, self.site.part
        made: Tensor | None = call_hook(self.hook, self.hook.on_value, value, hook)
        return made


@dataclass(frozen=True, slots=True)
class _Placed:
    """A variant whose sites are known: the first block it changes, and what it does by site."""

    layer: int
    acts: dict[str, list[_Act]]

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(self.acts)

    def all(self) -> list[_Act]:
        return [act for several in self.acts.values() for act in several]


def _looks_elsewhere(act: _Act) -> bool:
    """Whether it is an edit with a condition at another site."""
    return getattr(getattr(act.hook, "when", None), "where", None) is not None


def _acts(model: TransformerModel, item: Any) -> list[_Act]:
    hook = as_hook(item)
    if isinstance(hook, (skip, TorchHook)) or "fwd" not in hook.directions():
        raise TypeError(
            f"a variant changes values: give edits, or pairs (site, function); got {hook!r}."
        )
    wanted: Any = vars(hook).get("site")
    return [_Act(hook, site) for site, _ in model.select(wanted)] if hook.enabled else []


def _opened(progress: ShowProgress | Progress, total: int) -> AbstractContextManager[Progress]:
    """A bar, or the one that is open already."""
    if isinstance(progress, Progress):
        return nullcontext(progress)
    return Progress(progress, total, "row")
