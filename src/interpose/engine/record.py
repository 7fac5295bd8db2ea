"""A ``with`` block that keeps values: of all forward passes inside it, joined where they go on from one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interpose.engine.cache import Cache
from interpose.engine.capture_run import Cut, other_names
from interpose.engine.hooks import Engine, Hook
from interpose.engine.listeners import Capturing
from interpose.engine.points import HookPoint, Window
from interpose.engine.scope import Binding, Scope
from interpose.errors import Unsupported
from interpose.sites.axes import TEXT, key_axis
from interpose.sites.tree import Filter, Site
from interpose.taps import values
from interpose.taps.context import Whereabouts

if TYPE_CHECKING:
    from interpose.engine.model import Model


@dataclass(slots=True)
class Piece:
    """What was kept of one value, and the positions it has: those of its window, or just some that were picked."""

    tensor: Tensor
    window: Window
    keys: Window | None = None
    """The positions along its axis of keys, where it has one for itself."""
    picked: Tensor | None = None
    whole: bool = True

    def until(self, limit: int, axis: int) -> Piece | None:
        """The part of it before a position."""
        if self.window.end <= limit:
            return self
        if self.window.first >= limit:
            return None
        count = limit - self.window.first
        if not self.whole:
            counts = [] if self.picked is None else (self.picked < limit).sum(-1).unique().tolist()
            if len(counts) != 1:
                raise Unsupported(
                    f"positions from {limit} on were taken back (candidates that were rejected), and which of "
                    "the kept ones these are is not known. Record whole values, and cut them afterwards."
                )
            count = counts[0]
        length = limit - self.window.first
        part = self.tensor.narrow(axis, 0, count)
        return replace(self, tensor=part, window=self.window._replace(length=length))


@dataclass(slots=True)
class Text:
    """The values of one site (at one call of its module in each pass) over one text, piece by piece."""

    site: Site
    leaf: values.Leaf
    call: int | None
    axis: int | None
    pieces: list[Piece] = field(default_factory=list)
    where: Whereabouts = field(default_factory=Whereabouts)
    """Where the last pass was."""

    def continued(self, point: HookPoint) -> Text | None:
        """What a pass goes on with: this text, another that begins like it, or (None) one of its own."""
        before, now = self.where, point.where
        same = now.text is before.text
        if point.offset == 0 and not (same and now.prompt is not None):
            return None
        if same or point.offset >= (before.offset or 0) + (before.length or 0):
            return self
        return replace(self, pieces=list(self.pieces))

    def takes(self, part: Tensor) -> bool:
        """Whether a part can go on from it: as many rows, or more where one row began for all."""
        before = self.pieces[-1].tensor.shape[:1] if self.pieces and self.axis else (1,)
        return before in ((1,), part.shape[:1])

    def end_at(self, limit: int) -> None:
        """Forget what is known from a position on: it comes anew, or was taken back."""
        assert self.axis is not None
        found = [piece.until(limit, self.axis) for piece in self.pieces]
        self.pieces = [piece for piece in found if piece is not None]

    def settle(self, model: Model) -> None:
        """The text is complete: of its last pass, some positions may have been taken back."""
        kept = model.kept_of(self.where.text)
        self.where = self.where._replace(text=None)  # which may hold a whole cache
        if kept is not None and self.axis is not None and (self.where.offset or 0) <= kept:
            if self.pieces[-1].window.sequence in TEXT:
                self.end_at(kept)

    def joined(self) -> Tensor:
        """All of it as one tensor."""
        found = [piece.tensor for piece in self.pieces]
        end = self.pieces[-1].window.end
        unseen = torch.finfo(found[0].dtype).min if self.site.kind == "attn_scores" else 0.0
        for at, piece in enumerate(self.pieces):
            if piece.keys is not None and piece.keys.sequence in TEXT:
                # No weight lies on keys that a query did not see: later ones, and those that a
                # sliding cache has dropped at the left.
                first = piece.keys.first
                sizes = (first, end - first - found[at].shape[-1])
                if any(sizes):
                    found[at] = torch.nn.functional.pad(found[at], sizes, value=unseen)
        if len(found) == 1:
            return found[0]
        if self.axis:  # what began in one row is that of all
            found = [part.expand(found[-1].shape[:1] + part.shape[1:]) for part in found]
        return torch.cat(found, dim=self.axis or 0)


class Recording(Scope):
    """A scope that also keeps the values of some sites, over several forward passes."""

    def __init__(
        self, model: Model, wanted: Filter, hooks: Sequence[Hook] = (), *, cut: Cut
    ) -> None:
        super().__init__(model, hooks)
        self.cut = cut
        self.wanted = wanted
        self.texts: dict[str, list[Text]] = {}
        self.bindings.append(Binding(Engine("the cache"), "fwd", self._reads, model.changes))
        self._cache = Cache(spelling=model.tree.speller())

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
        try:
            self._fill()
        finally:
            super().__exit__(kind, error, trace)
            self.bindings.clear()

    def keep(
        self,
        site: Site,
        name: str,
        leaf: values.Leaf,
        part: Tensor,
        point: HookPoint,
        value: Tensor,
    ) -> None:
        """Take a part of one value."""
        texts, axis = self.texts.setdefault(name, []), point.pos_axis
        if axis is None:
            alone = [Piece(part, Window(0, 0, 0, None))]
            texts.append(Text(site, leaf, point.call, axis, alone))
            return
        shape, seen = value.shape, key_axis(point.axes)
        window = point.window(shape, axis)
        whole = part.ndim == len(shape) and part.shape[axis] == shape[axis]
        if whole and window.length < shape[axis]:
            part = part.narrow(axis, 0, window.length)  # the rest is a static cache's room
        keys = None
        if seen is not None and part.ndim == len(shape) and part.shape[seen] == shape[seen]:
            keys = point.window(shape, seen)
        now = point.where.text
        same = (x for x in reversed(texts) if x.call == point.call and x.where.text is now)
        before = next(same, None) or next((x for x in texts[::-1] if x.call == point.call), None)
        text = None if before is None or not before.takes(part) else before.continued(point)
        if before is None or text is not before:
            if before is not None and before.where.prompt is None:
                before.settle(self.model)
            text = text or Text(site, leaf, point.call, axis)
            texts.append(text)
        text.where = point.where
        text.end_at(window.first)
        picked = point.picked
        if picked is not None and picked.shape[-1] != part.shape[axis]:
            picked = None  # cut again
        text.pieces.append(Piece(part, window, keys, picked, whole))

    def done(self, listener: Capturing) -> None:
        """Nothing: it goes on."""

    def _fill(self) -> None:
        for name, texts in self.texts.items():
            for text in texts:
                text.settle(self.model)
            whole = [text.joined() for text in texts if text.pieces]
            keys = [name] if len(whole) == 1 else [f"{name}#{i}" for i in range(len(whole))]
            self._cache._values.update(zip(keys, whole))
            if len(whole) > 1:
                self._cache._calls[name] = keys
            for other in other_names(self.model.tree, texts[0].site, name, texts[0].leaf):
                self._cache._aliases.setdefault(other, name)
        self.texts = {}
