"""Filling segments: the model runs in the caller's thread, and another one writes what it made meanwhile.

Only a window of a segment is in memory at a time. On a GPU its values go to pinned memory on a stream of their own, and
nobody reads them before the event that says they are there.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from interpose.errors import FileError
from interpose.files.writing import create_whole, settle
from interpose.monitors.statistics import Summary
from interpose.store.in_order import InOrder
from interpose.store.quantised import quantised
from interpose.store.records import (
    COMMITS,
    INDEX,
    SEGMENTS,
    STATISTICS,
    UNFINISHED,
    About,
    Commit,
    commit_name,
    file_name,
    folder_name,
)
from interpose.store.rows import Row, batches_of, rows_of, windows
from interpose.store.sources import Shard, digest
from interpose.store.tensor_files import TensorWriter, Written, write_tensors
from interpose.store.vectors import Positions, Vectors

_ABANDONED = 7 * 24 * 3600
_AHEAD = 2
"""How many windows may wait to be written."""


class SegmentMaker:
    """Makes segments of shards and commits them; a ``with`` block, at whose end all of them are there.

    Args:
        folder: of the store.
        about: what the store is of.
        vectors: what runs the model.
        committed: told of each commit.
    """

    def __init__(
        self,
        folder: Path,
        about: About,
        vectors: Vectors,
        committed: Callable[[Commit], Any] | None = None,
    ) -> None:
        self.folder = folder
        self.committed = committed
        self.about = about
        self.vectors = vectors
        self.positions = Positions.of_data(about.pos)
        self._begun: deque[_Segment] = deque(maxlen=_AHEAD + 1)
        self._thread = InOrder()
        self._room = threading.BoundedSemaphore(_AHEAD)
        self._free: deque[dict[str, Tensor]] = deque()
        self._side = torch.cuda.Stream() if vectors.model.device.type == "cuda" else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._thread.end(wait=error is None)
        finally:
            for segment in self._begun:
                segment.discard()

    def make(self, shard: Shard, step: Callable[[int], Any] = int) -> None:
        """Run the texts of a shard. Its segment is committed some time later, at the latest when the block ends.

        Args:
            shard: some texts.
            step: told how many tokens were run.
        """
        texts = self.about.texts
        rows = rows_of(
            self.vectors.model,
            shard.items,
            shard.first,
            prepend_bos=texts.prepend_bos,
            length=texts.length,
        )
        kept = [self.positions.of(self.vectors.model, row.tokens) for row in rows]
        segment = _Segment(self.folder, self.about, shard, rows, kept)
        self._begun.append(segment)
        self._thread.do(segment.begin, otherwise=segment.discard)
        at = 0
        for window in windows(rows, self.about.plan.window):
            self._run(segment, window, kept[at : at + len(window)])
            at += len(window)
            step(sum(len(row.tokens) for row in window))
        self.vectors.must_have_fitted()
        self._thread.do(lambda: self._commit(segment), otherwise=segment.discard)

    def _commit(self, segment: _Segment) -> None:
        commit = segment.commit()
        if self.committed is not None:
            self.committed(commit)

    def wait(self) -> None:
        """Until everything is committed."""
        self._thread.wait()

    def _run(self, segment: _Segment, rows: Sequence[Row], kept: Sequence[Sequence[int]]) -> None:
        """A window: run it, and leave what came of it to the other thread."""
        self._thread.check()
        starts = [0]
        for places in kept:
            starts.append(starts[-1] + len(places))
        self._room.acquire()
        buffers = self._free.popleft() if self._free else self._buffers()
        try:
            for batch in batches_of(rows, self.about.plan.batch_tokens):
                made = self.vectors.read([rows[n].tokens for n in batch], self.positions)
                for site, values in made.items():
                    segment.count(site, values)
                    self._copy(buffers[site], values, [(starts[n], starts[n + 1]) for n in batch])
        except BaseException:
            self._room.release()
            raise
        there = None if self._side is None else self._side.record_event()

        def write() -> None:
            if there is not None:
                there.synchronize()
            segment.write({site: buffer[: starts[-1]] for site, buffer in buffers.items()})

        self._thread.do(write, otherwise=segment.discard, finally_=lambda: self._let_go(buffers))

    def _let_go(self, buffers: dict[str, Tensor]) -> None:
        self._free.append(buffers)
        self._room.release()

    def _buffers(self) -> dict[str, Tensor]:
        most = max(self.about.plan.window, self.about.texts.length)
        sites = self.about.sites.items()
        pinned = self._side is not None
        return {
            name: torch.empty((most, *site.shape), dtype=site.dtype_made, pin_memory=pinned)
            for name, site in sites
        }

    def _copy(self, to: Tensor, values: Tensor, spans: Sequence[tuple[int, int]]) -> None:
        """Vectors of several rows to where each row's are; those that lie side by side at once."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
            values.record_stream(self._side)
        with torch.cuda.stream(self._side) if self._side is not None else torch.no_grad():
            at = 0
            for start, end in _joined(spans):
                part = values[at : at + end - start]
                to[start:end].copy_(part, non_blocking=self._side is not None)
                at += end - start


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found = [spans[0]]
    for start, end in spans[1:]:
        if start == found[-1][1]:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


