"""`SweepResult`: what a sweep measured, with its labels, baselines and what it took."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interpose.render.frame import data_frame
from interpose.render.html import write
from interpose.render.svg import picture
from interpose.results.bootstrap import Interval, bootstrap
from interpose.sweeps import page
from interpose.sweeps.planning import Tally

FORMAT, VERSION = "interpose.sweep", 3
OF_DIRECTION = {"denoise": "clean", "noise": "corrupt"}
"""What old files call the run whose values go into the other."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SweepResult:
    """What a sweep measured.

    Attributes:
        axes: the entries of each axis, by its name: ``{"layer": [0, 1, ...], "pos": [...]}``.
        metrics: names of the metrics.
        several: whether metrics were given by name, so that values have an axis of metrics.
        each: every number, [metric, *axes, example].
        clean: the metric of the clean run, [metric, example].
        corrupt: of the corrupted run; None if there was none.
        patch: which run's values went into the other: ``clean`` or ``corrupt``.
        tally: what ran, and what it took.
        noise: in 16 bits, how far rounding alone moved each metric, [metric, draw, example]; no draws in 32 bits.
        tokens: of the clean text, if there was one alone.
        sites: the kinds of sites that were changed.
        fixed: what all places have, by axes that were not gone through: ``{"head": 3}``.
        measured: the metrics as they were written.
        edit: what was done at each place; nothing for patching.
        logits: the dtype of the logits that metrics looked at.
        own: the same by the model's own logits in 16 bits, where those that are shown are from float32; else None.
    """

    axes: dict[str, list[Any]]
    metrics: tuple[str, ...]
    several: bool
    each: Tensor
    clean: Tensor
    corrupt: Tensor | None
    patch: str
    tally: Tally
    noise: Tensor
    tokens: list[str] | None
    sites: tuple[str, ...] = ()
    fixed: dict[str, int] = field(default_factory=dict)
    measured: tuple[str, ...] = ()
    edit: str = ""
    logits: str = "float32"
    own: SweepResult | None = None

    # Numbers.

    @property
    def examples(self) -> int:
        """How many."""
        return self.each.shape[-1]

    @property
    def values(self) -> Tensor:
        """The metric at every place, the mean over examples: [*axes], or [metric, *axes] if several were given."""
        return self._shown(self.each.mean(-1))

    @property
    def baseline(self) -> Tensor:
        """The metric of the run that was changed, [metric, example]."""
        return self.corrupt if self.corrupt is not None and self.patch == "clean" else self.clean

    @property
    def effect(self) -> Tensor:
        """How far each place moves the metric from its baseline, shaped as `values`."""
        return self._shown(self._effects().mean(-1))

    @property
    def normalised(self) -> Tensor:
        """The effect as a share of the whole way from the changed run to the other: 1 is all of it."""
        return self._shown(self._effects().mean(-1) / self._way().mean(-1))

    @property
    def noise_floors(self) -> tuple[float, ...]:
        """How far rounding alone moved each metric's mean over examples, in the draw where it went furthest."""
        return tuple(_furthest(self.noise.mean(-1)).tolist())

    @property
    def noise_floor(self) -> float:
        """The largest of the noise floors, which is that of the metric if there is one alone."""
        return max(self.noise_floors)

    @property
    def within_noise(self) -> Tensor:
        """Where the effect is no larger than its metric's noise floor, shaped as `values`; nowhere in 32 bits."""
        return self._shown(self._within(examples=False))

    def _within(self, *, examples: bool) -> Tensor:
        """Which effects are within the noise, [metric, *axes]; with ``examples``, each example's: [..., example]."""
        if examples:
            effects, floors = self._effects(), self._spread(_furthest(self.noise))
        else:
            effects = self._effects().mean(-1)
            floors = self._spread(_furthest(self.noise.mean(-1)))[..., 0]
        return (effects.abs() <= floors) & (floors > 0)

    def interval(
        self,
        confidence: float = 0.95,
        resamples: int = 2000,
        seed: int = 0,
        of: str = "effect",
    ) -> Interval:
        """Bounds of the mean over examples, ``low`` and ``high``, when examples are drawn anew (the bootstrap).

        Args:
            confidence: the share of resampled means that lie inside.
            resamples: how often examples are drawn, as many as there are, with replacement.
            seed: of the draws.
            of: ``effect``, ``normalised`` or ``values``.
        """
        if of not in ("effect", "normalised", "values"):
            raise ValueError(f"of is 'effect', 'normalised' or 'values'; got {of!r}.")
        found = bootstrap(
            self.each if of == "values" else self._effects(),
            self._way() if of == "normalised" else None,
            confidence=confidence,
            resamples=resamples,
            seed=seed,
        )
        return Interval(*map(self._shown, found))

    def _effects(self) -> Tensor:
        return self.each - self._spread(self.baseline)

    def _way(self) -> Tensor:
        """From the changed run to the other, [metric, 1..., example]."""
        if self.corrupt is None:
            raise ValueError("without a second text there is no whole way to take a share of.")
        other = self.clean if self.patch == "clean" else self.corrupt
        return self._spread(other - self.baseline)

    def _spread(self, ends: Tensor) -> Tensor:
        return ends.reshape(len(self.metrics), *([1] * len(self.axes)), -1)

    def _shown(self, values: Tensor) -> Tensor:
        return values if self.several else values[0]

    # Places.

    @property
    def labels(self) -> dict[str, list[str]]:
        """What the entries of each axis are called: positions by their tokens, where there is one text."""
        found = {name: [str(entry) for entry in entries] for name, entries in self.axes.items()}
        if self.tokens is not None and "pos" in self.axes:
            found["pos"] = [self.tokens[pos] for pos in self.axes["pos"]]
        return found

    def records(self, examples: bool = False) -> Iterator[dict[str, Any]]:
        """Every place of every metric as a dictionary; with ``examples``, every example by itself.

        An example's share of the way is one of the mean way, so that shares have the place's as their mean.
        """
        values, effects = self.each, self._effects()
        shares = None if self.corrupt is None else effects / self._way().mean(-1, keepdim=True)
        numbers = [part for part in (values, effects, shares) if part is not None]
        flat = [(part if examples else part.mean(-1)).flatten().tolist() for part in numbers]
        counted: list[list[Any]] = [list(range(self.examples))] if examples else []
        places = itertools.product(self.metrics, *self.axes.values(), *counted)
        names = ["value", "effect", "normalised"][: len(flat)]
        if self.noise_floor > 0:
            flat.append(self._within(examples=examples).flatten().tolist())
            names.append("within_noise")
        for (metric, *entries), *found in zip(places, *flat):
            record = dict(zip((*self.axes, "example"), entries))
            if self.tokens is not None and "pos" in record:
                record["token"] = self.tokens[record["pos"]]
            yield {
                **record,
                "metric": metric,
                **dict(zip(names, found)),
            }

    def top(self, k: int = 10) -> list[dict[str, Any]]:
        """The places with the largest effects, up or down, the largest first; so many of each metric."""
        found = []
        for _, places in itertools.groupby(self.records(), key=lambda record: record["metric"]):
            known = [record for record in places if record["effect"] == record["effect"]]
            found += sorted(known, key=lambda record: -abs(record["effect"]))[:k]
        return found

    def to_pandas(self, examples: bool = False) -> Any:
        """A pandas data frame with a row for each place; with ``examples``, for each example of it."""
        return data_frame(self.records(examples))

    # Data.

    def to_dict(self) -> dict[str, Any]:
        """Itself as data that JSON takes, every number included."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if isinstance(value, Tensor):
                value = _listed(value.tolist())
            elif isinstance(value, SweepResult):
                value = value.to_dict()
            data[option.name] = list(value) if isinstance(value, tuple) else value
        return {**data, "tally": dataclasses.asdict(self.tally)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SweepResult:
        """What `to_dict` wrote."""
        words = dict(data)
        if words.pop("format", None) != FORMAT:
            raise ValueError("this is no result of a sweep, as SweepResult.to_dict writes them.")
        version = words.pop("version", None)
        if version not in (2, VERSION):
            raise ValueError(
                f"this result is of version {version!r}, and this interpose reads versions 2 and {VERSION}."
            )
        if version == 2 and words.get("direction") in OF_DIRECTION:
            words["patch"] = OF_DIRECTION[words.pop("direction")]
        there = {option.name for option in dataclasses.fields(cls)}
        if set(words) != there:
            wrong = sorted(set(words) - there) or sorted(there - set(words))
            verb = "has no" if set(words) - there else "needs"
            raise ValueError(f"a result of a sweep {verb} {wrong[0]!r}: written by hand?")
        for name in ("each", "clean", "corrupt", "noise"):
            words[name] = None if words[name] is None else _tensor(words[name])
        draws = len(data["noise"][0])
        words["noise"] = words["noise"].reshape(
            len(words["metrics"]), draws, words["each"].shape[-1]
        )
        for name in ("metrics", "sites", "measured"):
            words[name] = tuple(words[name])
        words["own"] = None if words["own"] is None else cls.from_dict(words["own"])
        return cls(**{**words, "tally": Tally(**words["tally"])})

    # Pictures.

    def __repr__(self) -> str:
        return page.as_text(self)

    def html(self) -> str:
        """Heat maps with their labels, as HTML that needs nothing else."""
        return page.as_html(self)

    def _repr_html_(self) -> str:
        return self.html()

    def svg(self, title: str | None = None, *, metric: str | None = None) -> str:
        """One or two axes as a picture for papers and pages, of the first metric or the named one."""
        number = 0 if metric is None else self.metrics.index(metric)
        shown = page.view(self, number)[1]
        return picture(shown, title=page.title(self) if title is None else title)

    def save_html(self, path: str | Path) -> Path:
        """Write a page that needs no script and loads nothing, and return where it is."""
        return write(path, page.as_page(self))

    def save(self, path: str | Path) -> Path:
        """Write a page (``x.html``), a picture (``x.svg``) or the numbers (``x.json``), and return where it is."""
        if Path(path).suffix == ".html":
            return self.save_html(path)
        if Path(path).suffix == ".svg":
            return write(path, self.svg())
        if Path(path).suffix == ".json":
            return write(path, json.dumps(self.to_dict(), allow_nan=False))
        raise ValueError(f"save writes .html, .svg or .json; got {str(path)!r}.")


def _furthest(noise: Tensor) -> Tensor:
    """How far a metric moved in the draw that moved it most, [metric, ...] of [metric, draw, ...]; 0 without draws."""
    moved = noise.abs().nan_to_num(0.0, torch.inf)
    return moved.amax(1) if noise.shape[1] else moved.sum(1)


def _listed(value: Any) -> Any:
    """Nested lists of numbers; JSON has no infinities, so they are written as texts."""
    if isinstance(value, list):
        return [_listed(part) for part in value]
    return value if abs(value) < float("inf") else str(value)


def _numbers(value: Any) -> Any:
    return [_numbers(part) for part in value] if isinstance(value, list) else float(value)


def _tensor(value: Any) -> Tensor:
    return torch.tensor(_numbers(value), dtype=torch.float32)
