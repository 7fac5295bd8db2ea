"""Intervals by the bootstrap: how far a mean over examples moves when they are drawn anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_MOST = 2**22  # numbers that are held at a time, of one kind


class Interval(NamedTuple):
    """Bounds between which most resampled means lie, each shaped as what they are about."""

    low: Tensor
    high: Tensor


def bootstrap(
    each: Tensor,
    way: Tensor | None = None,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int | torch.Generator = 0,
    statistic: str = "mean",
    fewest: int = 2,
) -> Interval:
    """Percentile intervals of the mean over examples, or of one mean as a share of another.

    Every place sees the same draws, those of ``torch.randint`` on a CPU generator with this seed, one resample after
    another; so places can be compared, and a part of a result has the intervals of the whole.

    Args:
        each: numbers [..., example].
        way: what each mean is divided by: the mean of these over the same draw, [..., example].
        confidence: the share of resampled means that lie inside.
        resamples: how often examples are drawn, as many as there are, with replacement.
        seed: of the draws, or what draws them.
        statistic: ``mean``; or ``median``, of which no share can be taken.
        fewest: how many examples there are at least.
    """
    count = each.shape[-1]
    if count < fewest:
        raise ValueError(
            "an interval says how far the mean over examples is to be trusted, and this sweep has one example alone. "
            "Give several texts."
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence lies between 0 and 1; got {confidence}.")
    if resamples < 1:
        raise ValueError(f"resamples is at least 1; got {resamples}.")
    shares = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    rows = each.detach().cpu().double().reshape(-1, count)
    ways = None if way is None else way.detach().cpu().double().expand_as(each).reshape(-1, count)
    found = torch.empty(2, len(rows), dtype=torch.float64, device="cpu")
    if isinstance(seed, torch.Generator):
        generator = seed
    else:
        generator = torch.Generator("cpu").manual_seed(seed)
    start = generator.get_state()
    step = max(1, _MOST // resamples)
    for at in range(0, len(rows), step):
        some = slice(at, at + step)
        means = torch.empty(len(rows[some]), resamples, dtype=torch.float64, device="cpu")
        first = 0
        for drawn in _draws(count, resamples, generator.set_state(start)):
            there = slice(first, first := first + len(drawn))
            if statistic == "median":
                each_draw = (rows[some][:, one].quantile(0.5, -1) for one in drawn)
                means[:, there] = torch.stack(list(each_draw), -1)
                continue
            counts = torch.zeros(drawn.shape, dtype=torch.float64)
            counts.scatter_add_(1, drawn, torch.ones_like(counts))
            means[:, there] = rows[some] @ counts.T / count
            if ways is not None:
                means[:, there] /= ways[some] @ counts.T / count
        found[:, some] = means.quantile(shares, -1)
    low, high = found.to(each.dtype).reshape(2, *each.shape[:-1])
    return Interval(low, high)


def _draws(count: int, resamples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Which examples are drawn, [some resamples, example], as many at a time as memory allows."""
    step = max(1, _MOST // count)
    for at in range(0, resamples, step):
        some = min(step, resamples - at)
        yield torch.randint(count, (some, count), generator=generator, device="cpu")
