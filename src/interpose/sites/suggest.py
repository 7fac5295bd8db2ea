"""What to say about a name that leads nowhere: how far it went, what is there, what was meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from interpose.files.schema import shown
from interpose.sites.grammar import OUTPUT

if TYPE_CHECKING:
    from interpose.sites.tree import ModuleTree


_LONG = 300
"""Letters of a name that errors show."""


def explain_missing(tree: ModuleTree, name: str) -> str:
    """The text of `SiteNotFound`: walk the name segment by segment and say where it went wrong."""
    module, path, rest = tree.walk(name)
    segment, mark, _ = re.match(r"([^.#\[]*)([.#\[]?)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    part = tree.children(module).get(segment)
    if mark and mark != "." and part is not None:
        # The module is there; what follows it is not a call, port or element.
        module, path = part, f"{path}.{segment}" if path else segment
        rest = rest[len(segment) :]
    where = repr(path) if path else tree.label
    if rest.startswith(("#", "[")):
        what = f"{where} is there, but {shown(rest, _LONG)} is none of #0 (its first call), .input, .output, [0]."
        hint = f"did you mean {path!r}?"
    elif segment in dict(module.named_parameters(recurse=False)):
        what = f"{segment!r} is a parameter of {where}; sites are what modules take and return."
        hint = f"read it: model.get_parameter({name!r})"
    else:
        what = _inventory(tree, module, where, segment)
        near = guess(tree, name)
        hint = f"did you mean {near!r}?" if near else "no name is close to it."
    return f"no site {shown(name, _LONG)} in {tree.label}.\n  {what}\n  {hint}   (list them: model.sites)"


def explain_nothing(tree: ModuleTree, asked: object) -> str:
    """The text of `NothingMatched`."""
    names = [tree.spell(path, OUTPUT) for path, _ in tree.modules()]
    some = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
    if isinstance(asked, str):
        what = f"the glob {shown(asked, _LONG)}"
        note = "\n  In a glob `*` stays within one dotted segment and `**` spans many."
    else:
        code = getattr(asked, "__code__", None)
        place = f" (line {code.co_firstlineno})" if code is not None else ""
        named = getattr(asked, "__name__", None)
        what = f"the filter {asked!r}" if named is None else f"the filter {named!r}{place}"
        note = ""
    return f"{what} matches no site in {tree.label}.\n  sites are: {some}{note}   (list them: model.sites)"


def guess(tree: ModuleTree, name: str) -> str | None:
    """The nearest right name: mend one segment at a time, else search all names."""
    text = name
    for _ in range(8):
        module, path, rest = tree.walk(text)
        segment, mark, after = re.match(r"([^.#\[]*)(.?)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
        if not segment or tree.leads_somewhere(text):
            break
        near = _close(segment, [*tree.children(module), "input", "output"])
        if near is None or near == segment:
            break
        text = (f"{path}." if path else "") + near + mark + after
    if text != name and tree.leads_somewhere(text):
        return text
    names = [path for path, _ in tree.modules() if path]
    ending = [path for path in names if path.endswith(f".{name}")]
    return ending[0] if ending else _close(name, names)


def _close(text: str, choices: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(text, list(choices), n=1)
    return near[0] if near else None


def _inventory(tree: ModuleTree, module: nn.Module, where: str, segment: str) -> str:
    children = list(tree.children(module))
    if children and all(child.isdigit() for child in children):
        return f"{where} has {len(children)} entries (0..{len(children) - 1}), no {shown(segment, _LONG)}."
    if children:
        more = f", ... ({len(children)} in all)" if len(children) > 10 else ""
        return f"{where} has: {', '.join(children[:10])}{more}; and input, output"
    return f"{where} is a {type(module).__name__} with no parts; it has: input, output"
