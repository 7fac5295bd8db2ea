"""A random sample of all tokens with the units that are active there.

It tells which units go together, and has examples of what a unit does not respond to.

Which tokens it has follows from their places alone, so that parts of the data merge into the sample of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from interpose.concepts.firings import Firings, Tokens, drawn

_SEED = 0x5EED


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """Some tokens, those drawn first in front.

    Attributes:
        draw: what they were chosen by, [token], ascending.
        order: which row and position, as one number, [token].
        windows: the token and those around it, [token, window].
        units: the units that are active at each, one token's after another's, [entry].
        starts: where each token's begin, and the end, [token + 1].
        near: the units that are active at it or around it, likewise.
        near_starts: likewise.
        size: how many tokens are kept.
    """

    draw: Tensor
    order: Tensor
    windows: Tensor
    units: Tensor
    starts: Tensor
    near: Tensor
    near_starts: Tensor
    size: int

    @classmethod
    def none(cls, size: int, context: int) -> Self:
        """No tokens yet."""
        whole = torch.zeros(0, dtype=torch.long)
        start = torch.zeros(1, dtype=torch.long)
        return cls(
            draw=whole,
            order=whole,
            windows=torch.zeros(0, 2 * context + 1, dtype=torch.int32),
            units=whole,
            starts=start,
            near=whole,
            near_starts=start,
            size=size,
        )

    def __len__(self) -> int:
        return len(self.draw)

    def of_batch(self, tokens: Tokens, firings: Firings) -> Sample:
        """Those of a batch that may be among the tokens of the whole."""
        counted = tokens.counted.nonzero()[:, 0]
        draw = drawn(_SEED, tokens.order[counted])
        if len(self) == self.size:
            draw, counted = (x[draw < self.draw[-1]] for x in (draw, counted))
        order = draw.argsort()[: self.size]
        draw, some = draw[order], counted[order]
        context = self.windows.shape[1] // 2
        near, inside = tokens.around(some, context)
        units, starts = _units(firings, some[:, None], torch.ones_like(some[:, None]) > 0)
        around, around_starts = _units(firings, near, inside)
        return Sample(
            draw=draw,
            order=tokens.order[some],
            windows=tokens.windows(some, context),
            units=units,
            starts=starts,
            near=around,
            near_starts=around_starts,
            size=self.size,
        )

    def merged(self, other: Sample) -> Sample:
        """Of both parts of the data."""
        if not len(other):
            return self
        draw = torch.cat([self.draw, other.draw])
        order = draw.argsort(stable=True)[: self.size]
        units, starts = _picked(self.units, self.starts, other.units, other.starts, order)
        near, near_starts = _picked(
            self.near, self.near_starts, other.near, other.near_starts, order
        )
        return Sample(
            draw=draw[order],
            order=torch.cat([self.order, other.order])[order],
            windows=torch.cat([self.windows, other.windows])[order],
            units=units,
            starts=starts,
            near=near,
            near_starts=near_starts,
            size=self.size,
        )

    def beside(self, unit: int, units: int, k: int) -> tuple[Tensor, Tensor]:
        """The units that are active at the same tokens as one, and at how many of the tokens at which either is.

        Args:
            unit: which.
            units: how many there are.
            k: how many others to name, at most.
        """
        counts = self.starts.diff()
        token = torch.arange(len(self)).repeat_interleave(counts)
        mine = token[self.units == unit]
        both = torch.bincount(self.units[_runs(self.starts[mine], counts[mine])], minlength=units)
        fired = torch.bincount(self.units, minlength=units)
        shares = both / (fired + fired[unit] - both).clamp(min=1)
        shares[unit] = 0
        best = shares.topk(min(k, units))
        there = best.values > 0
        return best.indices[there], best.values[there]

    def without(self, unit: int) -> Tensor:
        """The tokens of the sample around which a unit is nowhere active."""
        token = torch.arange(len(self)).repeat_interleave(self.near_starts.diff())
        there = torch.zeros(len(self), dtype=torch.bool)
        there[token[self.near == unit]] = True
        return (~there).nonzero()[:, 0]


def _units(firings: Firings, tokens: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """The units that are active at any of each row's tokens, one row's after another's, and where each row's begin."""
    begins = torch.searchsorted(firings.token, tokens)
    ends = torch.searchsorted(firings.token, tokens, right=True)
    counts = torch.where(inside, ends - begins, 0).flatten()
    entry = _runs(begins.flatten(), counts)
    row = torch.arange(len(tokens)).repeat_interleave(tokens.shape[1]).repeat_interleave(counts)
    found = (row * firings.units + firings.unit[entry]).unique()
    rows = torch.bincount(found // firings.units, minlength=len(tokens))
    return found % firings.units, _starts(rows)


def _picked(
    one: Tensor, starts: Tensor, other: Tensor, other_starts: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """The entries of some tokens of two lists, one after the other."""
    counts = torch.cat([starts.diff(), other_starts.diff()])
    begins = torch.cat([starts[:-1], other_starts[:-1] + len(one)])
    counts, begins = counts[order], begins[order]
    return torch.cat([one, other])[_runs(begins, counts)], _starts(counts)


def _runs(begins: Tensor, counts: Tensor) -> Tensor:
    """So many numbers in a row from each beginning on, one run after another."""
    ends = counts.cumsum(0)
    within = torch.arange(int(counts.sum())) - (ends - counts).repeat_interleave(counts)
    return begins.repeat_interleave(counts) + within


def _starts(counts: Tensor) -> Tensor:
    """Where each run begins, and the end."""
    return functional.pad(counts.cumsum(0), (1, 0))
