"""What all results can do, of a real one of each public class."""

from __future__ import annotations

import csv
import dataclasses
import html
import io
import json
import random
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from tests.results.made import MADE, made

OLD = Path(__file__).parent / "old"
ALL = pytest.mark.parametrize("name", MADE)
UNDRAWN = {"Report", "Probe", "TunedLens", "GradientHealth", "ActivationStatistics", "ShapeLog"}
UNDRAWN |= {"SteeringVector", "SideBySide"}
"""Those that are tables and nothing else."""


def same(one: Any, other: Any) -> bool:
    """Whether two things are alike to the last bit, NaNs and the kinds of containers included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        raw = (one.cpu().contiguous().view(-1).view(torch.uint8) for one in (one, other))
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)
    if isinstance(one, ip.Result):
        return all(same(getattr(one, part), getattr(other, part)) for part in one.hints())
    if dataclasses.is_dataclass(one):
        return all(
            same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one)
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def test_every_public_class_of_results_is_here() -> None:
    public = {name for name in ip.__all__ if isinstance(getattr(ip, name), type)}
    results = {name for name in public if issubclass(getattr(ip, name), ip.Result)} - {"Result"}
    assert {type(made(name)).__name__ for name in MADE} == results
    assert all(isinstance(made(name), ip.Result) for name in MADE)


@ALL
def test_the_strongest_entries_are_records(name: str) -> None:
    result = made(name)
    records = list(result.records())
    assert records
    assert all("value" in record for record in records)
    assert len({tuple(record) for record in records}) == 1
    top = result.top(3)
    per = len(result.axes.get("metric", [0])) if isinstance(result, ip.Scores) else 1
    if name in ("ProbeScores", "SteeringCurve"):
        per = len(result.axes["measure"])  # type: ignore[attr-defined]
    assert 1 <= len(top) <= 3 * per
    assert all(any(same(one, record) for record in records) for one in top)
    if per == 1 and name != "Report":
        sizes = [
            abs(record[result.ranked]) for record in records if record[result.ranked] is not None
        ]
        known = sorted((size for size in sizes if size == size), reverse=True)
        assert [abs(record[result.ranked]) for record in top] == known[: len(top)]


@ALL
def test_a_data_frame_has_a_row_for_each_record(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("pandas")
    stand_in.DataFrame = list  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", stand_in)
    assert same(made(name).to_pandas(), list(made(name).records()))


@ALL
@pytest.mark.parametrize("ending", ["json", "safetensors"])
def test_what_is_saved_is_loaded_to_the_last_bit(name: str, ending: str, tmp_path: Path) -> None:
    result = made(name)
    path = result.save(tmp_path / f"x.{ending}")
    again = ip.load_result(path)
    assert same(again, result)
    assert repr(again) == repr(result)
    assert type(result).load(path).title == result.title
    if ending == "json":
        data = json.loads(path.read_text())
        assert (data["format"], type(data["version"])) == (
            f"interpose.{type(result).__name__}",
            int,
        )
        assert same(type(result).from_dict(data), result)
        with pytest.raises(
            ip.FileError, match=r"of version 99, and this interpose reads versions 1 to"
        ):
            type(result).from_dict({**data, "version": 99})


@ALL
def test_numbers_that_json_lacks_come_back(name: str, tmp_path: Path) -> None:
    result = made(name)
    parts = {part: getattr(result, part) for part in result.hints()}
    floating = [p for p, held in parts.items() if isinstance(held, Tensor) and held.numel() > 4]
    floating = [part for part in floating if parts[part].is_floating_point()]
    if not floating or not dataclasses.is_dataclass(result):
        return
    odd = parts[floating[0]].clone()
    first = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, -0.0]).to(odd.dtype)
    odd.view(-1)[:5] = first[: odd.numel()]
    spoiled = dataclasses.replace(result, **{floating[0]: odd})
    for ending in ("json", "safetensors"):
        assert same(ip.load_result(spoiled.save(tmp_path / f"x.{ending}")), spoiled)
    assert isinstance(repr(spoiled), str)
    assert isinstance(spoiled.html(), str)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
def test_every_dtype_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(5).mul(1e3).to(dtype)
    result = ip.Scores(title="", values=values, axes={"a": [1, 2, 3, 4, 5]}, unit="")
    for ending in ("json", "safetensors"):
        assert same(ip.load_result(result.save(tmp_path / f"x.{ending}")), result)


def test_what_protocols_hold_comes_back(tmp_path: Path) -> None:
    inner = ip.Scores(title="inside", values=torch.zeros(()), axes={}, unit="")
    held = {"pair": (1, ("a", None)), "odd": float("-inf"), "by number": {1: True}, "tensor": [1.5]}
    held |= {"mark": {"tuple": [1]}, "other": {"number": 3}, "deep": {"a": {"b": (2.0,)}}}
    result = dataclasses.replace(inner, protocol=held, tokens=['"', "\n", "é", "\u2028"])
    assert same(ip.load_result(result.save(tmp_path / "x.json")), result)


@ALL
def test_text_stays_below_a_screen_and_pages_load_nothing(name: str, tmp_path: Path) -> None:
    result = made(name)
    lines = repr(result).splitlines()
    assert 1 < len(lines) < 40
    assert lines[0] == result.title
    assert all(f"  {line}" in lines for line in result.lines())
    page = result.save(tmp_path / "x.html").read_text()
    assert result.html_body() in page
    assert result.html_body() in result._repr_html_()
    assert html.escape(result.title) in page
    assert not re.search(r"<link|src=[\"'](?!data:)|https?://(?!www.w3.org/2000/svg)|@import", page)
    if isinstance(result, ip.Scores) and result.evidence:
        assert html.escape(result.evidence) in page


@ALL
def test_pictures_are_drawn_or_refused_with_what_can_be_written(name: str, tmp_path: Path) -> None:
    result = made(name)
    small = isinstance(result, (ip.SweepResult, ip.SAEEvaluation)) or (
        isinstance(result, ip.Scores) and len(result.axes) <= 2
    )
    svg, png = (name in ("Circuit", "SteeringCurve") or small), (name == "FeatureMaps" or small)
    if svg:
        root = ElementTree.fromstring(result.save(tmp_path / "x.svg").read_text())
        assert any(node.tag.endswith("text") for node in root.iter())
    if png:
        assert result.save(tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for ending in ["svg"] * (not svg) + ["png"] * (not png):
        with pytest.raises(ValueError, match=r"\.html|[Ss]ave a page"):
            result.save(tmp_path / f"x.{ending}")
    assert (name in UNDRAWN) <= (not svg and not png)
    with pytest.raises(ValueError, match=r"save writes \.html, \.svg, \.png, \.csv, \.json, \.saf"):
        result.save(tmp_path / "x.txt")
    assert all(one.suffix in (".svg", ".png") for one in tmp_path.iterdir())


@ALL
def test_a_table_has_every_record(name: str, tmp_path: Path) -> None:
    result = made(name)
    text = result.save(tmp_path / "x.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    records = list(result.records())
    assert len(rows) == len(records)
    for row, record in zip(rows, records):
        assert list(row) == list(record)
        for key, value in record.items():
            if type(value) in (int, float):
                assert same(float(row[key]), float(value))
            elif isinstance(value, str) and value[:1] not in tuple("=+-@"):
                assert row[key] == value


def test_no_cell_of_a_table_is_a_formula() -> None:
    axes = {"=head": ["=1+1", "+2", "-x", "@a", "-3.5", "ok", "'"]}
    result = ip.Scores(title="", values=torch.arange(-3.0, 4), axes=axes, unit="")
    rows = list(csv.reader(io.StringIO(result.to_csv(), newline="")))
    assert rows[0][0] == "'=head"
    assert [row[0] for row in rows[1:]] == ["'=1+1", "+2", "'-x", "'@a", "-3.5", "ok", "'"]
    assert [row[1] for row in rows[1:3]] == ["-3.0", "-2.0"]


# What is shown.


def tokened() -> list[str]:
    return [n for n in MADE if getattr(made(n), "tokens", None) and "pos" in made(n).axes]  # type: ignore[attr-defined]


def test_a_place_has_one_label_everywhere() -> None:
    assert len(tokened()) >= 4
    for name in tokened():
        result = made(name)
        assert isinstance(result, ip.Scores)
        assert result.tokens is not None
        last = result.axes["pos"][-1]
        label = f"{last} {result.tokens[last]!r}"
        assert result.labels["pos"][-1] == label
        assert label in repr(result)
        assert html.escape(label) in result.html()
        if len(result.axes) <= 2:
            root = ElementTree.fromstring(result.svg())
            assert label in [node.text for node in root.iter()]


@pytest.mark.parametrize(
    "name", ["Scores", "SweepResult", "SweepResult of ablation", "LogitLens", "Attribution"]
)
def test_text_page_and_picture_have_the_same_numbers(name: str) -> None:
    result = made(name)
    assert isinstance(result, ip.Scores)
    drawn = result.view()
    number = re.compile(r"\(?-?\d+\.\d+\)?")
    ((_, grid),) = drawn.grids()
    wanted = [grid.number(value) for row in grid.values for value in row]
    assert len(set(wanted)) > 2
    svg = [node.text or "" for node in ElementTree.fromstring(result.svg()).iter()]
    assert [text for text in svg if number.fullmatch(text)][: len(wanted)] == wanted
    page = re.findall(r">\(?(-?\d+\.\d+)\)?<", drawn.html())
    assert [found for found in page if found in wanted][: len(wanted)] == wanted
    text = drawn.text(40)
    assert text is not None
    rows = text.splitlines()[1:]
    columns = len(grid.columns)
    assert [one.strip("()") for row in rows for one in row.split()[-columns:]] == wanted


# Files.


OLDEST: dict[str, tuple[str, str]] = {
    "sweep-1-first.json": (
        "SweepResult",
        "lead, paris: resid_pre patched, by layer (2) x pos (2), 1 example",
    ),
    "sweep-1-16-bits.json": (
        "SweepResult",
        "logit_difference(' Paris', ' Rome'): resid_pre patched",
    ),
    "sweep-2.json": (
        "SweepResult",
        "lead, paris: resid_pre patched, by layer (2) x pos (2), 1 example",
    ),
    "sweep-2-16-bits.json": (
        "SweepResult",
        "logit_difference(' Paris', ' Rome'): resid_pre patched",
    ),
    "sweep-3.json": (
        "SweepResult",
        "logit_difference(' Paris', ' Rome'): resid_pre patched, by layer",
    ),
    "scores-1-first.json": ("Scores", "z ablated by zero, 2 texts"),
    "scores-1.json": ("Scores", "z ablated by zero, 2 texts"),
    "logit-lens-1.json": ("LogitLens", "Logit lens at resid_post"),
    "circuit-1.json": ("Circuit", "Circuit of 3 of 3018 edges, 4 nodes"),
    "probe-1.safetensors": ("Probe", "Probe of 2 classes at resid_post, layer 3"),
    "tuned-lens-1.safetensors": ("TunedLens", "Tuned lens: steps 1, texts 1"),
}


@pytest.mark.parametrize("file", OLDEST)
def test_files_of_older_versions_load(file: str, tmp_path: Path) -> None:
    kind, title = OLDEST[file]
    found = ip.load_result(OLD / file)
    assert type(found).__name__ == kind
    assert found.title.startswith(title)
    assert same(ip.load_result(found.save(tmp_path / "x.json")), found)
    assert isinstance(found.html(), str)


def test_every_old_file_is_read_by_a_test() -> None:
    assert {path.name for path in OLD.iterdir()} == set(OLDEST)


def test_old_sweeps_mean_what_they_meant() -> None:
    first, second = (ip.load_result(OLD / f"sweep-{n}.json") for n in ("1-first", "2"))
    for found in (first, second):
        assert isinstance(found, ip.SweepResult)
        assert (found.patch, found.noise_floor, found.several) == ("clean", 0.0, True)
        assert found.each[0, 0, :, 0].tolist() == [torch.inf, pytest.approx(torch.nan, nan_ok=True)]
        assert found.at(metric="paris", layer=2, pos=1) == 17.297775268554688
        assert found.top(1)[1]["metric"] == "paris"
    floors = json.loads((OLD / "sweep-1-16-bits.json").read_text())["noise_floors"]
    third = ip.load_result(OLD / "sweep-1-16-bits.json")
    assert isinstance(third, ip.SweepResult)
    assert floors[0] > 0
    assert third.noise_floors == pytest.approx(floors)
    fourth = ip.load_result(OLD / "sweep-2-16-bits.json")
    assert isinstance(fourth, ip.SweepResult)
    assert isinstance(fourth.own, ip.SweepResult)
    written = json.loads((OLD / "sweep-2-16-bits.json").read_text())["noise"]
    assert fourth.noise.tolist() == written


def fields(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every part of some data; of a list to its first few."""
    yield path
    if isinstance(data, (dict, list)):
        for key in list(data) if isinstance(data, dict) else range(min(len(data), 3)):
            yield from fields(data[key], (*path, key))


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The data with another value in one place."""
    if not path:
        return value
    kept = data.copy()
    kept[path[0]] = changed(data[path[0]], path[1:], value)
    return kept


@pytest.mark.parametrize("name", ["SweepResult", "LogitLens", "Circuit", "MaxActivating"])
def test_a_file_with_anything_changed_loads_or_is_refused_in_a_sentence(
    name: str, tmp_path: Path
) -> None:
    data, path = json.loads(json.dumps(made(name).to_dict())), tmp_path / "x.json"
    draw = random.Random(0)
    odd: list[Any] = [
        None,
        -1,
        2**70,
        1e300,
        "x",
        [],
        {},
        {"tensor": "0"},
        {"number": "z"},
        {"tuple": 3},
    ]
    odd += [{"tensor": [1], "dtype": "nn", "shape": [1]}, {"pairs": [[[1], 2]]}]
    places, refused = list(fields(data)), list[str]()
    for _ in range(80):
        path.write_text(json.dumps(changed(data, draw.choice(places), draw.choice(odd))))
        try:
            ip.load_result(path)
        except ip.FileError as error:
            refused.append(str(error))
    assert len(refused) > 40
    assert all(len(said) > 20 for said in refused)


def test_what_is_no_result_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    data = made("SweepResult").to_dict()
    tensor = data["each"]
    wrong: dict[str, Any] = {
        "{": "is not JSON",
        "[]": "is not a result that interpose wrote: it has no format",
        '{"format": 3}': "its format is '3'",
        '{"format": "interpose.Model", "version": 1}': "its format is 'interpose.Model'",
        json.dumps({**data, "colour": 1}): "has a field 'colour', which is none of: ",
        json.dumps({key: data[key] for key in data if key != "each"}): "has no field 'each'",
        json.dumps({**data, "patch": 3}): "patch is 3, and should be a text",
        json.dumps({**data, "each": 3}): "each is 3, and should be a Tensor",
        json.dumps({**data, "each": {**tensor, "dtype": "no"}}): "cannot be read as a SweepResult",
        json.dumps({**data, "each": {**tensor, "shape": [7]}}): "cannot be read as a SweepResult",
        json.dumps({**data, "axes": {"layer": [1]}}): "cannot be read as a SweepResult: values are",
        json.dumps({**data, "own": data["tally"]}): "own is an object",
        json.dumps({**data, "version": True}): "of version True",
    }
    for text, said in wrong.items():
        path.write_text(text)
        with pytest.raises(ip.FileError, match=re.escape(said)) as caught:
            ip.load_result(path)
        assert "\n" not in str(caught.value)
    (tmp_path / "x.safetensors").write_bytes(b"no")
    with pytest.raises(ip.FileError, match="is not a safetensors file"):
        ip.load_result(tmp_path / "x.safetensors")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        ip.load_result(tmp_path / "y.json")
    path.write_text(json.dumps(made("LogitLens").to_dict()))
    with pytest.raises(ip.FileError, match="holds a LogitLens, not a SweepResult"):
        ip.SweepResult.load(path)
    with pytest.raises(ip.FileError, match=r"Its format is 'interpose.LogitLens'; ip.load_result"):
        ip.Scores.from_dict(made("LogitLens").to_dict())
