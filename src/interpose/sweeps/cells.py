"""Cells: the places a sweep goes through, and rows, which are cells on one example."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interpose.engine.points import HookPoint
from interpose.errors import Unsupported


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


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a batch: the number of a cell, and of an example."""

    cell: int
    example: int


def sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers as a tensor on a device, without waiting for what is computed there."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


RowChange = Callable[[Tensor, int, int, HookPoint], Tensor]
"""From the values [row, pos, ...] of the rows from one number to another, at one site, to the changed ones.
``hook.offset`` is their first position."""

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

        def change(value: Tensor, first: int, end: int, hook: HookPoint) -> Tensor:
            must_have_rows(value, end - first, hook)
            must_have_units(value, neurons[first:end], hook)
            there = source(cells[rows[first].cell].site)
            part = {name: numbers[first:end] for name, numbers in fields.items()}
            here, from_there = _indices(value, there, examples[first:end], part, hook)
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


def edited(
    make: Callable[[Cell], Any], cells: Sequence[Cell], inputs: Mapping[str, Tensor]
) -> Change:
    """The change that lets an edit of its own change the rows of each cell, all its examples together.

    Args:
        make: the edit of a cell.
        cells: by number.
        inputs: what the module takes for the examples, each [example, pos].
    """

    def prepare(rows: Sequence[Row], device: torch.device) -> RowChange:  # noqa: ARG001
        def change(value: Tensor, first: int, end: int, hook: HookPoint) -> Tensor:
            must_have_rows(value, end - first, hook)
            parts = []
            for cell, start, stop in by_cell(rows, first, end):
                own = copy.copy(hook)
                own.given = dict(inputs)
                part = value[start - first : stop - first].clone()
                result = make(cells[cell]).change(part, own)
                parts.append(part if result is None else result)
            return torch.cat(parts)

        return change

    return prepare


def by_cell(rows: Sequence[Row], first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Each cell among some rows, with the first of its rows and the end of them."""
    at = first
    while at < end:
        cell = rows[at].cell
        until = next((number for number in range(at, end) if rows[number].cell != cell), end)
        yield cell, at, until
        at = until


def must_have_rows(value: Tensor, count: int, hook: HookPoint) -> None:
    """Refuse a value that all rows share."""
    if value.ndim == 0 or value.shape[0] != count:
        raise Unsupported(
            f"{hook.name!r} is {tuple(value.shape)} for {count} rows: they share it, and none has its own."
        )


def must_have_units(value: Tensor, neurons: Sequence[int], hook: HookPoint) -> None:
    """Refuse features that the last axis does not have; on an accelerator nobody else would, in time."""
    count = value.shape[-1]
    for neuron in neurons:
        if not -count <= neuron < count:
            raise IndexError(f"neurons: {hook.name!r} has {count} features; got {neuron}.")


def in_order(cells: Sequence[Cell], rows: Sequence[Row]) -> list[int]:
    """The numbers of rows by layer, and those of a site together."""
    return sorted(
        range(len(rows)), key=lambda n: (cells[rows[n].cell].layer, cells[rows[n].cell].site)
    )


def spans(cells: Sequence[Cell], rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """For each site the first of its rows, and the end of them: they stand together."""
    found: dict[str, tuple[int, int]] = {}
    for number, row in enumerate(rows):
        site = cells[row.cell].site
        if not site:
            continue
        found[site] = (found.get(site, (number, number))[0], number + 1)
    return found
