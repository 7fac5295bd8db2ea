"""Statistics of activations over a dataset, in one pass and constant memory.

Each site keeps, per unit, a count, a mean and a sum of squared deviations in float64. Chan's
formula joins two such summaries, be they of two batches or of two machines, so the result is that
of all the data at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interpose.engine.hooks import Detector
from interpose.engine.model import Model
from interpose.engine.points import HookPoint
from interpose.errors import SiteNotFound
from interpose.models.loading import as_model
from interpose.models.running.masks import mask_at
from interpose.monitors.dataset import Forward, run_batches
from interpose.progress import ShowProgress
from interpose.results.result import Result, number
from interpose.sites.tree import Filter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteStatistics:
    """What is known of one site; tensors have one number per unit, in float64 on the CPU.

    ``variance`` divides by count - 1, as `torch.var` does, and is NaN for a single sample.
    ``sparsity`` is the share of exact zeros; a unit is ``dead`` if it was never anything else.
    """

    site: str
    count: int
    mean: Tensor
    variance: Tensor
    minimum: Tensor
    maximum: Tensor
    sparsity: Tensor
    dead: Tensor

    @property
    def units(self) -> int:
        """How many units there are."""
        return self.mean.numel()

    @property
    def std(self) -> Tensor:
        """The standard deviation of each unit."""
        return self.variance.sqrt()

    def overall(self) -> tuple[float, float]:
        """Mean and standard deviation over all units together."""
        mean = self.mean.mean()
        within = (self.variance * (self.count - 1)).nansum()
        between = self.count * (self.mean - mean).square().sum()
        variance = (within + between) / (self.count * self.units - 1)
        return float(mean), float(variance.sqrt())


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class ActivationStatistics(Result):
    """Statistics by site, in execution order: ``result["fc1"].mean`` has one number per unit."""

    rows: tuple[SiteStatistics, ...]

    def __getitem__(self, site: str) -> SiteStatistics:
        for row in self.rows:
            if row.site == site:
                return row
        there = ", ".join(repr(row.site) for row in self.rows[:8])
        raise SiteNotFound(f"no statistics of {site!r}. There are: {there}.")

    @property
    def title(self) -> str:
        """One line that says what this is."""
        return f"Activation statistics of {len(self.rows)} sites"

    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return ("site", "units", "samples", "mean", "std", "min", "max", "zeros", "dead")

    def cells(self) -> list[tuple[str, ...]]:
        """One row per site, over all its units."""
        return [
            (
                row.site,
                str(row.units),
                str(row.count),
                *(number(value) for value in row.overall()),
                number(float(row.minimum.min())),
                number(float(row.maximum.max())),
                f"{float(row.sparsity.mean()):.1%}",
                str(int(row.dead.sum())),
            )
            for row in self.rows
        ]

    def records(self) -> Iterator[dict[str, Any]]:
        """Every unit of every site as a dictionary; its value is its mean."""
        names = ("value", "variance", "minimum", "maximum", "sparsity", "dead")
        for row in self.rows:
            parts = (row.mean, row.variance, row.minimum, row.maximum, row.sparsity, row.dead)
            for unit, numbers in enumerate(zip(*(part.flatten().tolist() for part in parts))):
                yield {"site": row.site, "unit": unit, **dict(zip(names, numbers))}


@dataclass(slots=True)
class Summary:
    """Sums over some rows, one column per unit; those of several together are what `join` makes of theirs."""

    count: int
    mean: Tensor
    squares: Tensor
    minimum: Tensor
    maximum: Tensor
    zeros: Tensor

    @staticmethod
    def of(rows: Tensor) -> Summary:
        """Of values [row, unit]."""
        wide = rows.to(torch.float64)
        mean = wide.mean(0)
        return Summary(
            count=rows.shape[0],
            mean=mean,
            squares=(wide - mean).square_().sum(0),
            minimum=wide.amin(0),
            maximum=wide.amax(0),
            zeros=(rows == 0).sum(0),
        )

    def join(self, other: Summary) -> Summary:
        """Of both together."""
        count = self.count + other.count
        apart = other.mean - self.mean
        between = apart.square() * (self.count * other.count / count)
        return Summary(
            count=count,
            mean=self.mean + apart * (other.count / count),
            squares=self.squares + other.squares + between,
            minimum=torch.minimum(self.minimum, other.minimum),
            maximum=torch.maximum(self.maximum, other.maximum),
            zeros=self.zeros + other.zeros,
        )

    def to(self, device: torch.device | str) -> Summary:
        """The same on a device."""
        parts = (self.mean, self.squares, self.minimum, self.maximum, self.zeros)
        return Summary(self.count, *(part.to(device) for part in parts))


class Statistics(Detector):
    """Collects mean, variance, range, sparsity and dead units while a model runs.

    ```python
    statistics = ip.Statistics("layers.*")
    with model.hooks([statistics]), torch.no_grad():
        for batch in batches:
            model(batch)
    statistics.result()["layers.0"].mean
    ```

    The calls of a module that is called several times in a forward pass count together.

    Args:
        site: where; None for the output of every module.
        unit_axis: the axis that counts the units; by default 1 for images (four or five axes: their
            channels), else the last. Of a text's values [batch, pos, ...] everything after the position
            is a unit, heads side by side, and padding is left out. Of attention scores each head is a unit, over the
            pairs of positions that are not masked.
    """

    def __init__(self, site: Filter = None, *, unit_axis: int | None = None) -> None:
        super().__init__(site, copies=False)
        self.unit_axis = unit_axis
        self._summaries: dict[str, Summary] = {}

    def read(self, value: Tensor, hook: HookPoint) -> None:
        """Add a batch of values."""
        rows = self._rows(value, hook)
        if rows.numel():
            self._add(hook.name, Summary.of(rows))

    def _rows(self, value: Tensor, hook: HookPoint) -> Tensor:
        """A value as [sample, unit]."""
        name = hook.name
        if value.is_complex():
            raise TypeError(f"statistics are of real numbers; {name!r} is {value.dtype}.")
        if value.ndim == 0:
            return value.reshape(1, 1)
        axis = self.unit_axis
        if axis is None and hook.axes[:1] == ("batch",) and hook.pos_axis == 1 and value.ndim > 2:
            return _tokens(value, hook)
        if hook.canonical.endswith("hook_attn_scores") and axis in (None, 1):
            return _seen(value, hook)
        if axis is None:
            axis = 1 if value.ndim in (4, 5) else -1
        if not -value.ndim <= axis < value.ndim:
            raise ValueError(
                f"unit_axis={axis} is not an axis of {name!r}, whose shape is "
                f"{tuple(value.shape)}. Choose another unit_axis, or other sites."
            )
        value = value.cpu() if value.device.type == "mps" else value  # mps has no float64
        return value.movedim(axis, -1).reshape(-1, value.shape[axis])

    def _add(self, name: str, more: Summary) -> None:
        known = self._summaries.get(name)
        if known is not None and known.mean.shape != more.mean.shape:
            raise ValueError(
                f"{name!r} had {known.mean.numel()} units and now has {more.mean.numel()}. Choose the "
                "unit_axis whose length stays the same."
            )
        self._summaries[name] = more if known is None else known.join(more.to(known.mean.device))

    def merge(self, other: Statistics) -> None:
        """Add what another one has seen, as if it had been seen here."""
        for name, summary in other._summaries.items():
            self._add(name, summary)

    def result(self) -> ActivationStatistics:
        """What was found so far."""
        found = self._summaries.items()
        return ActivationStatistics(tuple(finished(site, sums.to("cpu")) for site, sums in found))


def _tokens(value: Tensor, hook: HookPoint) -> Tensor:
    """A value of a text, [batch, pos, ...], as [token, unit]: heads side by side, padding left out."""
    value = value.cpu() if value.device.type == "mps" else value  # mps has no float64
    mask = mask_at(hook, 1)
    if mask is not None and mask.shape == value.shape[:2]:
        return value[mask.to(value.device) != 0].flatten(1)
    return value.flatten(2).flatten(0, 1)


def _seen(value: Tensor, hook: HookPoint) -> Tensor:
    """Attention scores [batch, head, query, key] as [pair, head], without pairs that a mask or padding takes out."""
    wide = (value.cpu() if value.device.type == "mps" else value).movedim(1, -1)
    there = (wide > torch.finfo(value.dtype).min / 2).all(-1)
    mask = mask_at(hook, 2)
    if mask is not None and mask.shape == there.shape[:2]:
        there &= (mask.to(there.device) != 0)[:, :, None]
    return wide[there]


def finished(site: str, sums: Summary) -> SiteStatistics:
    """What the sums of a site come to."""
    return SiteStatistics(
        site=site,
        count=sums.count,
        mean=sums.mean,
        variance=sums.squares / (sums.count - 1),
        minimum=sums.minimum,
        maximum=sums.maximum,
        sparsity=sums.zeros.double() / sums.count,
        dead=sums.zeros == sums.count,
    )


def activation_statistics(
    model: Model | nn.Module,
    loader: Iterable[Any],
    site: Filter = None,
    *,
    forward: Forward | None = None,
    progress: ShowProgress = True,
    unit_axis: int | None = None,
) -> ActivationStatistics:
    """Statistics of every unit over a dataset, without gradients and in evaluation mode.

    Example:
        ``ip.activation_statistics(model, DataLoader(dataset, batch_size=256), "layer?")``

    Args:
        model: the model; each of its modules is put back in the mode it was in.
        loader: batches: a DataLoader or any iterable. Of a tuple the first element is the input; a
            dictionary is passed as keywords. For a model of transformers also texts, or tokens, or what a tokenizer
            returns, by themselves.
        site: where; None for the output of every module.
        forward: how to run a batch instead: ``lambda model, batch: model(batch["image"])``.
        progress: as in `ip.sweep`.
        unit_axis: as in `Statistics`.
    """
    statistics = Statistics(site, unit_axis=unit_axis)
    run_batches(as_model(model), loader, [statistics], forward=forward, progress=progress)
    return statistics.result()
