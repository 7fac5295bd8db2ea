"""Two colour maps: one for amounts, one for effects that go both ways around zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Colour = tuple[int, int, int]
FAINT, FAINT_BAR, FAINT_INK = "#eaeef2", "#d0d7de", "#8c959f"  # grey, for what says nothing

# Viridis, at nine points: dark blue, green, yellow.
_SEQUENTIAL: tuple[Colour, ...] = (
    (68, 1, 84),
    (71, 45, 123),
    (59, 82, 139),
    (44, 114, 142),
    (33, 145, 140),
    (40, 174, 128),
    (94, 201, 98),
    (173, 220, 48),
    (253, 231, 37),
)
# ColorBrewer's RdBu turned round: blue, white, red.
_DIVERGING: tuple[Colour, ...] = (
    (5, 48, 97),
    (33, 102, 172),
    (67, 147, 195),
    (146, 197, 222),
    (255, 255, 255),
    (244, 165, 130),
    (214, 96, 77),
    (178, 24, 43),
    (103, 0, 31),
)


def sequential(share: float) -> Colour:
    """A colour for an amount from 0 (dark blue) to 1 (yellow); outside that it stays at the end."""
    return _between(_SEQUENTIAL, share)


def diverging(value: float, limit: float = 1.0) -> Colour:
    """A colour for an effect: white at 0, red up to ``limit``, blue down to ``-limit``."""
    share = 0.5 if not limit else 0.5 + 0.5 * value / limit
    return _between(_DIVERGING, share)


def table(colour_map: Callable[[float], Colour], steps: int = 256) -> list[Colour]:
    """A colour map as a list over its range from 0 to 1, to look many values up at once."""
    return [colour_map(step / (steps - 1)) for step in range(steps)]


def css(colour: Colour) -> str:
    """A colour as HTML writes it: ``#2c728e``."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def ink(background: Colour) -> str:
    """Black or white, whichever can be read on a background."""
    red, green, blue = background
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def _between(points: Sequence[Colour], share: float) -> Colour:
    share = 0.0 if math.isnan(share) else min(max(share, 0.0), 1.0)
    at = share * (len(points) - 1)
    low = min(int(at), len(points) - 2)
    part = at - low
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(points[low], points[low + 1]))
    return red, green, blue
