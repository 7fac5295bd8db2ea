"""The little language of site names, apart from any model.

    fc1                     output of a module
    fc1.input               its input
    attn.input.hidden       one argument, by name (or .input[0], by place)
    lstm.output[1][0]       an element of what it returns
    cell#2                  its third call within one forward pass
    output, input           the model itself
    layer*.0.conv?, **.act  globs: `*` and `?` stay in one segment, `**` spans many

`[` is never a glob. Parsing knows no model; `tree.py` resolves against one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

Key = int | str
"""One step into a container: an index, or a key, field or argument name."""

# No pattern here has two ways to read a letter, so that each takes as long as a name is.
_STEP = re.compile(
    r"(?s)\[(-?[0-9]{1,9})\]|\[(?:'((?:\\.|[^'\\])*+)'|\"((?:\\.|[^\"\\])*+)\")\]|\.([^.\[\]#]+)"
)
_TAIL = re.compile(
    r"(?s)(?P<call>#[0-9]{1,9}(?![0-9]))?(?P<port>\.(?:input|output)(?=[.\[]|\Z))?(?P<steps>.*)\Z"
)
_ESCAPED = re.compile(
    r"(?s)\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U((?:0010|000[0-9a-f])[0-9a-f]{4})|(.))"
)
_SHORT = {"n": "\n", "r": "\r", "t": "\t", "\n": "", **{sign: sign for sign in "\\'\""}}


@dataclass(frozen=True, slots=True)
class Tail:
    """What follows a module path: which call, input or output, and which element of it."""

    call: int | None = None
    port: str = "output"
    leaf: tuple[Key, ...] = ()

    def __str__(self) -> str:
        call = "" if self.call is None else f"#{self.call}"
        port = "" if self.port == "output" and not self.leaf else f".{self.port}"
        return call + port + spell(self.leaf)


OUTPUT = Tail()
"""Whatever a module returns."""


@lru_cache(maxsize=4096)
def parse_tail(text: str) -> Tail | None:
    """Read what follows a module path, such as ``#1.output[0]``; None if it is no such thing."""
    match = _TAIL.match(text)
    if match is None:
        return None
    steps = match["steps"]
    if steps and match["port"] is None and not steps.startswith("["):
        return None
    leaf: list[Key] = []
    at = 0
    while at < len(steps):
        step = _STEP.match(steps, at)
        if step is None:
            return None
        number, single, double, name = step.groups()
        quoted = double if single is None else single
        leaf.append(int(number) if number else name if quoted is None else _unquoted(quoted))
        at = step.end()
    call = None if match["call"] is None else int(match["call"][1:])
    return Tail(call=call, port=(match["port"] or ".output")[1:], leaf=tuple(leaf))


def _unquoted(text: str) -> str:
    """What a text in quotes says, as Python writes it."""

    def one(found: re.Match[str]) -> str:
        code = found[1] or found[2] or found[3]
        return _SHORT.get(found[4], found[0]) if code is None else chr(int(code, 16))

    return _ESCAPED.sub(one, text)


def spell(leaf: tuple[Key, ...]) -> str:
    """Write a path into a container the way a user would: ``[1].logits['odd key']``."""
    steps = []
    for key in leaf:
        if isinstance(key, int):
            steps.append(f"[{key}]")
        else:
            steps.append(f".{key}" if key.isidentifier() else f"[{key!r}]")
    return "".join(steps)


def is_glob(text: str) -> bool:
    """Whether a string is a pattern rather than a name."""
    return "*" in text or "?" in text


@lru_cache(maxsize=1024)
def compile_glob(pattern: str) -> re.Pattern[str]:
    """Turn a glob over dotted names into a regular expression for ``fullmatch``.

    What stands between two stars is taken where it first comes, and for good (``(?>...)``): if a name fits in any way,
    it fits so, and no way is tried twice.
    """
    groups = [""]
    for segment in pattern.split("."):
        if segment == "**":
            groups.append("")
        else:
            groups[-1] += _BEGIN + _segment(segment)
    first, *others = groups
    if not others:
        return re.compile(first)
    *between, last = others
    inner = "".join(f"(?>{_ANY}*?{group})" for group in between if group)
    return re.compile(first + inner + (f"{_ANY}*{last}" if last else f"{_ANY}*+"))


_BEGIN = r"(?:\A|(?!\A)\.)"
"""Before each segment a dot, but none at the beginning of a name; so `**.conv` finds a top-level conv too."""
_ANY = rf"(?:{_BEGIN}[^.]++)"


def _segment(text: str) -> str:
    """One segment of a glob, to its end."""
    first, *others = (
        "".join("[^.]" if sign == "?" else re.escape(sign) for sign in part)
        for part in re.split(r"\*+", text)
    )
    inner = "".join(f"(?>[^.]*?{part})" for part in others[:-1])
    last = f"[^.]*{others[-1]}" if others and others[-1] else "[^.]*+" if others else ""
    return rf"{first}{inner}{last}(?=\.|\Z)"
