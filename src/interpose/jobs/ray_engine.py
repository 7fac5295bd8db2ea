"""Jobs on Ray: actors that hold what a worker needs, restarted when they die.

Ray may run a shard twice, or lose what it was told of one; neither matters, since a commit counts once. By its own
defaults it would neither restart actors nor repeat what they were at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from interpose.errors import Unsupported
from interpose.jobs.job import Job

_AGAIN = -1
"""Ray's word for as often as it takes."""
_ROUNDS = 3
"""How often what is missing at the end is done again."""


def run_on_ray(job: Job[Any], *, workers: int | None, step: Callable[[int], Any]) -> None:
    """Do all that is left of a job by actors of Ray: those of the cluster that is joined, or of this machine.

    Args:
        job: the job; it is sent to the actors once.
        workers: how many actors; by default one for each GPU, or for each two cores where there is none.
        step: told how much was done.
    """
    with _cluster() as ray:
        found = workers or _workers(ray)
        gpus = 1 if ray.cluster_resources().get("GPU", 0) >= found else 0
        made = ray.remote(num_cpus=1, num_gpus=gpus)(_Actor)
        options = made.options(max_restarts=_AGAIN, max_task_retries=_AGAIN)
        sent = ray.put(job)
        actors = [options.remote(sent) for _ in range(found)]
        try:
            for _ in range(_ROUNDS):
                _round(ray, actors, job, step)
                if next(job.shards(), None) is None:
                    return
            raise RuntimeError(
                f"shards are missing after {_ROUNDS} rounds: see what the actors said."
            )
        finally:
            for actor in actors:
                ray.kill(actor)


def _round(ray: Any, actors: list[Any], job: Job[Any], step: Callable[[int], Any]) -> None:
    """Give every actor a shard, and another one when it is done."""
    shards: Iterator[Any] = job.shards()
    at: dict[Any, Any] = {}
    free = list(actors)
    while True:
        while free and (shard := next(shards, None)) is not None:
            actor = free.pop()
            at[actor.make.remote(shard)] = actor
        if not at:
            return
        done, _ = ray.wait(list(at), num_returns=1)
        for one in done:
            free.append(at.pop(one))
            step(ray.get(one))


def _workers(ray: Any) -> int:
    there = ray.cluster_resources()
    return int(there.get("GPU", 0)) or max(1, int(there.get("CPU", 1)) // 2)


@contextmanager
def _cluster() -> Iterator[Any]:
    """Ray, joined where a cluster is known (``RAY_ADDRESS``) or this program has one, else begun and ended here."""
    try:
        import ray
    except ImportError:
        raise Unsupported("engine='ray' needs Ray: pip install 'interpose[ray]'.") from None
    if ray.is_initialized():
        yield ray
        return
    ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        yield ray
    finally:
        ray.shutdown()


class _Actor:
    """A worker in a process of its own."""

    def __init__(self, job: Job[Any]) -> None:
        self.job = job
        self._worker: Any = None

    def make(self, shard: Any) -> int:
        """Do a shard, and commit it; how much that was."""
        done = 0

        def step(count: int) -> None:
            nonlocal done
            done += count

        if not self.job.is_done(shard):
            if self._worker is None:
                self._worker = self.job.worker().__enter__()
            try:
                self._worker.make(shard, step)
                self._worker.wait()
            except BaseException as error:
                self._worker.__exit__(type(error), error, None)
                self._worker = None
                raise
        return done

    def pid(self) -> int:
        """Its process."""
        import os

        return os.getpid()
