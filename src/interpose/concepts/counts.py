"""How often units are active, and how strongly: exact counts, whose sum over parts of the data is that of the whole."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from interpose.concepts.firings import Firings

PER_OCTAVE = 4
LOWEST, HIGHEST = -16, 16
BINS = (HIGHEST - LOWEST) * PER_OCTAVE
"""A bin of the histogram goes from 2**(i/4) to 2**((i+1)/4), from 2**-16 on; the first and the last take the rest."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Counts:
    """Of each unit, over the tokens that counted.

    Attributes:
        fired: at how many tokens it was above zero, [unit].
        sums: the sum of its values there, [unit].
        squares: the sum of their squares, [unit].
        most: its largest value, [unit].
        histogram: how many values fell into each bin, [unit, bin].
    """

    fired: Tensor
    sums: Tensor
    squares: Tensor
    most: Tensor
    histogram: Tensor

    @classmethod
    def none(cls, units: int) -> Self:
        """Nothing yet."""
        return cls(
            fired=torch.zeros(units, dtype=torch.long),
            sums=torch.zeros(units, dtype=torch.float64),
            squares=torch.zeros(units, dtype=torch.float64),
            most=torch.zeros(units),
            histogram=torch.zeros(units, BINS, dtype=torch.int32),
        )

    def add(self, firings: Firings) -> None:
        """Count a batch; changes these counts."""
        unit, value = firings.unit, firings.value.double()
        self.fired.index_add_(0, unit, torch.ones_like(unit))
        self.sums.index_add_(0, unit, value)
        self.squares.index_add_(0, unit, value.square())
        self.most.scatter_reduce_(0, unit, firings.value, "amax")
        flat = unit * BINS + bin_of(firings.value)
        self.histogram.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))

    def joined(self, other: Counts) -> Counts:
        """Of both parts of the data."""
        summed = {
            one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)
        }
        return Counts(**{**summed, "most": torch.maximum(self.most, other.most)})


def bin_of(value: Tensor) -> Tensor:
    """The bin of values above zero."""
    found = ((value.double().log2() - LOWEST) * PER_OCTAVE).floor().long()
    return found.clamp(0, BINS - 1)


def edges() -> Tensor:
    """Where bins begin and the last one ends, [bin + 1]."""
    steps = torch.arange(BINS + 1, dtype=torch.float64)
    return 2.0 ** (LOWEST + steps / PER_OCTAVE)
