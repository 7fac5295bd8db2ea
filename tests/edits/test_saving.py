"""Edits as data: what is written down is read back, and does the same to the last bit."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.files.writing import write_whole
from tests.edits.models import ids, talking, wrapped

VECTOR = torch.linspace(-2, 2, 32)


def source() -> ip.Cache:
    with torch.no_grad():
        return wrapped("llama").run_with_cache(ids().flip(0), names_filter=["resid_post", "z"])[1]


def every() -> list[ip.Edit]:
    cache = source()
    mask = torch.tensor([[True, False, True, False, False, True]] * 3)
    return [
        ip.zero("z", layer=[0, 2], head=[1, -1], pos=slice(1, None)),
        ip.zero(re.compile(r"blocks\.1\..*hook_z$", re.IGNORECASE), pos=mask),
        ip.zero(
            "z",
            layer=range(1, 3),
            at=(..., slice(2, 4)),
            exclude=[{"head": 0}, ip.at("z", layer=2, rows=1)],
        ),
        ip.fill("resid_post", VECTOR.to(torch.bfloat16), layer=1, neuron=[0, 3, 31], rows=1),
        ip.add(
            "resid_post", VECTOR, layer=-1, pos=[0, -1], strength=torch.tensor([0.5, 1.0, -2.0])
        ),
        ip.add(
            "attn_out",
            {("attn_out", 1): VECTOR, "blocks.0.hook_attn_out": 2 * VECTOR},
            layer=[0, 1],
        ),
        ip.scale("resid_post", -0.1, layer=slice(0, 2), rows=torch.tensor([True, False, True])),
        ip.clamp("post", max=torch.tensor(0.25), layer=0),
        ip.clamp("post", -0.5, layer=1, strength=0.5),
        ip.noise("resid_post", 0.125, seed=4, layer=0, head=None),
        ip.mean("z", cache, layer=1, head=2),
        ip.mean("resid_post", layer=0, per_position=True),
        ip.patch("resid_post", cache, layer=1, pos=[1, 2], source_pos=[4, 0]),
        ip.patch(("z", 1), cache["z", 1], head=3),
        ip.resample("z", cache, layer=0, seed=9),
        ip.project_out("resid_post", torch.randn(2, 32), layer=1, mean=VECTOR),
        ip.project_cap("resid_post", VECTOR, -1.0, float("inf"), layer=2),
        ip.rotate("resid_post", ip.Rotation(32, 3, seed=2), cache, layer=1, k=2),
        ip.rotate(
            "resid_post",
            torch.linalg.qr(torch.randn(2, 2))[0],
            subspace=torch.randn(2, 32),
            layer=0,
        ),
        ip.knockout([0, 1], query=[-1, 3], key=1, head=[0, 2], strength=0.5),
        ip.knockout(query=5, key=slice(1, 3)),
    ]


def logits(edit: ip.Edit) -> Tensor:
    with torch.no_grad():
        return wrapped("llama").run_with_hooks(ids(), hooks=[edit])


@pytest.mark.parametrize("number", range(21))
def test_an_edit_comes_back_as_it_was(number: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    edit = every()[number]
    expected = logits(edit)
    assert not torch.equal(expected, wrapped("llama")(ids()))
    # Through JSON with tensors beside it, and with tensors inside.
    tensors: dict[str, Tensor] = {}
    beside = json.loads(json.dumps(edit.to_dict(tensors), allow_nan=False))
    inside = json.loads(json.dumps(edit.to_dict(), allow_nan=False))
    ip.save_edits(tmp_path / "edits", edit)
    made = [
        ip.Edit.from_dict(beside, tensors),
        ip.Edit.from_dict(inside),
        *ip.load_edits(tmp_path / "edits"),
    ]
    for other in made:
        assert type(other) is type(edit)
        assert repr(other) == repr(edit)
        assert torch.equal(logits(other), expected)
        again: dict[str, Tensor] = {}
        assert other.to_dict(again) == edit.to_dict({})
        assert list(again) == list(tensors)
        for name, tensor in again.items():
            assert tensor.dtype == tensors[name].dtype
            assert torch.equal(tensor, tensors[name])


@pytest.mark.parametrize("number", range(21))
def test_an_edit_as_python_makes_the_same(number: int) -> None:
    torch.manual_seed(0)
    edit = every()[number]
    tensors: dict[str, Tensor] = {}
    code = edit.to_python(tensors)
    assert len(code) < 600
    other = eval(code, {"ip": ip, "torch": torch, "re": re, "tensors": tensors})
    assert torch.equal(logits(other), logits(edit))
    big = any(t.numel() > 16 for t in _tensors(edit))
    assert bool(tensors) == big == ("tensors[" in code)


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, torch.nn.Module):
        return list(given.parameters())
    if isinstance(given, (dict, ip.Cache)):
        return [t for part in given.values() for t in _tensors(part)]
    if dataclasses.is_dataclass(given):
        return [t for o in dataclasses.fields(given) for t in _tensors(getattr(given, o.name))]
    return []


def test_expressions_are_short() -> None:
    for edit, code in (
        (ip.zero("z", layer=3, head=5), "ip.zero('z', layer=3, head=5)"),
        (
            ip.add("fc", torch.tensor([1.0, 0.1])),
            "ip.add('fc', torch.tensor([1.0, 0.10000000149011612]))",
        ),
        (
            ip.fill("fc", torch.ones(2, dtype=torch.float16)),
            "ip.fill('fc', torch.tensor([1.0, 1.0], dtype=torch.float16))",
        ),
        (
            ip.add("fc", torch.ones(64), strength=2.0),
            "ip.add('fc', tensors['add.value'], strength=2.0)",
        ),
        (ip.knockout(3, query=-1, key=" Paris"), "ip.knockout(3, query=-1, key=' Paris')"),
        (ip.at("z", pos=" a", occurrence="last"), "ip.at('z', pos=' a', occurrence='last')"),
        (
            ip.zero(re.compile("z$"), exclude={"layer": 1, "pos": [0]}),
            "ip.zero(re.compile('z$'), exclude={'layer': 1, 'pos': [0]})",
        ),
        (ip.zero(None, at=(..., 2)), "ip.zero(None, at=(..., 2))"),
    ):
        assert edit.to_python() == code


def test_a_list_of_edits_and_selectors_is_kept_in_order(tmp_path: Path) -> None:
    model, folder = wrapped("llama"), tmp_path / "deep" / "edits"
    edits = every()
    ip.save_edits(folder, [*edits, ip.at("z", layer=1, head=2, pos=[1, 4])])
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".safetensors"]
    *found, there = ip.load_edits(folder)
    assert [repr(edit) for edit in found] == [repr(edit) for edit in edits]
    with torch.no_grad():
        expected, cache = model.run_with_cache(ids(), names_filter=there, hooks=edits)
        output, again = model.run_with_cache(ids(), names_filter=there, hooks=found)
    assert torch.equal(output, expected)
    assert cache["z", 1].shape == (3, 2, 1, 8)
    assert torch.equal(cache["z", 1], again["z", 1])
    # Again, with other tensors, and then with none: only what is needed is left.
    ip.save_edits(folder, ip.add("resid_post", torch.randn(32), layer=1))
    assert len(list(folder.iterdir())) == 2
    ip.save_edits(folder, ip.zero("z"))
    assert [path.name for path in folder.iterdir()] == ["edits.json"]
    assert json.loads((folder / "edits.json").read_text())["version"] == 2


def test_what_can_be_trained_can_be_trained_after_loading(tmp_path: Path) -> None:
    turn = ip.Rotation(32, 2)
    frozen = ip.Rotation(32, 2).requires_grad_(False)
    edits = [
        ip.rotate("resid_post", turn, source(), layer=1),
        ip.add("resid_post", VECTOR.clone().requires_grad_(), layer=1),
        ip.rotate("resid_post", frozen, source(), layer=1),
    ]
    ip.save_edits(tmp_path / "edits", edits)
    loaded = ip.load_edits(tmp_path / "edits")
    assert [[p.requires_grad for p in edit.parameters()] for edit in loaded] == [
        [True],
        [True],
        [False],
    ]
    grads = []
    for some in (edits, loaded):
        out = wrapped("llama").run_with_hooks(ids(), hooks=some)
        trained = [p for edit in some for p in edit.parameters() if p.requires_grad]
        grads.append(torch.autograd.grad(out.square().sum(), trained))
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(*grads))


def test_a_save_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "edits"
    ip.save_edits(folder, ip.add("resid_post", VECTOR, layer=1))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fails(self: Path, target: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="no space"):
        ip.save_edits(folder, ip.add("resid_post", 2 * VECTOR, layer=1))
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (edit,) = ip.load_edits(folder)
    assert torch.equal(edit.value, VECTOR)


def test_threads_that_save_to_one_place_leave_a_whole_file(tmp_path: Path) -> None:
    contents = [bytes([number]) * 200_000 for number in range(4)]
    failures: list[BaseException] = []

    def write(content: bytes) -> None:
        try:
            for _ in range(10):
                write_whole(tmp_path / "edits.json", content)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert (tmp_path / "edits.json").read_bytes() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["edits.json"]


def test_a_long_regex_is_written_out_whole() -> None:
    wanted = re.compile("blocks.1.attn.hook_z|" + "x" * 300, re.IGNORECASE)
    made = eval(ip.zero(wanted).to_python(), {"ip": ip, "re": re})
    assert made.where.site == wanted


def test_what_cannot_be_read_or_written_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "edits"
    ip.save_edits(folder, ip.add("resid_post", VECTOR, layer=1))
    file = folder / "edits.json"
    right = file.read_text()

    def error() -> str:
        with pytest.raises(ip.FileError) as caught:
            ip.load_edits(folder)
        file.write_text(right)
        return str(caught.value).replace(repr(str(file)), "FILE")

    file.write_text(right.replace('"version": 2', '"version": 7'))
    assert error() == "FILE is of version 7, and this interpose reads 1 to 2."
    file.write_text(right.replace('"type": "add"', '"type": "adds"'))
    assert error().startswith(
        "FILE: edits[0].type is 'adds', and no edit is called so. There are: Edit, add, add_keeping_norm, "
        "at, clamp, fill,"
    )
    file.write_text(right.replace('"layer": 1', '"layers": 1'))
    assert error() == "FILE: edits[0].layers is not a field of add: written by another version?"
    file.write_text(right.replace('"layer": 1', '"layer": {"span": [1, 2]}'))
    assert error() == (
        "FILE: edits[0].layer is an object with 'span': that is nothing that edits are written with. Written by "
        "another version?"
    )
    file.write_text(right.replace('"add.value"', '"add.other"'))
    assert error() == (
        "FILE: edits[0].value is the tensor 'add.other', which is not among those beside it."
    )
    file.write_text("{}")
    assert error() == "FILE holds no edits of interpose."
    file.write_text("{")
    assert "is not JSON" in error()
    with pytest.raises(FileNotFoundError, match=r"no edits in .*: it has no edits\.json"):
        ip.load_edits(tmp_path / "nowhere")

    def chosen(name: str) -> bool:
        return name.endswith("z")

    with pytest.raises(ip.EditError, match="'chosen' is a function, and code is not saved"):
        ip.save_edits(folder, ip.zero(chosen))
    assert file.read_text() == right
    with pytest.raises(TypeError, match="save_edits takes edits and selectors; got tuple"):
        ip.save_edits(folder, [("z", torch.zeros_like)])  # type: ignore[list-item]
    with pytest.raises(NotADirectoryError, match="edits are saved as a folder"):
        ip.save_edits(file, ip.zero("z"))
    with pytest.raises(ip.FileError, match="is 'at', and no edit is called so"):
        ip.Edit.from_dict(ip.at("z").to_dict())
    assert repr(ip.at.from_dict(ip.at("z", layer=1).to_dict())) == "at('z', layer=1)"


def test_texts_are_saved_as_they_are(tmp_path: Path) -> None:
    model = talking()
    edits = [
        ip.scale("resid_post", 0.1, layer=1, pos=[" cat", " on"]),
        ip.knockout(2, key=" cat", query=-1),
    ]
    ip.save_edits(tmp_path / "edits", edits)
    with torch.no_grad():
        first, again = (
            model.run_with_hooks("the cat sat on the mat", hooks=h)
            for h in (edits, ip.load_edits(tmp_path / "edits"))
        )
        plain = model("the cat sat on the mat")
    assert torch.equal(first, again)
    assert not torch.equal(first, plain)


def test_files_of_version_1_load(tmp_path: Path) -> None:
    """They said ``sites``, of the edit and of what it excludes."""
    edits = [
        {"type": "zero", "sites": "z", "layer": 1, "head": 2},
        {
            "type": "scale",
            "sites": "resid_*",
            "exclude": {"excluded": [{"sites": "resid_mid"}]},
            "by": 0.5,
        },
        {"type": "at", "sites": {"regex": "z$", "flags": 32}, "pos": -1},
    ]
    old = {"format": "interpose.edits", "version": 1, "edits": edits}
    (tmp_path / "edits.json").write_text(json.dumps(old))
    loaded = ip.load_edits(tmp_path)
    assert [one.to_python() for one in loaded] == [
        "ip.zero('z', layer=1, head=2)",
        "ip.scale('resid_*', 0.5, exclude={'site': 'resid_mid'})",
        "ip.at(re.compile('z$'), pos=-1)",
    ]
    ip.save_edits(tmp_path / "new", loaded)
    assert "sites" not in (tmp_path / "new" / "edits.json").read_text()
