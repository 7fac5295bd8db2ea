"""PNG files, with zlib and struct alone: of 8-bit arrays, and of heat maps with their labels."""

from __future__ import annotations

import struct
import textwrap
import zlib
from typing import Any

from interpose.render import colours, letters
from interpose.render.colours import Colour
from interpose.render.grid import Grid
from interpose.render.labelled import GREY, Labelled

_COLOUR_TYPE = {1: 0, 3: 2}
_ZOOM = 2  # how many pixels high and wide each point of the drawing is
_PAD, _LINE, _WIDEST = 4, 13, 9


def encode(pixels: Any) -> bytes:
    """The bytes of a PNG file.

    Args:
        pixels: a buffer of bytes, [height, width] (grey) or [height, width, 3] (RGB): a numpy
            ``uint8`` array, or ``memoryview(data).cast("B", (height, width))``.
    """
    view = memoryview(pixels)
    shape = tuple(view.shape or ())
    if view.format != "B" or not (len(shape) == 2 or (len(shape) == 3 and shape[2] == 3)):
        raise ValueError(
            f"a PNG needs bytes of shape [height, width] or [height, width, 3]; "
            f"got shape {list(shape)} of format {view.format!r}."
        )
    height, width = shape[:2]
    if not height or not width:
        raise ValueError(f"a PNG needs at least one pixel; got {width} x {height}.")
    channels = 1 if len(shape) == 2 else 3
    data, stride = view.tobytes(), width * channels
    # Each line of pixels begins with a filter byte; 0 means as it is.
    lines = b"".join(b"\0" + data[at : at + stride] for at in range(0, len(data), stride))
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPE[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, body) for kind, body in chunks)


def picture(shown: Labelled, title: str = "") -> bytes:
    """One or two axes as a heat map with its labels, a number in each cell and a legend: the bytes of a PNG file."""
    return grid(shown.single(), title)


def grid(shown: Grid, title: str = "") -> bytes:
    """A heat map as a PNG file. Labels are in ASCII; other letters are boxes."""
    numbers = [[shown.number(value) for value in row] for row in shown.values]
    widest = max(len(text) for row in numbers for text in row) if shown.numbers else 1
    left = letters.WIDE * max(map(len, (shown.corner, *shown.rows))) + 2 * _PAD
    roomy = max(map(len, shown.columns)) <= _WIDEST and shown.numbers
    cell = letters.WIDE * max(widest, *(map(len, shown.columns) if roomy else (1,))) + 2 * _PAD
    wide = left + cell * len(shown.columns) + _PAD
    lines = textwrap.wrap(title, max(wide, 300) // letters.WIDE - 2)
    upright = max(map(len, shown.columns)) * letters.WIDE > cell
    head = letters.WIDE * max(map(len, shown.columns)) if upright else letters.HIGH
    top = _PAD + _LINE * len(lines) + head + 2 * _PAD
    noted = any(map(any, shown.faint or ()))
    low = top + _LINE * len(shown.rows)
    longest = max([len(line) * letters.WIDE + 2 * _PAD for line in lines], default=0)
    canvas = _Canvas(max(wide, longest, 230), low + _LINE * (2 if noted else 1) + 2 * _PAD)
    for number, line in enumerate(lines):
        canvas.text(_PAD, _PAD + _LINE * number, line)
    canvas.text(left - _PAD - letters.WIDE * len(shown.corner), top - _PAD - 7, shown.corner)
    for column, name in enumerate(shown.columns):
        x = left + cell * column
        if upright:
            canvas.text(x + (cell - 7) // 2, top - _PAD, name, upright=True)
        else:
            canvas.text(x + (cell - letters.WIDE * len(name)) // 2, top - _PAD - 7, name)
    for row, name in enumerate(shown.rows):
        y = top + _LINE * row
        canvas.text(left - _PAD - letters.WIDE * len(name), y + 3, name)
        for column, value in enumerate(shown.values[row]):
            faint = shown.is_faint(row, column)
            back = _rgb(colours.FAINT) if faint else shown.scale(value, shown.limit)
            ink = _rgb(colours.FAINT_INK if faint else colours.ink(back))
            x = left + cell * column
            canvas.fill(x, y, cell - 1, _LINE - 1, back)
            text = numbers[row][column] if shown.numbers else ""
            canvas.text(x + cell - 2 - letters.WIDE * len(text), y + 3, text, ink=ink)
    _legend(canvas, shown, low + _PAD)
    if noted:
        canvas.text(_PAD, low + _PAD + _LINE, GREY, ink=_rgb(colours.FAINT_INK))
    return canvas.png()


def _legend(canvas: _Canvas, shown: Grid, y: int) -> None:
    """A strip of the colours between the numbers at its ends, and the unit."""
    below = shown.scale.two_sided and any(value < 0 for row in shown.values for value in row)
    least = shown.number(-shown.limit) if below else "0"
    strip = _PAD + letters.WIDE * len(least) + 2
    canvas.text(_PAD, y, least)
    for step in range(64):
        share = -1 + step * 2 / 63 if below else step / 63
        canvas.fill(strip + step, y - 1, 1, 9, shown.scale(share))
    canvas.text(strip + 67, y, f"{shown.number(shown.limit)} {shown.unit}".rstrip())


class _Canvas:
    """A white picture in RGB that takes rectangles and texts; what is outside of it is left out."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.rows = [bytearray(_rgb(colours.PAPER)) * width for _ in range(height)]

    def fill(self, x: int, y: int, width: int, height: int, colour: Colour) -> None:
        for row in self.rows[max(y, 0) : y + height]:
            row[3 * x : 3 * (x + width)] = bytes(colour) * width

    def text(
        self, x: int, y: int, text: str, *, ink: Colour | None = None, upright: bool = False
    ) -> None:
        """A line of text from its upper left corner on; upright from its lower left."""
        colour = bytes(_rgb(colours.INK) if ink is None else ink)
        for across, down in letters.points(text):
            column, row = (x + down, y - across) if upright else (x + across, y + down)
            if 0 <= column < self.width and 0 <= row < self.height:
                self.rows[row][3 * column : 3 * column + 3] = colour

    def png(self) -> bytes:
        wide = (
            b"".join(bytes(row[at : at + 3]) * _ZOOM for at in range(0, len(row), 3))
            for row in self.rows
        )
        data = b"".join(row * _ZOOM for row in wide)
        shape = (self.height * _ZOOM, self.width * _ZOOM, 3)
        return encode(memoryview(data).cast("B", shape))


def _rgb(css: str) -> Colour:
    red, green, blue = bytes.fromhex(css.removeprefix("#"))
    return red, green, blue


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
