import struct
import zlib

import numpy
import pytest
import torch

from interpose.render import colours, letters, png
from interpose.render.labelled import Labelled


def decode(data: bytes) -> numpy.ndarray:
    """A PNG reader of its own, for files without filters: enough to read back what was written."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        (crc,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert crc == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, rest) == (8, [0, 0, 0])
    channels = {0: 1, 2: 3}[colour]
    lines = numpy.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=numpy.uint8)
    lines = lines.reshape(height, 1 + width * channels)
    assert not lines[:, 0].any()
    pixels = lines[:, 1:]
    return pixels if channels == 1 else pixels.reshape(height, width, 3)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (3, 5, 3), (40, 7, 3)])
def test_a_picture_reads_back_as_it_was_written(shape):
    pixels = numpy.random.default_rng(0).integers(0, 256, shape, dtype=numpy.uint8)
    assert numpy.array_equal(decode(png.encode(pixels)), pixels)


def test_a_view_with_strides_is_written_as_it_looks():
    pixels = numpy.arange(24, dtype=numpy.uint8).reshape(4, 6)
    assert numpy.array_equal(decode(png.encode(pixels.T)), pixels.T)


def test_plain_bytes_need_no_numpy():
    picture = memoryview(bytes(range(6))).cast("B", (2, 3))
    assert decode(png.encode(picture)).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_other_arrays_are_refused():
    with pytest.raises(ValueError) as caught:
        png.encode(numpy.zeros((2, 3, 4), dtype=numpy.uint8))
    assert str(caught.value) == (
        "a PNG needs bytes of shape [height, width] or [height, width, 3]; "
        "got shape [2, 3, 4] of format 'B'."
    )
    with pytest.raises(ValueError, match="of format 'd'"):
        png.encode(numpy.zeros((2, 3)))
    with pytest.raises(ValueError, match="at least one pixel; got 0 x 2"):
        png.encode(numpy.zeros((2, 0), dtype=numpy.uint8))


def shown(values, columns, **said):
    return Labelled(
        values=torch.tensor(values),
        labels={"layer": [str(row) for row in range(len(values))], "pos": columns},
        **said,
    )


def text_at(picture, text, ink=(27, 31, 36)):
    """Where a text stands in a picture drawn with points of two by two pixels: found by its own pattern."""
    inked = (picture[::2, ::2] == ink).all(-1)
    pattern = numpy.zeros((7, 6 * len(text)), dtype=bool)
    for x, y in letters.points(text):
        pattern[y, x] = True
    windows = numpy.lib.stride_tricks.sliding_window_view(inked, pattern.shape)
    return list(zip(*(windows == pattern).all((2, 3)).nonzero()))


def test_a_heat_map_has_its_colours_numbers_labels_legend_and_title():
    values = [[1.5, -3.0], [0.0, float("nan")]]
    picture = decode(png.picture(shown(values, ["one", "two"], what="logits"), "A title"))
    assert (picture[::2] == picture[1::2]).all()
    pixels = {tuple(pixel) for pixel in picture.reshape(-1, 3).tolist()}
    for value in (1.5, -3.0, 0.0, float("nan")):
        assert colours.diverging(value, 3.0) in pixels
    (title,) = text_at(picture, "A title")
    one, two = (text_at(picture, name)[0] for name in ("one", "two"))
    (corner,) = text_at(picture, "layer / pos")
    (legend,) = text_at(picture, "3.00 logits")
    assert title[0] < one[0] == two[0] == corner[0] < legend[0]
    assert corner[1] < one[1] < two[1]
    (low,) = text_at(picture, "-3.00", (255, 255, 255))
    assert one[0] < low[0] < legend[0]
    assert two[1] - 20 < low[1] < two[1] + 20
    # The rest of the picture is paper: nothing runs over the edge.
    assert (picture[:, -2:] == 255).all()
    assert (picture[-4:] == 255).all()


def test_long_labels_stand_upright_and_letters_beyond_ascii_are_boxes():
    columns = ["a longer label", "日本"]
    picture = decode(png.picture(shown([[0.1, 0.2]], columns)))
    turned = numpy.rot90(picture, -1)
    assert text_at(turned, columns[0])
    assert text_at(turned, "\u0301\u0301")  # what no letter is known for is a box
    assert not text_at(picture, columns[0])


def test_what_is_within_the_noise_is_grey_and_says_so():
    faint = torch.tensor([[True, False]])
    picture = decode(png.picture(shown([[0.1, 2.0]], ["a", "b"], faint=faint)))
    assert text_at(picture, "grey: within the noise floor", (0x57, 0x60, 0x6A))
    assert text_at(picture, "0.1", (0x57, 0x60, 0x6A))


def test_many_columns_have_narrow_cells_and_one_axis_is_a_column():
    wide = decode(png.picture(shown([[0.5] * 60], [str(n) for n in range(60)])))
    assert wide.shape[1] < 60 * 40
    assert not text_at(wide, "0.50", (0, 0, 0))
    one = Labelled(values=torch.tensor([1.0, -1.0]), labels={"head": ["0.1", "5.3"]}, what="x")
    assert text_at(decode(png.picture(one)), "5.3")
    with pytest.raises(ValueError, match="has one or two axes; here there are a, b, c"):
        png.picture(
            Labelled(values=torch.ones(1, 1, 1), labels={"a": ["0"], "b": ["0"], "c": ["0"]})
        )


def test_every_printable_letter_is_drawn_and_no_two_alike():
    drawn = {chr(code): frozenset(letters.points(chr(code))) for code in range(32, 127)}
    assert not drawn.pop(" ")
    assert all(4 <= len(points) <= 20 or sign in "'.-`," for sign, points in drawn.items())
    assert len(set(drawn.values())) == len(drawn) == 94
    assert all(0 <= x < 5 and 0 <= y < 7 for points in drawn.values() for x, y in points)
