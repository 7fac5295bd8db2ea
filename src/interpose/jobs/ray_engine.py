"""Jobs on Ray: actors that hold what a worker needs, started again when they die.

Ray may do a shard twice, or lose what it was told of one; neither matters, since a shard counts once. By its own
defaults it would neither start actors again nor repeat what they were at. A shard is committed while its actor is at
the next one, so what an actor has made is lost if it dies then, and is done again.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from interpose.errors import InterposeError, WorkerDied
from interpose.jobs.cluster import cluster
from interpose.jobs.job import Job
from interpose.jobs.ray_actor import Actor, packed

TRIES = 5
"""How many workers may die at one shard."""
_AGAIN = -1
"""Ray's word for as often as it takes."""
_TICK = 0.5
"""Seconds between two looks at how far the workers are."""
_GRACE = 5.0
"""Seconds that workers have to leave what they are at."""
_TELL = {"concurrency_group": "tell", "max_task_retries": 0}
"""How actors are told and asked something while they work."""
_PATIENCE = 60.0
"""Seconds without any worker after which it is said what is waited for."""


def run_on_ray(job: Job[Any], *, workers: int | None, step: Callable[[int], Any]) -> None:
    """Do all that is left of a job by actors of Ray: those of the cluster that is joined, or of this machine.

    Args:
        job: the job; it is sent to the actors once.
        workers: how many actors; by default one for each GPU that a model takes, or for each two cores.
        step: told how much was done; where it returns False, no more is begun, and workers are told so.
    """
    shards = job.shards()
    first = next(shards, None)
    if first is None:
        return
    with cluster(workers) as ray:
        crew = _Crew(ray, job, itertools.chain([first], shards), step)
        try:
            crew.hire(workers)
            crew.work()
        except ray.exceptions.RayTaskError as error:
            raise _of_worker(error) from error
        finally:
            crew.dismiss()


@dataclass(eq=False, slots=True)
class _Task:
    """A shard on its way.

    Attributes:
        told: how much of it `step` was told of.
        deaths: how many workers died after they had made it.
    """

    shard: Any
    told: int = 0
    deaths: int = 0


@dataclass(eq=False, slots=True)
class _Hand:
    """An actor as the driver sees it: what it is at, and what it made that may not be committed yet."""

    actor: Any
    at: _Task | None = None
    made: list[_Task] = field(default_factory=list)


