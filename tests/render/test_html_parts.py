"""Parts of pages, and the page around them: safe, alone, and whole without its script."""

from __future__ import annotations

import re
from base64 import b64decode

import pytest

from interpose.render.grid import Grid
from interpose.render.html import Markup, bar, html_table, image, page, section
from interpose.render.words import WordGrid
from tests.pages import SCRIPT, Page, loads_nothing


def test_cells_are_escaped_unless_they_are_markup() -> None:
    shown = html_table(("a",), [("<b>",), (Markup("<i>x</i>"),)])
    assert "&lt;b&gt;" in shown
    assert "<i>x</i>" in shown


def test_a_bar_is_as_long_as_its_share_and_never_longer_than_its_place() -> None:
    assert "width:60px" in bar(0.5, width=120)
    assert "width:120px" in bar(7.0, width=120)
    assert "width:0px" in bar(-1.0, width=120)
    assert "&lt;" in bar(0.5, "<1")


def test_an_image_travels_inside_the_page() -> None:
    shown = image(b"\x89PNG", width=30, alt='a "map"')
    data = shown.split("base64,")[1].split('"')[0]
    assert b64decode(data) == b"\x89PNG"
    assert "width:30px" in shown
    assert 'alt="a &quot;map&quot;"' in shown


def whole() -> str:
    grid = Grid(values=[[0.5, -1.0]], rows=["<0>"], columns=["a", "a"], corner="layer / pos")
    words = WordGrid(cells=[[[(" <b>", 0.5)]]], rows=["0"], columns=["x"])
    return page(
        "A <title>",
        section("Part & one", grid.html(), words.html()),
        html_table(("n",), [("1",), ("2",)]),
    )


def test_a_page_loads_nothing_and_allows_no_other_script() -> None:
    loads_nothing(whole())
    assert len(SCRIPT.encode()) < 8192
    assert not re.search(r"fetch|XMLHttp|import|WebSocket|eval|innerHTML|//\w|sendBeacon", SCRIPT)
    assert "</" not in SCRIPT
    assert len(whole().encode()) < 12_000


@pytest.mark.parametrize(
    "outside",
    [
        '<img src="//x">',
        '<a href="x.html">',
        "<link>",
        "<style>@import 'x'</style>",
        '<p style="background:url(x)">',
        "<script>1</script>",
        '<p onclick="x">',
        "<!doctype html><p>",
    ],
)
def test_what_would_load_something_is_found(outside: str) -> None:
    with pytest.raises(AssertionError):
        loads_nothing(outside)


def test_a_page_is_read_by_phones_screen_readers_and_in_the_dark() -> None:
    tags = Page(whole()).tags
    assert ("html", {"lang": "en"}) in tags
    assert any(each.get("name") == "viewport" for tag, each in tags if tag == "meta")
    assert [tag for tag, _ in tags if tag in ("main", "h1", "h2")] == ["main", "h1", "h2"]
    scopes = [each.get("scope") for tag, each in tags if tag == "th"]
    assert scopes == ["col", "col", "row", "col", "row", "col"]
    (style,) = Page(whole()).inside["style"]
    assert "color-scheme:light dark" in style
    assert "light-dark(" in style


def test_everything_is_there_without_the_script() -> None:
    silent = whole().replace(SCRIPT, "")
    for shown in ("A &lt;title&gt;", "Part &amp; one", "0.50", "-1.00", "&lt;0&gt;", "50%", "<td"):
        assert shown in silent
    tags = Page(silent).tags
    assert ("details", {"open": None}) in tags  # folding is the browser's own
    assert not any(
        "hidden" in each or "display:none" in (each.get("style") or "") for _, each in tags
    )


def test_cells_without_room_for_numbers_have_them_all_the_same() -> None:
    grid = Grid(values=[[0.5]], rows=["0"], columns=["a"], numbers=False, faint=[[True]])
    assert '<td class="ip-faint" title="0, a: 0.50, within the noise floor"' in grid.html()
    assert ">0.50</td>" in grid.html()
