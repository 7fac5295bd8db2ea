import struct
import zlib

import numpy
import pytest

from interpose.render import png


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
