"""`ip.open_store`: read what was harvested, row by row, vector by vector, or batch by batch."""

from __future__ import annotations

import bisect
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interpose.engine.cache import Cache
from interpose.errors import FileError, SiteNotFound
from interpose.explain.words import nearest, some
from interpose.models.transformer import TransformerModel
from interpose.monitors.statistics import ActivationStatistics, Summary, finished
from interpose.names import Speller
from interpose.render.text import human_bytes, table
from interpose.store import fingerprint
from interpose.store.info import StoreInfo
from interpose.store.pools import POOL, PooledBatches
from interpose.store.reading import ChunkPools, Segment, addresses, summary
from interpose.store.records import (
    ABOUT,
    COMMITS,
    INDEX,
    SEGMENTS,
    STATISTICS,
    UNKNOWN,
    About,
    Commit,
    StoredSite,
    commit_name,
    file_name,
)
from interpose.store.remote import Remote, as_path, is_url
from interpose.store.tensor_files import Mapped


def open_store(path: str | Path, *, verify: bool = True, cache: str | Path | None = None) -> Store:
    """Open a store that `harvest` fills or has filled; also while it does.

    ```python
    store = ip.open_store("activations")
    store[0]["resid_post", 3]                            # [1, pos, d_model]
    store.gather(("resid_post", 3), row=[0, 5], pos=[2, 1])   # [2, d_model]
    for batch in store.batches(("resid_post", 3), batch_size=1024):
        batch["blocks.3.hook_resid_post"]
    ```

    Args:
        path: its folder, or a URL that fsspec knows, such as ``s3://bucket/activations``.
        verify: compare each file's checksum when it is first used. That reads the file once; without it a changed bit
            is not noticed.
        cache: of a URL, the folder for copies of the files that are used; by default a temporary one.
    """
    if is_url(path):
        return _opened(Remote(str(path), cache), verify=verify)
    folder = as_path(path)
    file = folder / ABOUT
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no store in {str(path)!r}: it has no {ABOUT}. ip.harvest(..., store=...) makes one."
        )
    about = About.read(file)
    return Store(folder, about, verify=verify)


def _opened(remote: Remote, *, verify: bool) -> Store:
    remote.pull()
    file = remote.folder / ABOUT
    if not file.is_file():
        raise FileNotFoundError(f"there is no store in {remote.url!r}: it has no {ABOUT}.")
    return Store(remote.folder, About.read(file), verify=verify, remote=remote)


