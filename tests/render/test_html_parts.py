from base64 import b64decode

from interpose.render.html import Markup, bar, html_table, image


def test_cells_are_escaped_unless_they_are_markup():
    shown = html_table(("a",), [("<b>",), (Markup("<i>x</i>"),)])
    assert "&lt;b&gt;" in shown
    assert "<i>x</i>" in shown


def test_a_bar_is_as_long_as_its_share_and_never_longer_than_its_place():
    assert "width:60px" in bar(0.5, width=120)
    assert "width:120px" in bar(7.0, width=120)
    assert "width:0px" in bar(-1.0, width=120)
    assert "&lt;" in bar(0.5, "<1")


def test_an_image_travels_inside_the_page():
    shown = image(b"\x89PNG", width=30, alt='a "map"')
    data = shown.split("base64,")[1].split('"')[0]
    assert b64decode(data) == b"\x89PNG"
    assert "width:30px" in shown
    assert 'alt="a &quot;map&quot;"' in shown
