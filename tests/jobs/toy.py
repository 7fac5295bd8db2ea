"""A job without a model: shards are numbers, and one counts when its file is there, which is made where none is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Toy:
    """Each shard is ``parts`` steps of some time; what a shard does besides is named in ``acts``."""

    def __init__(
        self, folder: Path, shards: int, *, parts: int = 4, seconds: float = 0.0, **acts: str
    ) -> None:
        self.folder = folder
        self.count = shards
        self.parts = parts
        self.seconds = seconds
        self.acts = acts
        folder.mkdir(exist_ok=True)

    def shards(self) -> Iterator[int]:
        return (shard for shard in range(self.count) if not self.is_done(shard))

    def is_done(self, shard: int) -> bool:
        return (self.folder / str(shard)).exists()

    def said(self, shard: int) -> str:
        return f"shard {shard}"

    def gpus(self) -> int:
        return 0

    def accept(self, shard: int, made: Any) -> None:
        with (self.folder / "accepted").open("a") as file:
            file.write(f"{shard} {made}\n")

    def worker(self) -> ToyWorker:
        return ToyWorker(self)

    def lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().split() if file.exists() else []


class ToyWorker:
    """Commits a shard only when it is told to wait, or at the end: what was made before is lost with it."""

    def __init__(self, job: Toy) -> None:
        self.job = job
        self.made: list[int] = []

    def __enter__(self) -> ToyWorker:
        self._note("workers", os.getpid())
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.wait()
        else:
            self._note("left", type(error).__name__)

    def make(self, shard: int, step: Callable[[int], Any] = int) -> int:
        self._note("begun", shard)
        for part in range(self.job.parts):
            time.sleep(self.job.seconds)
            step(1)
            if part == self.job.parts // 2:
                self._act(self.job.acts.get(f"at{shard}", ""))
        self.made.append(shard)
        return shard**2

    def wait(self) -> None:
        self._act(self.job.acts.get("wait", ""))
        for shard in self.made:
            with (self.job.folder / str(shard)).open("x") as file:
                file.write(str(os.getpid()))
        self.made = []

    def _act(self, act: str) -> None:
        if act == "die" or (act == "die once" and self._first("died")):
            os.kill(os.getpid(), signal.SIGKILL)
        if act == "raise":
            raise LookupError("nothing is there")

    def _first(self, name: str) -> bool:
        try:
            (self.job.folder / name).open("x").close()
        except FileExistsError:
            return False
        return True

    def _note(self, name: str, what: object) -> None:
        with (self.job.folder / name).open("a") as file:
            file.write(f"{what}\n")
