"""`knockout`: keep queries from seeing keys, at the scores before the softmax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from interpose.edits.blocks import find
from interpose.edits.edit import Edit, Spot
from interpose.edits.positions import choose, wanted_positions
from interpose.edits.selector import Layers, Positions, at
from interpose.engine.points import HookPoint
from interpose.errors import EditError, NothingSelected
from interpose.sites.axes import key_axis
from interpose.sites.tree import Filter


@dataclass(frozen=True, eq=False, repr=False)
class knockout(Edit):
    """Cut edges of attention: ``ip.knockout(3, query=-1, key=" Paris")``. Queries no longer see keys.

    The scores of these edges become -inf before the softmax, so the rest of the pattern still sums to
    one. A query that would see nothing at all is an error. With ``strength`` below 1 what the softmax
    makes of an edge is multiplied by ``1 - strength`` before it is normalised.

    Args:
        layer: which layers; by default all.
        query: positions that look, as ``pos`` in `ip.at`; by default all.
        key: positions that are looked at; by default all, so say at least one of the two.
        head: which heads; by default all.
    """

    site: Filter = field(default="attn_scores", kw_only=True)
    layer: Layers | None = field(default=None, kw_only=False)
    query: Positions | None = field(default=None, kw_only=True)
    key: Positions | None = field(default=None, kw_only=True)

    _unsaid = ("pos",)

    def __post_init__(self) -> None:
        if self.pos is not None and self.query is not None and self.pos is not self.query:
            raise TypeError("ip.knockout: pos is the queries' positions; say query.")
        vars(self)["pos"] = self.pos if self.query is None else self.query
        vars(self)["query"] = self.pos
        if self.at is not ...:
            raise TypeError("ip.knockout takes query, key and head, and no index.")
        super().__post_init__()
        # The key's positions as a selector of their own, so that texts are found and remembered.
        keys = at(pos=self.key, occurrence=self.occurrence, rows=self.rows)
        vars(keys)["_label"] = repr(self)
        vars(self)["_keys_at"] = keys

    def change(self, value: Tensor, hook: HookPoint) -> Tensor | None:
        """Lower the scores of the edges that are there."""
        if key_axis(hook.axes) is None:
            raise EditError(
                f"{self!r} cuts edges between queries and keys; {hook.name!r} is "
                f"{hook.axes or tuple(value.shape)}."
            )
        keys = self._keys(value, hook)  # first: a text is found in the prompt, whoever looks there
        places = find(self.where, value, hook)
        if places is None:
            return None
        edges = torch.zeros(value.shape, dtype=torch.bool, device=value.device)
        for block in places.blocks:
            edges = block.put(edges, torch.ones_like(block.take(edges)))
        edges = edges & keys if places.spared is None else edges & keys & ~places.spared
        visible = value > torch.finfo(value.dtype).min / 2
        edges = edges & visible
        if not bool(edges.any()):
            if hook.prompt is None and not hook.offset:
                raise NothingSelected(
                    f"{self!r}: no query that it selects sees a key that it selects at {hook.name!r} "
                    "(a later position is never seen)."
                )
            hook.idle = "no query that it selects saw a key that it selects."
            return None
        if self.strength is None:
            lowered = value.masked_fill(edges, float("-inf"))
            self._refuse_blindness(visible, visible & ~edges, hook)
            return lowered
        kept = torch.ones_like(value)
        for block in places.blocks:
            own = 1 - torch.as_tensor(Spot(self, block, value, hook).strength()).to(value)
            kept = block.put(kept, own.expand(block.sizes()))
        if bool((kept < 0).any()):
            raise ValueError(f"{self!r}: a strength above 1 would make weights negative.")
        gone = (kept == 0) & edges
        self._refuse_blindness(visible, visible & ~gone, hook)
        # Not log(0): its gradient would be NaN where edges are cut altogether.
        lowered = value + torch.where(kept == 0, torch.ones_like(kept), kept).log()
        return torch.where(edges, lowered, value).masked_fill(gone, float("-inf"))

    def _keys(self, value: Tensor, hook: HookPoint) -> Tensor:
        """A mask of the keys that are meant, [batch or 1, 1, 1, key]."""
        seen = key_axis(hook.axes)
        assert seen is not None
        length, keys = value.shape[seen], hook.window(value.shape, seen)
        where: Any = vars(self)["_keys_at"]
        batch = value.shape[hook.axes.index("batch")] if "batch" in hook.axes else 1
        wanted: Any = [torch.arange(keys.first, keys.end, device="cpu")]
        if self.key is not None:
            wanted = wanted_positions(where, self.key, keys, hook, value, batch)
        rows = [wanted] if isinstance(wanted, Tensor) else wanted
        mask = torch.zeros(len(rows), length, dtype=torch.bool, device=value.device)
        for line, one in zip(mask, rows):
            line[choose(one, None, keys, where, counted=False).places.to(line.device)] = True
        shape = [1] * value.ndim
        shape[seen] = length
        if "batch" in hook.axes:
            shape[hook.axes.index("batch")] = len(rows)
        return mask.reshape(shape)

    def _refuse_blindness(self, before: Tensor, after: Tensor, hook: HookPoint) -> None:
        axis = key_axis(hook.axes)
        assert axis is not None
        blind = before.any(axis) & ~after.any(axis)
        if bool(blind.any()):
            names = [name for at, name in enumerate(hook.axes) if at != axis]
            first = dict(zip(names, blind.nonzero()[0].tolist()))
            query = first["query"] + hook.window(before.shape, hook.axes.index("query")).first
            raise EditError(
                f"{self!r} leaves position {query} (row {first.get('batch', 0)}, head "
                f"{first.get('head', 0)}) of {hook.name!r} with no key to look at. Leave it one: a query "
                "sees itself, unless key=... has it too."
            )
