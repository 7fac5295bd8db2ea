"""Harvests in child processes that are killed at random moments, until a store is complete: run as a script.

The model is loaded once; every child is forked from here, so that a hundred kills take seconds and not minutes.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import interpose as ip
from tests.models import tiny

TEXTS = [[3 + (7 * row + place) % 40 for place in range(2 + row % 9)] for row in range(90)]
SITES = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_z"]


def harvest(model: ip.TransformerModel, folder: Path, **options: Any) -> ip.Store:
    given = {"segment_texts": 7, "progress": False, **options}
    return ip.harvest(model, TEXTS, SITES, store=folder, **given)


def killed(model: ip.TransformerModel, folder: Path, after: float) -> bool:
    """Harvest in a child, and kill it after some seconds; whether it was alive then."""
    child = os.fork()
    if child == 0:
        try:
            harvest(model, folder)
        finally:
            os._exit(0)
    end = time.monotonic() + after
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    model, rng = ip.wrap(tiny.build("llama")), random.Random(seed)
    start = time.monotonic()
    harvest(model, folder / "whole")
    takes = time.monotonic() - start
    done = number = 0
    while done < kills:
        target = folder / f"killed{number}"
        for _ in range(kills):
            alive = killed(model, target, rng.uniform(0, takes / 2))
            done += alive
            if not alive or done >= kills:
                break
        harvest(model, target)
        number += 1
    print(done, "kills,", number, "stores")


def link_or_die(left: Iterator[int], link: Callable[..., None], *names: Any) -> None:
    """Link a few times, then die."""
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    link(*names)


def killed_at_records(folder: Path) -> None:
    """Kill harvests just before a record takes its place, the first of a store and then one more each time."""
    torch.set_num_threads(1)
    model = ip.wrap(tiny.build("llama"))
    harvest(model, folder / "whole")
    for record in range(4):
        child = os.fork()
        if child == 0:
            os.link = partial(link_or_die, iter(range(record)), os.link)
            harvest(model, folder / "killed", segment_texts=7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    harvest(model, folder / "killed")
    print("4 kills")


def limited(folder: Path, size: int) -> None:
    """Harvest where no file may grow larger than this: as on a full disk."""
    model = ip.wrap(tiny.build("llama"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        harvest(model, folder, segment_texts=90)
    except ip.FileError as error:
        print(error)
    left = list((folder / "unfinished").iterdir())
    assert not left, left


if __name__ == "__main__":
    if sys.argv[1] == "limited":
        limited(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "records":
        killed_at_records(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
