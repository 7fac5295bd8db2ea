"""Whatever a field holds is checked for type, size and range; errors name file, field, and what should be there."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import interpose as ip
from interpose.files.reading import parse_json, read_json, read_tensors
from interpose.files.schema import (
    ANYTHING,
    FLAG,
    NULL,
    Either,
    Field,
    ListOf,
    MapOf,
    Number,
    OneOf,
    Record,
    Text,
    Whole,
    record_of,
)

RESULT = Record(
    {
        "title": Text(20),
        "layer": Either(Whole(0, 99), NULL),
        "axes": MapOf(ListOf(Either(Text(), Whole()))),
        "unit": OneOf("logits", "share"),
        "noise": Number(0),
        "exact": FLAG,
    },
    optional=("layer", "exact"),
)
GOOD: dict[str, Any] = {"title": "t", "axes": {"pos": ["a", 1]}, "unit": "logits", "noise": 0.5}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"title": 3}, "title is 3, and should be a text of at most 20 letters."),
        ({"title": "x" * 99}, f"title is '{'x' * 60}'... (99 letters), and should be a text of at"),
        ({"title": "\ud800"}, "title is '\\ud800', which has half of a letter (a lone surrogate)."),
        ({"layer": 100}, "layer is 100, and should be a whole number from 0 to 99, or null."),
        ({"layer": True}, "layer is true, and should be a whole number from 0 to 99, or null."),
        ({"layer": 1e3}, "layer is 1000.0, and should be a whole number from 0 to 99, or null."),
        ({"noise": float("nan")}, "noise is nan, and should be a finite number from 0 to inf."),
        ({"noise": -1}, "noise is -1, and should be a finite number from 0 to inf."),
        ({"noise": 1 << 2000}, "noise is a whole number of 2001 bits, and should be a finite"),
        ({"unit": "\x1b[2J"}, r"unit is '\x1b[2J', and should be 'logits' or 'share'."),
        ({"axes": []}, "axes is an empty list, and should be an object, each value a list, each"),
        ({"axes": {"a b": [1, None]}}, "axes['a b'][1] is null, and should be a text, or a whole"),
        ({"exact": 1}, "exact is 1, and should be true or false."),
        ({"more": 1}, "has a field 'more', which is none of: title, layer, axes,"),
    ],
)
def test_errors_name_file_and_field_and_what_should_be_there(
    change: dict[str, Any], said: str
) -> None:
    field = Field("'x.json'")
    assert RESULT(GOOD, field) == GOOD
    with pytest.raises(ip.FileError) as caught:
        RESULT({**GOOD, **change}, field)
    text = str(caught.value).replace("'x.json':", "'x.json'")
    assert text.startswith(f"'x.json' {said}")
    with pytest.raises(ip.FileError, match="has no field 'noise', and should have one: a finite"):
        RESULT({name: value for name, value in GOOD.items() if name != "noise"}, field)


@dataclass
class Inner:
    words: list[str]
    place: tuple[int, str] = (0, "")


@dataclass
class Outer:
    inner: Inner
    number: float
    named: dict[str, int] = field(default_factory=dict)
    either: int | list[int] | None = None


def test_kinds_come_out_of_the_annotations_of_a_dataclass() -> None:
    kind = record_of(Outer, number=Number(0, 1))
    good = {"inner": {"words": ["a"], "place": [1, "b"]}, "number": 1, "either": [3]}
    assert kind(good, Field()) == good
    for wrong, said in (
        ({**good, "number": 2}, "number is 2, and should be a finite number from 0 to 1"),
        ({**good, "either": "3"}, "either is '3', and should be a whole number, or a list,"),
        ({**good, "either": ["3"]}, "either.0. is '3', and should be a whole number"),
        ({**good, "inner": {"words": [1]}}, r"inner.words\[0\] is 1, and should be a text"),
        ({**good, "inner": {"words": [], "place": [1]}}, "inner.place is a list of 1, and should"),
        ({**good, "named": {"a": 0.5}}, "named.a is 0.5, and should be a whole number"),
        ({"number": 1}, "has no field 'inner'"),
    ):
        with pytest.raises(ip.FileError, match=said):
            kind(wrong, Field())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON: Expecting value"),
        ('{"a": NaN}', "is not JSON: NaN is not a number in JSON"),
        ('{"a": -Infinity}', "is not JSON: -Infinity is not a number"),
        ('{"a": 1e999}', "is not JSON: the number 1e999 is too large"),
        ('{"a": ' + "9" * 5000 + "}", "is not JSON: Exceeds the limit"),
        ('{"a": 1, "b": 2, "a": 1}', "is not JSON: the field 'a' is there twice"),
        ("[" * 60 + "]" * 60, "has lists in lists, deeper than 50"),
        ("[" * 200_000, "has lists in lists, deeper than 50"),
        ('{"a":' * 200_000, "has lists in lists, deeper than 50"),
    ],
)
def test_json_that_is_none_is_said_to_be_none(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ip.FileError, match=said) as caught:
        read_json(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 400


def test_only_regular_files_of_a_fair_size_are_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "x").write_bytes(b'"\xff"')
    for path, said in ((pipe, "is a pipe"), ("/dev/zero", "is a device")):
        for read in (read_json, read_tensors):
            with pytest.raises(ip.FileError, match=said):
                read(path)
    with pytest.raises(ip.FileError, match=r"byte 1 is not UTF-8"):
        read_json(tmp_path / "x")
    with pytest.raises(ip.FileError, match=r"has 3 bytes, and may have 2"):
        read_json(tmp_path / "x", most=2)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        read_json(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_json(tmp_path / "none")
    with pytest.raises(ip.FileError, match="is not a name of a file"):
        read_json("a\0b")
    with pytest.raises(ip.FileError, match="is not a safetensors file"):
        read_tensors(tmp_path / "x")


def test_foreign_tensors_have_no_header_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_file({"a": torch.ones(2, dtype=torch.int64)}, path)
    tensors, texts = read_tensors(path)
    assert (list(tensors), texts) == (["a"], {})
    with pytest.raises(
        ip.FileError, match=r"is not what Cache\.save writes: its header has no 'int"
    ):
        ip.Cache.load(path)
    good = {"same": {"a": "a", "b": "a"}, "aliases": {"c": "a"}, "calls": {}}
    for about, said in (
        ("[NaN]", "is not JSON: NaN is not a number"),
        ("[]", "is an empty list, and should be an object with same, aliases, calls"),
        (json.dumps({**good, "calls": {"a": "b"}}), "calls.a is 'b', and should be a list"),
        (json.dumps({**good, "aliases": {"a": 3}}), "aliases.a is 3, and should be a text"),
        (json.dumps({**good, "same": {"a": "z"}}), "has no tensor 'z', which it names"),
        (json.dumps({**good, "names": {"sites": {"a": 1}}}), "names.sites.a is 1, and should be"),
        (
            json.dumps({**good, "names": {"x": {}}}),
            "names has a field 'x', which is none of: sites",
        ),
    ):
        save_file({"a": torch.ones(1)}, path, metadata={"interpose.cache": about})
        with pytest.raises(ip.FileError, match=said):
            ip.Cache.load(path)
    save_file({"a": torch.ones(1)}, path, metadata={"interpose.cache": json.dumps(good)})
    assert torch.equal(ip.Cache.load(path)["c"], torch.ones(1))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(JSON, st.data())
def test_any_json_passes_or_is_refused_in_a_sentence(data: Any, draw: st.DataObject) -> None:
    name = draw.draw(st.sampled_from([*RESULT.fields, "else"]))
    for kind, value in ((RESULT, data), (RESULT, {**GOOD, name: data}), (ANYTHING, data)):
        try:
            read = kind(value, Field("'x.json'"))
            assert read == value
        except ip.FileError as error:
            text = str(error)
            assert text.startswith(("'x.json': ", "'x.json' "))
            assert text.endswith((".", "?"))
            assert text.isprintable()
    try:
        read = parse_json(json.dumps(data))
    except ip.FileError as error:
        text = str(error)
        assert "is not JSON" in text
    else:
        assert read == data
