"""`at`: one language for places, to read and to write. What it means of a model, and of a value there.

A selector is plain data, so it is made without a model. `select_in` finds its sites in one, `find`
(in `blocks.py`) the part of a value that is meant; `cut` and `put` read and write that part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from interpose import names
from interpose.edits.blocks import check_axes, find
from interpose.edits.expressions import written
from interpose.edits.positions import MOST
from interpose.edits.saving import Saved
from interpose.engine.points import HookPoint
from interpose.errors import EditShapeError, NothingMatched, NothingSelected
from interpose.models.selection import entries
from interpose.sites.grammar import is_glob
from interpose.sites.tree import Filter, ModuleTree, Site

Numbers = int | slice | Sequence[int] | Tensor
"""Some of a row of things: one (from the end, if negative), several, a slice, or a mask."""
Positions = Numbers | str | Sequence[str]
"""Positions in the whole text, counted from its first token (from the end, if negative), or texts in it."""
Layers = int | slice | Sequence[int] | str


@dataclass(frozen=True, eq=False, repr=False)
class at(Saved):
    """A place: which sites, and which part of each value. The same words for reading and for writing.

    ```python
    there = ip.at("z", layer=[3, 4], head=5, pos=" Paris")
    logits, cache = model.run_with_cache(text, names_filter=there)  # this part alone, [batch, n, 1, d_head]
    model.run_with_hooks(other, hooks=[ip.patch(there, cache)])     # written to the same place
    ```

    Args:
        site: a kind (``z``), a name, a glob, a regex, a callable on names, or a list of these.
        layer: a number, several, a range, a slice, or ``all``.
        head: which heads.
        neuron: which entries of the last axis; of an image, which channels.
        pos: positions in the text: numbers, a slice, a mask [pos] or [batch, pos], or a text that is
            looked for in each row of the batch.
        occurrence: ``all`` places where a text is, the ``first`` or the ``last``.
        rows: which rows of the batch.
        phase: ``prompt`` or ``generated``.
        exclude: what is not meant: another selector, a dictionary of the same words, or several.
        at: an index into what the others leave, as in ``value[at]``.
    """

    site: Filter = None
    at: Any = field(default=..., kw_only=True)
    layer: Layers | None = field(default=None, kw_only=True)
    head: Numbers | None = field(default=None, kw_only=True)
    neuron: Numbers | None = field(default=None, kw_only=True)
    pos: Positions | None = field(default=None, kw_only=True)
    occurrence: str = field(default="all", kw_only=True)
    rows: Numbers | None = field(default=None, kw_only=True)
    phase: str | None = field(default=None, kw_only=True)
    exclude: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        inner: Any = self.site
        if isinstance(inner, at):
            vars(self).update(vars(merged(inner, vars(self))))
        if isinstance(self.site, (list, tuple)) and any(isinstance(s, at) for s in self.site):
            raise TypeError("a selector is one place; give one edit or hook for each.")
        for name in ("layer", "head", "neuron", "pos", "rows"):
            vars(self)[name] = _plain(vars(self)[name])
        if self.exclude is not None:
            given = self.exclude if isinstance(self.exclude, (list, tuple)) else [self.exclude]
            vars(self)["exclude"] = tuple(_exclusion(one) for one in given)
        self._check()

    def _check(self) -> None:
        if self.phase not in (None, "prompt", "generated"):
            raise ValueError(f"{self.label}: phase is 'prompt' or 'generated'.")
        if self.occurrence not in ("all", "first", "last"):
            raise ValueError(f"{self.label}: occurrence is 'all', 'first' or 'last'.")
        for name in ("layer", "head", "neuron", "pos", "rows"):
            given = getattr(self, name)
            if isinstance(given, str):
                right = bool(given) and (name == "pos" or (name, given) == ("layer", "all"))
            else:
                right = given is None or isinstance(given, (int, slice, Sequence, Tensor))
            if not right or isinstance(given, (bool, bytes)):
                words = {"layer": "'all'", "pos": "a text"}.get(name, "a mask")
                raise TypeError(
                    f"{self.label}: {name} is a number, several, a slice or {words}; got {given!r}."
                )
            if isinstance(given, range) and len(given) > MOST:
                raise ValueError(
                    f"{self.label}: {name} is a range of {len(given)} numbers; a slice may be as long."
                )
            if isinstance(given, (Sequence, Tensor)) and not (
                given.numel() if isinstance(given, Tensor) else len(given)
            ):
                raise NothingSelected(f"{self.label}: {name} is empty, so it selects nothing.")

    _is_exclusion = False

    @property
    def label(self) -> str:
        """What errors call it: the edit it belongs to, or itself."""
        return str(vars(self).get("_label") or repr(self))

    def __repr__(self) -> str:
        return written(self, short=True)

    # Sites.

    @property
    def narrows(self) -> bool:
        """Whether it means less than whole values."""
        words = ("head", "neuron", "pos", "rows", "phase")
        inner = any(ex.narrows for ex in self.exclude or ())
        return inner or self.at is not ... or any(getattr(self, w) is not None for w in words)

    def select_in(self, tree: ModuleTree) -> list[tuple[Site, bool]]:
        """Its sites in a model, each with whether it was named outright."""
        found: dict[str, tuple[Site, bool]] = {}
        for asked in self.site if isinstance(self.site, list) else [self.site]:
            for site, outright in _in_layers(tree, asked, self.layer, self.label):
                found.setdefault(site.name, (site, outright))
        gone = [ex.reach(tree) for ex in self.exclude or () if not ex.narrows]
        left = [
            (replace(site, part=self if self.narrows else None), outright)
            for site, outright in found.values()
            if not any(speaks_of(site.canonical) for speaks_of in gone)
        ]
        if not left:
            shown = ", ".join(list(found)[:6]) + (", ..." if len(found) > 6 else "")
            raise NothingMatched(f"{self.label} excludes every site that it selects: {shown}.")
        for site, _ in left:
            check_axes(self, site.name, site.axes)
        beside: at | None = vars(self).get(
            "_beside"
        )  # where a condition is looked at, before the edit
        if beside is not None:
            left = [(replace(s, part=beside), True) for s, _ in beside.select_in(tree)] + left
        return left

    def covers(self, canonical: str, tree: ModuleTree) -> bool:
        """As an exclusion: whether it speaks of a site."""
        return self.reach(tree)(canonical)

    def reach(self, tree: ModuleTree) -> Callable[[str], bool]:
        """As an exclusion: what tells whether it speaks of a site; it looks through the model once."""
        layers: set[int | None] | None = None
        if self.layer is not None:
            most = max((number for number in _numbers(tree) if number is not None), default=-1) + 1
            layers = set(_layers(self.layer, most, self.label))
        known = None if self.site is None else {s.canonical for s, _ in tree.select(self.site)}
        return lambda canonical: (
            (layers is None or layer_of(canonical) in layers)
            and (known is None or canonical in known)
        )

    # Values.

    def cut(self, value: Tensor, hook: HookPoint) -> Tensor | None:
        """The part of a value that it means, every axis kept; None if this pass has nothing of it."""
        places = find(self, value, hook)
        if places is None:
            return None
        if len(places.blocks) > 1 or places.spared is not None:
            counts = [block.count for block in places.blocks]
            why = (
                f"rows have {' and '.join(map(str, counts))} of the positions"
                if len(counts) > 1
                else "what it excludes is a corner of what it selects"
            )
            raise NothingSelected(
                f"{self.label} is not a rectangle of {hook.name!r}: {why}, so it can be written to and "
                "not read. Say occurrence='first' or 'last', or read the whole value."
            )
        block = places.blocks[0]
        part = block.take(value)
        if self.at is not ...:
            return part[self.at]
        chosen = block.by_row if block.by_row is not None else block.index.get(block.pos)  # type: ignore[arg-type]
        if chosen is not None and block.pos is not None:
            hook.picked = chosen + hook.window(value.shape, block.pos).first
        return part

    def put(self, value: Tensor, new: Tensor, hook: HookPoint) -> Tensor:
        """The value with that part replaced."""
        places = find(self, value, hook)
        assert places is not None  # it was read before
        block = places.blocks[0]
        part = block.take(value)
        if self.at is not ...:
            whole = part.clone()
            part = part[self.at]
        if not isinstance(new, Tensor) or new.shape != part.shape:
            shape = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
            raise EditShapeError(
                f"a hook returned {shape}; {self.label} selects {tuple(part.shape)} of {hook.name!r}."
            )
        if self.at is not ...:
            whole[self.at] = new
            new = whole
        return block.put(value, new)


def _plain(given: Any) -> Any:
    """Numbers and arrays of NumPy as Python's and torch's."""
    if isinstance(given, (int, str, Tensor)) or given is None:
        return given
    if hasattr(given, "__array__"):
        return torch.as_tensor(given) if getattr(given, "ndim", 0) else int(given)
    return int(given) if hasattr(given, "__index__") else given


FIELDS = tuple(option.name for option in fields(at) if option.name != "site")
_DEFAULTS = {option.name: option.default for option in fields(at)}


def merged(where: at, given: Mapping[str, Any]) -> at:
    """A selector with other words beside it: those that are given take the place of its own."""
    said = {name: given[name] for name in FIELDS if given[name] is not _DEFAULTS[name]}
    return replace(where, **said)


class _Exclusion(at):
    _is_exclusion = True


def _exclusion(given: Any) -> at:
    if isinstance(given, at):
        given = {name: getattr(given, name) for name in ("site", *FIELDS)}
    if not isinstance(given, Mapping):
        raise TypeError(f"exclude is ip.at(...) or a dictionary of its words; got {given!r}.")
    unknown = set(given) - {"site", *FIELDS}
    if unknown:
        raise TypeError(f"exclude has no {unknown.pop()!r}; it has site, {', '.join(FIELDS)}.")
    made = _Exclusion(**given)
    if made.at is not ... or made.exclude is not None:
        raise TypeError("exclude takes no index and no exclusions of its own.")
    if made.site is None and made.layer is None and not made.narrows:
        raise TypeError("an exclusion without a word would exclude everything.")
    return made


def layer_of(canonical: str) -> int | None:
    """The first number in a name: 5 for ``blocks.5.attn``."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|#|$)", canonical)
    return None if found is None else int(found[1])


