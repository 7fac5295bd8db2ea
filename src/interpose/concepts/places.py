"""The k places of the highest score that each unit has, kept while firings pass by, in any order of the batches.

With its value as the score they are a unit's strongest places; with a draw as the score, a random sample of them all.
Two parts of the data, each looked at by itself, merge into what both together give.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from interpose.concepts.firings import Firings, Tokens

NOWHERE = 2**62
"""An order that comes after all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Where units are active, [unit, place], the highest score first. Places that the data did not fill are NaN.

    Attributes:
        score: what they were chosen by, [unit, place]; minus infinity where there is none.
        order: which row and position, as one number, [unit, place].
        values: how active the unit is there, [unit, place].
        windows: the token and those around it, [unit, place, window]; -1 outside of the text.
        activations: how active the unit is at each of them, [unit, place, window].
    """

    score: Tensor
    order: Tensor
    values: Tensor
    windows: Tensor
    activations: Tensor

    @classmethod
    def none(cls, units: int, k: int, context: int) -> Self:
        """No places yet."""
        window = 2 * context + 1
        return cls(
            score=torch.full((units, k), -torch.inf, dtype=torch.float64),
            order=torch.full((units, k), NOWHERE),
            values=torch.full((units, k), torch.nan),
            windows=torch.full((units, k, window), -1, dtype=torch.int32),
            activations=torch.full((units, k, window), torch.nan),
        )

    @property
    def rows(self) -> Tensor:
        """The row of each place, [unit, place]; -1 where there is none."""
        return (self.order >> 32).masked_fill(self.order == NOWHERE, -1)

    @property
    def positions(self) -> Tensor:
        """The position of each in its row, [unit, place]; -1 where there is none."""
        return (self.order & (2**32 - 1)).masked_fill(self.order == NOWHERE, -1)

    @property
    def context(self) -> int:
        """How many tokens are kept on each side."""
        return self.windows.shape[2] // 2

    def offer(self, firings: Firings, score: Tensor, tokens: Tokens, every: Firings) -> None:
        """Keep those that are among the best; changes these places.

        Args:
            firings: entries that may be kept.
            score: of each, [entry], in float64.
            tokens: of the batch.
            every: all entries of the batch, for what is around.
        """
        order, k = tokens.order[firings.token], self.score.shape[1]
        last, last_order = self.score[firings.unit, -1], self.order[firings.unit, -1]
        better = (score > last) | ((score == last) & (order < last_order))
        if not bool(better.any()):
            return
        unit, value, token = firings.unit[better], firings.value[better], firings.token[better]
        score, order = score[better], order[better]
        chosen = _best(unit, score, order, k)
        unit, value, token, score, order = (x[chosen] for x in (unit, value, token, score, order))
        near, inside = tokens.around(token, self.context)
        around = every.at(near, unit[:, None].expand_as(near)).masked_fill(~inside, torch.nan)
        self._join(unit, score, order, value, tokens.windows(token, self.context), around)

    def _join(self, unit: Tensor, *new: Tensor) -> None:
        """Merge new places [n, ...] of units into these."""
        k, own = self.score.shape[1], unit.unique()
        mine = (self.score, self.order, self.values, self.windows, self.activations)
        both = [torch.cat([old[own].flatten(0, 1), one]) for old, one in zip(mine, new)]
        units = torch.cat([own.repeat_interleave(k), unit])
        chosen = _best(units, both[0], both[1], k)
        units = units[chosen]
        rank = _rank(units)
        for old, one in zip(mine, both):
            old[units, rank] = one[chosen]

    def merged(self, other: Places) -> Places:
        """Of both parts of the data."""
        made = replace(self, **{name: getattr(self, name).clone() for name in _PARTS})
        units, k = other.score.shape
        number = torch.arange(units).repeat_interleave(k)
        there = other.order.flatten() != NOWHERE
        parts = (getattr(other, name).flatten(0, 1)[there] for name in _PARTS)
        made._join(number[there], *parts)
        return made


_PARTS = ("score", "order", "values", "windows", "activations")


def _best(unit: Tensor, score: Tensor, order: Tensor, k: int) -> Tensor:
    """Which entries are the k best of their unit: by unit, then by score, of equal ones those of lower order."""
    chosen = order.argsort(stable=True)
    chosen = chosen[score[chosen].argsort(stable=True, descending=True)]
    chosen = chosen[unit[chosen].argsort(stable=True)]
    return chosen[_rank(unit[chosen]) < k]


def _rank(unit: Tensor) -> Tensor:
    """The number of each entry within its unit, where units are ascending."""
    at = torch.arange(len(unit))
    first = torch.ones(len(unit), dtype=torch.bool)
    first[1:] = unit[1:] != unit[:-1]
    return at - at.masked_fill(~first, 0).cummax(0).values if len(unit) else at
