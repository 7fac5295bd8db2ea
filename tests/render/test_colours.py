import math

from interpose.render import colours


def luminance(colour):
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_the_sequential_map_grows_brighter_all_the_way():
    shades = [luminance(colour) for colour in colours.table(colours.sequential)]
    assert shades == sorted(shades)
    assert shades[-1] - shades[0] > 150


def test_values_outside_the_range_stay_at_the_ends():
    assert colours.sequential(-3) == colours.sequential(0) == colours.sequential(math.nan)
    assert colours.sequential(7) == colours.sequential(1)


def test_the_diverging_map_is_white_at_zero_red_above_and_blue_below():
    assert colours.diverging(0.0, 5.0) == (255, 255, 255)
    red, green, blue = colours.diverging(2.5, 5.0)
    assert red > green
    assert red > blue
    red, green, blue = colours.diverging(-2.5, 5.0)
    assert blue > green
    assert blue > red
    assert colours.diverging(1.0, 0.0) == (255, 255, 255)


def test_ink_can_be_read_on_its_background():
    for step in range(101):
        background = colours.diverging(step / 50 - 1)
        ink = 255 if colours.ink(background) == "#ffffff" else 0
        assert abs(luminance(background) - ink) > 100


def test_css_writes_six_hexadecimal_digits():
    assert colours.css((1, 171, 255)) == "#01abff"
