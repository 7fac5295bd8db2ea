"""Labelled numbers as a picture: SVG, which pages and papers show at any size, and a person can read."""

from __future__ import annotations

import textwrap

from interpose.render import colours, escape
from interpose.render.grid import Grid
from interpose.render.labelled import GREY, Labelled

_LETTER, _LINE = 6.7, 18  # the width of a letter and the height of a line, at 12 pixels
_FONT = 'font-family="system-ui,sans-serif" font-size="12"'


def picture(shown: Labelled, title: str = "") -> str:
    """One axis as bars, two as a heat map with a number in each cell."""
    grid = shown.single()
    return _bars(grid, title) if len(shown.labels) == 1 else _map(grid, title)


def _titled(title: str, wide: float) -> tuple[list[str], int]:
    """A title in as many lines as it takes to be no wider than what is below it, and their height."""
    lines = textwrap.wrap(title, max(48, round(wide / _LETTER))) if title else []
    return [letters(4, 15 + 16 * n, line, bold=True) for n, line in enumerate(lines)], 16 * len(
        lines
    )


def _map(grid: Grid, title: str) -> str:
    left = 12 + _LETTER * max(map(len, (grid.corner, *grid.rows)))
    widest = max(map(len, grid.columns))
    shown = [[grid.number(value) for value in row] for row in grid.values]
    cell = 10 + _LETTER * max(len(text) for row in shown for text in row)
    upright = widest * _LETTER > cell
    wide = left + cell * len(grid.columns) + 8
    parts, high = _titled(title, wide)
    top = high + 10 + (widest * _LETTER + 6 if upright else _LINE)
    parts.append(letters(left - 6, top - 6, grid.corner, "end"))
    for column, name in enumerate(grid.columns):
        middle = left + cell * (column + 0.5)
        if upright:
            turn = f' transform="rotate(-90 {middle + 4:.1f} {top - 6:.1f})"'
            parts.append(letters(middle + 4, top - 6, name, extra=turn))
        else:
            parts.append(letters(middle, top - 6, name, "middle"))
    for row, name in enumerate(grid.rows):
        y = top + _LINE * row
        parts.append(letters(left - 6, y + 13, name, "end"))
        for column, value in enumerate(grid.values[row]):
            back = grid.scale(value, grid.limit)
            fill, ink = colours.css(back), colours.ink(back)
            if grid.is_faint(row, column):
                fill, ink = colours.FAINT, colours.FAINT_INK
            x = left + cell * column
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{cell - 1:.1f}" height="{_LINE - 1}" fill="{fill}"/>'
            )
            parts.append(letters(x + cell - 5, y + 13, shown[row][column], "end", ink=ink))
    low = _noted(parts, grid, top + _LINE * len(grid.rows))
    return document(max(wide, 340 if title else 0), low + 8, parts)


def _bars(grid: Grid, title: str) -> str:
    left, half = 12 + _LETTER * max(map(len, grid.rows)), 150
    middle, wide = left + half, left + 2 * half + 70
    parts, high = _titled(title, wide)
    top = high + 14
    for row, (name, (value,)) in enumerate(zip(grid.rows, grid.values)):
        y = top + _LINE * row
        long = half * min(abs(value) / grid.limit, 1.0) if value == value else 0.0
        fill, ink = colours.css(grid.scale(0.6 if value > 0 else -0.6)), colours.INK
        if grid.is_faint(row, 0):
            fill, ink = colours.FAINT_BAR, colours.FAINT_INK
        x = middle if value > 0 else middle - long
        parts += [
            letters(left - 6, y + 13, name, "end"),
            f'<rect x="{x:.1f}" y="{y + 2}" width="{long:.1f}" height="{_LINE - 5}" fill="{fill}"/>',
            letters(middle + half + 8, y + 13, grid.number(value), ink=ink),
        ]
    low = top + _LINE * len(grid.rows)
    parts.append(f'<path d="M{middle} {top}V{low}" stroke="{colours.LINE}"/>')
    return document(wide, _noted(parts, grid, low) + 8, parts)


def _noted(parts: list[str], grid: Grid, low: float) -> float:
    """Say below what grey means, where something is; the height of it all."""
    if not any(map(any, grid.faint or ())):
        return low
    parts.append(letters(4, low + 17, GREY, ink=colours.FAINT_INK))
    return low + 20


def letters(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    *,
    ink: str = colours.INK,
    bold: bool = False,
    extra: str = "",
) -> str:
    """A text in a picture.

    Args:
        x: where.
        y: where its line stands.
        text: what it says.
        anchor: which end is there: ``start``, ``middle``, ``end``.
        ink: its colour.
        bold: whether it is heavy.
        extra: other attributes.
    """
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{ink}"{weight}{extra} xml:space="preserve">'
        f"{escape.svg(text)}</text>"
    )


def document(width: float, height: float, parts: list[str]) -> str:
    """A picture of some parts that loads nothing.

    Args:
        width: of all of it.
        height: of all of it.
        parts: what is in it.
    """
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    back = f'<rect width="100%" height="100%" fill="{colours.PAPER}"/>'
    inside = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {_FONT}>\n{back}\n{inside}\n</svg>\n'
