"""Folders of edits that someone else has made: whatever is in them, what comes out is edits or a sentence."""

from __future__ import annotations

import base64
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import interpose as ip

LARGE = torch.arange(40.0)


def written(folder: Path, *edits: dict[str, Any], **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    data = {"format": "interpose.edits", "version": 2, "edits": list(edits), **more}
    (folder / "edits.json").write_text(json.dumps(data))
    return folder


def inside(dtype: str = "float32", shape: Any = (2,), raw: bytes = bytes(8)) -> dict[str, Any]:
    text = base64.b64encode(raw).decode()
    return {"tensor": {"dtype": dtype, "shape": list(shape), "base64": text}}


def regex(text: str, flags: int = 0) -> dict[str, Any]:
    return {"regex": text, "flags": flags}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("site", 3, "site is 3, and should be a text"),
        ("site", {"mapping": []}, "site is empty, and should be"),
        ("site", regex("(a+)+$"), "repeats a group: it might never end"),
        ("site", regex("a?" * 30 + "a" * 30), "repeats too often"),
        ("site", regex(".*.*.*.*x"), "repeats too often"),
        ("site", regex(r"(a*)\1"), "refers back"),
        ("site", regex("(a*) *", 64), "is verbose"),
        ("site", regex("(?x)(a*) *"), "is verbose"),
        ("site", regex("("), "is not a regex: missing"),
        ("site", regex("a", 4096), "flags is 4096, and should be a whole number from 0 to 511"),
        ("layer", "3", "makes no fill: .*layer is a number, several, a slice or 'all'"),
        ("layer", True, "layer is true, and should be a whole number"),
        ("layer", 1.5, "layer is 1.5, and should be a whole number"),
        ("layer", 10**30, "layer is 1000000000000000000000000000000, and should be a whole number"),
        ("pos", {"range": [0, 10**12, 1]}, "makes no fill: .*pos is a range of 1000000000000 numbers"),
        ("pos", {"range": [0, 1, 0]}, "is a range whose step is 0"),
        ("pos", {"range": [0, 1]}, r"pos.range is a list of 2, and should be a list of 3"),
        ("pos", {"slice": ["a", 1, None]}, r"pos.slice\[0\] is 'a', and should be a whole number"),
        ("pos", {"slice": [1], "more": 1}, "has a field 'more', which is none of: slice"),
        ("pos", {}, "pos is empty: that is nothing that edits are written with"),
        ("head", [1, "a"], r"head\[1\] is 'a', and should be a whole number"),
        ("phase", "later", "makes no fill: .*phase is 'prompt' or 'generated'"),
        ("occurrence", 3, "occurrence is 3, and should be a text"),
        ("exclude", {"excluded": [{"site": 3}]}, r"exclude.excluded\[0\].site is 3, and should be a text"),
        ("exclude", {"excluded": [{}]}, "makes no fill: .*would exclude everything"),
        ("exclude", {"excluded": [{"strange": 3}]}, r"exclude.excluded\[0\].strange is not a field of at"),
        ("value", "x", "value is 'x', and should be a number"),
        ("value", inside("float33"), "dtype is 'float33', and should be"),
        ("value", inside("__class__"), "dtype is '__class__', and should be"),
        ("value", inside(shape=[2**40] * 3), "has 8 bytes, and a tensor of float32 and shape"),
        ("value", inside(shape=[-1]), r"shape\[0\] is -1, and should be a whole number from 0"),
        ("value", inside(shape=[2, 1] * 20), "shape is a list of 40, and should be a list of 0 to 16"),
        ("value", {"tensor": {"dtype": "int8", "shape": [1], "base64": "?"}}, "is not base64"),
        ("value", {"tensor": "none"}, "is the tensor 'none', which is not among those beside it"),
        ("value", {**inside("int64", [1]), "requires_grad": True}, "of whole numbers cannot"),
        ("value", {"float": "9" * 5000}, "should be 'nan' or 'inf' or '-inf'"),
        ("value", {"mapping": [[{"slice": [1, 2, 3]}, 1]]}, "value.mapping.0. is a slice, and should"),
        ("value", {"mapping": [[1, 2, 3]]}, r"mapping\[0\] is a list of 3, and should be a list of 2"),
        ("value", {"cache": {}, "aliases": {}, "calls": {"a": "b"}}, "calls.a is 'b', and should be a list"),
        ("value", {"cache": {"a": 3}, "aliases": {}, "calls": {}}, "cache.a is 3, and should be an object"),
        ("strength", "much", "strength is 'much', and should be a number"),
        ("__class__", 3, "is not a field of fill"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_what_it_should_be_is_named(
    field: str, value: Any, said: str, tmp_path: Path
) -> None:
    edit = {"type": "fill", "site": "z", "value": 1.0, field: value}
    with pytest.raises(ip.FileError, match=said) as caught:
        ip.load_edits(written(tmp_path, edit))
    text = str(caught.value)
    assert text.startswith(f"{str(tmp_path / 'edits.json')!r}: edits[0]")
    assert len(text) < 1500


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "holds no edits of interpose"),
        ('{"format": "interpose.edits", "version": NaN, "edits": []}', "NaN is not a number"),
        ('{"format": "interpose.edits", "version": 2, "edits": 3}', "edits is 3, and should be a list"),
        ('{"format": "interpose.edits", "version": 2, "edits": [3]}', r"edits\[0\] is 3, and should be an"),
        ('{"format": "interpose.edits", "version": 2}', "has no field 'edits'"),
        ('{"format": "interpose.edits", "version": 2, "edits": [], "x": 1}', "has a field 'x'"),
        ("[" * 100_000, "deeper than 50"),
    ],
)  # fmt: skip
def test_a_file_that_holds_something_else_says_what(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "edits.json").write_text(text)
    with pytest.raises(ip.FileError, match=said):
        ip.load_edits(tmp_path)


