"""A committed segment, read: its rows and vectors, mapped into memory when they are first looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interpose.monitors.statistics import Summary
from interpose.store import checks
from interpose.store.pools import Pool, generator
from interpose.store.quantised import restored
from interpose.store.records import INDEX, STATISTICS, Commit, StoredSite, file_name
from interpose.store.remote import Remote
from interpose.store.tensor_files import Mapped

_CHUNK = 4096
"""How many vectors that lie side by side are read at once when they are shuffled."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """A committed segment: its rows, mapped into memory when they are first looked at."""

    commit: Commit
    folder: Path
    sites: Mapping[str, StoredSite]
    verify: bool
    _mapped: dict[str, Mapped]
    remote: Remote | None = None

    def path(self, name: str, *, anew: bool = False) -> Path:
        """Where one of its files is, copied here first if the store is elsewhere."""
        path = self.folder / name
        if self.remote is not None and (anew or not path.exists()):
            path.unlink(missing_ok=True)
            self.remote.fetch(self.folder.name, name)
        return path

    def file(self, name: str) -> Mapped:
        """One of its files, checked when it is first looked at."""
        found = self._mapped.get(name)
        if found is None:
            path = self.path(name)
            found = Mapped(path, self.commit.files[name], verify=self.verify)
            self._check(name, found, repr(str(path)))
            self._mapped[name] = found
        return found

    def _check(self, name: str, found: Mapped, source: str) -> None:
        if name == INDEX:
            checks.index_of(found, self.commit, source)
        for site, stored in self.sites.items():
            if name == STATISTICS and self.commit.vectors:
                checks.statistics_of(found, site, stored, source)
            if name == file_name(site):
                checks.values_of(found, stored, self.commit, source)

    @property
    def index(self) -> Mapped:
        """Which tokens its rows have."""
        return self.file(INDEX)

    def span(self, row: int) -> tuple[int, int]:
        """Where the tokens of one of its rows are."""
        offsets = self.index["offsets"]
        return int(offsets[row]), int(offsets[row + 1])

    def vectors(self, row: int) -> tuple[int, int]:
        """Where the vectors of one of its rows are."""
        offsets = self.index.get("vector_offsets")
        return self.span(row) if offsets is None else (int(offsets[row]), int(offsets[row + 1]))

    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of every vector: its row in the segment, its position, its token."""
        index = self.index
        offsets = index["offsets"].long()
        counted = index.get("vector_offsets", index["offsets"]).long()
        row = torch.repeat_interleave(torch.arange(len(counted) - 1), counted.diff())
        if "positions" in index:
            pos = index["positions"].long()
        else:
            pos = torch.arange(self.commit.vectors) - counted[row]
        return row, pos, index["tokens"][offsets[row] + pos].long()

    def values(self, site: str, index: slice | Tensor = slice(None)) -> Tensor:
        """Vectors of a site, as they are stored or, of eight bits, restored."""
        mapped = self.file(file_name(site))
        if "scales" in mapped:
            return restored(_some(mapped["values"], index), _some(mapped["scales"], index))
        return _some(mapped["values"], index)


def _some(values: Tensor, index: slice | Tensor) -> Tensor:
    return values[index] if isinstance(index, slice) else values.index_select(0, index)


def addresses(segment: Segment, rows: Tensor, pos: Tensor) -> Tensor:
    """Where in a segment's vectors those of some rows and positions are."""
    index = segment.index
    first, end = index["offsets"][rows].long(), index["offsets"][rows + 1].long()
    places = torch.where(pos < 0, pos + end - first, pos)
    if bool(((places < 0) | (places >= end - first)).any()):
        at = int(((places < 0) | (places >= end - first)).nonzero()[0])
        raise IndexError(
            f"pos {int(pos[at])} is not there: that row has positions 0 to {int((end - first)[at]) - 1}."
        )
    if "positions" not in index:
        return first + places
    starts, ends = index["vector_offsets"][rows].long(), index["vector_offsets"][rows + 1].long()
    # Ascending in each row: one search over rows and positions together.
    wide = int(index["offsets"].diff().max()) + 1
    whose = torch.repeat_interleave(
        torch.arange(len(index["vector_offsets"]) - 1), index["vector_offsets"].long().diff()
    )
    found = torch.searchsorted(whose * wide + index["positions"].long(), rows * wide + places)
    inside = (found >= starts) & (found < ends)
    there = (
        index["positions"][found.clamp(max=max(0, len(index["positions"]) - 1))].long() == places
    )
    if not bool((inside & there).all()):
        at = int((~(inside & there)).nonzero()[0])
        raise IndexError(
            f"position {int(places[at])} of that row was not kept: see store.positions_of(row)."
        )
    return found


def summary(segment: Segment, site: str) -> Summary:
    """The statistics of a site in a segment."""
    file = segment.file(STATISTICS)
    return Summary(
        count=segment.commit.vectors,
        mean=file[f"{site}.mean"],
        squares=file[f"{site}.squares"],
        minimum=file[f"{site}.minimum"].double(),
        maximum=file[f"{site}.maximum"].double(),
        zeros=file[f"{site}.zeros"].long(),
    )


class ChunkPools:
    """The vectors of a store in pools: chunks from all over it, in an order that the seed decides."""

    def __init__(
        self,
        segments: Sequence[Segment],
        first_rows: Sequence[int],
        names: Sequence[str],
        size: int,
        *,
        shuffle: bool,
        seed: int,
    ) -> None:
        self.segments = list(segments)
        self.first_rows = list(first_rows)
        self.names = names
        self.shuffle = shuffle
        self.seed = seed
        chunk = max(1, min(_CHUNK, size // 16)) if shuffle else size
        self._chunks = [
            (number, start, min(start + chunk, segment.commit.vectors))
            for number, segment in enumerate(segments)
            for start in range(0, segment.commit.vectors, chunk)
        ]
        self._size = size

    def of(self, epoch: int, state: Any, first: int) -> Iterator[Pool]:  # noqa: ARG002
        """The pools of an epoch, from one on."""
        order = list(range(len(self._chunks)))
        if self.shuffle:
            order = torch.randperm(len(order), generator=generator(self.seed, epoch)).tolist()
        for number, some in enumerate(self._pools_of(order)):
            if number >= first:
                yield self._pool(some)

    def _pools_of(self, order: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
        """Chunks that are mixed: as many as a pool holds, whatever the sizes of segments."""
        held: list[tuple[int, int, int]] = []
        count = 0
        for chunk in (self._chunks[number] for number in order):
            _, start, end = chunk
            if held and count + end - start > self._size:
                yield held
                held, count = [], 0
            held.append(chunk)
            count += end - start
        if held:
            yield held

    def _pool(self, chunks: Sequence[tuple[int, int, int]]) -> Pool:
        values: dict[str, list[Tensor]] = {name: [] for name in self.names}
        rows, places, tokens = [], [], []
        for number, start, end in chunks:
            segment = self.segments[number]
            row, pos, token = (one[start:end] for one in segment.places())
            rows.append(row + self.first_rows[number])
            places.append(pos)
            tokens.append(token)
            for name in self.names:
                values[name].append(segment.values(name, slice(start, end)))
        return Pool(
            values={name: torch.cat(parts) for name, parts in values.items()},
            tokens=torch.cat(tokens),
            row=torch.cat(rows),
            pos=torch.cat(places),
            state=None,
        )
