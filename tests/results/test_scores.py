"""Results of methods: numbers by the names of their places, as text, page, picture and data."""

from __future__ import annotations

import itertools
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest
import torch

import interpose as ip
from interpose.render import colours
from tests.pages import loads_nothing


def scores(**more: object) -> ip.Scores:
    values = torch.arange(24.0).reshape(2, 3, 4) - 11.5
    said: dict[str, object] = {
        "title": "a <title>",
        "values": values,
        "axes": {"layer": [4, 6], "pos": [0, 1, 2], "head": [0, 1, 2, 3]},
        "unit": "logits",
        "tokens": ["<a>", " b", "\n"],
        "protocol": {"metric": "logit('<x>')", "forwards": 2, "share": 0.123456789},
        "evidence": "for this & not for that",
    }
    return ip.Scores(**{**said, **more})  # type: ignore[arg-type]


def test_a_number_is_found_by_the_entries_of_its_axes() -> None:
    found = scores()
    assert found.at(layer=6, pos=2, head=1) == float(found.values[1, 2, 1])
    assert found.at(pos=1).equal(found.values[:, 1])
    with pytest.raises(KeyError, match=r"no axis 'row'. The axes are: layer, pos, head."):
        found.at(row=1)
    with pytest.raises(KeyError, match=r"no layer 5 among \[4, 6\]"):
        found.at(layer=5)


def test_one_entry_of_an_axis_is_picked_and_the_others_stay() -> None:
    found = scores().pick(layer=6)
    assert found.values.equal(scores().values[1])
    assert list(found.axes) == ["pos", "head"]
    assert found.title == "a <title>, layer 6"
    assert "<svg" in found.svg()


def test_sums_leave_the_other_axes_and_all_that_was_said() -> None:
    found = scores().sum("pos")
    assert found.values.equal(scores().values.sum(1))
    assert list(found.axes) == ["layer", "head"]
    assert (found.unit, found.protocol, found.tokens) == (
        "logits",
        scores().protocol,
        scores().tokens,
    )
    assert scores().sum("layer", "head").values.equal(scores().values.sum((0, 2)))
    assert scores().sum().values.equal(scores().values)
    with pytest.raises(KeyError, match="no axis 'layers'"):
        scores().sum("layers")


def test_records_are_every_place_once_and_top_is_by_size() -> None:
    found = list(scores().records())
    places = list(itertools.product([4, 6], range(3), range(4)))
    assert [(r["layer"], r["pos"], r["head"]) for r in found] == places
    assert [r["value"] for r in found] == scores().values.flatten().tolist()
    assert found[5]["token"] == " b"
    sizes = [abs(record["value"]) for record in scores().top(24)]
    assert sizes == sorted(sizes, reverse=True)
    unknown = scores(values=torch.full((2, 3, 4), float("nan")))
    assert unknown.top() == []
    assert "nan" not in repr(unknown)


def test_values_must_fit_the_axes() -> None:
    with pytest.raises(ValueError, match=r"values are \(2, 2\), and axes \(2, 3, 4\)"):
        scores(values=torch.zeros(2, 2))


def test_data_goes_through_json_and_comes_back_the_same() -> None:
    odd = scores().values.clone()
    odd[0, 0, 0], odd[0, 0, 1] = float("inf"), float("nan")
    found = scores(values=odd, protocol={"rate": float("-inf"), "list": [1, 2]})
    again = ip.Scores.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False)))
    assert again.values.nan_to_num(7).equal(odd.nan_to_num(7))
    assert again.values.isnan().equal(odd.isnan())
    assert again.protocol == found.protocol
    assert (again.axes, again.tokens, again.title) == (found.axes, found.tokens, found.title)
    with pytest.raises(ValueError, match=r"not what Scores\.to_dict writes"):
        ip.Scores.from_dict({"format": "interpose.sweep", "version": 1})


def test_numbers_of_one_element_and_of_other_kinds_keep_shape_and_kind() -> None:
    one = ip.Scores(title="", values=torch.tensor(3), axes={}, unit="tokens")
    again = ip.Scores.from_dict(one.to_dict())
    assert again.values.dtype == torch.int64
    assert again.values.shape == ()
    none = ip.Scores(title="", values=torch.zeros(0, 3), axes={"a": [], "b": [0, 1, 2]}, unit="")
    assert ip.Scores.from_dict(none.to_dict()).values.shape == (0, 3)
    assert isinstance(repr(none), str)
    assert isinstance(none.html(), str)


def test_the_text_is_a_grid_of_two_axes_or_the_strongest_places() -> None:
    grid = repr(scores().sum("head")).splitlines()
    assert grid[0] == "a <title>, added up over head"
    assert grid[1:3] == ["  unit: logits", "  metric logit('<x>'); forwards 2; share 0.1235"]
    assert grid[4].split() == ["layer", "/", "pos", "0", "'<a>'", "1", "'", "b'", "2", "'\\n'"]
    assert grid[5].split() == ["4", "-40.0", "-24.0", "-8.0"]
    assert "the strongest places:" in repr(scores())
    assert len(repr(scores()).splitlines()) < 40


def test_the_page_says_everything_and_loads_nothing(tmp_path: Path) -> None:
    page = scores().save(tmp_path / "x.html").read_text()
    assert "a &lt;title&gt;" in page
    assert "for this &amp; not for that" in page
    assert "&lt;a&gt;" in page
    assert "layer 6" in page
    loads_nothing(page)


def test_the_picture_has_each_number_in_its_colour(tmp_path: Path) -> None:
    two = scores().sum("head")
    root = ElementTree.fromstring(two.save(tmp_path / "x.svg").read_text())
    texts = [node.text for node in root.iter() if node.tag.endswith("text")]
    cells = [node for node in root.iter() if node.tag.endswith("rect")][1:]
    assert [text for text in texts if re.fullmatch(r"-?\d+\.\d", text or "")] == [
        f"{value:.1f}" for value in two.values.flatten().tolist()
    ]
    limit = float(two.values.abs().max())
    wanted = [colours.css(colours.diverging(v, limit)) for v in two.values.flatten().tolist()]
    assert [cell.get("fill") for cell in cells] == wanted
    width = float(root.get("width", 0))
    assert all(float(cell.get("x", 0)) + float(cell.get("width", 0)) <= width for cell in cells)


def test_bars_go_right_for_more_and_left_for_less() -> None:
    one = ip.Scores(
        title="", values=torch.tensor([2.0, -1.0, 0.0]), axes={"layer": [0, 1, 2]}, unit="logits"
    )
    root = ElementTree.fromstring(one.svg())
    right, left, none = [node for node in root.iter() if node.tag.endswith("rect")][1:]
    assert float(right.get("width", 0)) == 2 * float(left.get("width", 0)) > 0
    assert float(left.get("x", 0)) + float(left.get("width", 0)) == float(right.get("x", 0))
    assert float(none.get("width", 1)) == 0
    assert "0.00" in one.html()


def test_a_picture_of_three_axes_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"here there are layer, pos, head. Save a page"):
        scores().svg()


def test_a_data_frame_has_a_row_for_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match="pip install pandas"):
        scores().to_pandas()
    stand_in = ModuleType("pandas")
    stand_in.DataFrame = list  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", stand_in)
    assert scores().to_pandas() == list(scores().records())
