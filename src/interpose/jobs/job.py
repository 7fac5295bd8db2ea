"""A job: work in shards, each of which anybody may do, any number of times, and which counts once.

What counts is decided by the commit of a shard, which is the job's own; so it does not matter who ran it, how often, or
what became of the others. `run` does all that is left, in this process or on Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

Shard = TypeVar("Shard")
Given = TypeVar("Given", contravariant=True)


class Worker(AbstractContextManager[Any], Protocol[Given]):
    """What does shards, with whatever it needs for all of them. At the end of its block all of them are committed."""

    def make(self, shard: Given, step: Callable[[int], Any] = ...) -> None:
        """Do a shard; it may be committed later."""

    def wait(self) -> None:
        """Until all that was done is committed."""


class Job(Protocol[Shard]):
    """Work in shards."""

    def shards(self) -> Iterator[Shard]:
        """Those that nobody has committed yet."""

    def is_done(self, shard: Shard) -> bool:
        """Whether somebody has committed it by now."""

    def worker(self) -> Worker[Shard]:
        """What does shards; made once in each process."""


def run(
    job: Job[Any],
    *,
    engine: str = "local",
    workers: int | None = None,
    step: Callable[[int], Any] = int,
) -> None:
    """Do all that is left of a job.

    Args:
        job: the job.
        engine: ``local`` for this process, ``ray`` for a cluster.
        workers: how many processes, with ``ray``.
        step: told how much was done.
    """
    if engine == "ray":
        from interpose.jobs.ray_engine import run_on_ray

        run_on_ray(job, workers=workers, step=step)
    elif engine == "local":
        if workers is not None:
            raise ValueError("workers= is for engine='ray'; a local job runs in this process.")
        with job.worker() as worker:
            for shard in job.shards():
                worker.make(shard, step)
    else:
        raise ValueError(f"engine is 'local' or 'ray'; got {engine!r}.")
