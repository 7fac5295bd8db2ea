r"""What makes a text safe to show, one function for each medium; everything that is drawn or printed goes through one.

Tokens, names and texts come from models and files: a label may hold markup, a terminal's control sequences, a sign that
XML forbids or a spreadsheet's formula. Each is shown as what it is (``\x1b`` for an escape), and none is obeyed.
"""

from __future__ import annotations

import html as _html
import re

# What makes a spreadsheet take a cell for a formula; the last four are as wide as Chinese letters.
_FORMULA = re.compile("[=+\\-@\t\r\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?inf|nan")


def html(text: str) -> str:
    """A text inside HTML, also inside an attribute in quotes."""
    return _html.escape(_shown(text, keep="\n\t"))


def svg(text: str) -> str:
    """A text inside SVG, which is XML: signs that XML has no way to write are shown as what they are."""
    return _html.escape(_shown(text, keep="\n\t"))


def terminal(text: str, *, lines: bool = False) -> str:
    """A text in a terminal: control characters and escape sequences are shown, not obeyed.

    Args:
        text: what is to be shown.
        lines: whether line ends stay line ends, as in a text of its own; in a label they are shown.
    """
    return _shown(text, keep="\n" if lines else "")


def csv(cell: object) -> str:
    """A cell of a CSV file, in quotes where it needs them; no spreadsheet takes a text for a formula."""
    text = "" if cell is None else str(cell)
    if _FORMULA.match(text) and not _NUMBER.fullmatch(text):
        text = f"'{text}"
    if any(sign in text for sign in ',"\n\r') or text != text.strip():
        text = '"{}"'.format(text.replace('"', '""'))
    return text


def _shown(text: str, keep: str) -> str:
    """A text with unseen signs written out: control characters, marks that turn the direction, surrogates."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or sign in keep or _blank(sign) else repr(sign)[1:-1]
        for sign in text
    )


def _blank(sign: str) -> bool:
    """Spaces of other widths do no harm; what else cannot be printed is spelt out."""
    return sign.isspace() and ord(sign) > 0x9F and sign not in "\u2028\u2029"
