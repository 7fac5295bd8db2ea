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

import ast
import re
from dataclasses import dataclass
from functools import lru_cache

Key = int | str
"""One step into a container: an index, or a key, field or argument name."""

_STEP = re.compile(r"\[(-?\d+)\]|\[((['\"])(?:\\.|(?!\3).)*\3)\]|\.([^.\[\]#]+)", re.DOTALL)
_TAIL = re.compile(
    r"(?P<call>#\d+)?(?P<port>\.(?:input|output)(?=[.\[]|$))?(?P<steps>.*)$", re.DOTALL
)


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
        number, quoted, _, name = step.groups()
        leaf.append(int(number) if number else ast.literal_eval(quoted) if quoted else name)
        at = step.end()
    call = None if match["call"] is None else int(match["call"][1:])
    return Tail(call=call, port=(match["port"] or ".output")[1:], leaf=tuple(leaf))


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
    """Turn a glob over dotted names into a regular expression for ``fullmatch``."""
    out = ""
    while "**.**" in pattern:
        pattern = pattern.replace("**.**", "**")
    for number, segment in enumerate(pattern.split(".")):
        if segment == "**":
            # `**.` may be empty, so that `**.conv` finds a top-level conv too, and `a.**` finds a.
            out += r"(?:[^.]+(?:\.[^.]+)*)?" if number == 0 else r"(?:\.[^.]+)*"
            continue
        if number and not (number == 1 and pattern.startswith("**.")):
            out += r"\."
        elif number:
            out += r"(?:(?<=.)\.|^)"
        out += re.escape(segment).replace(r"\*", "[^.]*").replace(r"\?", "[^.]")
    return re.compile(out)
