"""A sweep over a dataset as a job: each batch of examples is a shard, which any process can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from interpose.jobs.job import gpus_of
from interpose.models.running.masks import remember, remembered
from interpose.sweeps.execution import Found, Task, run
from interpose.sweeps.planning import Tally
from interpose.sweeps.prompts import Batch


@dataclass(frozen=True, slots=True)
class Part:
    """A batch of examples on its way.

    Attributes:
        number: which it is.
        batch: the examples.
        text: which of its tokens are text, clean and corrupted, as far as that is remembered where it was made.
    """

    number: int
    batch: Batch
    text: tuple[Tensor | None, ...]


class BatchesJob:
    """The job: what a batch gave is accepted once, and kept here.

    Args:
        task: what is done with each batch.
        parts: the batches.

    Attributes:
        ended: whether no more are wanted.
    """

    def __init__(self, task: Task, parts: Sequence[Batch]) -> None:
        self.task = task
        self.parts = parts
        self.ended = False
        self._made: dict[int, tuple[Found, Tally]] = {}

    @property
    def found(self) -> dict[int, Found]:
        """What batches gave, by their numbers."""
        return {number: self._made[number][0] for number in sorted(self._made)}

    @property
    def tally(self) -> Tally:
        """What all of it took."""
        return sum((self._made[number][1] for number in sorted(self._made)), Tally())

    def shards(self) -> Iterator[Part]:
        """Those that were not run yet."""
        for number, batch in enumerate(self.parts):
            if number not in self._made and not self.ended:
                yield Part(number, batch, tuple(map(remembered, _tokens(batch))))

    def is_done(self, shard: Part) -> bool:
        """Whether it was accepted here."""
        return shard.number in self._made

    def said(self, shard: Part) -> str:
        """What errors call it."""
        numbers = shard.batch.numbers
        return f"a batch of {len(numbers)} examples, of which number {numbers[0]} is the first"

    def gpus(self) -> int:
        """As many as the model stands on here."""
        return gpus_of(self.task.model.root)

    def accept(self, shard: Part, made: tuple[Found, Tally]) -> None:
        """Keep what a batch gave."""
        self._made[shard.number] = made

    def worker(self) -> BatchWorker:
        """What runs batches, in this process."""
        return BatchWorker(self.task)

    def __getstate__(self) -> dict[str, Any]:
        """What other processes are sent: batches come one by one."""
        return {**vars(self), "parts": (), "_made": {}}


class BatchWorker:
    """Runs batches; there is nothing to commit."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        pass

    @torch.no_grad()
    def make(self, shard: Part, step: Callable[[int], Any] = lambda _: True) -> tuple[Found, Tally]:
        """What a batch gives, and what that took."""
        for tokens, text in zip(_tokens(shard.batch), shard.text):
            if text is not None:  # in another process nothing is remembered of it
                remember(tokens, text)
        tally = Tally()
        return run(replace(self.task, tally=tally), shard.batch, step), tally

    def wait(self) -> None:
        """Nothing is under way."""


def _tokens(batch: Batch) -> list[Tensor]:
    return [inputs["input_ids"] for inputs in (batch.clean, batch.corrupt) if inputs is not None]
