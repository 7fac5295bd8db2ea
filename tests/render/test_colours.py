"""The scales: what they say of a number, to whom, and whether what is written on them can be read."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from interpose.render import colours
from interpose.render.colours import Colour, Scale
from interpose.render.html import legend

SCALES = {
    "sequential": colours.sequential,
    "positive": colours.positive,
    "diverging": colours.diverging,
}
PAGES = [(name, dark) for name in SCALES for dark in (False, True)]


def linear(colour: Colour) -> list[float]:
    return [(c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]


def luminance(colour: Colour) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def lightness(colour: Colour) -> float:
    """L* of CIELAB."""
    light = luminance(colour)
    return 116 * light ** (1 / 3) - 16 if light > 0.008856 else 903.3 * light


def contrast(one: Colour, other: Colour) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def rgb(text: str) -> Colour:
    red, green, blue = bytes.fromhex(text.removeprefix("#"))
    return red, green, blue


def along(scale: Scale, dark: bool, steps: int = 200) -> list[Colour]:
    low = -1.0 if scale.two_sided else 0.0
    return [scale(low + (1 - low) * step / steps, dark=dark) for step in range(steps + 1)]


# How colours look without one kind of cone, in linear light (Vienot, Brettel and Mollon, 1999).
BLIND = {
    "protanopia": ((0.1124, 0.8876, 0.0), (0.1124, 0.8876, 0.0), (0.0040, -0.0040, 1.0)),
    "deuteranopia": ((0.2928, 0.7072, 0.0), (0.2928, 0.7072, 0.0), (-0.0223, 0.0223, 1.0)),
}


def seen(colour: Colour, kind: str) -> Colour:
    light = linear(colour)
    shown = [sum(w * part for w, part in zip(row, light)) for row in BLIND[kind]]
    red, green, blue = (
        round(255 * (1.055 * max(0.0, c) ** (1 / 2.4) - 0.055 if c > 0.0031308 else 12.92 * c))
        for c in shown
    )
    return red, green, blue


@pytest.mark.parametrize(("name", "dark"), PAGES)
def test_what_is_written_on_a_colour_can_be_read(name: str, dark: bool) -> None:
    unknown = SCALES[name](math.nan, dark=dark)
    for colour in (*along(SCALES[name], dark), unknown):
        assert contrast(colour, rgb(colours.ink(colour))) >= 4.5


@pytest.mark.parametrize("dark", [False, True])
def test_what_says_nothing_can_still_be_read(dark: bool) -> None:
    found = re.findall(r"light-dark\((#\w+),(#\w+)\)", colours.FAINT_STYLE)
    back, ink = (rgb(pair[dark]) for pair in found)
    assert contrast(back, ink) >= 4.5


@pytest.mark.parametrize(("name", "dark"), PAGES)
def test_lightness_goes_one_way_so_that_it_reads_in_grey_too(name: str, dark: bool) -> None:
    shades = [lightness(colour) for colour in along(SCALES[name], dark)]
    if SCALES[name].two_sided:
        shades = shades[len(shades) // 2 :]
        assert abs(shades[0] - shades[-1]) > 60
    steps = [b - a for a, b in itertools.pairwise(shades)]
    way = math.copysign(1, sum(steps))
    assert all(step * way > -0.3 for step in steps)  # a colour's parts are whole numbers
    assert abs(shades[-1] - shades[0]) > 60


@pytest.mark.parametrize("dark", [False, True])
def test_up_and_down_are_as_strong_as_each_other(dark: bool) -> None:
    for step in range(1, 101):
        up, down = (colours.diverging(sign * step / 100, dark=dark) for sign in (1, -1))
        assert abs(lightness(up) - lightness(down)) < 6
        assert up[0] > down[0]
        assert up[2] < down[2]
        assert colours.diverging(step / 20, 5.0, dark=dark) == up


@pytest.mark.parametrize("kind", BLIND)
@pytest.mark.parametrize("dark", [False, True])
def test_up_and_down_are_told_apart_without_red_or_green_cones(kind: str, dark: bool) -> None:
    for share in (0.3, 0.5, 0.75, 1.0):
        up, down = (seen(colours.diverging(s * share, dark=dark), kind) for s in (1, -1))
        blue = [colour[2] - colour[0] for colour in (up, down)]
        assert blue[1] - blue[0] > 40, (share, up, down)


def test_zero_is_the_page_itself() -> None:
    assert colours.diverging(0.0, 5.0) == colours.positive(0.0) == (255, 255, 255)
    zero = colours.diverging(0.0, dark=True)
    assert zero == colours.positive(0.0, dark=True)
    assert lightness(zero) < 12


def test_numbers_beyond_the_limit_stay_at_the_end_and_nan_is_grey() -> None:
    for scale, dark in itertools.product(SCALES.values(), (False, True)):
        assert scale(7, dark=dark) == scale(math.inf, dark=dark) == scale(1, dark=dark)
        assert scale(-7, dark=dark) == scale(-math.inf, dark=dark) == scale(-1, dark=dark)
        grey = scale(math.nan, dark=dark)
        assert max(grey) - min(grey) < 20
        assert grey not in along(scale, dark)
        assert scale(1.0, 0.0, dark=dark) == scale(0.0, dark=dark)


def test_a_style_has_the_colours_of_both_pages() -> None:
    style = colours.diverging.style(0.5)
    light, dark = colours.diverging(0.5), colours.diverging(0.5, dark=True)
    for colour in (light, dark):
        assert colours.css(colour) in style
        assert colours.ink(colour) in style
    assert style.index(colours.css(light)) < style.index("light-dark(")  # for older browsers


def test_a_legend_names_its_ends_and_the_unit() -> None:
    shown = re.sub(
        "<[^>]*>", "", legend(colours.diverging, -2.5, 2.5, digits=1, unit="<logits>", note="grey")
    )
    assert shown.split() == ["-2.5", "2.5", "&lt;logits&gt;;", "grey"]
    strip = legend(colours.diverging, 0.0, 2.5)
    assert colours.css(colours.diverging(0.0)) in strip
    assert colours.css(colours.diverging(1.0)) in strip
    assert colours.css(colours.diverging(-1.0)) not in strip


def test_a_map_as_a_list_begins_and_ends_where_the_map_does() -> None:
    found = colours.table(colours.sequential)
    assert len(found) == 256
    assert (found[0], found[-1]) == (colours.sequential(0), colours.sequential(1))
    assert colours.css((1, 171, 255)) == "#01abff"
