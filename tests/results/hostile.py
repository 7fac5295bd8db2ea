"""Results whose texts attack: what a page, a picture, a terminal or a spreadsheet would obey, in any field."""

from __future__ import annotations

import copy
import csv
import io
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import interpose as ip
from tests.pages import loads_nothing

MARK = "OWNED"
ATTACKS = (
    f"<script>document.title='{MARK}'</script>",
    f'"><img src=x onerror="document.title=\'{MARK}\'">',
    f"'><svg onload='document.title=\"{MARK}\"'></svg>",
    f"</style></script></title></textarea><script>document.title='{MARK}'</script>",
    "<img src=http://127.0.0.1:9/owned>",
    '" style="background:url(http://127.0.0.1:9/owned)',
    "<link rel=stylesheet href=http://127.0.0.1:9/owned><base href=http://127.0.0.1:9/>",
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1:9/owned'>",
    f"javascript:document.title='{MARK}'",
    "]]><foreignObject><body xmlns='http://www.w3.org/1999/xhtml'></body></foreignObject><![CDATA[",
    "<!--",
    "&lt;script&gt; &#60;b&#62; &amp;",
    "\x1b]0;owned\x07\x1b[2J\x9b31m",
    "\u202egnp.exe\u2066",
    "\x00\x0b\x7f\ufffe",
    "a\nb\r\nc\u2028d",
    "=cmd|' /C calc'!A0",
    "@SUM(1+1)*9",
    "+1-1|x",
    "\t=1+1",
    "{0} {name} %s %(a)s",
    "",
    "x" * 5000,
)
KEPT = ("format", "version", "dtype", "shape", "tensor")


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every text in some data, keys of objects included (they end in None)."""
    if isinstance(data, dict):
        for key, value in data.items():
            if key not in KEPT:
                if path:
                    yield (*path, key, None)
                yield from places(value, (*path, key))
    elif isinstance(data, list):
        for number, value in enumerate(data[:6]):
            yield from places(value, (*path, number))
    elif isinstance(data, str):
        yield path


def attacked(data: Any, path: tuple[Any, ...], text: str) -> Any:
    """The data with a text put in at a place."""
    made = copy.deepcopy(data)
    inner = made
    renames = path[-1] is None
    *way, last = path[:-1] if renames else path
    for key in way:
        inner = inner[key]
    if renames:
        items = [(text if key == last else key, value) for key, value in inner.items()]
        inner.clear()
        inner.update(items)
    else:
        inner[last] = text
    return made


def many(data: dict[str, Any], seed: int, count: int) -> Iterator[Any]:
    """Data with one text after another attacked, and at last with several at once."""
    draw = random.Random(seed)
    everywhere = list(places(data))
    values = [path for path in everywhere if path[-1] is not None] or everywhere
    for number in range(count if everywhere else 0):
        made, there = data, everywhere if number % 4 == 0 else values
        for path in sorted(
            draw.sample(there, min(len(there), draw.choice((1, 1, 1, 3, 30)))), key=str
        ):
            try:
                made = attacked(made, path, draw.choice(ATTACKS))
            except (KeyError, TypeError):  # what is above it was renamed
                continue
        yield made


def must_be_harmless(result: ip.Result, folder: Path) -> str:
    """Fail if a result obeys a text in any medium; its page."""
    printed = repr(result)
    wrong = re.search(
        r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", printed
    )
    assert wrong is None, printed[max(0, wrong.start() - 80) : wrong.end()].__repr__()
    page = result.save(folder / "x.html").read_text("utf-8")
    for text in (page, result.html()):
        loads_nothing(text)
        assert "<script>document" not in text
    for row in csv.reader(io.StringIO(result.to_csv())):
        for cell in row:
            plain = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?inf|nan", cell)
            assert plain or not re.match(r"[=+\-@\t\r]", cell), cell
    try:
        picture = result.svg()
    except ValueError:  # nothing to draw
        return page
    for node in ElementTree.fromstring(picture).iter():
        tag = str(node.tag).split("}")[-1]
        assert tag not in ("script", "foreignObject", "iframe", "a", "use", "animate", "set"), tag
        for name, value in node.attrib.items():
            assert not name.lower().startswith("on"), name
            local = name.split("}")[-1] != "href" or value.startswith(("data:image/", "#"))
            assert local, value
            assert "url(http" not in value
    return page
