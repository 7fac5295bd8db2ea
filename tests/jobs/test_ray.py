"""Jobs on a cluster of this machine, whose workers are killed, fail, are told to end, and are too many."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import interpose as ip
from interpose.jobs import cluster as clusters
from interpose.jobs import ray_engine
from interpose.jobs.job import run
from tests.bounds import assert_near
from tests.jobs.test_sweeps import METRIC, same
from tests.jobs.toy import Toy
from tests.models import tiny
from tests.sweeps import oracle

TEXTS = [[3 + (7 * row + place) % 40 for place in range(2 + row % 9)] for row in range(60)]
SITES = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_z"]


def processes(name: str = "") -> list[psutil.Process]:
    """What this process has begun, and what that has."""
    found = []
    for one in psutil.Process().children(recursive=True):
        try:
            if name in " ".join(one.cmdline()) and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
        except psutil.NoSuchProcess:
            pass
    return found


@pytest.fixture(scope="module", autouse=True)
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster begun as a job would begin it; afterwards nothing of it is left."""
    import tempfile

    there = set(Path(tempfile.gettempdir()).glob("interpose-ray-*"))
    before = (
        sys.excepthook,
        signal.getsignal(signal.SIGTERM),
        dict(os.environ),
        {one.pid for one in processes()},
    )
    with clusters.cluster(2) as found:
        assert processes("raylet")
        yield found
    assert {one.pid for one in processes()} <= before[3]
    assert set(Path(tempfile.gettempdir()).glob("interpose-ray-*")) == there
    environment = {n: v for n, v in os.environ.items() if n != "PYTEST_CURRENT_TEST"}
    assert environment == {n: v for n, v in before[2].items() if n != "PYTEST_CURRENT_TEST"}
    assert (sys.excepthook, signal.getsignal(signal.SIGTERM)) == before[:2]


def test_every_shard_is_done_once_also_when_there_is_no_room_for_all_workers(
    tmp_path: Path,
) -> None:
    job = Toy(tmp_path / "job", 9, parts=10, seconds=0.1)
    told: list[int] = []
    run(job, engine="ray", workers=3, step=told.append)
    assert list(job.shards()) == []
    assert sorted(map(int, job.lines("begun"))) == list(range(9))
    accepted = job.lines("accepted")
    assert dict(zip(accepted[::2], accepted[1::2])) == {str(n): str(n**2) for n in range(9)}
    workers = job.lines("workers")
    assert len(workers) == len(set(workers)) <= 2  # a worker is made once in a process
    assert str(os.getpid()) not in workers
    assert sum(told) == 9 * job.parts
    assert len(told) > 9  # it is told from the middle of shards, too
    assert all(count > 0 for count in told)


def test_a_worker_that_dies_is_begun_again_and_what_it_had_not_committed_is_done_again(
    tmp_path: Path,
) -> None:
    job = Toy(tmp_path / "job", 5, wait="die once")
    told: list[int] = []
    run(job, engine="ray", workers=1, step=told.append)
    assert list(job.shards()) == []
    assert sorted(map(int, job.lines("begun"))) == sorted([*range(5), *range(5)])
    assert sum(told) == 5 * job.parts  # nothing is counted twice


def test_a_shard_at_which_every_worker_dies_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "TRIES", 2)
    job = Toy(tmp_path / "job", 3, at1="die")
    with pytest.raises(ip.WorkerDied, match="2 workers of Ray died one after another at shard 1"):
        run(job, engine="ray", workers=1)
    assert job.lines("begun").count("1") == 2


def test_an_error_in_a_worker_is_the_callers(tmp_path: Path) -> None:
    job = Toy(tmp_path / "job", 30, seconds=0.01, at3="raise")
    with pytest.raises(LookupError) as raised:
        run(job, engine="ray", workers=1)
    assert type(raised.value) is LookupError
    assert str(raised.value) == "nothing is there"
    assert "toy.py" in str(raised.value.__cause__)  # Ray's own, with the lines of the worker
    assert "LookupError" in job.lines("left")
    assert len(job.lines("begun")) < 30


def test_a_job_that_is_done_begins_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(workers: int | None) -> Any:
        raise AssertionError("a cluster was begun")

    monkeypatch.setattr(ray_engine, "cluster", refuse)
    run(Toy(tmp_path / "job", 0), engine="ray")
    with pytest.raises(AssertionError, match="a cluster was begun"):
        run(Toy(tmp_path / "job", 1), engine="ray")