class _Segment:
    """A segment that is being made."""

    def __init__(
        self,
        folder: Path,
        about: About,
        shard: Shard,
        rows: Sequence[Row],
        kept: Sequence[Sequence[int]],
    ) -> None:
        self.store = folder
        self.about = about
        self.shard = shard
        self.rows = rows
        self.kept = kept
        self.vectors = sum(map(len, kept))
        self.folder = own_folder(folder)
        self._files: dict[str, TensorWriter] = {}
        self._scales: dict[str, list[Tensor]] = {}
        self._sums: dict[str, Summary] = {}

    def count(self, site: str, values: Tensor) -> None:
        """Add to the statistics."""
        if values.numel():
            more = Summary.of(values.flatten(1))
            known = self._sums.get(site)
            self._sums[site] = more if known is None else known.join(more)

    def begin(self) -> None:
        """Make its files, as large as they will be."""
        self.folder.mkdir(parents=True)
        for name, site in self.about.sites.items():
            parts = {"values": (site.torch_dtype, (self.vectors, *site.shape))}
            if site.torch_dtype == torch.int8:
                parts["scales"] = (torch.bfloat16, (self.vectors,))
            with self._enough_room():
                self._files[name] = TensorWriter(self.folder / file_name(name), parts)

    def write(self, values: Mapping[str, Tensor]) -> None:
        """The vectors of the next rows."""
        for name, some in values.items():
            if self.about.sites[name].torch_dtype == torch.int8:
                some, scales = quantised(some, name)
                self._scales.setdefault(name, []).append(scales)
            with self._enough_room():
                self._files[name].write(some)

    def commit(self) -> Commit:
        """All of it is there: from now on it counts."""
        with self._enough_room():
            files = {file_name(name): self._close(name) for name in self.about.sites}
            files[INDEX] = write_tensors(self.folder / INDEX, self._index())
            files[STATISTICS] = write_tensors(self.folder / STATISTICS, self._statistics())
        settle(self.folder)
        number, shard = self.shard.number, self.shard
        name = folder_name(number, files)
        _move(self.folder, self.store / SEGMENTS / name, files)
        commit = Commit(
            segment=number,
            folder=name,
            texts=(shard.first, shard.first + len(shard.items)),
            rows=len(self.rows),
            tokens=sum(len(row.tokens) for row in self.rows),
            vectors=self.vectors,
            files=files,
            digest=digest(shard.items),
            last=shard.last,
            resume=shard.resume,
        )
        with self._enough_room():
            first = record(self.store, f"{COMMITS}/{commit_name(number)}", commit.to_json())
        if not first:
            there = Commit.read(self.store / COMMITS / commit_name(number))
            if there.folder != name:  # another writer's values count, and these are nobody's
                shutil.rmtree(self.store / SEGMENTS / name, ignore_errors=True)
            return there
        return commit

    def _close(self, name: str) -> Written:
        file = self._files.pop(name)
        try:
            for scales in self._scales.pop(name, []):
                file.write(scales)
            return file.close()
        except BaseException:
            file.discard()
            raise

    def _index(self) -> dict[str, Tensor]:
        def ends(lengths: Sequence[int]) -> Tensor:
            return torch.tensor([0, *lengths]).cumsum(0).int()

        made = {
            "tokens": torch.tensor([t for row in self.rows for t in row.tokens]).int(),
            "offsets": ends([len(row.tokens) for row in self.rows]),
            "texts": torch.tensor([row.text - self.shard.first for row in self.rows]).int(),
            "starts": torch.tensor([row.start for row in self.rows]).int(),
        }
        if self.about.pos is not None:
            made["positions"] = torch.tensor([p for some in self.kept for p in some]).int()
            made["vector_offsets"] = ends([len(some) for some in self.kept])
        return made

    def _statistics(self) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for name, sums in self._sums.items():
            there = sums.to("cpu")
            made |= {
                f"{name}.mean": there.mean,
                f"{name}.squares": there.squares,
                f"{name}.minimum": there.minimum.float(),
                f"{name}.maximum": there.maximum.float(),
                f"{name}.zeros": there.zeros.int(),
            }
        return made

    def discard(self) -> None:
        """Leave nothing of it."""
        for file in self._files.values():
            file.discard()
        self._files.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _enough_room(self) -> _EnoughRoom:
        return _EnoughRoom(self.store)


