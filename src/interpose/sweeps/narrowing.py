"""What a function of logits looks at, found out by asking it: no other logits need be computed for it.

A function looks at some logits alone if it says the same, bit for bit, whatever stands in place of the others. Which
to try is guessed: what torch's operations read while it runs, or the last position.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Function = Callable[[Tensor], Any]
_FEW = 8  # a function of more than one in so many tokens has all of them


@dataclass(frozen=True, slots=True, eq=False)
class Looks:
    """Which logits are looked at.

    Attributes:
        positions: which, counted from the end, ascending.
        columns: which tokens, ascending; None for all.
    """

    positions: tuple[int, ...]
    columns: Tensor | None

    def put(self, logits: Tensor, into: Tensor) -> Tensor:
        """Write logits [batch, position, column] of these alone where they belong, [batch, pos, d_vocab]."""
        into[self._where(into)] = logits
        return into

    def of(self, logits: Tensor) -> Tensor:
        """These alone, of all: [batch, position, column]."""
        return logits[self._where(logits)]

    def _where(self, logits: Tensor) -> Any:
        places = torch.tensor(self.positions, device=logits.device)
        return (
            (slice(None), places)
            if self.columns is None
            else (slice(None), places[:, None], self.columns)
        )


def together(looks: Sequence[Looks]) -> Looks:
    """What some look at, all in all."""
    places = sorted({place for one in looks for place in one.positions})
    found = [one.columns for one in looks if one.columns is not None]
    columns = torch.cat(found).unique() if len(found) == len(looks) else None
    return Looks(tuple(places), columns)


def looked_at(function: Function, runs: Sequence[Tensor]) -> Looks | None:
    """What a function looks at in some runs' logits; None for all of them, and where it cannot be told.

    A function that draws at random, that keeps what it is given, or that says something else the second time, is left
    with all logits.

    Args:
        function: of logits [batch, pos, d_vocab].
        runs: such logits, of several runs.
    """
    with _nothing_drawn(runs[0].device):
        said = [_answer(function, run) for run in runs]
        if None in said:
            return None
        for guess in _guesses(function, runs):
            same = all(
                _answer(function, other) == before
                for run, before in zip(runs, said)
                for other in (run, *_filled(run, guess), run)
            )
            if same:
                return guess
    return None


@contextmanager
def _nothing_drawn(device: torch.device) -> Iterator[None]:
    """A ``with`` block after which random numbers go on as before it."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(state)


def _answer(function: Function, logits: Tensor) -> tuple[torch.Size, bytes] | None:
    """What a function says of a copy, to the last bit; None if it raises, or keeps what it was given."""
    given = logits.clone()
    kept = weakref.ref(given)
    try:
        found = torch.as_tensor(function(given)).detach()
        said = found.shape, found.double().cpu().numpy().tobytes()
    except Exception:  # whatever somebody's function raises at logits that no model gives
        return None
    del given, found
    return None if kept() is not None else said


def _guesses(function: Function, runs: Sequence[Tensor]) -> Iterator[Looks]:
    """What it may be that a function looks at, the least first."""
    length, width = runs[0].shape[1:]
    read = torch.stack([_read(function, run) for run in runs]).any(0)
    last = Looks((-1,), None)
    places = tuple((read.any(1).nonzero()[:, 0] - length).tolist()) or last.positions
    columns = read.any(0).nonzero()[:, 0]
    if len(columns) * _FEW <= width:
        yield Looks(places, columns if len(columns) else columns.new_zeros(1))
    if len(places) < length and places != last.positions:
        yield Looks(places, None)
    if length > 1:
        yield last


def _read(function: Function, logits: Tensor) -> Tensor:
    """Which logits operations read while a function runs, [pos, d_vocab], as far as torch sees them."""
    given = logits.clone(memory_format=torch.contiguous_format)
    reads = _Reads(given)
    with suppress(Exception), reads:  # whatever somebody's function raises where it is watched
        reads.note(torch.as_tensor(function(given)))
    return reads.found.view(given.shape).any(0)


class _Reads(TorchDispatchMode):
    """Notes which numbers of a tensor operations read: views of it read none."""

    def __init__(self, of: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = of.untyped_storage().data_ptr()
        self.found = torch.zeros(of.numel(), dtype=torch.bool, device=of.device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        outputs = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        for one in tree_leaves((args, kwargs)):
            is_view = any(self._is_part(other) and other is not one for other in outputs)
            if isinstance(one, Tensor) and not is_view:
                self.note(one, func, args)
        return made

    def _is_part(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.memory

    def note(self, tensor: Tensor, func: Any = None, args: Any = ()) -> None:
        """All numbers of a tensor are read, or those that an operation picks."""
        if not self._is_part(tensor):
            return
        sizes = [size if step else 1 for size, step in zip(tensor.shape, tensor.stride())]
        there = self.found.as_strided(sizes, tensor.stride(), tensor.storage_offset())
        if func is torch.ops.aten.index.Tensor and tensor is args[0]:
            torch.ops.aten.index_put_(there, args[1], there.new_ones(()))
        elif func is torch.ops.aten.gather.default and tensor is args[0]:
            there.scatter_(args[1], args[2], True)
        else:
            there.fill_(True)


def _filled(logits: Tensor, looks: Looks) -> Iterator[Tensor]:
    """The same logits where it looks, and elsewhere NaN, then numbers like them, then far larger ones."""
    seen = looks.of(logits)
    yield looks.put(seen, torch.full_like(logits, torch.nan))
    size = float(logits.float().nan_to_num(0.0, 0.0, 0.0).abs().amax())
    for scale in (0.3 * size + 0.1, 100 * size + 100):
        yield looks.put(seen, torch.empty_like(logits).normal_(0, scale))


@dataclass(slots=True, eq=False)
class Filled:
    """Makes logits of all from those that a function looks at: the others are NaN.

    Args:
        looks: which logits are there.
        length: how many positions there are.
        width: how many tokens.
    """

    looks: Looks
    length: int
    width: int
    _held: Tensor | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """All logits, in the same memory each time: nobody looks at what a function may have left in the others."""
        shape = (len(logits), self.length, self.width)
        if self._held is None or self._held.shape != shape or self._held.dtype != logits.dtype:
            self._held = logits.new_full(shape, torch.nan)
        return self.looks.put(logits, self._held)
