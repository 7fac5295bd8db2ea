"""`SweepResult`: scores of many runs that differ in a change, with their baselines and what they took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from interpose.files.schema import Instance, Kind
from interpose.render import png
from interpose.render.frame import data_frame
from interpose.render.labelled import Labelled
from interpose.render.svg import picture
from interpose.results.bootstrap import Interval, bootstrap
from interpose.results.result import number
from interpose.results.scores import Scores, standard_error
from interpose.sweeps.planning import Tally

_FAINT = 0.25  # the largest share below which colours are scaled to the data
OF_DIRECTION = {"denoise": "clean", "noise": "corrupt"}
"""What old files call the run whose values go into the other."""
_PATCHED = (
    "Evidence for places that carry, each by itself, what tells the two texts apart for this metric; not for what they "
    "compute, nor that a place without effect is idle: others may carry the same."
)
_EDITED = (
    "Evidence for what the edit at each place, by itself, does to this metric on these texts; not for what the place "
    "computes, nor that one without effect is idle: others may stand in for it."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SweepResult(Scores):
    """What a sweep measured. Its `values` are means over examples; several metrics are an axis in front.

    Attributes:
        axes: the entries of each axis, by its name: ``{"layer": [0, 1, ...], "pos": [...]}``.
        metrics: names of the metrics.
        several: whether metrics were given by name, so that values have an axis of metrics.
        each: every number, [metric, *axes, example], with one metric, too.
        clean: the metric of the clean run, [metric, example].
        corrupt: of the corrupted run; None if there was none.
        patch: which run's values went into the other: ``clean`` or ``corrupt``.
        tally: what ran, and what it took.
        noise: in 16 bits, how far rounding alone moved each metric, [metric, draw, example]; no draws in 32 bits.
        sites: the kinds of sites that were changed.
        fixed: what all places have, by axes that were not gone through: ``{"head": 3}``.
        measured: the metrics as they were written.
        edit: what was done at each place; nothing for patching.
        logits: the dtype of the logits that metrics looked at.
        own: the same by the model's own logits in 16 bits, where those that are shown are from float32; else None.
        noise_floor: the largest of the noise floors, which is that of the metric if there is one alone.
    """

    VERSION: ClassVar[int] = 4
    FORMER: ClassVar[tuple[str, ...]] = ("interpose.sweep",)

    metrics: tuple[str, ...]
    several: bool
    each: Tensor
    clean: Tensor
    corrupt: Tensor | None
    patch: str
    tally: Tally
    noise: Tensor
    sites: tuple[str, ...] = ()
    fixed: dict[str, Any] = field(default_factory=dict)
    measured: tuple[str, ...] = ()
    edit: str = ""
    logits: str = "float32"
    own: SweepResult | None = None

    title: str = field(init=False)
    values: Tensor = field(init=False)
    unit: str = field(init=False)
    protocol: dict[str, Any] = field(init=False)
    evidence: str = field(init=False)
    errors: Tensor | None = field(init=False)
    noise_floor: float = field(init=False)

    def __post_init__(self) -> None:
        ends = {"clean": self.clean, "corrupt": self.corrupt}
        shape = (len(self.metrics), self.examples)
        for name, end in ends.items():
            if end is not None and tuple(end.shape) != shape:
                raise ValueError(f"{name} is {tuple(end.shape)}, and should be {shape}.")
        if tuple(self.noise.shape) != (shape[0], *self.noise.shape[1:2], shape[1]):
            raise ValueError(
                f"noise is {tuple(self.noise.shape)}, and should be [metric, draw, example]."
            )
        places = {name: entries for name, entries in self.axes.items() if name != "metric"}
        metric = {"metric": list(self.metrics)} if self.several else {}
        said = ", ".join(self.metrics if self.several else self.measured) or "metric"
        object.__setattr__(self, "axes", {**metric, **places})
        errors = standard_error(self._effects())
        made = {
            "title": f"{said}: {self._what(places)}",
            "values": self._shown(self.each.mean(-1)),
            "unit": said,
            "protocol": {
                **({} if self.edit or self.corrupt is None else {"patch": self.patch}),
                **{name: end.mean(-1).tolist() for name, end in ends.items() if end is not None},
                "examples": self.examples,
                "forwards": self.tally.forwards,
            },
            "evidence": _EDITED if self.edit or self.corrupt is None else _PATCHED,
            "errors": None if errors is None else self._shown(errors),
            "noise_floor": max(self.noise_floors),
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)
        Scores.__post_init__(self)

    def _what(self, places: dict[str, list[Any]]) -> str:
        axes = " x ".join(f"{name} ({len(entries)})" for name, entries in places.items())
        fixed = (f" at {name} {self._labels(name, [at])[0]}" for name, at in self.fixed.items())
        sites = ", ".join(self.sites) + "".join(fixed)
        where = f"{self.edit} at {sites}, " if self.edit else f"{sites} patched, "
        count = "1 example" if self.examples == 1 else f"{self.examples} examples"
        return f"{where if sites else ''}{f'by {axes}, ' if axes else ''}{count}"

    # Numbers.

    @property
    def examples(self) -> int:
        """How many."""
        return self.each.shape[-1]

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

    def pick(self, **entries: Any) -> SweepResult:
        """The sweep at one entry of some axes: ``found.pick(layer=5)``."""
        place = list(self._index(entries))
        metric = place.pop(0) if self.several else slice(None)
        chosen = metric if isinstance(metric, slice) else slice(metric, metric + 1)
        fixed = {name: entry for name, entry in entries.items() if name != "metric"}
        return replace(
            self,
            metrics=self.metrics[chosen],
            measured=self.measured[chosen],
            several=self.several and "metric" not in entries,
            axes={name: there for name, there in self.axes.items() if name not in entries},
            each=self.each[(chosen, *place)],
            clean=self.clean[chosen],
            corrupt=None if self.corrupt is None else self.corrupt[chosen],
            noise=self.noise[chosen],
            fixed={**self.fixed, **fixed},
            own=None if self.own is None else self.own.pick(**entries),
        )

    def sum(self, *axes: str) -> Scores:
        """The effects added up over some axes."""
        return self._derived(values=self.effect, unit=f"effect on {self.unit}").sum(*axes)

    @property
    def ranked(self) -> str:
        """Which number of a record says how strong it is."""
        return "effect"

    def _effects(self) -> Tensor:
        return self.each - self._spread(self.baseline)

    def _way(self) -> Tensor:
        """From the changed run to the other, [metric, 1..., example]."""
        if self.corrupt is None:
            raise ValueError("without a second text there is no whole way to take a share of.")
        other = self.clean if self.patch == "clean" else self.corrupt
        return self._spread(other - self.baseline)

    def _spread(self, ends: Tensor) -> Tensor:
        return ends.reshape(len(self.metrics), *([1] * (self.each.ndim - 2)), -1)

    def _shown(self, values: Tensor) -> Tensor:
        return values if self.several else values[0]

    # Places.

    def columns(self, examples: bool = False) -> dict[str, Sequence[Any]]:
        """What there is of every place, by name: value, effect, share of the way; with ``examples``, of each example.

        An example's share of the way is one of the mean way, so that shares have the place's as their mean.
        """
        found: dict[str, Any] = {"value": self.each, "effect": self._effects()}
        if self.corrupt is not None:
            found["normalised"] = found["effect"] / self._way().mean(-1, keepdim=True)
        if not examples:
            found = {name: part.mean(-1) for name, part in found.items()}
            if self.errors is not None:
                found["error"] = self.errors
        if self.noise_floor > 0:
            found["within_noise"] = self._within(examples=examples)
        return {name: part.flatten().tolist() for name, part in found.items()}

    def records(self, examples: bool = False) -> Iterator[dict[str, Any]]:
        """Every place as a dictionary; with ``examples``, every example by itself."""
        if not examples:
            return self._records(self.places())
        axes = {**self.axes, "example": list(range(self.examples))}
        return self._records(range(self.each.numel()), axes, self.columns(examples=True))

    def to_pandas(self, examples: bool = False) -> Any:
        """A pandas data frame with a row for each place; with ``examples``, for each example of it."""
        return data_frame(self.records(examples))

    # Data.

    @classmethod
    def kinds(cls) -> dict[str, Kind]:
        """What a file may hold in parts whose annotations do not say it."""
        return {"own": Instance((cls, type(None)), "the result of a sweep, or null")}

    @classmethod
    def brought_up(cls, words: dict[str, Any]) -> dict[str, Any]:
        """The parts of versions 1 to 3: numbers in lists, ``direction`` for ``patch``, noise floors for noise."""
        if "direction" in words:
            words["patch"] = OF_DIRECTION[words.pop("direction")]
        for name in ("each", "clean", "corrupt", "noise"):
            if words.get(name) is not None:
                words[name] = torch.tensor(_numbers(words[name]), dtype=torch.float32)
        metrics, examples = len(words["metrics"]), words["each"].shape[-1]
        if "noise" not in words:  # version 1
            one = [words.pop("noise_floor")] * metrics if "noise_floor" in words else []
            floors = torch.tensor(one or words.pop("noise_floors"), dtype=torch.float32)
            drawn = floors[:, None, None].expand(-1, int(bool(floors.any())), examples)
            words["noise"] = drawn.contiguous()
        return words | {"noise": words["noise"].reshape(metrics, -1, examples)}

    # Pictures.

    def view(self, metric: str | None = None) -> Labelled:
        """One metric's numbers as a picture shows them: shares of the way where there is one, else effects."""
        at = 0 if metric is None else self.metrics.index(metric)
        floor, values, limit = self.noise_floors[at], self._effects()[at].mean(-1), None
        shares = self._shares(at)
        if shares:
            values = values / self._way()[at].mean(-1)
            most = float(values.nan_to_num(0, 0, 0).abs().max()) if values.numel() else 0.0
            limit = max(1.0, most) if most > _FAINT else most or 1.0
        return Labelled(
            values=values.reshape(values.shape or (1,)),
            labels={n: some for n, some in self.labels.items() if n != "metric"}
            or {"": [self.unit]},
            what="share" if shares else "effect",
            limit=limit,
            faint=self._within(examples=False)[at] if floor > 0 else None,
        )

    def _shares(self, at: int) -> bool:
        """Whether there is a way to take shares of, beyond what rounding makes of it."""
        if self.corrupt is None:
            return False
        way = float((self.clean[at] - self.corrupt[at]).mean().abs())
        return way > max(self.noise_floors[at], 1e-6)

    def drawings(self) -> dict[str, Labelled]:
        """Each metric's numbers, by what is said above them."""
        found = {}
        for at, name in enumerate(self.metrics):
            meaning = "how far each place moves the metric"
            if self._shares(at):
                meaning = (
                    f"how much of the way to the {self.patch} run each place goes (1 is all of it)"
                )
            found[f"{name}: {meaning}" if self.several else meaning] = self.view(name)
        return found

    def lines(self) -> list[str]:
        """The runs as they are without a change, what ran, and how far to trust it."""
        said = []
        for at, name in enumerate(self.metrics):
            ends = [f"clean {number(self.clean[at].mean())}"]
            if self.corrupt is not None:
                ends.append(f"corrupt {number(self.corrupt[at].mean())}")
            changed = "corrupt" if self.baseline is self.corrupt else "clean"
            head = f"{name}: " if self.several else ""
            said.append(f"{head}{', '.join(ends)}; the {changed} run is changed")
        said.append(str(self.tally))
        if self.corrupt is not None and self.clean.equal(self.corrupt):
            said.append("the two texts give the same: there is nothing to carry over")
        if self.own is not None:
            said.append(
                f"logits of these tokens in float32, from a stream in {self.own.logits}; result.own has the same by "
                f"the model's own logits, in {self.own.logits}"
            )
        elif self.noise_floor > 0:
            said.append(f"logits are the model's own, in {self.logits}")
        if self.noise_floor > 0:
            floors, within = ", ".join(map(number, self.noise_floors)), self.within_noise
            said.append(
                f"noise floor {floors}: so far rounding alone moves the metric; {int(within.sum())} of "
                f"{within.numel()} effects are within it, grey or in brackets"
            )
        return said

    def strongest_table(self, k: int = 10) -> tuple[list[str], list[list[str]]]:
        """The strongest places as a table, with intervals over examples where there are several."""
        head, rows = Scores.strongest_table(self, k)
        if self.examples == 1 or not rows:
            return head, rows
        bounds = bootstrap(self._effects().reshape(-1, self.examples)[self._order(k)])
        said = (
            f"{number(low)} to {number(high)}" for low, high in zip(*map(Tensor.tolist, bounds))
        )
        return [*head, "95% of the effect"], [[*row, more] for row, more in zip(rows, said)]

    def svg(self, title: str | None = None, *, metric: str | None = None) -> str:
        """One or two axes as a picture for papers and pages, of the first metric or the named one."""
        return picture(self.view(metric), self._titled(metric) if title is None else title)

    def png(self, title: str | None = None, *, metric: str | None = None) -> bytes:
        """The same picture as pixels, the bytes of a PNG file."""
        return png.picture(self.view(metric), self._titled(metric) if title is None else title)

    def _titled(self, metric: str | None) -> str:
        """The title of one metric's picture."""
        if not self.several:
            return self.title
        return f"{metric or self.metrics[0]}: {self.title.removeprefix(f'{self.unit}: ')}"


def _furthest(noise: Tensor) -> Tensor:
    """How far a metric moved in the draw that moved it most, [metric, ...] of [metric, draw, ...]; 0 without draws."""
    moved = noise.abs().nan_to_num(0.0, torch.inf)
    return moved.amax(1) if noise.shape[1] else moved.sum(1)


def _numbers(value: Any) -> Any:
    return [_numbers(part) for part in value] if isinstance(value, list) else float(value)