def fill_segment(
    folder: Path,
    about: About,
    shard: Shard,
    rows: Sequence[Row],
    parts: Iterable[Mapping[str, Tensor]],
) -> None:
    """Make and commit a segment of values that are there already, at every position.

    Args:
        folder: of the store.
        about: what the store is of.
        shard: its texts.
        rows: their rows.
        parts: the vectors of some rows after the other, by site.
    """
    segment = _Segment(folder, about, shard, rows, [range(len(row.tokens)) for row in rows])
    try:
        segment.begin()
        for part in parts:
            for name, values in part.items():
                segment.count(name, values)
            segment.write(part)
        segment.commit()
    except BaseException:
        segment.discard()
        raise


class _EnoughRoom:
    """Says of a full disk what to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise FileError(
                f"the disk is full: {str(self.folder)!r}. What was committed stays; make room, and the same "
                "ip.harvest(...) goes on from there."
            ) from error


def _move(unfinished: Path, folder: Path, files: dict[str, Written]) -> None:
    """Put a complete folder in its place. One that is there already holds the same, or is damaged."""
    with suppress(OSError):
        unfinished.rename(folder)
        settle(folder.parent)
        return
    from interpose.store.tensor_files import Mapped

    try:
        for name, written in files.items():
            Mapped(folder / name, written, verify=True)
    except FileError:
        folder.rename(unfinished.with_name(unfinished.name + "~damaged"))
        unfinished.rename(folder)
        settle(folder.parent)
    shutil.rmtree(unfinished, ignore_errors=True)


def own_folder(store: Path) -> Path:
    """Where this process may write what is not finished; a name of its own each time."""
    owner = f"{socket.gethostname()}~{os.getpid()}~{secrets.token_hex(6)}"
    return store / UNFINISHED / owner


def record(store: Path, name: str, content: str) -> bool:
    """Put a record in its place if none is there: whole, and with nothing beside it even if this process is killed."""
    folder = own_folder(store)
    folder.mkdir(parents=True)
    try:
        return create_whole(store / name, content, by_way_of=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep_unfinished(folder: Path) -> None:
    """Remove what writers left that are no more."""
    for left in (folder / UNFINISHED).glob("*~*~*"):
        host, pid, _ = left.name.split("~", 2)
        with suppress(FileNotFoundError):  # another writer sweeps, too
            old = time.time() - left.stat().st_mtime > _ABANDONED
            if old or (host == socket.gethostname() and not _lives(pid)):
                shutil.rmtree(left, ignore_errors=True)


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True
