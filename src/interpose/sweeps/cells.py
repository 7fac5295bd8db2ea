"""Variants, cells and rows: what makes a run differ, at which sites, and on which example."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from interpose.engine.points import HookPoint
from interpose.errors import EditShapeError, Unsupported


class Act(Protocol):
    """What a variant or a cell does at a site: an edit, or another hook that changes values."""

    def on_value(self, value: Tensor, hook: HookPoint) -> Tensor | None:
        """The new value; None for what was made of the given one in place."""


class Changes(Protocol):
    """What rows are known by: a `Cell` of a sweep, or a variant whose sites are known."""

    @property
    def layer(self) -> int:
        """The first block it changes."""

    @property
    def sites(self) -> tuple[str, ...]:
        """The canonical names of the sites it changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One place: a site, and what of it.

    Attributes:
        site: its canonical name; nothing for a cell that changes nothing.
        layer: the block it is in.
        pos: which position; None for all.
        head: which head; None for all.
        neuron: which feature of the last axis; None for all.
    """

    site: str
    layer: int
    pos: int | None = None
    head: int | None = None
    neuron: int | None = None

    @property
    def sites(self) -> tuple[str, ...]:
        """Its site, if it changes something."""
        return (self.site,) if self.site else ()


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a batch: the number of a cell or variant, and of an example."""

    cell: int
    example: int


def sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers as a tensor on a device, without waiting for what is computed there."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Some rows of a pass: their numbers, ascending, and what picks them on the device."""

    numbers: Sequence[int]
    index: slice | Tensor

    @staticmethod
    def of(numbers: Sequence[int], device: torch.device) -> Chosen:
        """Rows that stand together are a slice, which copies nothing."""
        first, end = numbers[0], numbers[-1] + 1
        together = end - first == len(numbers)
        return Chosen(numbers, slice(first, end) if together else sent(numbers, device))

    def within(self, value: Tensor, hook: HookPoint) -> Tensor:
        """Their values; a value that all rows share is refused."""
        if value.ndim == 0 or value.shape[0] <= self.numbers[-1]:
            raise Unsupported(
                f"{hook.name!r} is {tuple(value.shape)} for {len(self.numbers)} rows: they share it, and none has "
                "its own."
            )
        return value[self.index]


RowChange = Callable[[Tensor, Chosen, HookPoint], Tensor]
"""From the values [row, pos, ...] of some rows, at one site, to the changed ones. ``hook.offset`` is their first
position."""

Change = Callable[[Sequence[Row], torch.device], RowChange]
"""From the rows of a pass, and where they are, to what changes them. What it needs goes to the device once."""


def patch(cells: Sequence[Cell], source: Callable[[str], Tensor]) -> Change:
    """The change that puts another run's values in place of each row's part.

    Args:
        cells: by number; all with a position or none, and so with heads and neurons.
        source: the other run's value at a site, [example, pos, ...].
    """

    def prepare(rows: Sequence[Row], device: torch.device) -> RowChange:
        examples = sent([row.example for row in rows], device)
        fields = {
            name: sent([getattr(cells[row.cell], name) for row in rows], device)
            for name in ("pos", "head", "neuron")
            if getattr(cells[rows[0].cell], name) is not None
        }

        neurons = [cells[row.cell].neuron or 0 for row in rows]

        def change(value: Tensor, chosen: Chosen, hook: HookPoint) -> Tensor:
            must_have_units(value, [neurons[number] for number in chosen.numbers], hook)
            there = source(cells[rows[chosen.numbers[0]].cell].site)
            part = {name: numbers[chosen.index] for name, numbers in fields.items()}
            here, from_there = _indices(value, there, examples[chosen.index], part, hook)
            value = value.clone()
            value[here] = there[from_there].to(value)
            return value

        return change

    return prepare


