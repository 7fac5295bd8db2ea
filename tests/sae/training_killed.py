"""Trainings in child processes that are killed at random moments until one is done: run as a script.

Everything is loaded once; every child is forked from here, so that kills take seconds and not minutes.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import interpose as ip
from tests.sae.vectors import mixed


def train(folder: Path) -> ip.SAETraining:
    """The same training, whoever does it."""
    saes = [ip.BatchTopKSAE(8, 16, k=2), ip.JumpReLUSAE(8, 16)]
    recipe = ip.SAERecipe(dead_after=300, resample=11)
    options = {"steps": 40, "batch_size": 64, "keep_every": 3, "say_every": 10}
    return ip.train_sae(
        mixed(1500), saes, recipe=recipe, folder=folder, progress=False, device="cpu", **options
    )


def killed(folder: Path, after: float) -> bool:
    """Train in a child, and kill it after some seconds; whether it was alive then."""
    child = os.fork()
    if child == 0:
        try:
            train(folder)
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
    """Kill so often, and compare with a training that nobody ended."""
    torch.set_num_threads(1)
    drawn = random.Random(seed)
    begun = time.monotonic()
    whole = train(folder / "whole")
    takes = time.monotonic() - begun
    done = 0
    while done < kills:
        target = folder / f"killed{done}"
        while done < kills and killed(target, drawn.uniform(0, takes / 2)):
            done += 1
        found = train(target)
        assert found.history == whole.history
        for one, other in zip(found.saes, whole.saes):
            for name, weights in one.state_dict().items():
                assert torch.equal(weights, other.state_dict()[name]), name
        names = sorted(path.name for path in target.iterdir())
        assert [name for name in names if not name.startswith(".")] == [
            "0", "1", "training.json", "training.safetensors",
        ], names  # fmt: skip
    print(done, "kills")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
