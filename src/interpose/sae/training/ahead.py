"""Batches read in a thread of their own while a device learns from those before."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from queue import Empty, Full, Queue
from typing import Any, Self

from interpose.activations import ActivationBatch, ActivationBatches

_MOST = 2
"""How many batches wait at most."""


class Ahead(Iterator[ActivationBatch]):
    """The same batches, with the same states. Nothing is read before the first is asked for.

    Args:
        batches: of a store or a tensor: no model runs in the thread.
        pinned: whether values lie where a GPU copies them from by itself.
    """

    def __init__(self, batches: ActivationBatches, *, pinned: bool) -> None:
        self._batches, self._pinned = batches, pinned
        self.left_out = batches.left_out
        self._waiting: Queue[tuple[ActivationBatch | BaseException, Any]] = Queue(_MOST)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._state: Any = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ActivationBatch:
        if self._thread is None:
            self._state = self._batches.state_dict()
            self._thread = threading.Thread(target=self._read, name="batches ahead", daemon=True)
            self._thread.start()
        found, state = self._waiting.get()
        if isinstance(found, BaseException):
            self._waiting.put((found, state))  # whoever asks again is told again
            raise found
        self._state, self.left_out = state, self._batches.left_out
        return found

    def state_dict(self) -> dict[str, Any]:
        """Where whoever takes the batches is."""
        found: dict[str, Any] = self._batches.state_dict() if self._thread is None else self._state
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another one was; before the first batch is taken."""
        if self._thread is not None:
            raise RuntimeError("batches are being read already: load the state before the first.")
        self._batches.load_state_dict(state)

    def close(self) -> None:
        """Read no more."""
        self._ended.set()
        if self._thread is not None:
            while self._thread.is_alive():
                try:
                    self._waiting.get_nowait()
                except Empty:
                    self._thread.join(0.01)

    def _read(self) -> None:
        while not self._ended.is_set():
            try:
                batch = next(self._batches)
                if self._pinned:
                    values = {name: one.pin_memory() for name, one in batch.values.items()}
                    batch = dataclasses.replace(batch, values=values)
                found: ActivationBatch | BaseException = batch
            except BaseException as error:  # it is raised where the batch is asked for
                found = error
            self._put(found, self._batches.state_dict())
            if isinstance(found, BaseException):
                return

    def _put(self, found: ActivationBatch | BaseException, state: Any) -> None:
        while not self._ended.is_set():
            try:
                self._waiting.put((found, state), timeout=0.1)
            except Full:
                continue
            return
