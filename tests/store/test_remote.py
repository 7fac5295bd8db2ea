"""Stores in object stores hold what stores in folders hold, and of several writers of a segment one counts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import interpose as ip
from interpose.store.remote import Remote
from tests.models import tiny

TEXTS = [[3 + (5 * row + place) % 40 for place in range(2 + (3 * row) % 7)] for row in range(23)]
SITE = "blocks.1.hook_resid_post"


class Plain(MemoryFileSystem):
    """A file system of which nobody knows that it creates a name only if it is not there."""

    protocol = "plain"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("plain://", "memory://")))

    def pipe_file(self, path: str, value: bytes) -> None:
        super().pipe_file(path, value)


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    fsspec.register_implementation("plain", Plain, clobber=True)
    for kind in (MemoryFileSystem, Plain):
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]
    yield
    for kind in (MemoryFileSystem, Plain):
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]


def build() -> Any:
    return ip.wrap(tiny.build("llama"))


def harvest(store: str | Path, model: Any = None, **options: Any) -> ip.Store:
    given = {"segment_texts": 5, "progress": False, **options}
    return ip.harvest(model or build(), TEXTS, [SITE, "z"], store=store, **given)


def contents(kind: type[MemoryFileSystem]) -> dict[str, bytes]:
    """Every file that is there, without the name of the bucket."""
    return {name.split("/", 2)[2]: file.getvalue() for name, file in kind.store.items()}


def of_folder(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("protocol", ["memory", "plain"])
def test_the_files_are_those_of_a_folder(protocol: str, tmp_path: Path) -> None:
    whole = harvest(tmp_path / "whole")
    url = f"{protocol}://bucket"
    edit = ip.zero("z", layer=0, head=1)
    store = harvest(url)
    kind = MemoryFileSystem if protocol == "memory" else Plain
    assert contents(kind) == of_folder(tmp_path / "whole")
    assert store.manifest() == whole.manifest()
    assert (store.complete, len(store)) == (True, 23)
    assert f"in {url!r}" in repr(store)
    assert store.info().data["store"] == url
    opened = ip.open_store(url)
    for row in (0, 7, 22):
        assert torch.equal(opened[row][SITE], whole[row][SITE])
    rows, pos = torch.randint(23, (50,)), torch.zeros(50, dtype=torch.long)
    assert torch.equal(opened.gather(SITE, rows, pos), whole.gather(SITE, rows, pos))
    opened.verify()
    harvest(f"{protocol}://edited", hooks=[edit])
    edited = ip.open_store(f"{protocol}://edited")
    (loaded,) = ip.load_edits(edited.path / "hooks")
    assert loaded.to_dict() == edit.to_dict()
    with pytest.raises(ip.FileError, match="is a store of something else: hooks"):
        harvest(url, hooks=[edit])


def test_copies_go_with_the_store_that_needed_them() -> None:
    store = harvest("memory://bucket")
    store[0][SITE]
    folder = store.path
    assert folder.exists()
    del store
    gc.collect()
    assert not folder.exists()


def test_only_files_that_are_looked_at_are_copied(tmp_path: Path) -> None:
    harvest("memory://bucket")
    store = ip.open_store("memory://bucket", cache=tmp_path)
    assert not list(tmp_path.glob("segments/*/*"))
    store[6][SITE]
    copied = {path.parent.name for path in tmp_path.glob("segments/*/*")}
    assert copied == {store.commits[1].folder}
    store.gather(SITE, [0], [0])
    (first,) = tmp_path.glob("segments/00000000-*/blocks*")
    assert "resid_post" in first.name
    harvest("memory://other", segment_texts=6)
    with pytest.raises(ip.FileError, match="has copies of another store"):
        ip.open_store("memory://other", cache=tmp_path)
    assert torch.equal(ip.open_store("memory://bucket", cache=tmp_path)[6][SITE], store[6][SITE])


def test_a_harvest_goes_on_and_readers_see_what_is_committed() -> None:
    seen: list[int] = []

    def end(done: int, total: int | None) -> bool:
        if any("store.json" in name for name in MemoryFileSystem.store):
            seen.append(len(ip.open_store("memory://bucket")))
        return done < 60

    with pytest.raises(ip.Cancelled):
        harvest("memory://bucket", progress=end)
    committed = len(ip.open_store("memory://bucket"))
    assert 0 < committed < 23
    assert seen == sorted(seen)
    store = harvest("memory://bucket")
    harvest("memory://whole")
    assert store.complete
    assert store.manifest() == ip.open_store("memory://whole").manifest()


def test_writers_share_the_work_where_names_are_created_once() -> None:
    model = build()
    harvest("memory://whole", model)
    for part in ((1, 2), (0, 2)):
        harvest("memory://parts", model, part=part)

    def between(done: int, total: int | None) -> None:
        if done < 30:
            harvest("memory://both", model)

    harvest("memory://both", model, progress=between)
    whole = ip.open_store("memory://whole").manifest()
    assert ip.open_store("memory://parts").manifest() == whole
    assert ip.open_store("memory://both").manifest() == whole
    assert not Remote("plain://bucket").creates
    with pytest.raises(ip.Unsupported, match=r"'plain://bucket' has one writer"):
        harvest("plain://bucket", model, part=(0, 2))
    with pytest.raises(ip.Unsupported, match="workers share a folder"):
        harvest("memory://ray", model, engine="ray")


def test_damage_there_is_found_and_mended() -> None:
    harvest("memory://bucket")
    before = contents(MemoryFileSystem)
    name = next(one for one in MemoryFileSystem.store if "00000001-" in one and "resid" in one)
    content = bytearray(MemoryFileSystem.store[name].getvalue())
    content[-3] ^= 4
    MemoryFileSystem().pipe_file(name, bytes(content))
    store = ip.open_store("memory://bucket")
    store[0][SITE]
    with pytest.raises(ip.FileError, match="its checksum is"):
        store[6][SITE]
    assert store.drop_damaged() == [1]
    harvest("memory://bucket")
    assert contents(MemoryFileSystem) == before
    MemoryFileSystem().rm(name)
    with pytest.raises(ip.FileError, match="is gone, and was committed"):
        ip.open_store("memory://bucket").verify()


def test_what_writes_to_folders_only_says_so(tmp_path: Path) -> None:
    with pytest.raises(ip.Unsupported, match="is a URL, and this is written to folders"):
        ip.StoreLog(SITE, store="memory://bucket")
    with pytest.raises(ip.Unsupported, match="cannot be opened"):
        ip.open_store("nowhere://bucket")
    with pytest.raises(FileNotFoundError, match="there is no store in 'memory://empty'"):
        ip.open_store("memory://empty")
    store = harvest(f"file://{tmp_path}/s")
    assert store.path == tmp_path / "s"
    assert len(ip.open_store(f"file://{tmp_path}/s")) == 23
