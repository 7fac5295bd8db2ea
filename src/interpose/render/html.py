"""Self-contained HTML: no script, nothing loaded from outside, so it shows in notebooks, mail and offline."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path

from interpose.files.writing import write_whole
from interpose.render import escape

_CELL = "padding:2px 10px 2px 0;text-align:left;font-variant-numeric:tabular-nums"


class Markup(str):
    """Text that is HTML already; a table puts it in as it is."""

    __slots__ = ()


def bar(share: float, text: str = "", *, colour: str = "#4c78a8", width: int = 120) -> Markup:
    """A bar for a table cell, as long as a share of its full width, with a text after it."""
    filled = round(width * min(max(share, 0.0), 1.0))
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
    heads = "".join(f'<th style="{_CELL}">{escape.html(name)}</th>' for name in head)
    more = f"<p>... {len(rows) - most} more</p>" if len(rows) > most else ""
    caption = f"<p><b>{escape.html(title)}</b></p>" if title else ""
    return f"<div>{caption}<table><thead><tr>{heads}</tr></thead><tbody>{cells}</tbody></table>{more}</div>"


def _safe(cell: str) -> str:
    return cell if isinstance(cell, Markup) else escape.html(cell)


def page(title: str, *sections: str) -> str:
    """A whole document around parts that are HTML already."""
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;"
        "color:#1b1f24;background:#fff}"
        "h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}table{border-collapse:collapse}"
        "th{border-bottom:1px solid #c8ccd1}img{image-rendering:pixelated;max-width:100%}"
        "code{background:#f3f4f6;padding:1px 4px;border-radius:3px}p.note{color:#57606a}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape.html(title)}</title>'
        f"<style>{style}</style></head><body><h1>{escape.html(title)}</h1>{''.join(sections)}</body></html>"
    )


def write(path: str | Path, text: str) -> Path:
    """Write a page, whole or not at all, and return where it is."""
    return write_whole(path, text)
