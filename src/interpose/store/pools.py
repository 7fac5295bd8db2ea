"""Batches out of pools: what a store and a live model give is mixed, filtered and cut in one way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from interpose.activations import ActivationBatch

POOL = 2**29
"""How many bytes of vectors are mixed with each other, by default."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """Vectors that are mixed with each other.

    Attributes:
        values: by site, each [vector, ...].
        tokens: [vector]
        row: [vector]
        pos: [vector]
        state: where the source was before this pool, as data; None if its number is enough.
    """

    values: Mapping[str, Tensor]
    tokens: Tensor
    row: Tensor
    pos: Tensor
    state: Any = None

    def some(self, which: Tensor) -> ActivationBatch:
        """Some of its vectors."""
        return ActivationBatch(
            values={
                name: values.index_select(0, which.to(values.device))
                for name, values in self.values.items()
            },
            tokens=self.tokens[which],
            row=self.row[which],
            pos=self.pos[which],
        )


class Pools(Protocol):
    """A source of pools."""

    def of(self, epoch: int, state: Any, first: int) -> Iterator[Pool]:
        """The pools of an epoch, from one on; the state is what that one had."""


class PooledBatches(Iterator[ActivationBatch]):
    """Batches of vectors, in an order that the seed decides. `state_dict` says where it is, in JSON's terms.

    Attributes:
        batch_size: how many vectors a batch has; the last of a pool may have fewer.
        pos: which positions of rows come; None for all.
        left_out: how many vectors were left out so far, since their norm is far from the others'.
    """

    def __init__(
        self,
        pools: Pools,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        epochs: int | None,
        pos: slice | None = None,
        most_norm: float | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is at least 1; got {batch_size}.")
        must_be_part(part)
        self._pools = pools
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._epochs = epochs
        self.pos = pos
        self._most_norm = most_norm
        self._part = part
        self.left_out = 0
        self._epoch = self._number = self._batch = 0
        self._state: Any = None
        self._open: Iterator[Pool] | None = None
        self._now: Pool | None = None
        self._order = torch.empty(0, dtype=torch.long)
        self._left_out_before = 0
        self._empty = True

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ActivationBatch:
        while True:
            if self._now is None:
                self._next_pool()
            assert self._now is not None
            start = self._batch * self.batch_size
            if start < len(self._order):
                self._batch += 1
                self._empty = False
                return self._now.some(self._order[start : start + self.batch_size])
            self._now, self._batch = None, 0
            self._number += 1

    def _next_pool(self) -> None:
        """Go on to the next pool of one's part, of the next epoch if there is none."""
        while self._epochs is None or self._epoch < self._epochs:
            if self._open is None:
                self._open = self._pools.of(self._epoch, self._state, self._number)
            for found in self._open:
                if self._number % self._part[1] == self._part[0]:
                    self._state, self._left_out_before = found.state, self.left_out
                    self._now, self._order = found, self._mixed(found)
                    return
                self._number += 1
            if self._empty:
                break  # nothing in a whole epoch
            self._open, self._number, self._state = None, 0, None
            self._epoch += 1
            self._empty = True
        raise StopIteration

    def _mixed(self, pool: Pool) -> Tensor:
        """Which of its vectors come, in which order."""
        keep = torch.ones(len(pool.tokens), dtype=torch.bool)
        if self.pos is not None:
            keep &= _inside(pool.pos, self.pos)
        if self._most_norm is not None:
            for values in pool.values.values():
                norms = values.flatten(1).float().norm(dim=1)
                far = norms.to(keep.device) > self._most_norm * norms[
                    keep.to(norms.device)
                ].median().to(keep.device)
                self.left_out += int((far & keep).sum())
                keep &= ~far
        order = keep.nonzero()[:, 0]
        if self._shuffle:
            mixed = generator(self._seed, self._epoch, self._number)
            order = order[torch.randperm(len(order), generator=mixed)]
        return order

    def state_dict(self) -> dict[str, Any]:
        """Where it is: the next batch of one that was made with the same arguments and this state is the same."""
        return {
            "epoch": self._epoch,
            "pool": self._number,
            "batch": self._batch,
            "source": self._state,
            "left_out": self._left_out_before if self._now is not None else self.left_out,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another one was."""
        self._epoch, self._number = int(state["epoch"]), int(state["pool"])
        self._batch = int(state["batch"])
        self._state = state["source"]
        self.left_out = int(state["left_out"])
        self._open = self._now = None
        self._empty = not (self._number or self._batch)  # else there was something in this epoch


def _inside(pos: Tensor, where: slice) -> Tensor:
    """Which positions a slice means; from the front, since rows differ in length."""
    start, stop, step = where.start or 0, where.stop, where.step or 1
    if min(start, stop or 0, step) < 0:
        raise ValueError(f"pos counts from the front of a row here; got {where}.")
    found = (pos >= start) & ((pos - start) % step == 0)
    return found if stop is None else found & (pos < stop)


def must_be_part(part: tuple[int, int]) -> None:
    """Refuse what is not one of so many parts."""
    if not 0 <= part[0] < part[1]:
        raise ValueError(f"part is a number and how many there are, such as (0, 4); got {part}.")


def generator(*seeds: int) -> torch.Generator:
    """A generator of numbers that these decide, each another one."""
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 0x5851F42D4C957F2D + seed + 1) % 2**63
    return torch.Generator().manual_seed(mixed)