def test_gpus_are_shared_by_more_workers_than_there_are() -> None:
    assert [ray_engine.gpu_share(1, 4, workers) for workers in (1, 4, 5, 8, 9)] == [
        1, 1, 1 / 2, 1 / 2, 1 / 3,
    ]  # fmt: skip
    assert ray_engine.gpu_share(0, 4, 2) == 0
    assert ray_engine.gpu_share(2, 4, 8) == 2  # a model that stands on two


# Harvests.


@pytest.fixture(scope="module")
def model() -> ip.TransformerModel:
    made = ip.wrap(tiny.build("llama"))
    assert isinstance(made, ip.TransformerModel)
    return made


def harvest(model: Any, folder: Path, **options: Any) -> ip.Store:
    given = {"segment_texts": 4, "progress": False, "site": SITES, **options}
    return ip.harvest(model, TEXTS, given.pop("site"), store=folder, **given)


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Everything that counts in a store."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "unfinished" not in path.parts
    }


@pytest.mark.parametrize("kills", [3, 20])
def test_workers_killed_at_random_moments_leave_the_same_bytes(
    kills: int, model: ip.TransformerModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [("blocks.0.hook_resid_post", _slowly)]
    whole = harvest(model, tmp_path / "whole", hooks=slow)
    rng, done, rounds = random.Random(kills), 0, 0
    while done < kills:
        folder = tmp_path / f"killed{rounds}"
        rounds += 1
        over = threading.Event()

        def kill(most: int, folder: Path = folder, over: threading.Event = over) -> None:
            """Kill workers, each some time after the last commit that it may have made."""
            nonlocal done
            for _ in range(most):
                before = len(list((folder / "commits").glob("*")))
                while not over.is_set() and len(list((folder / "commits").glob("*"))) == before:
                    time.sleep(0.002)
                over.wait(rng.uniform(0, 0.05))
                there = processes("ray::Actor")
                if over.is_set() or not there:
                    return
                rng.choice(there).send_signal(signal.SIGKILL)
                done += 1

        thread = threading.Thread(target=kill, args=(min(3, kills - done),))
        (folder / "commits").mkdir(parents=True)
        (folder / "unfinished").mkdir()
        thread.start()
        try:
            store = harvest(model, folder, engine="ray", workers=2, hooks=slow)
        finally:
            over.set()
            thread.join()
        assert store.complete
        assert bytes_of(folder) == bytes_of(whole.path)
        assert store.manifest() == whole.manifest()
    assert done == kills


def test_control_c_leaves_a_valid_store_that_goes_on_here_with_a_model_by_name(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "ended"
    given: dict[str, Any] = {
        "site": SITES, "hooks": [("blocks.0.hook_resid_post", _slowly)], "segment_texts": 4,
        "progress": False,
    }  # fmt: skip

    def interrupt() -> None:
        while len(list((folder / "commits").glob("*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ip.harvest("pocket", TEXTS, store=folder, engine="ray", workers=1, **given)
    thread.join()
    store = ip.open_store(folder)
    assert 2 <= len(store.commits) < 15
    assert not store.complete
    store.verify()
    assert list((folder / "unfinished").iterdir()) == []  # the worker left tidily
    deadline = time.monotonic() + 30
    while processes("ray::Actor") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes("ray::Actor")
    ip.harvest("pocket", TEXTS, store=folder, **given)
    whole = ip.harvest("pocket", TEXTS, store=tmp_path / "whole", **given)
    assert bytes_of(folder) == bytes_of(whole.path)


# Sweeps.


def test_a_sweep_gives_what_one_process_gives() -> None:
    model = ip.wrap(oracle.build("gpt2"))
    clean, corrupt = oracle.pair(6)
    options: dict[str, Any] = {
        "metric": METRIC, "over": ("layer", "pos"), "batch_size": 2, "max_rows": 8,
    }  # fmt: skip
    wanted = ip.sweep(model, clean, corrupt, progress=False, **options)
    seen: list[int] = []
    found = ip.sweep(
        model, clean, corrupt, engine="ray", workers=2, **options,
        progress=lambda done, total: seen.append(done),
    )  # fmt: skip
    same(found, wanted)
    assert seen[-1] == wanted.each[0].numel()
    with pytest.raises(ip.Cancelled) as ended:
        ip.sweep(
            model, clean, corrupt, engine="ray", workers=1, progress=lambda done, total: False,
            **options,
        )  # fmt: skip
    there = ~ended.value.result.each.isnan()
    assert 0 < int(there.sum()) < there.numel()
    assert_near(ended.value.result.each[there], wanted.each[there], wanted.clean)


def _slowly(value: Any, hook: Any) -> None:
    time.sleep(0.03)
