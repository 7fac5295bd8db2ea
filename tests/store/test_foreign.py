"""What other tools cached becomes a store without padding, and what a store holds becomes files of other tools."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.store.foreign import extras
from tests.bounds import assert_near
from tests.models import tiny
from tests.store.cached import as_mi_crow

TEXTS = [[3 + (5 * row + place) % 40 for place in range(2 + (3 * row) % 7)] for row in range(11)]
LAYER = "gpt2lmheadmodel_transformer_h_1"
SITE = "blocks.1.hook_resid_post"


def build() -> Any:
    return ip.wrap(tiny.build("gpt2"))


def values(model: Any) -> list[Tensor]:
    """What the block returns for each text alone, by a plain hook of torch."""
    found: list[Tensor] = []
    handle = model.module.transformer.h[1].register_forward_hook(
        lambda *call: found.append((call[2][0] if isinstance(call[2], tuple) else call[2])[0])
    )
    with torch.no_grad():
        for text in TEXTS:
            model.module(input_ids=torch.tensor([text]))
    handle.remove()
    return found


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("unified", [False, True], ids=["batches", "unified"])
def test_a_run_of_mi_crow_becomes_a_store_without_its_padding(
    left: bool, unified: bool, tmp_path: Path
) -> None:
    model = build()
    made = values(model)
    run = as_mi_crow(
        tmp_path / "run", {LAYER: made, "other": made}, batch=4, tokens=TEXTS, unified=unified, left=left
    )  # fmt: skip
    store = ip.import_activations(run, store=tmp_path / "s", progress=False)
    assert (len(store), store.complete, store.vectors) == (11, True, sum(map(len, TEXTS)))
    assert set(store.sites) == {LAYER, "other"}
    for row, text in enumerate(TEXTS):
        assert store.tokens_of(row).tolist() == text
        assert torch.equal(store[row][LAYER][0], made[row])
    store.verify()
    batch = next(store.batches(LAYER, batch_size=100, shuffle=False))
    assert torch.equal(batch[LAYER], torch.cat(made))


def test_with_its_model_sites_have_their_names_and_values_are_compared(tmp_path: Path) -> None:
    model = build()
    made = values(model)
    run = as_mi_crow(tmp_path / "run", {LAYER: made}, batch=4, masks=False)
    store = ip.import_activations(
        run, store=tmp_path / "s", model=model, texts=TEXTS, progress=False
    )
    harvested = ip.harvest(
        model, TEXTS, ("resid_post", 1), store=tmp_path / "harvested", progress=False
    )
    assert list(store.sites) == list(harvested.sites) == [SITE]
    for row in range(11):
        assert_near(store[row]["resid_post", 1], harvested[row]["resid_post", 1])
        assert store.tokens_of(row).tolist() == TEXTS[row]
    store.must_be_of(model)
    others = [[(token + 1) % 40 for token in text] for text in TEXTS]
    with pytest.raises(
        ip.FileError, match=r"are not those that this model has at .*they differ by"
    ):
        ip.import_activations(run, store=tmp_path / "no", model=model, texts=others, progress=False)
    assert not (tmp_path / "no").exists()


def test_padding_that_nobody_kept_is_asked_for(tmp_path: Path) -> None:
    made = values(build())
    run = as_mi_crow(tmp_path / "run", {LAYER: made}, batch=4, masks=False)
    with pytest.raises(ip.FileError, match="which of these values are padding"):
        ip.import_activations(run, store=tmp_path / "s", progress=False)
    kept = ip.import_activations(run, store=tmp_path / "s", keep_padding=True, progress=False)
    assert kept.vectors > sum(map(len, TEXTS))
    assert kept.tokens_of(0).eq(-1).all()
    with pytest.raises(ip.FileError, match=r"imported without its model.*model="):
        kept.must_be_of(build())
    for texts, said in (
        (TEXTS[:5], "more were cached"),
        ([[*text, 9] for text in TEXTS], "these are other texts"),
    ):
        run = as_mi_crow(tmp_path / said[:4], {LAYER: made}, batch=11)
        with pytest.raises(ip.FileError, match=said):
            ip.import_activations(
                run, store=tmp_path / "no", model=build(), texts=texts, progress=False
            )


def test_an_import_that_was_ended_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from interpose.store.foreign import importing

    monkeypatch.setattr(importing, "SEGMENT", 1000)
    run = as_mi_crow(tmp_path / "run", {LAYER: values(build())}, batch=4)
    ip.import_activations(run, store=tmp_path / "whole", progress=False)
    with pytest.raises(ip.Cancelled):
        ip.import_activations(run, store=tmp_path / "s", progress=lambda done, _: done < 3)
    assert 0 < len(ip.open_store(tmp_path / "s")) < 11
    store = ip.import_activations(run, store=tmp_path / "s", progress=False)
    assert len(store.segments) > 2
    assert store.manifest() == ip.open_store(tmp_path / "whole").manifest()
    other = as_mi_crow(tmp_path / "other", {LAYER: values(build())[:7]}, batch=4)
    with pytest.raises(ip.FileError, match="is a store of something else: texts"):
        ip.import_activations(other, store=tmp_path / "s", progress=False)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({}, "is not a run of mi-crow"),
        ({"meta.json": "{}"}, "has no activations"),
        ({"runs/first/meta.json": "{}"}, "is a store of mi-crow with runs 'first': give the folder"),
        ({"state.json": "{}", "dataset_info.json": "{}"}, "is not a data set that SAELens saved"),
        (
            {"state.json": '{"_data_files": []}', "dataset_info.json": '{"features": {"text": {}}}'},
            "is a data set without activations",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_folders_of_something_else_are_told_apart(
    made: dict[str, str], said: str, tmp_path: Path
) -> None:
    for name, text in made.items():
        path = tmp_path / "x" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "x").mkdir(exist_ok=True)
    with pytest.raises(ip.FileError, match=said):
        ip.import_activations(tmp_path / "x", store=tmp_path / "s", progress=False)
    assert not (tmp_path / "s").exists()


# To other tools.


def filled(folder: Path, **options: Any) -> ip.Store:
    options = {"segment_texts": 4, "dtype": "bfloat16", **options}
    return ip.harvest(build(), TEXTS, ["resid_post", "z"], store=folder, progress=False, **options)


def test_arrays_of_numpy_hold_every_vector_in_order(tmp_path: Path) -> None:
    store = filled(tmp_path / "s")
    folder = store.export(tmp_path / "out", format="npy", site=["resid_post"])
    described = json.loads((folder / "sites.json").read_text())
    assert sorted(one["site"] for one in described.values()) == ["blocks.0.hook_resid_post", SITE]
    batch = next(store.batches("resid_post", batch_size=1000, shuffle=False))
    for file, one in described.items():
        assert np.array_equal(np.load(folder / file), batch[one["site"]].float().numpy())
    for name in ("tokens", "row", "pos"):
        assert np.load(folder / f"{name}.npy").tolist() == getattr(batch, name).tolist()
    with pytest.raises(ip.FileError, match="is there already"):
        store.export(folder, format="npy")
    with pytest.raises(ValueError, match="format is one of npy, parquet, dataset; got 'csv'"):
        store.export(tmp_path / "other", format="csv")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "s"]


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_what_is_not_installed_is_told_of_with_its_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path / "s")

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(extras, "importlib", SimpleNamespace(import_module=missing))
    with pytest.raises(ip.Unsupported, match=r"pip install 'interpose\[tables\]'"):
        store.export(tmp_path / "out", format=kind)
    assert not (tmp_path / "out").exists()


def test_tables_say_where_every_vector_is_and_what_units_do(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="of the extra [tables]")
    read: Any = importlib.import_module("pyarrow.parquet").read_table
    store = filled(tmp_path / "s", pos=[0, -1])
    folder = store.export(tmp_path / "out", format="parquet", site=["resid_post"])
    rows = read(folder / "rows.parquet").to_pylist()
    assert [row["tokens"] for row in rows] == TEXTS
    assert [(row["row"], row["text"], row["start"]) for row in rows] == [
        (n, n, 0) for n in range(11)
    ]
    vectors = read(folder / "vectors.parquet").to_pylist()
    assert len(vectors) == store.vectors == 22
    for row in rows:
        mine = [one for one in vectors if one["row"] == row["row"]]
        assert mine[0]["vector"] == row["vector"]
        assert [one["pos"] for one in mine] == [0, len(TEXTS[row["row"]]) - 1]
        assert [one["token"] for one in mine] == [TEXTS[row["row"]][0], TEXTS[row["row"]][-1]]
    table = read(folder / "statistics.parquet").to_pylist()
    wanted = store.statistics(SITE)[SITE]
    mine = [one for one in table if one["site"] == SITE]
    assert [one["mean"] for one in mine] == wanted.mean.tolist()


def test_a_data_set_is_what_saelens_caches_and_comes_back_as_a_store(tmp_path: Path) -> None:
    datasets: Any = pytest.importorskip("datasets", reason="of the extra [tables]")
    texts = [[3 + (row + place) % 40 for place in range(6)] for row in range(9)]
    store = ip.harvest(
        build(), texts, ["resid_post"], store=tmp_path / "s", segment_texts=4, progress=False
    )
    folder = store.export(tmp_path / "out", format="dataset")
    loaded = datasets.load_from_disk(str(folder)).with_format("torch")
    width = store.sites[SITE].shape[0]
    assert loaded.features[SITE] == datasets.Array2D((6, width), "float32")
    again = ip.import_activations(folder, store=tmp_path / "again", model=build(), progress=False)
    for row, text in enumerate(texts):
        assert torch.equal(loaded[row][SITE], store[row][SITE][0])
        assert torch.equal(again[row][SITE], store[row][SITE])
        assert again.tokens_of(row).tolist() == loaded[row]["token_ids"].tolist() == text
    (file,) = folder.glob("data-*.arrow")
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ip.FileError, match=r"data-.*arrow' is damaged"):
        ip.import_activations(folder, store=tmp_path / "no", progress=False)


def test_rows_of_other_lengths_are_a_data_set_too(tmp_path: Path) -> None:
    datasets: Any = pytest.importorskip("datasets", reason="of the extra [tables]")
    store = filled(tmp_path / "s", dtype=None)
    folder = store.export(tmp_path / "out", format="dataset", site="blocks.0.attn.hook_z")
    loaded = datasets.load_from_disk(str(folder))
    for row in range(11):
        there = torch.tensor(loaded[row]["blocks.0.attn.hook_z"])
        assert torch.equal(there, store[row]["blocks.0.attn.hook_z"][0].flatten(1))
