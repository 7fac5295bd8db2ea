"""The colours of all that is drawn: three scales, for light and for dark pages, that colour-blind people can tell.

`diverging` is for effects, which go both ways around zero; `positive` for amounts that begin at zero, such as
probabilities; `sequential` for pictures, where lowest and highest are both of interest. NaN is grey.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Colour = tuple[int, int, int]
INK, PAPER = "#1b1f24", "#ffffff"  # of pictures; pages follow the reader's choice of light or dark
FAINT, FAINT_BAR, FAINT_INK = "#eaeef2", "#d0d7de", "#57606a"  # grey, for what says nothing
LINE = "#57606a"
FAINT_STYLE = (
    f"background-color:{FAINT};color:{FAINT_INK};background-color:light-dark({FAINT},#262c34);"
    f"color:light-dark({FAINT_INK},#a9b3bd)"
)
QUIET = "opacity:.78"  # of labels and notes: fainter than the text around, whatever its colour is
EDGE = "rgba(127,127,127,.45)"  # of lines that are seen on any background
_UNKNOWN: tuple[Colour, Colour] = ((214, 219, 224), (60, 66, 74))


@dataclass(frozen=True, slots=True)
class Scale:
    """Colours for numbers from 0 to a limit, or from its negative.

    ```python
    diverging(0.5, limit=2.0)              # (red, green, blue)
    diverging.style(0.5, limit=2.0)        # for HTML: background and ink, in light and dark
    ```

    Attributes:
        light: The colours on light pages, at equal distances from the least number to the largest.
        dark: Those on dark pages.
        two_sided: Whether it begins at the negative of the limit, with zero in the middle.
    """

    light: Sequence[Colour]
    dark: Sequence[Colour]
    two_sided: bool = False

    def __call__(self, value: float, limit: float = 1.0, *, dark: bool = False) -> Colour:
        """The colour of a number; beyond the limit it stays at the end."""
        if math.isnan(value):
            return _UNKNOWN[dark]
        share = value / limit if limit else 0.0
        return _between(
            self.dark if dark else self.light, 0.5 + 0.5 * share if self.two_sided else share
        )

    def style(self, value: float, limit: float = 1.0) -> str:
        """A background and an ink that can be read on it, for HTML."""
        light, dark = self(value, limit), self(value, limit, dark=True)
        return (
            f"background-color:{css(light)};color:{ink(light)};background-color:light-dark({css(light)},{css(dark)});"
            f"color:light-dark({ink(light)},{ink(dark)})"
        )

    def strip(self, low: float = 0.0, high: float = 1.0, steps: int = 8) -> str:
        """The part from ``low`` to ``high``, of a limit of 1, as the background of a legend."""
        at = [low + (high - low) * step / steps for step in range(steps + 1)]
        light = ",".join(css(self(value)) for value in at)
        both = ",".join(
            f"light-dark({css(self(value))},{css(self(value, dark=True))})" for value in at
        )
        return f"background:linear-gradient(to right,{light});background:linear-gradient(to right,{both})"


def _points(text: str) -> tuple[Colour, ...]:
    colours = (bytes.fromhex(one) for one in text.split())
    return tuple((red, green, blue) for red, green, blue in colours)


# Viridis, at nine points: dark blue, green, yellow; the same on every page.
_VIRIDIS = _points("440154 472d7b 3b528b 2c728e 21918c 28ae80 5ec962 addc30 fde725")
sequential = Scale(_VIRIDIS, _VIRIDIS)
# ColorBrewer's Blues from white on.
positive = Scale(
    _points("ffffff deebf7 c6dbef 9ecae1 6baed6 4292c6 2171b5 08519c 08306b"),
    _points("161b22 173152 1a4a80 2567ab 4285cb 6ba5e0 98c3f0 c8e0fb"),
)
# ColorBrewer's RdBu turned round: blue, white, red; on dark pages from bright blue over black to bright red.
diverging = Scale(
    _points("053061 2166ac 4393c3 92c5de ffffff f4a582 d6604d b2182b 67001f"),
    _points("a6d0ff 68a5ea 3875bd 1f4a80 161b22 7a2c26 b5493c e57f68 ffbfa6"),
    two_sided=True,
)


def table(colour_map: Callable[[float], Colour], steps: int = 256) -> list[Colour]:
    """A colour map as a list over its range from 0 to 1, to look many values up at once."""
    return [colour_map(step / (steps - 1)) for step in range(steps)]


def css(colour: Colour) -> str:
    """A colour as HTML writes it: ``#2c728e``."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def ink(background: Colour) -> str:
    """Black or white, whichever has more contrast; one of them always has 4.5 to 1."""
    return "#000000" if luminance(background) > 0.179 else "#ffffff"


def luminance(colour: Colour) -> float:
    """How much light a colour gives, from 0 to 1, as WCAG counts it."""
    linear = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4
        for part in (part / 255 for part in colour)
    )
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


def _between(points: Sequence[Colour], share: float) -> Colour:
    at = min(max(share, 0.0), 1.0) * (len(points) - 1)
    low = min(int(at), len(points) - 2)
    part = at - low
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(points[low], points[low + 1]))
    return red, green, blue
