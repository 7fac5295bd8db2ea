"""What to say about a name that leads nowhere: how far it went, what is there, what was meant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from interpose.explain.words import hint, nearest, some
from interpose.files.schema import shown
from interpose.names import Speller, kinds, layer_of, of_transformers, short_form

LONG = 300
"""Letters of a name that errors show."""
ModuleTree = Any  # of `interpose.sites`, which stands above


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
        what = f"{where} is there, but {shown(rest, LONG)} is none of #0 (its first call), .input, .output, [0]."
        last = f"did you mean {path!r}?"
    elif segment in dict(module.named_parameters(recurse=False)):
        what = f"{segment!r} is a parameter of {where}; sites are what modules take and return."
        last = f"read it: model.get_parameter({name!r})"
    else:
        what = _inventory(tree, module, where, segment)
        near = guess(tree, name)
        last = f"did you mean {near!r}?" if near else "no name is close to it."
        last = (not (near or path) and of_transformers(name)) or last
    return f"no site {shown(name, LONG)} in {tree.label}.\n  {what}\n  {last}   (list them: model.sites)"


def explain_nothing(tree: ModuleTree, asked: object) -> str:
    """The text of `NothingMatched`."""
    there = some(tree.place(path, module).name for path, module in tree.modules())
    if isinstance(asked, str):
        what = f"the glob {shown(asked, LONG)}"
        note = "\n  In a glob `*` stays within one dotted segment and `**` spans many."
    else:
        code = getattr(asked, "__code__", None)
        place = f" (line {code.co_firstlineno})" if code is not None else ""
        named = getattr(asked, "__name__", None)
        what = f"the filter {asked!r}" if named is None else f"the filter {named!r}{place}"
        note = ""
    return f"{what} matches no site in {tree.label}.\n  sites are: {there}{note}   (list them: model.sites)"


def guess(tree: ModuleTree, name: str) -> str | None:
    """The nearest right name: mend one segment at a time, else search all names."""
    text = name
    for _ in range(8):
        module, path, rest = tree.walk(text)
        segment, mark, after = re.match(r"([^.#\[]*)(.?)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
        if not segment or tree.leads_somewhere(text):
            break
        near = nearest(segment, [*tree.children(module), "input", "output"])
        if near is None or near == segment:
            break
        text = (f"{path}." if path else "") + near + mark + after
    if text != name and tree.leads_somewhere(text):
        return text
    names = [path for path, _ in tree.modules() if path]
    ending = [path for path in names if path.endswith(f".{name}")]
    return ending[0] if ending else nearest(name, names)


def _inventory(tree: ModuleTree, module: nn.Module, where: str, segment: str) -> str:
    children = list(tree.children(module))
    if children and all(child.isdigit() for child in children):
        return f"{where} has {len(children)} entries (0..{len(children) - 1}), no {shown(segment, LONG)}."
    if children:
        more = f", ... ({len(children)} in all)" if len(children) > 10 else ""
        return f"{where} has: {', '.join(children[:10])}{more}; and input, output"
    return f"{where} is a {type(module).__name__} with no parts; it has: input, output"


def explain_attribute(model: Any, name: str) -> str:
    """The text of an AttributeError: what neither a model nor its module has."""
    said = f"neither {type(model).__name__} nor {type(model.module).__name__} has {name!r}"
    if name.startswith("_"):
        return said
    import interpose

    if name in interpose.__all__:
        return f"{said}; it is a function: ip.{name}(model, ...)"
    missing = "" if hasattr(type(model), "cfg") else of_transformers(name)
    if missing:
        return f"{said}.\n  {missing}"
    module = model.module
    parts = (*dir(type(model)), *module._modules, *vars(module), *dir(type(module)))
    public = (word for word in parts if word[0] != "_")
    return said + hint(name, public, lambda word: f"model.{word}")


def explain_not_kept(speller: Speller | Any, key: str, kept: Sequence[str]) -> str:
    """Why a value is not among those that a run kept, and what to write.

    Args:
        speller: the names that are known of the model.
        key: the canonical spelling of what was asked for.
        kept: what there is.
    """
    stem = key.removesuffix("_grad")
    if not isinstance(speller, Speller):
        near = nearest(stem, kept, 0.7)
        meant = "" if near is None else f"Did you mean {near!r}? "
        return f"{meant}A run keeps what its names_filter says."
    where = layer_of(stem)
    count = 0 if where is None else speller.blocks(where[0])
    if stem in speller.absent:
        return f"The model has no such site: {speller.absent[stem]}."
    if stem in speller.sites and stem not in kept:
        why = "The run did not keep it" if speller.sites[stem] else "It is kept only when named"
        return f"{why}: run_with_cache(..., names_filter=[{short_form(stem)}, ...])."
    kind = stem.removeprefix("hook_")
    if where is None and kind in kinds():
        return f"It is in every block; say which: cache[{kind!r}, 3], or -1 for the last."
    if where is not None and count and not 0 <= where[1] < count:
        return f"The model has layers 0 to {count - 1}."
    near = nearest(stem, [*kept, *(name for name in speller.sites if name not in kept)])
    return "" if near is None else f"Did you mean {short_form(near)}?"
