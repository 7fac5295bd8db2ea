"""Where units are active in a batch: one entry for each token and unit, so that work follows what fires."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from interpose.sae.codes import Codes

_MASK = (1 << 62) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Firings:
    """The entries of a batch whose value is above zero, by token and unit.

    Attributes:
        token: which token of the batch, counted through, [entry], ascending.
        unit: which unit, [entry].
        value: how strongly, [entry], above zero.
        units: how many units there are.
        keys: ``token * units + unit`` of each entry, ascending.
    """

    token: Tensor
    unit: Tensor
    value: Tensor
    units: int
    keys: Tensor

    @classmethod
    def of(cls, token: Tensor, unit: Tensor, value: Tensor, units: int) -> Firings:
        """Of entries in any order; those that are not above zero are left out.

        Args:
            token: of each.
            unit: of each.
            value: of each.
            units: how many units there are.
        """
        there = value > 0
        token, unit, value = (part[there].cpu() for part in (token, unit, value))
        keys, order = (token.long() * units + unit).sort()
        return cls(
            token=token[order].long(),
            unit=unit[order].long(),
            value=value[order].float(),
            units=units,
            keys=keys,
        )

    @classmethod
    def of_codes(cls, codes: Codes, neuron: Tensor | None) -> Firings:
        """Of an autoencoder's codes.

        Args:
            codes: of the vectors of a batch.
            neuron: the latents that count, ascending; None for all.
        """
        token, unit, value = codes.rows, codes.indices, codes.values
        if neuron is None:
            return cls.of(token, unit, value, codes.width)
        number = torch.full((codes.width,), -1, device=unit.device)
        number[neuron.to(unit.device)] = torch.arange(len(neuron), device=unit.device)
        mine = number[unit] >= 0
        return cls.of(token[mine], number[unit[mine]], value[mine], len(neuron))

    @classmethod
    def of_dense(cls, values: Tensor) -> Firings:
        """Of values [token, unit]."""
        token, unit = (values > 0).nonzero(as_tuple=True)
        return cls.of(token, unit, values[token, unit], values.shape[1])

    def at(self, token: Tensor, unit: Tensor) -> Tensor:
        """The values of units at tokens; zero where they are not above it."""
        asked = token * self.units + unit
        if not len(self.keys):
            return torch.zeros(asked.shape)
        found = torch.searchsorted(self.keys, asked).clamp(max=len(self.keys) - 1)
        return torch.where(self.keys[found] == asked, self.value[found], 0.0)

    def where(self, some: Tensor) -> Firings:
        """Some of the entries: a mask, [entry]."""
        return Firings(
            token=self.token[some],
            unit=self.unit[some],
            value=self.value[some],
            units=self.units,
            keys=self.keys[some],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """The tokens of a batch, flat, and where each stands.

    Attributes:
        ids: which token, [token].
        row: of which row of the data, [token].
        pos: at which position of it, [token].
        length: how many tokens each row has.
        counted: which of them count, [token]; the others are seen around those that do.
    """

    ids: Tensor
    row: Tensor
    pos: Tensor
    length: int
    counted: Tensor

    @property
    def order(self) -> Tensor:
        """A number for each that tells it from all others of the data, and puts them in order."""
        return (self.row << 32) + self.pos

    def around(self, token: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Those around tokens, [n, 2 context + 1], and which of them are in the same row."""
        steps = torch.arange(-context, context + 1)
        there = self.pos[token][:, None] + steps
        inside = (there >= 0) & (there < self.length)
        return (token[:, None] + steps).clamp(0, len(self.ids) - 1), inside

    def windows(self, token: Tensor, context: int) -> Tensor:
        """The tokens around some, [n, 2 context + 1]; -1 outside of the row."""
        near, inside = self.around(token, context)
        return self.ids[near].masked_fill(~inside, -1).int()


def drawn(*numbers: Tensor | int) -> Tensor:
    """Numbers below 2**52 that look random, and follow from these alone: a draw that any part of the data agrees on."""
    mixed: Tensor = torch.zeros((), dtype=torch.long)
    for number in numbers:
        mixed = _stirred(mixed + number + 0x1E3779B97F4A7C15)
    return mixed >> 10


def _stirred(x: Tensor) -> Tensor:
    x = x & _MASK
    x = ((x ^ (x >> 30)) * 0x3F58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x14D049BB133111EB) & _MASK
    return x ^ (x >> 31)
