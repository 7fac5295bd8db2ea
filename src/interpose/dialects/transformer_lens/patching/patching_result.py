"""The cells of a patching sweep: running them, measuring each, and what came out.

A cell is one place to patch, such as (layer, pos, head). `run_cells` is the only place where cells run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from interpose.errors import SiteNotFound
from interpose.results.bootstrap import bootstrap
from interpose.sweeps.variants import Variant, VariantRuns

Cell = tuple[int, ...]
Hook = Callable[..., Tensor | None]
MetricFn = Callable[[Tensor], Any]
REDUCTIONS = ("scalar", "mean", "none")
_MOST_EXACT = 12  # examples up to which every combination of signs is tried


def run_cells(
    model: Any,
    tokens: Tensor,
    cells: Sequence[Cell],
    hook_of: Callable[[Cell], tuple[str, Hook]],
    measure: Callable[[Tensor], Tensor],
    *,
    progress: bool = True,
) -> list[Tensor]:
    """Run the model for every cell with that cell's hook, many together, and measure each run's logits."""
    if not cells:
        return []
    variants = [Variant([hook_of(cell)]) for cell in cells]
    runs = VariantRuns(model, model.prepare(tokens), variants, progress=progress)
    found = {run.number: measure(run.logits) for run in runs}
    return [found[number] for number in range(len(cells))]


def require_eval(model: Any) -> None:
    """Refuse a model in training mode: its dropout would be measured along with the patch."""
    if getattr(model, "is_from_scratch", False):
        return  # nothing in it depends on the mode
    training = [name for name, part in model.module.named_modules() if part.training]
    if training:
        shown = ", ".join(repr(name) if name else "the model itself" for name in training[:3])
        more = f" and {len(training) - 3} more" if len(training) > 3 else ""
        raise ValueError(
            f"patching compares runs that differ in the patch alone, but {shown}{more} are in "
            "training mode. Call model.eval() first."
        )


def kept(cache: Mapping[str, Tensor], name: str, *, which: str) -> Tensor:
    """A value of a cache, or an error that says how to keep it."""
    try:
        return cache[name]
    except KeyError:
        raise SiteNotFound(
            f"{which} has no {name!r}, which is needed here. Keep it: model.run_with_cache without "
            "a names_filter, or with one that has it."
        ) from None


def pandas() -> Any:
    """The pandas module, which only tables need."""
    try:
        return importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tables of indices are pandas data frames: pip install pandas. Without it, give "
            "index_axis_names, and read `cells` and `values` of the result.",
            name="pandas",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """One metric or several by name, and what is to become of the batch."""

    named: dict[str, MetricFn]
    several: bool
    reduce: str
    batch: int

    @classmethod
    def of(cls, given: MetricFn | Mapping[str, MetricFn], *, reduce: str, batch: int) -> Metrics:
        """Metrics as users give them: a callable, or a mapping of names to callables."""
        if reduce not in REDUCTIONS:
            raise ValueError(f"reduce is 'scalar', 'mean' or 'none'; got {reduce!r}")
        several = isinstance(given, Mapping)
        named = dict(given) if isinstance(given, Mapping) else {"metric": given}
        if not named:
            raise ValueError("the mapping of metrics is empty; give at least one, by its name.")
        return cls(named=named, several=several, reduce=reduce, batch=batch)

    def __call__(self, logits: Tensor) -> Tensor:
        """What every metric says of these logits: [metric], or [metric, batch] with reduce='none'."""
        return torch.stack([self._one(name, metric(logits)) for name, metric in self.named.items()])

    def _one(self, name: str, found: Any) -> Tensor:
        value = torch.as_tensor(found).detach()
        if value.dtype not in (torch.float32, torch.float64):
            value = value.float()
        if self.reduce == "scalar":
            if value.numel() != 1:
                raise ValueError(
                    f"with reduce='scalar' a metric returns one number; {name!r} returned shape "
                    f"{tuple(value.shape)}. Take its mean, or pass reduce='mean' or reduce='none'."
                )
            return value.reshape(())
        if value.shape != (self.batch,):
            raise ValueError(
                f"with reduce={self.reduce!r} a metric returns one number for each of the "
                f"{self.batch} examples; {name!r} returned shape {tuple(value.shape)}."
            )
        return value.mean() if self.reduce == "mean" else value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class PatchingResult:
    """What a sweep measured, with statistics over the examples of the batch.

    Attributes:
        values: [metric, *axes, example]; no metric axis for a single callable, no example axis if ``reduced``,
            one flat axis in place of the axes if the cells came from an ``index_df``.
        axis_names: names of the axes; empty if flat.
        cells: the index of every cell, in the order they ran.
        columns: what the numbers of a cell are.
        metric_names: names of the metrics, ``["metric"]`` for a single callable.
        reduced: whether there is one number per cell, not one for each example.
        baseline: the metric of the corrupted run without a patch, [metric, example] likewise, or None.
        has_metric_axis: whether ``values`` begins with an axis of metrics.
        patch_type_names: what the entries of the axis ``patch_type`` are, if there is one.
    """

    values: Tensor
    axis_names: list[str]
    cells: list[Cell]
    columns: list[str]
    metric_names: list[str]
    reduced: bool
    baseline: Tensor | None = None
    has_metric_axis: bool = False
    patch_type_names: list[str] | None = None

    def __repr__(self) -> str:
        axes = self.axis_names or ["cell"]
        axes = [*["metric"] * self.has_metric_axis, *axes, *["example"] * (not self.reduced)]
        sizes = ", ".join(f"{name} {size}" for name, size in zip(axes, self.values.shape))
        baseline = "no baseline" if self.baseline is None else "with baseline"
        return f"PatchingResult of {', '.join(self.metric_names)}: {sizes}; {baseline}"

    def __getitem__(self, metric_name: str) -> PatchingResult:
        """The result of one metric, without the axis of metrics."""
        if metric_name not in self.metric_names:
            raise KeyError(f"no metric {metric_name!r}; there are {self.metric_names}")
        if not self.has_metric_axis:
            return self
        at = self.metric_names.index(metric_name)
        baseline = None if self.baseline is None else self.baseline[at]
        return replace(
            self,
            values=self.values[at],
            baseline=baseline,
            metric_names=[metric_name],
            has_metric_axis=False,
        )

    @property
    def index_df(self) -> Any:
        """A pandas data frame with a row for each cell, in the order they ran."""
        return pandas().DataFrame(self.cells, columns=self.columns)

    def mean(self) -> Tensor:
        """The mean over the examples; the values themselves if they are reduced already."""
        return self.values if self.reduced else self.values.mean(-1)

    def stderr(self) -> Tensor:
        """The standard error of the mean over the examples."""
        self._require_examples("stderr")
        count = self.values.shape[-1]
        if count < 2:
            raise ValueError(f"a standard error needs at least 2 examples; there is {count}.")
        found: Tensor = self.values.std(-1) / count**0.5
        return found

    def effect(self) -> Tensor:
        """How far each patch moves the metric of the corrupted run, shaped as ``values``."""
        return self.values - self._spread(self._required_baseline("effect"))

    def normalized(self, clean_baseline: Tensor) -> Tensor:
        """How much of the way back each patch goes: 0 leaves the corrupted run, 1 restores the clean one.

        Where clean and corrupted run agree there is no way to go, and the result is inf or NaN.

        Args:
            clean_baseline: the metric of the clean run, shaped as ``baseline``.
        """
        baseline = self._required_baseline("normalized")
        clean = torch.as_tensor(clean_baseline).to(baseline)
        if clean.shape != baseline.shape:
            raise ValueError(
                f"clean_baseline has shape {tuple(clean.shape)}, the baseline of this result "
                f"{tuple(baseline.shape)}. Measure the clean run with the same metric."
            )
        return self.effect() / self._spread(clean - baseline)

    def bootstrap_ci(
        self,
        *,
        confidence: float = 0.95,
        n_resamples: int = 1000,
        seed: int = 0,
        statistic: str = "mean",
        of_effect: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The interval, low and high, in which a statistic of the examples lies when they are drawn anew.

        Args:
            confidence: the share of the draws that fall into the interval.
            n_resamples: how many draws, with replacement.
            seed: of the draws.
            statistic: ``mean`` or ``median``.
            of_effect: of `effect` in place of the values.
        """
        self._require_examples("bootstrap_ci")
        if not 0 < confidence < 1:
            raise ValueError(f"confidence lies between 0 and 1; got {confidence}")
        if n_resamples < 1:
            raise ValueError(f"n_resamples is at least 1; got {n_resamples}")
        if statistic not in ("mean", "median"):
            raise ValueError(f"statistic is 'mean' or 'median'; got {statistic!r}")
        values = self.effect() if of_effect else self.values
        low, high = bootstrap(
            values,
            confidence=confidence,
            resamples=n_resamples,
            seed=seed,
            statistic=statistic,
            fewest=1,
        )
        return low.to(values.device), high.to(values.device)

    def permutation_pvalue(
        self, *, n_permutations: int = 1000, seed: int = 0, alternative: str = "two-sided"
    ) -> Tensor:
        """How often a mean effect at least this large comes about if each example's sign is a coin toss.

        Exact for up to 12 examples: all signs are tried.

        Args:
            n_permutations: how many random signs for more than 12 examples.
            seed: of the random signs.
            alternative: ``two-sided``, ``greater`` or ``less``.
        """
        self._require_examples("permutation_pvalue")
        if alternative not in ("two-sided", "greater", "less"):
            raise ValueError(
                f"alternative is 'two-sided', 'greater' or 'less'; got {alternative!r}"
            )
        effect = self.effect().double()
        count = effect.shape[-1]
        exact = count <= _MOST_EXACT
        if exact:
            heads = torch.arange(2**count)[:, None].bitwise_right_shift(torch.arange(count)) % 2
        else:
            heads = torch.randint(0, 2, (n_permutations, count), generator=_generator(seed))
        signs = (1 - 2 * heads).to(effect)
        observed, found = effect.mean(-1, keepdim=True), effect @ signs.T / count
        if alternative == "two-sided":
            observed, found = observed.abs(), found.abs()
        elif alternative == "less":
            observed, found = -observed, -found
        rounding = 1e-9 * effect.abs().mean(-1, keepdim=True)
        hits = (found >= observed - rounding).sum(-1) + (not exact)
        share = hits / (len(signs) + (not exact))
        return share.where(observed[..., 0].isfinite(), torch.nan).to(self.values.dtype)

    def to_dataframe(self) -> Any:
        """A pandas data frame with a row for every metric, cell and example."""
        examples = 1 if self.reduced else self.values.shape[-1]
        rows = []
        values = iter(self.values.flatten().tolist())
        for metric in self.metric_names:
            for cell in self.cells:
                kind = () if self.patch_type_names is None else (self.patch_type_names[cell[0]],)
                for example in range(examples):
                    number = () if self.reduced else (example,)
                    rows.append((metric, *cell, *kind, *number, next(values)))
        kinds = [] if self.patch_type_names is None else ["patch_type_name"]
        numbers = [] if self.reduced else ["example"]
        columns = ["metric", *self.columns, *kinds, *numbers, "value"]
        return pandas().DataFrame(rows, columns=columns)

    def _require_examples(self, what: str) -> None:
        if self.reduced:
            raise ValueError(f"{what} needs a number for each example: sweep with reduce='none'.")

    def _required_baseline(self, what: str) -> Tensor:
        if self.baseline is None:
            raise ValueError(f"{what} needs the corrupted run itself: sweep with baseline=True.")
        return self.baseline

    def _spread(self, baseline: Tensor) -> Tensor:
        """A baseline with an axis of size 1 for every axis of cells."""
        at = int(self.has_metric_axis)
        for _ in range(self.values.ndim - baseline.ndim):
            baseline = baseline.unsqueeze(at)
        return baseline


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def must_fit(name: str, clean: Tensor, value: Tensor) -> None:
    """Refuse to patch a value of a run of another length, which would put it at wrong positions."""
    if clean.ndim == value.ndim and clean.shape[1:] != value.shape[1:]:
        raise ValueError(
            f"{name!r} is {tuple(clean.shape)} in clean_cache and {tuple(value.shape)} in the corrupted run: "
            "the two prompts must have the same number of tokens (give both the same prepend_bos)."
        )
