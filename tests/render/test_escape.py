"""What is hostile in a label is shown, in each medium, and never obeyed."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.dom import minidom

import pytest
from torch import tensor

import interpose as ip
from interpose.render import escape
from interpose.render.grid import Grid
from interpose.render.labelled import Labelled
from interpose.render.labels import cut, token_label, token_text
from interpose.render.svg import picture
from interpose.render.text import table
from interpose.render.words import WordGrid

HOSTILE = [
    "<script>alert(1)</script>",
    '" onmouseover="x()',
    "'\">&amp;",
    "\x1b[2J\x1b[31mred",
    "\x1b]0;title\x07",
    "a\x00b\x08\x7f\x9b31m",
    "\u202eright to left",
    "zero\u200bwidth",
    "half a pair \ud800",
    "line\nend\ttab\r",
    "\u2028",
    "=1+1",
    "日本語 🙂 é",
]
UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b\u202e\u2028\ud800]")


class Reader(HTMLParser):
    """The texts and the tags of a page, with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_markup_stays_text_and_unseen_signs_are_spelt_out(text: str) -> None:
    reader = Reader()
    reader.feed(f'<p title="{escape.html(text)}">{escape.html(text)}</p>')
    reader.close()
    ((tag, attributes),) = reader.tags
    assert (tag, list(attributes)) == ("p", ["title"])
    shown = "".join(reader.texts)
    assert shown == attributes["title"]
    assert not UNSEEN.search(shown.replace("\n", "").replace("\t", ""))


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_svg_stays_xml_whatever_a_label_holds(text: str) -> None:
    shown = Labelled(values=tensor([[1.0, -2.0]]), labels={"layer": [text], "pos": [text, "b"]})
    document = minidom.parseString(picture(shown, title=text).encode())
    assert not document.getElementsByTagName("script")
    assert not any(
        name.startswith("on")
        for element in document.getElementsByTagName("*")
        for name in dict(element.attributes or {})
    )


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_terminal_is_told_nothing_but_our_own_colours(text: str) -> None:
    cells = [[[(text, 0.5)]]]
    for shown in (
        table((text, "b"), [(text, text)], title=text),
        Grid(values=[[1.0]], rows=[text], columns=[text], corner=text).text(coloured=False),
        WordGrid(cells=cells, rows=[text], columns=[text], corner=text).text(),
    ):
        assert not UNSEEN.search(shown.replace("\n", ""))
    coloured = Grid(values=[[1.0]], rows=[text], columns=[text]).text(coloured=True)
    ours = re.sub(r"\x1b\[48;2;\d+;\d+;\d+;38;2;\d+;\d+;\d+m([^\x1b]*)\x1b\[0m", r"\1", coloured)
    assert "\x1b" not in ours
    assert len(table(("a",), [(text,)]).splitlines()) == 2


def test_texts_of_their_own_keep_their_lines() -> None:
    assert escape.terminal("a\nb\x1b", lines=True) == "a\nb\\x1b"
    assert escape.terminal("a\nb") == "a\\nb"


@pytest.mark.parametrize(
    "text", [*HOSTILE, "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\uff1d1", "-", "--1"]
)
def test_no_spreadsheet_takes_a_cell_for_a_formula(text: str) -> None:
    (row,) = csv.reader(io.StringIO(f"{escape.csv(text)},b\n", newline=""))
    assert row[1] == "b"
    assert text in (row[0], row[0].removeprefix("'"))
    assert not re.match("[=+\\-@\t\r\uff1d]", row[0])


@pytest.mark.parametrize("number", [0, -1.5, 1e-07, -3, "-1.5", "+2", float("-inf"), float("nan")])
def test_numbers_stay_numbers_in_csv(number: object) -> None:
    assert float(escape.csv(number)) == float(number) or number != number  # type: ignore[arg-type]
    assert escape.csv(None) == ""


def test_tokens_are_called_the_same_everywhere() -> None:
    assert token_label(" cat") == "' cat'"
    assert token_label(" cat", 4) == "4 ' cat'"
    assert token_label("\x1b[0m\n") == "'\\x1b[0m\\n'"
    assert token_text(" a\n") == " a\\n"
    assert token_text("") == "''"
    assert cut("abcdef", 4) == "abc…"
    assert cut("abcd", 4) == "abcd"


def test_there_is_one_escaping_function_for_each_medium() -> None:
    package = Path(ip.__file__).parent
    for path in package.rglob("*.py"):
        if path != package / "render" / "escape.py":
            code = path.read_text()
            written = (
                r"from html import|import html\b|csv\.(Dict)?[wW]riter|from csv import|saxutils"
            )
            assert not re.search(written, code), path
