"""A job: work in shards, each of which anybody may do, any number of times, and which counts once.

What counts is decided by the job: by the commit of a shard, or by what it accepts; so it does not matter who did a
shard, how often, or what became of the others. `run` does all that is left, in this process or on Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from torch import nn

from interpose.engine.hooks import Engine
from interpose.errors import Unsupported
from interpose.models.transformer import TransformerModel
from interpose.taps.context import current

Shard = TypeVar("Shard")
Given = TypeVar("Given", contravariant=True)

ENGINES = ("local", "ray")


class Worker(AbstractContextManager[Any], Protocol[Given]):
    """What does shards, with whatever it needs for all of them. At the end of its block all of them are committed."""

    def make(self, shard: Given, step: Callable[[int], Any] = ...) -> Any:
        """Do a shard; it may be committed later. What it returns, the job accepts.

        ``step`` is told how much more is done, and returns False where no more is wanted, which a worker may heed.
        """

    def wait(self) -> None:
        """Until all that was done is committed."""


class Job(Protocol[Shard]):
    """Work in shards. Processes that have workers of it are sent a copy, and shards one by one."""

    def shards(self) -> Iterator[Shard]:
        """Those that are not done yet."""

    def is_done(self, shard: Shard) -> bool:
        """Whether it counts by now, whoever did it."""

    def said(self, shard: Shard) -> str:
        """What errors call it."""

    def gpus(self) -> int | None:
        """How many GPUs a worker's model takes; None for one of those that there are, if there are any."""

    def worker(self) -> Worker[Shard]:
        """What does shards; made once in each process."""

    def accept(self, shard: Shard, made: Any) -> None:
        """Take what a worker returned of a shard; in the process that runs the job."""


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
        step: told how much was done; where it returns False, workers may come to an early end.
    """
    must_be_engine(engine, workers)
    if engine == "ray":
        from interpose.jobs.ray_engine import run_on_ray

        run_on_ray(job, workers=workers, step=step)
    else:
        with job.worker() as worker:
            for shard in job.shards():
                job.accept(shard, worker.make(shard, step))


def must_be_engine(engine: str, workers: int | None) -> None:
    """Refuse what is no engine, and workers that there are none of."""
    if engine not in ENGINES:
        raise ValueError(f"engine is 'local' or 'ray'; got {engine!r}.")
    if engine == "local" and workers is not None:
        raise ValueError("workers= is for engine='ray'; a local job runs in this process.")
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers is how many processes, at least 1; got {workers!r}.")


def live_hooks(model: TransformerModel) -> list[Any]:
    """The hooks that are on a model, and would change its runs, outermost scope first."""
    standing = [handle.hook for handle in model.list_hooks() if handle.hook.enabled]
    scopes = [one for one in current().scopes if getattr(one, "model", None) is model]
    around = [binding.hook for scope in scopes for binding in getattr(scope, "bindings", ())]
    return [
        *standing,
        *(hook for hook in around if not isinstance(hook, Engine) and hook.enabled),
    ]


def must_travel(model: TransformerModel, advice: str) -> None:
    """Refuse models that other processes would run differently.

    Args:
        model: what they would be sent.
        advice: what to do about hooks.
    """
    if live_hooks(model):
        raise Unsupported(
            f"hooks that are on the model stay in this process, and with engine='ray' others run it. {advice}"
        )
    away = [name for name, one in model.root.named_parameters() if one.is_meta]
    if away:
        raise Unsupported(
            f"{away[0]!r} is not in memory, so the model cannot be sent to other processes. Load it without offloading."
        )


def gpus_of(module: nn.Module) -> int:
    """On how many GPUs a module stands."""
    return len({one.device for one in module.parameters() if one.device.type == "cuda"})
