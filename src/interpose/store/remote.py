"""Stores in object stores, by fsspec's URLs: ``s3://bucket/activations``, ``gs://``, ``memory://``.

Records are copied here when a store is opened, and a segment's file when it is first looked at: then it is mapped into
memory and checked as any other. A segment is made here, copied there, and counts there when its record is created.
"""

from __future__ import annotations

import inspect
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from interpose.errors import FileError, Unsupported
from interpose.files.writing import write_whole
from interpose.store.records import ABOUT, COMMITS, HOOKS, SEGMENTS, Commit, commit_name
from interpose.store.tensor_files import Written

_CREATES = ("memory", "s3", "s3a", "gs", "gcs")
"""Where a name can be created only if it is not there, in one step."""


def is_url(store: str | Path) -> bool:
    """Whether a store is in an object store; ``file://`` is a folder."""
    return "://" in str(store) and not str(store).startswith(_FILE)


_FILE = "file://"


def as_path(store: str | Path) -> Path:
    """The folder that is meant."""
    return Path(str(store).removeprefix(_FILE))


def local_folder(store: str | Path) -> Path:
    """The folder of a store that has to be on this machine."""
    if is_url(store):
        raise Unsupported(
            f"{str(store)!r} is a URL, and this is written to folders. ip.harvest(..., store=URL) writes to object "
            "stores, and ip.open_store(URL) reads them."
        )
    return as_path(store).absolute()


class Remote:
    """A store in an object store, and the folder here where copies of its files are.

    Args:
        url: of the store.
        cache: a folder for the copies, which stays; by default a temporary one.
    """

    def __init__(self, url: str, cache: str | Path | None = None) -> None:
        try:
            import fsspec
        except ImportError:
            raise Unsupported(f"{url!r} needs fsspec: pip install 'interpose[remote]'.") from None
        try:
            self.files, self.root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise Unsupported(f"{url!r} cannot be opened: {error}") from None
        self.url = url
        if cache is None:
            cache = tempfile.mkdtemp(prefix="interpose-")
            weakref.finalize(self, shutil.rmtree, cache, ignore_errors=True)
        self.folder = Path(cache).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def of(cls, store: str | Path) -> Self | None:
        """The object store of a URL; None for a folder."""
        return cls(str(store)) if is_url(store) else None

    @property
    def creates(self) -> bool:
        """Whether of several writers who create one name one succeeds."""
        protocol = self.files.protocol
        names = (protocol,) if isinstance(protocol, str) else tuple(protocol)
        put = getattr(self.files, "_pipe_file", self.files.pipe_file)
        return bool(set(names) & set(_CREATES)) and "mode" in inspect.signature(put).parameters

    def _path(self, *parts: str) -> str:
        return "/".join([self.root.rstrip("/"), *parts])

    def _names(self, folder: str) -> list[str]:
        self.files.invalidate_cache()
        try:
            listed = self.files.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(one).rstrip("/").rpartition("/")[2] for one in listed)

    def _copy_here(self, *parts: str) -> bool:
        """Copy a file if it is there; records are never changed once they are."""
        target = self.folder.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            content = self.files.cat_file(self._path(*parts))
        except FileNotFoundError:
            return False
        write_whole(target, content)
        return True

    def _create(self, content: bytes, *parts: str) -> bool:
        """Create a name if it is not there; where a backend cannot do that in one step, it has one writer."""
        path = self._path(*parts)
        if not self.creates:
            if self.files.exists(path):
                return False
            self.files.pipe_file(path, content)
            return True
        try:
            self.files.pipe_file(path, content, mode="create")
        except FileExistsError:
            return False
        return True

    def pull(self) -> None:
        """Copy the records that are there, and forget those that are not any more."""
        about = self.folder / ABOUT
        before = about.read_bytes() if about.is_file() else None
        if not self._copy_here(ABOUT):
            return
        if before is not None and before != about.read_bytes():
            write_whole(about, before)
            raise FileError(
                f"{str(self.folder)!r} has copies of another store than {self.url!r}. Give another cache=."
            )
        there = {name for name in self._names(COMMITS) if name.endswith(".json")}
        here = {file.name for file in (self.folder / COMMITS).glob("*.json")}
        for name in sorted(there - here):
            self._copy_here(COMMITS, name)
        for name in here - there:
            (self.folder / COMMITS / name).unlink()
        for name in self._names(HOOKS):
            if not (self.folder / HOOKS / name).exists():
                self._copy_here(HOOKS, name)

    def fetch(self, folder: str, name: str) -> None:
        """Copy a segment's file here; one that is not there is an error where it is opened."""
        target = self.folder / SEGMENTS / folder
        target.mkdir(parents=True, exist_ok=True)
        unfinished = target / f".{name}.unfinished"
        try:
            self.files.get_file(self._path(SEGMENTS, folder, name), str(unfinished))
        except FileNotFoundError:
            unfinished.unlink(missing_ok=True)
            return
        unfinished.replace(target / name)

    def begin(self, part: tuple[int, int]) -> None:
        """Put what the store is of there, unless it is."""
        if part[1] > 1 and not self.creates:
            raise Unsupported(
                f"{self.url!r} has one writer: nothing is known there that creates a name only if it is not there, so "
                "several would overwrite each other. Leave out part=, or have each write a store of its own."
            )
        self.files.makedirs(self._path(COMMITS), exist_ok=True)
        content = (self.folder / ABOUT).read_bytes()
        if not self._create(content, ABOUT) and self.files.cat_file(self._path(ABOUT)) != content:
            raise FileError(
                f"{self.url!r} was begun by another writer meanwhile, as a store of something else or by other "
                "versions. Give another URL, or make the same call again."
            )
        for file in (self.folder / HOOKS).glob("*"):
            self._create(file.read_bytes(), HOOKS, file.name)

    def has(self, segment: int) -> bool:
        """Whether a segment is committed there."""
        self.files.invalidate_cache()
        return bool(self.files.exists(self._path(COMMITS, commit_name(segment))))

    def push(self, commit: Commit) -> None:
        """Copy a segment that was committed here, commit it there, and let go of the copy."""
        here = self.folder / SEGMENTS / commit.folder
        self.files.makedirs(self._path(SEGMENTS, commit.folder), exist_ok=True)
        for name, written in commit.files.items():
            path = self._path(SEGMENTS, commit.folder, name)
            self.files.put_file(str(here / name), path)
            self._must_be_there(path, written)
        record = commit.to_json().encode()
        name = commit_name(commit.segment)
        if not self._create(record, COMMITS, name):
            there = self.files.cat_file(self._path(COMMITS, name))
            write_whole(self.folder / COMMITS / name, there)
            if Commit.from_json(there.decode(), repr(name)).folder != commit.folder:
                self.files.rm(self._path(SEGMENTS, commit.folder), recursive=True)
        shutil.rmtree(here, ignore_errors=True)

    def _must_be_there(self, path: str, written: Written) -> None:
        self.files.invalidate_cache()
        size = self.files.info(path)["size"]
        if size != written.size:
            raise FileError(f"{path!r} has {size} bytes there, and {written.size} were written.")

    def drop(self, commits: Mapping[int, Commit]) -> None:
        """Take back commits, and what they name."""
        for number, commit in commits.items():
            self.files.rm(self._path(COMMITS, commit_name(number)))
            if self.files.exists(self._path(SEGMENTS, commit.folder)):
                self.files.rm(self._path(SEGMENTS, commit.folder), recursive=True)
