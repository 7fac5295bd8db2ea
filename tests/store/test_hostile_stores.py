"""Stores that someone else wrote, with checksums that are right: all is read, or `ip.FileError` says what is wrong."""

from __future__ import annotations

import json
import random
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

import interpose as ip
from interpose.store.records import _canonical, _hash
from tests.files.changes import changed, changed_bytes, changed_tensors
from tests.store.test_harvest import TEXTS, build

SITES = ["blocks.0.hook_resid_post", "blocks.1.hook_mlp_out"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of all positions, of some, and of eight bits."""
    model, folder = build("llama"), tmp_path_factory.mktemp("stores")
    options: dict[str, Any] = {"all": {}, "some": {"pos": [0, -1]}, "int8": {"dtype": "int8"}}
    for name, given in options.items():
        ip.harvest(
            model, TEXTS[:6], SITES, store=folder / name, segment_texts=3, progress=False, **given
        )
    return {name: folder / name for name in options}


def forge(folder: Path, segment: int, name: str, content: bytes) -> None:
    """Put another file into a segment, and its checksum into the commit."""
    record = folder / "commits" / f"{segment:08d}.json"
    commit = json.loads(record.read_text())["commit"]
    (folder / "segments" / commit["folder"] / name).write_bytes(content)
    commit["files"][name] = {"size": len(content), "sha256": sha256(content).hexdigest()}
    sign(record, commit)


def sign(record: Path, commit: Any) -> None:
    try:
        text = _canonical(commit)
    except UnicodeEncodeError:
        text = json.dumps(commit)
    record.write_text(json.dumps({"commit": commit, "sha256": _hash(text)}))


def spoil(folder: Path, draw: random.Random) -> None:
    """Change one file of a store in some places."""
    segment = draw.randrange(2)
    record = folder / "commits" / f"{segment:08d}.json"
    commit = json.loads(record.read_text())["commit"]
    what = draw.randrange(6)
    if what == 0:
        about = json.loads((folder / "store.json").read_text())
        (folder / "store.json").write_text(json.dumps(changed(about, draw)))
    elif what == 1:
        sign(record, changed(commit, draw))
    elif what == 2:
        changed_bytes(draw.choice((record, folder / "store.json")), draw)
    else:
        name = draw.choice(sorted(commit["files"]))
        path = folder / "segments" / commit["folder"] / name
        if what == 3:
            copy = folder / "copy"
            shutil.copy(path, copy)
            changed_bytes(copy, draw)
            forge(folder, segment, name, copy.read_bytes())
        else:
            forge(folder, segment, name, save(changed_tensors(load_file(path), draw)))


def used(folder: Path) -> None:
    """Do with a store what people do."""
    store = ip.open_store(folder)
    assert len(repr(store)) < 20_000
    for row in range(min(len(store), 10)):
        store[row]
        assert len(store.tokens_of(row)) <= store.tokens
        store.text_of(row)
        for site in list(store.sites)[:3]:
            store.gather(site, row, store.positions_of(row))
    for site in list(store.sites)[:3]:
        assert (
            sum(len(batch.tokens) for batch in store.batches(site, batch_size=5)) == store.vectors
        )
        repr(store.statistics(site))
    assert len(store.lengths()) == len(store)
    store.verify()
    store.manifest()


def read_or_refused(folder: Path) -> bool:
    """Whether it is refused, in a sentence; if it is not, all of it can be read."""
    try:
        used(folder)
    except (ip.FileError, FileNotFoundError) as error:
        said = str(error)
        assert str(folder) in said, said
        assert len(said) < 4000, said
        assert said.replace("\n", "").isprintable(), said
        return True
    return False


@pytest.mark.parametrize("seed", range(12))
def test_stores_are_read_or_refused(seed: int, stores: dict[str, Path], tmp_path: Path) -> None:
    draw, refused = random.Random(seed), 0
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        shutil.copytree(stores[draw.choice(sorted(stores))], folder)
        if not number:
            assert not read_or_refused(folder)
        spoil(folder, draw)
        refused += read_or_refused(folder)
        shutil.rmtree(folder)
    assert refused > ROUNDS / 3


ROUNDS = 25


def index(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        path = next(folder.glob("segments/00000000-*/index.safetensors"))
        tensors = load_file(path) | {n: one(load_file(path)[n]) for n, one in changes.items()}
        forge(folder, 0, path.name, save(tensors))

    return change


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("all", index(tokens=lambda t: t - 9), "tokens has numbers that stand for nothing"),
        ("all", index(offsets=lambda t: t * 2), "offsets do not divide 15 from end to end"),
        ("all", index(offsets=lambda t: t[[0, 2, 1, 3]]), "offsets do not divide"),
        ("all", index(offsets=lambda t: t[1:]), r"'offsets' is torch.int32 of \(3,\)"),
        ("all", index(texts=lambda t: t + 1), "texts has numbers that stand for nothing"),
        ("all", index(starts=lambda t: -1 - t), "starts has numbers that stand for nothing"),
        ("all", index(starts=lambda t: t.float()), "'starts' is torch.float32"),
        ("some", index(positions=lambda t: t + 9), "positions are not ascending"),
        ("some", index(positions=lambda t: t.flip(0)), "positions are not ascending"),
        ("some", index(vector_offsets=lambda t: t - 1), "vector_offsets do not divide"),
    ],
)  # fmt: skip
def test_an_index_that_points_elsewhere_is_refused(
    name: str, change: Any, said: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(stores[name], tmp_path / "s")
    ip.open_store(tmp_path / "s")[0]
    change(tmp_path / "s")
    store = ip.open_store(tmp_path / "s")
    with pytest.raises(ip.FileError, match=said):
        store[0]


def test_values_of_other_sizes_than_the_store_says_are_refused(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    for name, made in {
        "all": torch.zeros(15, 31),
        "int8": torch.zeros(15, 32),
        "some": torch.zeros(0),
    }.items():
        folder = tmp_path / name
        shutil.copytree(stores[name], folder)
        path = next(folder.glob(f"segments/00000000-*/{SITES[0]}.safetensors"))
        forge(folder, 0, path.name, save({"values": made}))
        with pytest.raises(ip.FileError, match=r"'values' is torch.float32 of .* and should be"):
            ip.open_store(folder).gather(SITES[0], 0, 0)