class Store(Sequence[Cache]):
    """Rows of text with the values of some sites: `open_store` opens one. ``store[7]`` is a row as a `Cache`.

    Attributes:
        path: its folder; of one in an object store, that of the copies.
        about: what it is of: model, texts, sites, hooks.
    """

    def __init__(
        self, path: Path, about: About, *, verify: bool, remote: Remote | None = None
    ) -> None:
        self.path = path
        self._remote = remote
        self.about = about
        self._verify = verify
        self.segments: list[Segment] = []
        self.refresh()

    def refresh(self) -> None:
        """See what writers have committed since it was opened."""
        if self._remote is not None:
            self._remote.pull()
        known = {segment.commit.segment: segment for segment in self.segments}
        found = []
        for file in sorted((self.path / COMMITS).glob("*.json")):
            if file.name.startswith("."):
                continue
            commit = Commit.read(file)
            if file.name != commit_name(commit.segment):
                raise FileError(f"{str(file)!r} is the record of segment {commit.segment}.")
            if missing := {INDEX, STATISTICS, *map(file_name, self.sites)} - set(commit.files):
                raise FileError(f"{str(file)!r} has no file {min(missing)!r}.")
            before = known.get(commit.segment)
            if before is None or before.commit != commit:
                folder = self.path / SEGMENTS / commit.folder
                before = Segment(
                    commit=commit,
                    folder=folder,
                    sites=self.sites,
                    verify=self._verify,
                    _mapped={},
                    remote=self._remote,
                )
            found.append(before)
        self.segments = found
        self._rows = [0, *accumulate(segment.commit.rows for segment in found)]

    # What there is.

    @property
    def commits(self) -> dict[int, Commit]:
        """What is committed, by the number of the segment."""
        return {segment.commit.segment: segment.commit for segment in self.segments}

    def manifest(self) -> str:
        """All records of commits, sorted: two stores of the same manifest hold the same bytes."""
        return "".join(self.commits[number].to_json() for number in sorted(self.commits))

    @property
    def sites(self) -> Mapping[str, StoredSite]:
        """The sites by canonical name."""
        return self.about.sites

    def __len__(self) -> int:
        return self._rows[-1]

    @property
    def tokens(self) -> int:
        """How many tokens all rows have."""
        return sum(segment.commit.tokens for segment in self.segments)

    @property
    def vectors(self) -> int:
        """How many vectors each site has."""
        return sum(segment.commit.vectors for segment in self.segments)

    @property
    def complete(self) -> bool:
        """Whether all texts are there."""
        numbers = sorted(self.commits)
        return (
            bool(numbers)
            and numbers == list(range(len(numbers)))
            and self.commits[numbers[-1]].last
        )

    @property
    def nbytes(self) -> int:
        """How much it takes on the disk."""
        return sum(file.size for s in self.segments for file in s.commit.files.values())

    def site(self, asked: Any) -> str:
        """The canonical name of one of its sites, by any name of it."""
        found = (
            self._speller(asked) if not isinstance(asked, str) or asked not in self.sites else asked
        )
        if found not in self.sites:
            also = [name for name, site in self.sites.items() if asked in site.aliases]
            found = also[0] if also else found
        if found not in self.sites:
            near = nearest(str(found), list(self.sites))
            meant = f" Did you mean {near!r}?" if near else ""
            raise SiteNotFound(
                f"{asked!r} is not in this store.{meant} It has: {some(map(repr, self.sites))}."
            )
        return found

    @cached_property
    def _speller(self) -> Speller:
        return self.about.speller

    def _named(self, site: Any) -> list[str]:
        """The canonical names of sites: by any names, by kinds such as ``resid_post``, by globs; None for all."""
        if site is None:
            return list(self.sites)
        several = isinstance(site, (list, set)) or (
            isinstance(site, tuple) and all(isinstance(one, (str, tuple)) for one in site)
        )
        found = [name for one in (site if several else [site]) for name in self._meant(one)]
        return list(dict.fromkeys(found))

    def _meant(self, asked: Any) -> list[str]:
        found = [
            name
            for name, site in self.sites.items()
            if isinstance(asked, str) and (site.kind == asked or fnmatchcase(name, asked))
        ]
        return found or [self.site(asked)]

    @property
    def hooks(self) -> tuple[str, ...]:
        """What was live while it was filled, by its label."""
        return self.about.hooks

    def has_all_positions(self) -> bool:
        """Whether there is a vector for every token of every row."""
        return self.vectors == self.tokens

    def must_be_of(self, model: TransformerModel) -> None:
        """Refuse a model whose values these are not: by its class, config and, where that takes seconds, its weights.

        Args:
            model: of transformers.
        """
        if not self.about.model.weights:
            raise FileError(
                f"{str(self.path)!r} was imported without its model, so it may be of another. Import it "
                "again, with model=."
            )
        if len(self) and int(self.tokens_of(0)[0]) == UNKNOWN:
            raise FileError(
                f"{str(self.path)!r} was imported without its tokens, which are needed here. Import it "
                "again, with texts=."
            )
        if (why := fingerprint.differs(model, self.about.model)) is not None:
            raise FileError(
                f"{str(self.path)!r} is a store of another model: {why}. Give the model that it was harvested from, or "
                "the texts instead of the store."
            )

    # Rows.

    def _find(self, row: int) -> tuple[Segment, int]:
        """The segment of a row, and its number there."""
        count = len(self)
        number = row + count if row < 0 else row
        if not 0 <= number < count:
            raise IndexError(f"row {row} is not there: the store has rows 0 to {count - 1}.")
        at = bisect.bisect_right(self._rows, number) - 1
        return self.segments[at], number - self._rows[at]

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        segment, number = self._find(row)
        where = slice(*segment.vectors(number))
        values = {name: segment.values(name, where)[None].clone() for name in self.sites}
        aliases = {other: name for name, site in self.sites.items() for other in site.aliases}
        return Cache(values, aliases=aliases, spelling=self._speller)

    def lengths(self) -> Tensor:
        """How many tokens each row has, [row]."""
        found = [segment.index["offsets"].diff().long() for segment in self.segments]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.long)

    def tokens_of(self, row: int) -> Tensor:
        """The tokens of a row, [pos]."""
        segment, number = self._find(row)
        return segment.index["tokens"][slice(*segment.span(number))].long()

    def positions_of(self, row: int) -> Tensor:
        """The positions of a row that have vectors."""
        segment, number = self._find(row)
        if "positions" not in segment.index:
            return torch.arange(len(self.tokens_of(row)))
        return segment.index["positions"][slice(*segment.vectors(number))].long()

    def text_of(self, row: int) -> tuple[int, int]:
        """The number of the text that a row is of, and the first token of it that the row has."""
        segment, number = self._find(row)
        text = segment.commit.texts[0] + int(segment.index["texts"][number])
        return text, int(segment.index["starts"][number])

    # Vectors.

    def gather(self, site: Any, row: Any, pos: Any) -> Tensor:
        """Single vectors of a site, [vector, ...], wherever they are.

        Args:
            site: which site.
            row: the row of each.
            pos: the position of each in its row, negative from its end.
        """
        name = self.site(site)
        rows, places = torch.as_tensor(row).long(), torch.as_tensor(pos).long()
        rows, places = (one.reshape(-1) for one in torch.broadcast_tensors(rows, places))
        rows = torch.where(rows < 0, rows + len(self), rows)
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < len(self)):
            raise IndexError(
                f"rows are 0 to {len(self) - 1}; got {int(rows.min())} to {int(rows.max())}."
            )
        whose = torch.bucketize(rows, torch.tensor(self._rows[1:]), right=True)
        stored = self.sites[name]
        kind = torch.float32 if stored.dtype == "int8" else stored.torch_dtype
        found = torch.empty((len(rows), *stored.shape), dtype=kind)
        for number in map(int, whose.unique()):
            segment = self.segments[number]
            mine = (whose == number).nonzero()[:, 0]
            at = addresses(segment, rows[mine] - self._rows[number], places[mine])
            if len(mine) == len(rows):
                return segment.values(name, at)
            found.index_copy_(0, mine, segment.values(name, at))
        return found

    def statistics(self, site: Any = None) -> ActivationStatistics:
        """Mean, variance and range of every unit of some sites, as the harvest counted them.

        Args:
            site: which sites; None for all.
        """
        rows = []
        for name in self._named(site):
            sums: Summary | None = None
            for segment in self.segments:
                if segment.commit.vectors:
                    more = summary(segment, name)
                    sums = more if sums is None else sums.join(more)
            if sums is not None:
                rows.append(finished(name, sums))
        return ActivationStatistics(tuple(rows))

    def batches(
        self,
        site: Any = None,
        *,
        batch_size: int = 4096,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = 1,
        pos: slice | None = None,
        most_norm: float | None = None,
        pool: int | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> PooledBatches:
        """Batches of vectors, shuffled: chunks from all over the store are read in turn, and mixed in a pool.

        Args:
            site: which sites; None for all.
            batch_size: how many vectors a batch has; the last of a pool may have fewer.
            shuffle: False goes through rows in their order.
            seed: of the order.
            epochs: how often all of them come; None for ever.
            pos: which positions of rows: ``slice(1, None)`` leaves out the first of each.
            most_norm: leave out vectors whose norm is more than so many times the median of its pool, at any site.
            pool: how many vectors are mixed; by default 512 MB of them.
            part: which of how many consumers: ``(0, 2)`` gets every other pool.
        """
        names = self._named(site)
        pool = pool or max(batch_size, POOL // sum(self.sites[name].nbytes for name in names))
        return PooledBatches(
            ChunkPools(self.segments, self._rows, names, pool, shuffle=shuffle, seed=seed),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            epochs=epochs,
            pos=pos,
            most_norm=most_norm,
            part=part,
        )

    def export(self, folder: str | Path, *, format: str, site: Any = None) -> Path:  # noqa: A002
        """Write it for other programs, to a new folder.

        Args:
            folder: a new one.
            format: ``npy`` (an array for each site), ``parquet`` (tables of rows, places of vectors and statistics,
                without values), or ``dataset`` (of Hugging Face, a row for each row).
            site: which sites; None for all.
        """
        from interpose.store.foreign.exporting import export_store

        return export_store(self, folder, format, self._named(site))

    # Whether it is whole.

    def damaged(self) -> dict[str, str]:
        """Every committed file that is not what was committed, with what is wrong; reads the whole store once."""
        found = {}
        for segment in self.segments:
            for name, written in segment.commit.files.items():
                path = segment.path(name, anew=True)
                try:
                    Mapped(path, written, verify=True)
                except FileError as error:
                    found[str(path)] = str(error)
        return found

    def verify(self) -> None:
        """Compare every file with what was committed; an error that names all that differ."""
        if wrong := self.damaged():
            listed = "\n  ".join(wrong.values())
            raise FileError(f"{len(wrong)} files of {str(self.path)!r} are damaged:\n  {listed}")

    def drop_damaged(self) -> list[int]:
        """Take back the commits of segments with damaged files, so that the same harvest makes them anew."""
        wrong = {Path(path).parent for path in self.damaged()}
        gone = {s.commit.segment: s.commit for s in self.segments if s.folder in wrong}
        if self._remote is not None:
            self._remote.drop(gone)
        for number, commit in gone.items():
            (self.path / COMMITS / commit_name(number)).unlink()
            shutil.rmtree(self.path / SEGMENTS / commit.folder, ignore_errors=True)
        self.refresh()
        return list(gone)

    def info(self) -> StoreInfo:
        """What it holds, and what it was made of: model, texts, hooks, versions."""
        counts = {
            "rows": len(self),
            "tokens": self.tokens,
            "vectors": self.vectors,
            "nbytes": self.nbytes,
            "segments": len(self.segments),
            "complete": self.complete,
        }
        where = str(self.path) if self._remote is None else self._remote.url
        return StoreInfo.of(where, self.about, counts)

    @property
    def _name(self) -> str:
        return self.path.name if self._remote is None else self._remote.url

    def __repr__(self) -> str:
        state = "complete" if self.complete else "not complete"
        title = (
            f"Store of {len(self):,} rows, {self.tokens:,} tokens, {human_bytes(self.nbytes)}, {state}: "
            f"{self.about.model.name or self.about.model.kind or 'a model without a name'} in {self._name!r}"
        )
        return table(("site", "vectors", "shape", "dtype", "size"), self._table(), title=title)

    def _repr_html_(self) -> str:
        from interpose.render.html import html_table

        title = repr(self).splitlines()[0]
        return html_table(("site", "vectors", "shape", "dtype", "size"), self._table(), title=title)

    def _table(self) -> list[tuple[str, ...]]:
        sizes = {
            name: sum(s.commit.files[file_name(name)].size for s in self.segments)
            for name in self.sites
        }
        return [
            (name, f"{self.vectors:,}", str(site.shape), site.dtype, human_bytes(sizes[name]))
            for name, site in self.sites.items()
        ]
