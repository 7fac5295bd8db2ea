"""Runs on a disk: mi-crow's batches, what detectors found, and what was harvested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import interpose as ip
from interpose.dialects.mi_crow.datasets import LoadingStrategy, TextDataset
from interpose.dialects.mi_crow.hooks import FunctionController, LayerActivationDetector
from interpose.dialects.mi_crow.store import LocalStore, Store, StoreDataloader
from tests.dialects.mi_crow.models import TEXTS, small

A, B = torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.bfloat16)
MLP, LAYER = "model.layers.1.mlp", "model.layers.0"


@pytest.mark.parametrize("batch", [{"a": A, "b": B}, [A, B], [B] * 12, [], {"item_0": A, "x": B}])
def test_batches_come_back_as_they_were_put(tmp_path: Path, batch: Any) -> None:
    store = LocalStore(tmp_path)
    path = store.put_run_batch("run", 3, batch)
    assert Path(path) == tmp_path / "runs" / "run" / "batch_000003.safetensors"
    found: Any = store.get_run_batch("run", 3)
    assert type(found) is type(batch)
    assert len(found) == len(batch)
    pairs = zip(found.values(), batch.values()) if isinstance(batch, dict) else zip(found, batch)
    assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in pairs)
    assert store.list_run_batches("run") == [3]


def test_batches_are_gone_through_in_ranges() -> None:
    class Memory(LocalStore):
        def list_run_batches(self, run_id: str) -> list[int]:
            return [0, 1, 2, 4, 5]

        def get_run_batch(self, run_id: str, batch_index: int) -> Any:
            return batch_index

    store = Memory()
    assert list(store.iter_run_batches("r")) == [0, 1, 2, 4, 5]
    for options, expected in (
        ({}, [0, 1, 2, 4, 5]), ({"start": 1, "stop": 5}, [1, 2, 4]), ({"step": 2}, [0, 2, 4]), ({"start": 9}, []),
        ({"start": 4, "step": -2}, [4, 2, 0]),
    ):  # fmt: skip
        assert list(store.iter_run_batch_range("r", **options)) == expected
    with pytest.raises(ValueError, match="step cannot be 0"):
        next(store.iter_run_batch_range("r", step=0))
    with pytest.raises(ValueError, match="start is at least 0; got -1"):
        next(store.iter_run_batch_range("r", start=-1))


@pytest.mark.parametrize("together", [False, True])
def test_what_detectors_found_is_kept_by_layer(tmp_path: Path, together: bool) -> None:
    store = LocalStore(tmp_path)
    for number in range(2):
        facts = {"model.layers.0": {"shape": [2, 3]}, "0": {}}
        tensors = {"model.layers.0": {"activations": A + number, "x": B}, "0": {"activations": B}}
        put: Any = store.put_run_detector_metadata if together else store.put_detector_metadata
        put("run", *([] if together else [number]), facts, tensors)
    assert store.list_run_batches("run") == [0, 1]
    found, kept = store.get_detector_metadata("run", 1)
    assert found == facts
    assert {layer: set(of) for layer, of in kept.items()} == {
        "model.layers.0": {"activations", "x"},
        "0": {"activations"},
    }
    one = store.get_detector_metadata_by_layer_by_key("run", 1, "model.layers.0", "activations")
    assert torch.equal(one, A + 1)
    batch = store.get_run_batch("run", 0)
    assert isinstance(batch, dict)
    assert set(batch) == {"model.layers.0", "model.layers.0/x", "0"}
    with pytest.raises(
        FileNotFoundError,
        match=r"no 'y' of layer '0' in batch 0 of run 'run' .*there are: '0' 'activations'",
    ):
        store.get_detector_metadata_by_layer_by_key("run", 0, "0", "y")
    with pytest.raises(
        FileNotFoundError, match=r"no batch 7 of run 'run' in .*it has batches 0 to 1"
    ):
        store.get_detector_metadata("run", 7)
    store.delete_run("run")
    store.delete_run("run")
    assert store.list_run_batches("run") == []


def test_a_batch_is_there_when_all_its_tensors_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from interpose.dialects.mi_crow.store import local_store

    store, whole = LocalStore(tmp_path), local_store._write_tensors

    def full(path: Path, tensors: Any) -> None:
        if path.parent.name == "second":
            raise OSError("no space left")
        whole(path, tensors)

    monkeypatch.setattr(local_store, "_write_tensors", full)
    with pytest.raises(OSError, match="no space left"):
        store.put_detector_metadata("run", 0, {}, {"first": {"x": A}, "second": {"x": A}})
    assert store.list_run_batches("run") == []
    monkeypatch.undo()
    store.put_detector_metadata("run", 0, {}, {"first": {"x": A}, "second": {"x": A}})
    assert store.list_run_batches("run") == [0]
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_names_and_numbers_stay_in_the_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    for run in ("", "a/b", "..", ".x", "a\\b", 3):
        with pytest.raises(ValueError, match="run_id is a name"):
            store.put_run_batch(run, 0, [A])  # type: ignore[arg-type]
    for number in (-1, "0", True):
        with pytest.raises(ValueError, match="batch_index is a number from 0 on"):
            store.put_run_batch("run", number, [A])  # type: ignore[arg-type]
    for key in ("../x", "/x", ""):
        with pytest.raises(ValueError, match="the name of a tensor stays in the store"):
            store.put_tensor(key, A)
    with pytest.raises(TypeError, match="a batch is of tensors; 'x' is int"):
        store.put_run_batch("run", 0, {"x": 3})  # type: ignore[dict-item]
    store.put_detector_metadata("run", 0, {}, {"../../x": {"..": A}})
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert torch.equal(store.get_detector_metadata("run", 0)[1]["../../x"][".."], A)
    store.save_tensor("steering/v", A)
    assert torch.equal(store.get_tensor("steering/v"), A)
    assert store.get_run_metadata("run") == {}
    store.put_run_metadata("run", {"x": [1]})
    assert store.get_run_metadata("run") == {"x": [1]}
    (tmp_path / "store/runs/run/meta.json").write_text("{")
    with pytest.raises(ip.FileError, match=r"meta.json' is not JSON"):
        store.get_run_metadata("run")
    with pytest.raises(TypeError, match="abstract"):
        Store()  # type: ignore[abstract]


def alone(lm: Any, texts: list[str], path: str) -> list[torch.Tensor]:
    """What a layer returns for each text by itself, [pos, size], by a raw torch hook."""
    seen: list[torch.Tensor] = []
    part = lm.model.get_submodule(path)
    handle = part.register_forward_hook(
        lambda _, args, out: seen.append((out[0] if isinstance(out, tuple) else out)[0].clone())
    )
    with torch.no_grad():
        for text in texts:
            lm.model(torch.tensor([lm.tokenizer(text)["input_ids"]]))
    handle.remove()
    return seen


@pytest.mark.parametrize("adds_bos", [False, True])
def test_activations_are_those_of_each_text_alone(tmp_path: Path, adds_bos: bool) -> None:
    lm = small(store=tmp_path, adds_bos=adds_bos)
    paths = [MLP, LAYER, "model.layers.1.self_attn"]
    names: list[Any] = [
        MLP,
        lm.layers.list_layers().index(LAYER),
        "llamaforcausallm_model_layers_1_self_attn",
    ]
    run = lm.activations.save_activations(TEXTS, names, "run", batch_size=3, dtype=torch.float32)
    assert run == "run"
    assert lm.store.list_run_batches("run") == [0, 1]
    meta = lm.store.get_run_metadata("run")
    assert meta["layer_signatures"] == list(map(str, names))
    assert meta["options"] == {"dtype": "torch.float32", "max_length": None, "batch_size": 3}
    for name, path in zip(map(str, names), paths):
        rows = alone(lm, TEXTS, path)
        for number, texts in enumerate((range(3), range(3, 4))):
            whole = lm.store.get_detector_metadata_by_layer_by_key(
                "run", number, name, "activations"
            )
            batch = lm.store.get_run_batch("run", number)
            assert torch.equal(batch[name], whole)
            for row, text in enumerate(texts):
                real = batch["attention_mask"][row] != 0
                assert (
                    batch["input_ids"][row][real].tolist() == lm.tokenizer(TEXTS[text])["input_ids"]
                )
                torch.testing.assert_close(whole[row][real], rows[text], rtol=1e-4, atol=1e-5)
                assert not whole[row][~real].any()
        loader = StoreDataloader(lm.store, "run", name, batch_size=4)
        for _ in range(2):  # as often as it is asked for
            torch.testing.assert_close(
                torch.cat(list(loader)), torch.cat(rows), rtol=1e-4, atol=1e-5
            )
        assert all(len(one) == 4 for one in list(loader)[:-1])
    facts, tensors = lm.store.get_detector_metadata("run", 0)
    assert facts[MLP]["activations_shape"] == list(tensors[MLP]["activations"].shape)
    assert set(tensors) == {*map(str, names), "input"}
    few = StoreDataloader(lm.store, "run", MLP, batch_size=2, max_batches=2, dtype=torch.float64)
    assert [tuple(one.shape) for one in few] == [(2, rows[0].shape[1])] * 2
    assert next(iter(few)).dtype == torch.float64
    opened = ip.open_store(tmp_path / "runs" / "run" / "activations")
    assert len(opened) == 4
    for message, call in (
        (
            "no layer 'x'",
            lambda: lm.store.get_detector_metadata_by_layer_by_key("run", 0, "x", "activations"),
        ),
        ("no batch 5", lambda: lm.store.get_run_batch("run", 5)),
        (
            "no 'neurons' of layer",
            lambda: lm.store.get_detector_metadata_by_layer_by_key("run", 0, MLP, "neurons"),
        ),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            call()


def test_the_same_call_goes_on_and_another_is_refused(tmp_path: Path) -> None:
    lm = small(store=tmp_path)
    run = lm.activations.save_activations(TEXTS, [MLP], "run", batch_size=2)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.safetensors")}
    assert lm.activations.save_activations(TEXTS, [MLP], "run", batch_size=2) == run
    assert {path: path.stat().st_mtime_ns for path in files} == files
    with pytest.raises(ip.FileError, match="is a store of something else"):
        lm.activations.save_activations(TEXTS[:2], [MLP], "run")
    other = lm.activations.save_activations(TEXTS, MLP)
    assert other != run
    with pytest.raises(ValueError, match="say which layers"):
        lm.activations.save_activations(TEXTS, [])
    with pytest.raises(ValueError, match="Texts list cannot be empty"):
        lm.activations.save_activations([], MLP)
    with pytest.raises(ValueError, match="Store must be provided"):
        small().activations.save_activations(TEXTS, MLP)


def test_data_sets_are_saved_counted_or_streamed(tmp_path: Path) -> None:
    lm = small(store=tmp_path)
    expected = torch.cat(alone(lm, TEXTS, MLP))
    streamed = TextDataset(iter(TEXTS), loading_strategy=LoadingStrategy.STREAMING)
    for number, data in enumerate((TextDataset(texts=TEXTS), streamed, TEXTS)):
        run = lm.activations.save_activations_dataset(data, MLP, f"run{number}", batch_size=2)
        torch.testing.assert_close(
            torch.cat(list(StoreDataloader(lm.store, run, MLP))), expected, rtol=1e-4, atol=1e-5
        )
    run = lm.activations.save(
        layer_signature=MLP,
        dataset=TextDataset(texts=TEXTS),
        sample_limit=2,
        batch_size=1,
        shard_size=1,
    )
    assert lm.store.list_run_batches(run) == [0, 1]
    assert len(ip.open_store(tmp_path / "runs" / run / "activations").segments) == 2
    cut = lm.activations.save_activations(TEXTS, MLP, max_length=2)
    rows = [row[:2] for row in alone(lm, TEXTS, MLP)]
    torch.testing.assert_close(
        torch.cat(list(StoreDataloader(lm.store, cut, MLP))), torch.cat(rows), rtol=1e-4, atol=1e-5
    )


def test_controllers_count_and_detectors_do_not_look(tmp_path: Path) -> None:
    lm = small(store=tmp_path)
    plain = torch.cat(alone(lm, TEXTS, LAYER))
    detector = LayerActivationDetector(LAYER)
    lm.layers.register_hook(LAYER, detector)
    lm.layers.register_hook(LAYER, FunctionController(LAYER, lambda x: x * 2, hook_id="twice"))
    run = lm.activations.save_activations(TEXTS, LAYER)
    torch.testing.assert_close(
        torch.cat(list(StoreDataloader(lm.store, run, LAYER))), plain * 2, rtol=1e-4, atol=1e-5
    )
    assert detector.get_captured() is None
    for hook in lm.layers.get_hooks():
        lm.layers.unregister_hook(hook)
    about = json.loads((tmp_path / "runs" / run / "activations" / "store.json").read_text())
    assert "twice" in str(about["hooks"])


def test_data_sets_run_batch_by_batch_and_padding_is_known_afterwards(tmp_path: Path) -> None:
    lm = small(store=tmp_path)
    detector = LayerActivationDetector(MLP)
    lm.layers.register_hook(MLP, detector)
    run = lm.inference.infer_dataset(TextDataset(texts=TEXTS), batch_size=3)
    lm.layers.unregister_hook(detector)
    found = torch.cat(list(StoreDataloader(lm.store, run, MLP, batch_size=5)))
    torch.testing.assert_close(found, torch.cat(alone(lm, TEXTS, MLP)), rtol=1e-4, atol=1e-5)
    padded = lm.store.get_detector_metadata_by_layer_by_key(run, 0, MLP, "activations")
    assert padded.shape[:2].numel() > sum(len(row) for row in alone(lm, TEXTS[:3], MLP))
