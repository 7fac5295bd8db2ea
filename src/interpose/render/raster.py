"""The pictures that `render` draws, as pixels: a PNG of the same rectangles, lines and labels as in the SVG."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from xml.etree import ElementTree

import torch
from torch import Tensor

from interpose.render import png

_ZOOM = 2  # pixels for each unit of the SVG
_WIDE, _HIGH = 5, 7  # of a letter, in dots; a dot is `_ZOOM` pixels
_STEP = 13  # pixels from letter to letter
_LOW = "gpqy"  # letters that reach below the line, by one dot
_DIGITS = "0123456789abcdefghijklmnopqrstuv"
# The letters from " " to "~", seven rows each, a digit for the five dots of a row.
_LETTERS = (
    "00000004444404aaa0000aavavaa4fke5u4op248j3cik8lid44400002488842842224804lel40044v440"
    "0000624000v00000000cc01248g0ehjlphe4c4444eeh1248vv2421he26aiv22vgu11he68guhhev124888"
    "ehhehheehhf12c0cc0cc00660624248g84200v0v008421248eh12404ehnlngeehhvhhhuhhuhhufgggggf"
    "uhhhhhuvgguggvvggugggfggnhhfhhhvhhhe44444e72222ichikokihggggggvhrllhhhhppljjhehhhhhe"
    "uhhugggehhhliduhhukihfgge11uv444444hhhhhhehhhhha4hhhllrhhha4ahhhha4444v1248gve88888e"
    "0g84210e22222e4ah0000000000v842000000e1fhfggmphhu00egghe11djhhf00ehvge698s8880fhhf1e"
    "ggmphhh40c444e20622icggikokic44444e00qllll00mphhh00ehhhe0uhhugg0djhf1100mpggg00fge1u"
    "88s889600hhhjd00hhha400hllla00ha4ah0hhhf1e00v248v34484434444444o44244o008l200"
)
_NUMBER = r"-?\d+(?:\.\d+)?"


def raster(svg: str) -> bytes:
    """A picture of rectangles, texts and lines, as `svg` and methods draw them, as the bytes of a PNG file."""
    root = ElementTree.fromstring(svg)
    size = [round(float(root.get(name, 1))) * _ZOOM for name in ("height", "width")]
    canvas = torch.full((*size, 3), 255, dtype=torch.uint8, device="cpu")
    for node in root.iter():
        kind = node.tag.rpartition("}")[2]
        if kind == "rect" and "%" not in node.get("width", ""):
            _rectangle(canvas, node)
        if kind == "text":
            _text(canvas, node)
        if kind == "path":
            _path(canvas, node)
    return png.encode(canvas.numpy())


def _pixels(node: ElementTree.Element, name: str) -> int:
    return round(float(node.get(name, 0)) * _ZOOM)


def _colour(name: str | None) -> Tensor:
    code = (name or "#000000").removeprefix("#")
    return torch.tensor(
        [int(code[at : at + 2], 16) for at in (0, 2, 4)], dtype=torch.uint8, device="cpu"
    )


def _rectangle(canvas: Tensor, node: ElementTree.Element) -> None:
    left, top = max(0, _pixels(node, "x")), max(0, _pixels(node, "y"))
    inside = canvas[top : top + _pixels(node, "height"), left : left + _pixels(node, "width")]
    if node.get("fill", "").startswith("#"):
        inside[:] = _colour(node.get("fill"))
    if "stroke" in node.attrib and inside.numel():
        line = _colour(node.get("stroke"))
        inside[[0, -1]], inside[:, [0, -1]] = line, line


def _text(canvas: Tensor, node: ElementTree.Element) -> None:
    """A line of text; those that the SVG turns run from below to above."""
    dots = _written(node.text or "", bold=node.get("font-weight") == "bold")
    x, y = _pixels(node, "x"), _pixels(node, "y") + _ZOOM
    if "rotate(-90" in node.get("transform", ""):
        dots, top, left = dots.mT.flip(0), y - _ZOOM - dots.shape[1], x + _ZOOM - dots.shape[0]
    else:
        shift = {"middle": dots.shape[1] // 2, "end": dots.shape[1]}
        top, left = y - dots.shape[0], x - shift.get(node.get("text-anchor", ""), 0)
    dots = dots[max(0, -top) :, max(0, -left) :]
    there = canvas[max(0, top) :, max(0, left) :][: dots.shape[0], : dots.shape[1]]
    there[dots[: there.shape[0], : there.shape[1]]] = _colour(node.get("fill"))


def _written(text: str, *, bold: bool) -> Tensor:
    """Which pixels a line of text covers, [height, width], one dot of it below the line; what is not ASCII is a box."""
    found = torch.zeros(
        (_HIGH + 1) * _ZOOM, max(1, _STEP * len(text)), dtype=torch.bool, device="cpu"
    )
    for number, letter in enumerate(text):
        at = (ord(letter) - 32) * _HIGH
        rows = _LETTERS[at : at + _HIGH] if " " <= letter <= "~" else "vhhhhhv"
        bits = [
            [_DIGITS.index(row) >> shift & 1 for shift in range(_WIDE - 1, -1, -1)] for row in rows
        ]
        drawn = torch.tensor(bits, dtype=torch.bool, device="cpu")
        wide = drawn.repeat_interleave(_ZOOM, 0).repeat_interleave(_ZOOM, 1)
        for shift in (0, 1) if bold else (0,):
            left, top = number * _STEP + shift, _ZOOM * (letter in _LOW)
            found[top : top + len(wide), left : left + wide.shape[1]] |= wide
    return found


def _path(canvas: Tensor, node: ElementTree.Element) -> None:
    """A line or a curve, as dots along it."""
    half = float(node.get("stroke-width", 1)) * _ZOOM / 2
    share, colour = float(node.get("stroke-opacity", 1)), _colour(node.get("stroke")).float()
    height, width = canvas.shape[:2]
    covered = torch.zeros(height, width, dtype=torch.bool, device="cpu")
    for x, y in _along(node.get("d", "")):
        rows, columns = (
            [max(0, round(at * _ZOOM - half)), round(at * _ZOOM + half)] for at in (y, x)
        )
        covered[
            rows[0] : max(rows[1], rows[0] + 1), columns[0] : max(columns[1], columns[0] + 1)
        ] = True
    canvas[covered] = (canvas[covered] * (1 - share) + colour * share).round().to(torch.uint8)


def _along(path: str) -> Iterator[tuple[float, float]]:
    """Points along a path of the commands M, V, H, L and C, no further than half a pixel apart."""
    x = y = 0.0
    for command, said in re.findall(r"([MVHLC])([^MVHLC]*)", path):
        given = [float(one) for one in re.findall(_NUMBER, said)]
        given = {"V": [x, *given], "H": [*given, y]}.get(command, given)
        points = [(x, y), *zip(given[::2], given[1::2])]
        if command == "M":
            x, y = points[1]
            continue
        long = sum(abs(a - c) + abs(b - d) for (a, b), (c, d) in pairwise(points))
        steps = max(1, round(2 * _ZOOM * long))
        for step in range(steps + 1):
            yield _between(points, step / steps)
        x, y = points[-1]


def _between(points: list[tuple[float, float]], share: float) -> tuple[float, float]:
    """A point of the Bezier curve of some points: of two, of the line between them."""
    while len(points) > 1:
        points = [(a + (c - a) * share, b + (d - b) * share) for (a, b), (c, d) in pairwise(points)]
    return points[0]
