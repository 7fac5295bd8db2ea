"""Letters of five by seven pixels, for pictures made without any library that draws.

`letters.txt` has a line for each: the letter, and its rows from top to bottom as bits. Other letters than those of
ASCII are empty boxes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

WIDE, HIGH = 6, 9  # what a letter takes, with the space to the next one and to the next line
_BOX = bytes([0x1F, 0x11, 0x11, 0x11, 0x11, 0x11, 0x1F])


def points(text: str) -> Iterator[tuple[int, int]]:
    """Where a line of text has ink: columns and rows, from the upper left."""
    known = _letters()
    for number, sign in enumerate(text):
        for y, row in enumerate(known.get(sign, _BOX)):
            for x in range(5):
                if row >> (4 - x) & 1:
                    yield WIDE * number + x, y


@functools.cache
def _letters() -> dict[str, bytes]:
    lines = Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines()
    return {line[0]: bytes.fromhex(line[2:]) for line in lines}
