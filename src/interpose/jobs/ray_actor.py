"""What runs in a process of Ray: a copy of the job, and its worker."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from interpose.errors import Cancelled


def packed(thing: Any) -> bytes:
    """A job or a shard as bytes; functions that were made at a prompt too, and tensors wherever they are."""
    from ray import cloudpickle

    file = io.BytesIO()
    torch.save(thing, file, pickle_module=cloudpickle)
    return file.getvalue()


def unpacked(content: bytes, devices: dict[str, str]) -> Any:
    """What `packed` made.

    Args:
        content: of `packed`.
        devices: which GPU of this process stands for one of the sender's; those that are new to it are added, in order.
    """

    def placed(storage: Any, location: str) -> Any:
        if not location.startswith("cuda"):
            return None
        mine = devices.setdefault(location, f"cuda:{len(devices)}")
        return torch.serialization.default_restore_location(storage, mine)

    return torch.load(
        io.BytesIO(content), map_location=placed, pickle_module=pickle, weights_only=False
    )


class Actor:
    """A worker in a process of its own.

    Args:
        threads: how many threads torch has in this process.
        precision: in how many bits torch multiplies, `torch.get_float32_matmul_precision` of who sent it.
    """

    def __init__(self, threads: int, precision: str) -> None:
        torch.set_float32_matmul_precision(precision)
        self._threads = threads
        self._job: Any = None
        self._worker: Any = None
        self._devices: dict[str, str] = {}
        self._done = 0
        self._ends: str | None = None

    def is_there(self) -> bool:
        """That the process has begun."""
        return True

    def make(self, sent: list[Any], content: bytes) -> tuple[int, Any]:
        """Do a shard: how much that was, and what the job accepts of it. It may be committed later.

        Args:
            sent: one reference to the job as `packed` made it; in a list, where Ray does not open it each time.
            content: what to do, packed likewise.
        """
        self._done = 0
        torch.set_num_threads(self._threads)  # of this thread of Python
        if self._job is None:
            import ray

            self._job = unpacked(ray.get(sent[0]), self._devices)
        shard = unpacked(content, self._devices)
        if self._job.is_done(shard):  # by this actor, before it died
            return 0, None
        if self._worker is None:
            self._worker = self._job.worker().__enter__()
        try:
            made = self._worker.make(shard, self._step)
        except BaseException as error:
            worker, self._worker = self._worker, None
            worker.__exit__(type(error), error, error.__traceback__)
            raise
        return self._done, made

    def settle(self) -> None:
        """Until all that was made here is committed."""
        if self._worker is not None:
            self._worker.wait()

    def leave(self) -> None:
        """Commit what was made, and let go of what was needed for it."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.__exit__(None, None, None)

    def so_far(self) -> int:
        """How much of the present shard is done."""
        return self._done

    def end(self, how: str) -> None:
        """End what it is at, at its next step.

        Args:
            how: ``early`` to be told that no more is wanted, ``now`` to leave it.
        """
        self._ends = how

    def _step(self, count: int) -> bool:
        self._done += count
        if self._ends == "now":
            raise Cancelled("the job was ended.")
        return self._ends is None
