"""A ``with`` block that keeps values: of all forward passes inside it, joined where they go on from one another."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from interpose.engine.cache import Cache
from interpose.engine.capture import Cut, other_names
from interpose.engine.hooks import Engine, Hook
from interpose.engine.listeners import Capturing
from interpose.engine.scope import Binding, Scope
from interpose.sites.tree import Filter, Site
from interpose.taps import values
from interpose.taps.context import frame_of

if TYPE_CHECKING:
    from interpose.engine.model import Model


class Piece(NamedTuple):
    """One value, and the position in the whole text where it begins."""

    site: Site
    leaf: values.Leaf
    offset: int
    tensor: Tensor
    generated: bool = False
    """Whether it was made while text was being generated."""
    length: int | None = None
    """How many positions its forward pass had, where only a part of the value is kept."""


class Recording(Scope):
    """A scope that also keeps the values of some sites, over several forward passes."""

    def __init__(
        self, model: Model, wanted: Filter, hooks: Sequence[Hook] = (), *, cut: Cut
    ) -> None:
        super().__init__(model, hooks)
        self.cut = cut
        self.wanted = wanted
        self.pieces: dict[str, list[Piece]] = {}
        self.bindings.append(Binding(Engine("the cache"), "fwd", self._reads, model.changes))
        self._cache = Cache(spelling=model.tree.spelling)

    def _reads(self) -> list[Capturing]:
        return [
            Capturing(self.model, site, self, outright=outright, sink=self)
            for site, outright in self.model.select(self.wanted)
        ]

    def __enter__(self) -> Cache:  # type: ignore[override]
        super().__enter__()
        return self._cache

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._fill()
        super().__exit__(kind, error, trace)
        self.bindings.clear()

    def keep(
        self,
        site: Site,
        name: str,
        call: int | None,  # noqa: ARG002
        leaf: values.Leaf,
        part: Tensor,
    ) -> None:
        """Take one value."""
        frame = frame_of(self.model.root)
        tokens = None if site.part is None else frame.given.get("input_ids")
        length = None if tokens is None else tokens.shape[-1]
        piece = Piece(site, leaf, frame.offset, part, frame.prompt is not None, length)
        self.pieces.setdefault(name, []).append(piece)

    def done(self, listener: Capturing) -> None:
        """Nothing: it goes on."""

    def _fill(self) -> None:
        for name, pieces in self.pieces.items():
            site, leaf = pieces[0].site, pieces[0].leaf
            whole = joined(pieces)
            keys = [name] if len(whole) == 1 else [f"{name}#{i}" for i in range(len(whole))]
            self._cache._values.update(zip(keys, whole))
            if len(whole) > 1:
                self._cache._calls[name] = keys
            for other in other_names(self.model.tree, site, name, leaf):
                self._cache._aliases.setdefault(other, name)
        self.pieces = {}


def joined(pieces: Sequence[Piece]) -> list[Tensor]:
    """Values of one site as sequences: a piece that begins where positions are known goes on with them."""
    axes = pieces[0].site.axes
    axis = next((axes.index(name) for name in ("pos", "query") if name in axes), None)
    whole: list[list[Piece]] = []
    for piece in pieces:
        if piece.offset == 0 or axis is None or not whole:
            if axis is not None and whole and _is_next(whole[-1], piece, axis):
                whole.pop()  # without a KV cache each pass repeats the text so far
            whole.append([piece])
        else:
            whole[-1].append(piece)
    return [_cat(parts, axis, axes) for parts in whole]


def _is_next(before: list[Piece], after: Piece, axis: int) -> bool:
    """Whether a pass is the next step of generating a text, over all of it."""
    lengths = [piece.length or piece.tensor.shape[axis] for piece in (before[0], after)]
    return after.generated and len(before) == 1 and lengths[1] == lengths[0] + 1


def _cat(parts: list[Piece], axis: int | None, axes: tuple[str, ...]) -> Tensor:
    if axis is None or len(parts) == 1:
        return parts[0].tensor
    found = [part.tensor for part in parts]
    if "key" in axes:
        # No weight lies on keys that a query did not see: later ones, and those that a sliding
        # cache has dropped at the left.
        ends = [part.offset + part.tensor.shape[axis] for part in parts]
        left = [max(0, end - value.shape[-1]) for end, value in zip(ends, found)]
        widest = max(ends[-1], *(value.shape[-1] for value in found))
        found = [
            torch.nn.functional.pad(value, (gap, widest - gap - value.shape[-1]))
            for gap, value in zip(left, found)
        ]
    return torch.cat(found, dim=axis)