def _indices(
    value: Tensor,
    there: Tensor,
    examples: Tensor,
    fields: dict[str, Tensor],
    hook: HookPoint,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Indices of the rows' parts: in their values, and in the other run's. Axes behind the last chosen are whole."""
    pos = hook.pos_axis if hook.axes else 1
    named = [
        "pos" if axis == pos else name if name == "head" else None
        for axis, name in enumerate(hook.axes or [""] * value.ndim)
    ]
    if "neuron" in fields:
        named[-1] = "neuron"
    chosen = [name in fields for name in named]
    apart = [axis > 0 and value.shape[axis] != there.shape[axis] for axis in range(value.ndim)]
    needed = [axis for axis in range(value.ndim) if chosen[axis] or apart[axis]]
    count = max(needed, default=0) + 1
    here, from_there = [], []
    for axis in range(count):
        shift = there.shape[axis] - value.shape[axis] if named[axis] == "pos" else 0
        if axis == 0:
            mine, others = torch.arange(len(value), device=value.device), examples
        elif chosen[axis]:
            others = fields[str(named[axis])]
            mine = others - shift
        else:
            mine = torch.arange(value.shape[axis], device=value.device)
            others = mine + shift
        shape = [1] * count
        shape[0 if axis == 0 or chosen[axis] else axis] = -1
        here.append(mine.reshape(shape))
        from_there.append(others.to(there.device).reshape(shape))
    return tuple(here), tuple(from_there)


def acted(acts: Callable[[int, str], Sequence[Act]], inputs: Mapping[str, Tensor]) -> Change:
    """The change that lets each cell's or variant's own acts change its rows, all its examples together.

    Args:
        acts: what is done by the number of a cell at a site, in order.
        inputs: what the module takes for the examples, each [example, pos].
    """
    batch = inputs["input_ids"].shape[0]

    def prepare(rows: Sequence[Row], device: torch.device) -> RowChange:
        given: dict[tuple[int, ...], Mapping[str, Tensor]] = {tuple(range(batch)): inputs}

        def change(value: Tensor, chosen: Chosen, hook: HookPoint) -> Tensor:
            value = value.clone()
            for cell, start, stop in _by_cell(rows, chosen.numbers):
                examples = tuple(rows[n].example for n in chosen.numbers[start:stop])
                if examples not in given:
                    some = sent(examples, device)
                    given[examples] = {name: tokens[some] for name, tokens in inputs.items()}
                own = copy.copy(hook)
                own.given = dict(given[examples])
                part = value[start:stop]
                for act in acts(cell, hook.canonical):
                    made = act.on_value(part, own)
                    if made is not None and made is not part:
                        must_fit(made, part, own)
                        part.copy_(made)
            return value

        return change

    return prepare


def _by_cell(rows: Sequence[Row], numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Each cell among some rows, with the first of its places among them and the end of them."""
    at = 0
    while at < len(numbers):
        cell, end = rows[numbers[at]].cell, at + 1
        while end < len(numbers) and rows[numbers[end]].cell == cell:
            end += 1
        yield cell, at, end
        at = end


def must_fit(made: Tensor, value: Tensor, hook: HookPoint) -> None:
    """Refuse a value of another shape, which would be spread over rows silently."""
    if made.shape != value.shape:
        raise EditShapeError(
            f"a variant's hook returned {tuple(made.shape)} at {hook.name!r}; the model needs {tuple(value.shape)}. "
            "Return a tensor of the same shape, or None to leave the value alone."
        )


def must_have_units(value: Tensor, neurons: Sequence[int], hook: HookPoint) -> None:
    """Refuse features that the last axis does not have; on an accelerator nobody else would, in time."""
    count = value.shape[-1]
    for neuron in neurons:
        if not -count <= neuron < count:
            raise IndexError(f"neuron: {hook.name!r} has {count} features; got {neuron}.")


def in_order(cells: Sequence[Changes], rows: Sequence[Row]) -> list[int]:
    """The numbers of rows by the first layer they change, and those of the same sites together."""
    return sorted(
        range(len(rows)), key=lambda n: (cells[rows[n].cell].layer, cells[rows[n].cell].sites)
    )


def changed_at(
    cells: Sequence[Changes], rows: Sequence[Row], device: torch.device
) -> dict[str, Chosen]:
    """For each site the rows that are changed there."""
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        for site in cells[row.cell].sites:
            found.setdefault(site, []).append(number)
    return {site: Chosen.of(numbers, device) for site, numbers in found.items()}
