"""PNG files from 8-bit arrays, with zlib and struct alone."""

from __future__ import annotations

import struct
import zlib
from typing import Any

_COLOUR_TYPE = {1: 0, 3: 2}


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


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
