"""`Store`: what a place for runs can do."""

from __future__ import annotations

import datetime
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

Batch = dict[str, Tensor] | list[Tensor]
"""What a batch of a run is: tensors by name, or one after the other."""


def new_run_id() -> str:
    """A name that no other run has."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d_%H%M%S")
    return f"run_{now}_{secrets.token_hex(4)}"


class Store(ABC):
    """A place where runs are kept: batches of tensors, and what detectors found."""

    @abstractmethod
    def put_run_batch(
        self, run_id: str, batch_index: int, tensors: Mapping[str, Tensor] | Sequence[Tensor]
    ) -> str:
        """Keep a batch, and return where."""

    @abstractmethod
    def get_run_batch(self, run_id: str, batch_index: int) -> Batch:
        """A batch as it was put."""

    @abstractmethod
    def list_run_batches(self, run_id: str) -> list[int]:
        """The numbers of all batches, ascending."""

    @abstractmethod
    def delete_run(self, run_id: str) -> None:
        """Forget a run; it is no error if there is none."""

    @abstractmethod
    def put_run_metadata(self, run_id: str, meta: Mapping[str, Any]) -> str:
        """Keep what is known of a run, and return where."""

    @abstractmethod
    def get_run_metadata(self, run_id: str) -> dict[str, Any]:
        """What is known of a run; empty if nothing was put."""

    @abstractmethod
    def put_detector_metadata(
        self,
        run_id: str,
        batch_index: int,
        metadata: Mapping[str, Mapping[str, Any]],
        tensor_metadata: Mapping[str, Mapping[str, Tensor]],
    ) -> str:
        """Keep what detectors found in a batch, by layer, and return where."""

    @abstractmethod
    def get_detector_metadata(
        self, run_id: str, batch_index: int
    ) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Tensor]]]:
        """What detectors found in a batch, by layer: facts, and tensors."""

    @abstractmethod
    def get_detector_metadata_by_layer_by_key(
        self, run_id: str, batch_index: int, layer: str, key: str
    ) -> Tensor:
        """One tensor of what a layer's detector found in a batch."""

    @abstractmethod
    def put_run_detector_metadata(
        self,
        run_id: str,
        metadata: Mapping[str, Mapping[str, Any]],
        tensor_metadata: Mapping[str, Mapping[str, Tensor]],
    ) -> str:
        """Keep what detectors found in the next batch, all batches of the run in one place, and return where."""

    def iter_run_batches(self, run_id: str) -> Iterator[Batch]:
        """Every batch, in order."""
        for number in self.list_run_batches(run_id):
            yield self.get_run_batch(run_id, number)

    def iter_run_batch_range(
        self, run_id: str, start: int = 0, stop: int | None = None, step: int = 1
    ) -> Iterator[Batch]:
        """Some batches, by their numbers; those that are not there are left out.

        Args:
            run_id: the run.
            start: the first.
            stop: the one before which to end; None for all that are there.
            step: how far the next is.
        """
        if step == 0:
            raise ValueError("step cannot be 0.")
        if start < 0:
            raise ValueError(f"start is at least 0; got {start}.")
        there = self.list_run_batches(run_id)
        end = (max(there, default=-1) + 1 if step > 0 else -1) if stop is None else stop
        wanted = set(there)
        for number in range(start, end, step):
            if number in wanted:
                yield self.get_run_batch(run_id, number)