def _numbers(tree: ModuleTree) -> Iterable[int | None]:
    blocks: Callable[..., int] | None = getattr(tree, "blocks", None)
    if blocks is not None:
        return range(blocks() or blocks("decoder."))
    return [layer_of(path) for path, _ in tree.modules()]


def _layers(layer: Layers, count: int, label: str) -> list[int]:
    """Layers counted from the front."""
    if layer == "all":
        return list(range(count))
    if isinstance(layer, slice):
        return list(range(count))[layer]
    try:
        return sorted(entries(layer, count, "layer", "the model"))
    except IndexError as error:
        raise IndexError(f"{label}: {error}") from None


def _in_layers(
    tree: ModuleTree, sites: Any, layer: Layers | None, label: str
) -> list[tuple[Site, bool]]:
    if layer is None:
        return tree.select(sites)
    is_kind = isinstance(sites, str) and not is_glob(sites) and not names.looks_semantic(sites)
    if is_kind and tree.spelling is not None:
        count = len(list(_numbers(tree)))
        if not count:
            return tree.select(sites)  # which says where layers are
        numbers = _layers(layer, count, label)
        if layer != "all" and not isinstance(layer, slice):
            return [pair for number in numbers for pair in tree.select((sites, number))]
        found = tree.select(sites)
        return [pair for pair in found if layer_of(pair[0].canonical) in numbers]
    found = tree.select(sites)
    there = {layer_of(site.canonical) for site, _ in found} - {None}
    if not there:
        raise IndexError(f"{label}: {sites!r} is in no numbered layer. Leave layer= out.")
    numbers = _layers(layer, max((n for n in there if n is not None), default=-1) + 1, label)
    missing = set() if isinstance(layer, (str, slice)) else set(numbers) - there
    left = [pair for pair in found if layer_of(pair[0].canonical) in numbers]
    if missing or not left:
        known = ", ".join(map(str, sorted(n for n in there if n is not None)))
        raise NothingMatched(
            f"{label}: {sites!r} has sites in layers {known or 'without numbers'}."
        )
    return left
