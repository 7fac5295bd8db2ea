"""Self-contained HTML: nothing is loaded from outside, so it shows in notebooks, mail and offline.

Parts bring their style with them and need no script; a page has one small script that adds to what is there.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path

from interpose.files.writing import write_whole
from interpose.render import colours, escape

NUMBERS = "font-variant-numeric:tabular-nums"
QUIET_HEAD = (
    f"padding:2px 8px;font-weight:normal;text-align:right;white-space:pre;border:0;{colours.QUIET}"
)
_CELL = f"padding:2px 10px 2px 0;text-align:left;{NUMBERS}"


class Markup(str):
    """Text that is HTML already; a table puts it in as it is."""

    __slots__ = ()


def bar(share: float, text: str = "", *, colour: str = "#4c78a8", width: int = 120) -> Markup:
    """A bar for a table cell, as long as a share of its full width, with a text after it."""
    filled = round(width * min(max(share, 0.0), 1.0)) if share == share else 0
    block = (
        f"display:inline-block;height:0.8em;width:{filled}px;background:{colour};border-radius:2px"
    )
    gap = ";margin-right:6px" if text else ""
    return Markup(f'<span style="{block}{gap}"></span>{escape.html(text)}')


def image(png: bytes, *, width: int, alt: str = "") -> Markup:
    """A picture inside the page itself, shown ``width`` pixels wide with sharp edges."""
    data = b64encode(png).decode("ascii")
    style = f"image-rendering:pixelated;width:{width}px;max-width:100%"
    return Markup(
        f'<img src="data:image/png;base64,{data}" alt="{escape.html(alt)}" style="{style}">'
    )


def html_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", most: int = 200
) -> str:
    """A plain table; rows beyond ``most`` are counted, not shown. Cells are escaped, unless they are `Markup`."""
    cells = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{_safe(cell)}</td>' for cell in row) + "</tr>"
        for row in rows[:most]
    )
    heads = "".join(f'<th scope="col" style="{_CELL}">{escape.html(name)}</th>' for name in head)
    more = f"<p>... {len(rows) - most} more</p>" if len(rows) > most else ""
    caption = f"<p><b>{escape.html(title)}</b></p>" if title else ""
    table = f'<table class="ip-table"><thead><tr>{heads}</tr></thead><tbody>{cells}</tbody></table>'
    return f"<div>{caption}{scrolled(table)}{more}</div>"


def scrolled(wide: str) -> str:
    """A part that may be wider than the page, and scrolls by itself."""
    return f'<div class="ip-scroll" style="overflow-x:auto">{wide}</div>'


def legend(
    scale: colours.Scale,
    low: float,
    limit: float,
    *,
    digits: int = 2,
    unit: str = "",
    note: str = "",
) -> str:
    """What colours mean: a strip of them from ``low`` to ``limit``, the numbers at its ends, the unit, and a note."""
    strip = f"display:inline-block;width:120px;height:0.8em;border:1px solid {colours.EDGE}"
    least, most = (f"{end:.{digits}f}" if end else "0" for end in (low, limit))
    said = f"{most} {escape.html(unit)}".rstrip() + (f"; {escape.html(note)}" if note else "")
    painted = scale.strip(low / limit if limit else 0.0)
    return (
        f'<p><span style="{colours.QUIET}">{least}</span> '
        f'<span role="img" aria-label="to" style="{strip};{painted}"></span> '
        f'<span style="{colours.QUIET}">{said}</span></p>'
    )


def section(title: str, *parts: str) -> str:
    """A part of a page under a heading, which a click or a key folds; parts are HTML already."""
    return (
        f"<details open><summary><h2>{escape.html(title)}</h2></summary>{''.join(parts)}</details>"
    )


def _safe(cell: str) -> str:
    return cell if isinstance(cell, Markup) else escape.html(cell)


def page(title: str, *sections: str) -> str:
    """A whole document around parts that are HTML already: light or dark as its reader has it, also on a phone."""
    style, script = (
        (Path(__file__).with_name(f"page.{kind}").read_text("utf-8")) for kind in ("css", "js")
    )
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape.html(title)}</title><style>{style}</style></head>"
        f"<body><main><h1>{escape.html(title)}</h1>{''.join(sections)}</main><script>{script}</script></body></html>"
    )


def write(path: str | Path, text: str) -> Path:
    """Write a page, whole or not at all, and return where it is."""
    return write_whole(path, text)