def test_positions_up_to_a_million_million_end_at_once() -> None:
    model = ip.load("pocket", device="cpu")
    edit = ip.zero("resid_post", layer=1, pos=slice(0, 10**12))
    whole = ip.zero("resid_post", layer=1)
    text = "The Eiffel Tower is in"
    one, other = (model.run_with_hooks(text, hooks=[made]) for made in (edit, whole))
    assert torch.equal(one, other)
    with pytest.raises(ValueError, match=r"pos is a range of 1000000000000 numbers"):
        ip.zero("resid_post", layer=1, pos=range(10**12))
    with pytest.raises(IndexError, match=r"selects 1000000000000 positions; no text has so many"):
        model.generate(text, max_new_tokens=2, hooks=[edit])


# Where files are.


def test_nothing_outside_of_the_folder_is_read(tmp_path: Path) -> None:
    folder, other = tmp_path / "shared", tmp_path / "other"
    ip.save_edits(folder, ip.add("z", LARGE))
    ip.save_edits(other, ip.add("z", LARGE + 1))
    data = json.loads((folder / "edits.json").read_text())
    name = json.loads((other / "edits.json").read_text())["tensors"]
    asks = {
        str(other / name): "should be the name of a file beside it",
        f"../other/{name}": "should be the name of a file beside it",
        "..": "should be the name of a file beside it",
        "/etc/passwd": "should be the name of a file beside it",
        f"\x00{name}": "should be the name of a file beside it",
        f"./{name}": "should be the name of a file beside it",
    }
    for asked, said in asks.items():
        (folder / "edits.json").write_text(json.dumps({**data, "tensors": asked}))
        with pytest.raises(ip.FileError, match=said):
            ip.load_edits(folder)
    (folder / name).symlink_to(other / name)
    (folder / "edits.json").write_text(json.dumps({**data, "tensors": name}))
    with pytest.raises(ip.FileError, match="is a link out of its folder"):
        ip.load_edits(folder)
    (folder / "edits.json").unlink()
    (folder / "edits.json").symlink_to(other / "edits.json")
    for act in (ip.load_edits, lambda path: ip.save_edits(path, ip.zero("z"))):
        with pytest.raises(ip.FileError, match="is a link out of its folder"):
            act(folder)
    assert torch.equal(ip.load_edits(other)[0].value, LARGE + 1)
    # A folder that is itself reached by a link is the user's own choice.
    (tmp_path / "link").symlink_to(other)
    assert torch.equal(ip.load_edits(tmp_path / "link")[0].value, LARGE + 1)


def test_tensors_that_are_not_those_that_were_saved_are_refused(tmp_path: Path) -> None:
    ip.save_edits(tmp_path, ip.add("z", LARGE))
    (file,) = tmp_path.glob("*.safetensors")
    save_file({"add.value": LARGE + 1}, file)
    with pytest.raises(ip.FileError, match="is not what was saved there"):
        ip.load_edits(tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="there is no file"):
        ip.load_edits(tmp_path)
    os.mkfifo(file)
    with pytest.raises(ip.FileError, match="is a pipe"):
        ip.load_edits(tmp_path)


def test_saving_deletes_nothing_but_what_it_saved_before(tmp_path: Path) -> None:
    ip.save_edits(tmp_path, ip.add("z", LARGE))
    (own,) = tmp_path.glob("*.safetensors")
    strange = {
        "tensors-0123456789abcdef.safetensors": b"mine",
        "tensors-of-mine.safetensors": b"mine too",
        "other-0123456789abcdef.safetensors": b"and this",
    }
    for name, content in strange.items():
        (tmp_path / name).write_bytes(content)
    ip.save_edits(tmp_path, ip.zero("z"))
    assert not own.exists()
    # Nor a file that a foreign edits.json says is one of ours.
    for name in strange:
        written(tmp_path, tensors=name)
        ip.save_edits(tmp_path, ip.zero("z"))
    left = {one.name: one.read_bytes() for one in tmp_path.iterdir() if one.name != "edits.json"}
    assert left == strange


def test_savers_at_the_same_time_leave_what_one_of_them_saved(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    seen: list[float] = []

    def work(number: int) -> None:
        try:
            for step in range(12):
                if number < 3:
                    ip.save_edits(tmp_path, ip.add("z", LARGE + number + 3 * (step % 2)))
                else:
                    (edit,) = ip.load_edits(tmp_path)
                    assert torch.equal(edit.value - edit.value[0], LARGE)
                    seen.append(float(edit.value[0]))
        except BaseException as error:
            failures.append(error)

    ip.save_edits(tmp_path, ip.add("z", LARGE))
    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert set(seen) <= set(range(6))
    assert len(list(tmp_path.iterdir())) == 2
    ip.load_edits(tmp_path)


def test_what_a_regex_from_a_file_may_say_is_still_a_regex(tmp_path: Path) -> None:
    for text in (r"blocks\.(1|2)\..*hook_z$", r"[*+?()]+x", r"\(\)*", "(attn|mlp)?", "a{2}"):
        edit = {"type": "zero", "site": regex(text)}
        (made,) = ip.load_edits(written(tmp_path, edit))
        assert made.where.site.pattern == text
