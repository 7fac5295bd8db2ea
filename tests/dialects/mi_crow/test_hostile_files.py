"""Files of mi-crow's kinds and of detectors that someone else wrote: they are read, or an error says what is wrong."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import interpose as ip
from interpose.dialects.mi_crow.hooks import LayerActivationDetector, ModelInputDetector
from interpose.dialects.mi_crow.language_model import LanguageModel
from interpose.dialects.mi_crow.store import LocalStore
from tests.files.changes import changed, changed_bytes, changed_tensors

TEXTS = ["The Eiffel Tower is in", "Once"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each kind, a saved model, and what a detector found."""
    folder = tmp_path_factory.mktemp("whole")
    lm = LanguageModel.from_huggingface("pocket", store=LocalStore(folder))
    layer = "transformer.h.2"
    lm.activations.save_activations(
        TEXTS, layer_signature=layer, run_name="saved", batch_size=1, verbose=False
    )
    log = ip.ActivationLog(("resid_post", 1))
    with torch.no_grad():
        lm.context.model(torch.tensor([[3, 4]]))
    ip.load("pocket", device="cpu").run_with_hooks(TEXTS[1], hooks=[log])
    ip.save_collected(folder / "found", [log])
    store = LocalStore(folder)
    store.put_run_batch("put", 0, {"a": torch.ones(2), "b": torch.zeros(1)})
    store.put_run_batch("put", 1, [torch.ones(2), torch.zeros(1)])
    store.put_detector_metadata("seen", 0, {layer: {"n": 1}}, {layer: {"values": torch.ones(3)}})
    store.put_run_metadata("put", {"x": [1, 2]})
    store.put_tensor("single", torch.ones(2))
    return folder


def used(folder: Path) -> None:
    """Read all of it."""
    store = LocalStore(folder)
    for run in ("saved", "put", "seen"):
        store.get_run_metadata(run)
        for number in store.list_run_batches(run):
            store.get_run_batch(run, number)
            if run != "put":
                _, tensors = store.get_detector_metadata(run, number)
                for layer, keys in tensors.items():
                    for key in keys:
                        store.get_detector_metadata_by_layer_by_key(run, number, layer, key)
    store.get_tensor("single")
    assert len(repr(ip.load_collected(folder / "found"))) < 10_000


def read_or_refused(use: Callable[[], Any], folder: Path) -> bool:
    """Whether it is refused, in a sentence that names the file."""
    try:
        use()
    except (ip.FileError, FileNotFoundError, NotADirectoryError) as error:
        said = str(error)
        assert str(folder) in said, said
        assert len(said) < 4000, said
        assert said.replace("\n", "").isprintable(), said
        return True
    return False


@pytest.mark.parametrize("seed", range(4))
def test_runs_and_what_detectors_found_are_read_or_refused(
    seed: int, whole: Path, tmp_path: Path
) -> None:
    draw, folder, refused = random.Random(seed), tmp_path / "x", 0
    shutil.copytree(whole, folder)
    assert not read_or_refused(lambda: used(folder), folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    kinds = {".json", ".safetensors"}
    files = [path for path in files if path.suffix in kinds]
    assert len(files) > 10
    for _ in range(60):
        path = draw.choice(files)
        before = path.read_bytes()
        if draw.random() < 0.3:
            changed_bytes(path, draw)
        elif path.suffix == ".json":
            path.write_text(json.dumps(changed(json.loads(before), draw)))
        else:
            save_file(changed_tensors(load_file(path), draw), path)
        refused += read_or_refused(lambda: used(folder), folder)
        path.write_bytes(before)
    assert refused > 15


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was saved with two hooks."""
    lm = LanguageModel.from_huggingface("pocket")
    lm.layers.register_hook("transformer.h.2", LayerActivationDetector("transformer.h.2", "mine"))
    lm.layers.register_hook("input", ModelInputDetector(hook_id="in", save_attention_mask=True))
    path = lm.save_model(tmp_path_factory.mktemp("model") / "model.pt")
    for one in lm.layers.get_hooks():
        lm.layers.unregister_hook(one)
    return path


class Harm:
    """A pickle of it makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.path,)


def hook(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda saved: saved["metadata"]["hooks"][0].update(changes)


def put(part: str, name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda saved: saved[part].update({name: value})


def first(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def act(saved: dict[str, Any]) -> None:
        name = next(iter(saved["model_state_dict"]))
        saved["model_state_dict"][name] = change(saved["model_state_dict"][name])

    return act


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("metadata", "hooks", 3), r"metadata\.hooks is 3"),
        (put("metadata", "hooks", [3]), r"metadata\.hooks\[0\] is 3"),
        (put("metadata", "model_id", ["x"]), r"metadata\.model_id is a list"),
        (lambda saved: saved.update(metadata={"hooks": []}), "does not say which model"),
        (lambda saved: saved.update(metadata=[]), "metadata is an empty list"),
        (hook(type="sideways"), r"hooks\[0\]\.type is 'sideways', and should be 'forward' or"),
        (hook(options=3), r"hooks\[0\]\.options is 3"),
        (hook(id=None), r"hooks\[0\]\.id is null"),
        (hook(layer=7), r"hooks\[0\]\.layer is 7"),
        (lambda saved: saved.update(model_state_dict=3), "model_state_dict is 3"),
        (first(lambda t: "x"), "should be a tensor"),
        (first(lambda t: t[:-1]), "is of another model: .*size mismatch"),
        (first(lambda t: torch.ones(1).expand(t.shape)), "the file has fewer numbers"),
        (first(lambda t: t.to_sparse()), "layout torch.sparse_coo"),
        (put("model_state_dict", "more", torch.ones(1)), "is of another model: .*Unexpected key"),
    ],
)  # fmt: skip
def test_a_saved_model_that_is_none_is_refused(
    change: Callable[[dict[str, Any]], None], said: str, model_file: Path, tmp_path: Path
) -> None:
    saved = torch.load(model_file)
    change(saved)
    torch.save(saved, tmp_path / "model.pt")
    with pytest.raises(ip.FileError, match=said) as caught:
        LanguageModel.from_local(tmp_path / "model.pt")
    assert str(tmp_path) in str(caught.value)


def test_no_program_in_a_saved_model_is_run(model_file: Path, tmp_path: Path) -> None:
    saved = torch.load(model_file)
    torch.save({**saved, "more": Harm(tmp_path / "harm")}, tmp_path / "model.pt")
    with pytest.raises(ip.FileError, match="could run any program"):
        LanguageModel.from_local(tmp_path / "model.pt")
    assert not (tmp_path / "harm").exists()
    content = model_file.read_bytes()
    for broken in (content[:1000], b"", b"x" * 50):
        (tmp_path / "model.pt").write_bytes(broken)
        with pytest.raises(ip.FileError, match=r"model\.pt"):
            LanguageModel.from_local(tmp_path / "model.pt")