class _Crew:
    """The actors, and which shard is where."""

    def __init__(
        self, ray: Any, job: Job[Any], shards: Iterator[Any], step: Callable[[int], Any]
    ) -> None:
        self.ray = ray
        self.job = job
        self.step = step
        self._left: Iterator[Any] | None = shards
        self._again: deque[_Task] = deque()
        self._hands: list[_Hand] = []
        self._busy: dict[Any, _Hand] = {}
        self._coming: dict[Any, _Hand] = {}

    def hire(self, workers: int | None) -> None:
        """Begin the actors. They come when the cluster has room for them."""
        there = self.ray.cluster_resources()
        cpus, gpus = int(there.get("CPU", 1)), int(there.get("GPU", 0))
        each = self.job.gpus()
        each = min(1, gpus) if each is None else each
        found = workers or (gpus // each if each else cpus // 2) or 1
        # No more than there are shards: each takes the memory of a model.
        self._again.extend(map(_Task, itertools.islice(self._left or (), found)))
        found = max(1, min(found, len(self._again)))
        share = gpu_share(each, gpus, found)
        self._needs = f"1 CPU and {share:g} GPU" if share else "1 CPU"
        made = self.ray.remote(
            num_cpus=1,
            num_gpus=share,
            max_restarts=_AGAIN,
            max_task_retries=TRIES - 1,
            concurrency_groups={"work": 1, "tell": 1},
        )(Actor)
        self._sent = self.ray.put(packed(self.job))
        threads = max(1, min(torch.get_num_threads(), cpus // found))
        for _ in range(found):
            hand = _Hand(made.remote(threads, torch.get_float32_matmul_precision()))
            self._hands.append(hand)
            self._coming[hand.actor.is_there.options(concurrency_group="tell").remote()] = hand

    def work(self) -> None:
        """Until all is done and committed."""
        begun = said = time.monotonic()
        free: list[_Hand] = []
        while True:
            while free and (task := self._next()) is not None:
                self._give(free.pop(), task)
            if free and not self._busy:
                self._settle(free)
                if not self._again:
                    return
                continue
            done, _ = self.ray.wait([*self._busy, *self._coming], num_returns=1, timeout=_TICK)
            free += [
                self._arrived(one) if one in self._coming else self._finished(one) for one in done
            ]
            now = time.monotonic()
            if now - said > _TICK and self._busy:
                self._tell()
                said = now
            if not self._busy and not free and now - begun > _PATIENCE:
                begun = float("inf")
                there = {
                    name: f"{size:g}"
                    for name, size in self.ray.cluster_resources().items()
                    if name in ("CPU", "GPU")
                }
                warnings.warn(
                    f"no worker has begun yet: each needs {self._needs}, and of all that the cluster has, {there}, "
                    "others may have taken some.",
                    stacklevel=2,
                )

    def dismiss(self) -> None:
        """End the actors; those that are at something may leave it tidily first."""
        with suppress(self.ray.exceptions.RayError):
            there = self._end("now")
            leaves = {"concurrency_group": "work", "max_task_retries": 0}
            left = [hand.actor.leave.options(**leaves).remote() for hand in there]
            if left:
                self.ray.wait(left, num_returns=len(left), timeout=_GRACE)
        for hand in self._hands:
            self.ray.kill(hand.actor)

    def _end(self, how: str) -> list[_Hand]:
        there = [hand for hand in self._hands if hand not in self._coming.values()]
        told = [hand.actor.end.options(**_TELL).remote(how) for hand in there]
        if told:
            self.ray.wait(told, num_returns=len(told), timeout=_GRACE)
        return there

    def _next(self) -> _Task | None:
        if self._again:
            return self._again.popleft()
        shard = None if self._left is None else next(self._left, None)
        return None if shard is None else _Task(shard)

    def _give(self, hand: _Hand, task: _Task) -> None:
        made = hand.actor.make.options(concurrency_group="work").remote(
            [self._sent], packed(task.shard)
        )
        hand.at = task
        self._busy[made] = hand

    def _arrived(self, one: Any) -> _Hand:
        hand = self._coming.pop(one)
        self._got(one, "before any work was given to it")
        return hand

    def _finished(self, one: Any) -> _Hand:
        """An actor has made its shard."""
        hand = self._busy.pop(one)
        task, hand.at = hand.at, None
        assert task is not None
        count, made = self._got(one, f"at {self.job.said(task.shard)}")
        self._count(task, count)
        self.job.accept(task.shard, made)
        hand.made = [other for other in [*hand.made, task] if not self.job.is_done(other.shard)]
        return hand

    def _settle(self, hands: list[_Hand]) -> None:
        """Have everything committed, and put back what was lost."""
        waits = [hand.actor.settle.options(concurrency_group="work").remote() for hand in hands]
        for hand, one in zip(hands, waits):
            self._got(one, "while its work was committed")
            lost = [task for task in hand.made if not self.job.is_done(task.shard)]
            hand.made = []
            for task in lost:
                task.deaths += 1
                if task.deaths >= TRIES:
                    raise WorkerDied(_died(f"after {self.job.said(task.shard)}", ""))
            self._again.extend(lost)

    def _tell(self) -> None:
        """Say how far the actors are in what they are at."""
        asked = {h.actor.so_far.options(**_TELL).remote(): h for h in self._busy.values()}
        done, _ = self.ray.wait(list(asked), num_returns=len(asked), timeout=_TICK)
        for one in done:
            task = asked[one].at
            with suppress(self.ray.exceptions.RayError):  # it is being started again
                count = self.ray.get(one)
                if task is not None:
                    self._count(task, count)

    def _count(self, task: _Task, count: int) -> None:
        if count > task.told:
            more, task.told = count - task.told, count
            if self.step(more) is False and self._left is not None:
                self._left = None  # what is under way may come to an early end
                self._again.clear()
                self._end("early")

    def _got(self, one: Any, where: str) -> Any:
        """What an actor returned; if it died too often, that."""
        try:
            return self.ray.get(one)
        except self.ray.exceptions.RayTaskError:
            raise
        except self.ray.exceptions.RayError as error:
            raise WorkerDied(_died(where, str(error))) from error


def gpu_share(each: int, gpus: int, workers: int) -> float:
    """How much of GPUs a worker asks a cluster for: a part of one, where there are more workers than GPUs.

    Args:
        each: how many a worker's model stands on.
        gpus: how many there are.
        workers: how many workers.
    """
    if each != 1 or not gpus:
        return each
    return min(1, 1 / -(-workers // gpus))


def _died(where: str, said: str) -> str:
    more = f"\n  Ray says: {said.strip().splitlines()[0]}" if said.strip() else ""
    return (
        f"{TRIES} workers of Ray died one after another {where}. Most often memory is short: give fewer workers=, or "
        f"less at a time.{more}"
    )


def _of_worker(error: Any) -> BaseException:
    """What a worker raised, as the same error; Ray's own follows as its cause, and has the lines."""
    cause = error.cause
    if isinstance(cause, BaseException):
        return cause
    return InterposeError(f"a worker of Ray failed: {error}")
