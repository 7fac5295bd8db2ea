"""`ip.when`: a condition of edits as plain data: at which positions something fires.

It is looked at where the edit is at work, or at a site that is computed before, of the same forward pass: then the edit
also listens there. Where a condition does not hold, the value stays as it is, to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from interpose.edits.blocks import batch_axis, unit_axis
from interpose.edits.expressions import written
from interpose.edits.positions import along
from interpose.edits.saving import Saved
from interpose.edits.selector import Layers, Numbers, at
from interpose.edits.sources import looked_up
from interpose.engine.points import HookPoint
from interpose.errors import EditError, EditShapeError
from interpose.sites.tree import Filter


@dataclass(frozen=True, eq=False, repr=False)
class when(Saved):
    """Where something fires, for the ``when=`` of edits: ``ip.when(direction, above=2.0)``.

    ```python
    asked = ip.when(direction, above=2.0)                          # in the edited value itself
    fires = ip.when(site=there.latents, neuron=17, above=0.5)      # elsewhere: a latent of an autoencoder
    ip.add("resid_post", vector, layer=4, when=fires)
    ```

    Each position of each row is looked at by itself. Along a direction it is the sum of the value's units times the
    direction's numbers; without one, the units themselves, of which one must fire.

    Args:
        direction: [units], not scaled to any length; or a mapping from site names to such.
        above: fires only where it is more than this.
        below: fires only where it is less than this.
        bias: what is added to it first, such as a probe's.
        site: where it is looked at, if not in the edited value: a site that the model computes before.
        layer: of that site.
        head: in which heads; of several, one must fire.
        neuron: which units, where there is no direction.
    """

    direction: Any = None
    above: float | None = field(default=None, kw_only=True)
    below: float | None = field(default=None, kw_only=True)
    bias: float = field(default=0.0, kw_only=True)
    site: Filter = field(default=None, kw_only=True)
    layer: Layers | None = field(default=None, kw_only=True)
    head: Numbers | None = field(default=None, kw_only=True)
    neuron: Numbers | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.above is None and self.below is None:
            raise TypeError(f"{self!r}: say above, below or both: from where on it fires.")
        if self.direction is not None and self.neuron is not None:
            raise TypeError(f"{self!r}: a direction has all units, so that neuron says nothing.")
        if self.direction is None and self.neuron is None:
            raise TypeError(f"{self!r}: say what fires: a direction, or neuron=...")
        if not isinstance(self.direction, (Tensor, Mapping, type(None))):
            raise TypeError(f"{self!r}: direction is a tensor, or a mapping from site names.")
        if self.site is None and self.layer is not None:
            raise TypeError(f"{self!r}: a layer goes with a site.")
        where = None
        if self.site is not None:
            where = at(self.site, layer=self.layer)
            vars(where)["_label"] = repr(self)
        vars(self)["_where"] = where

    @property
    def where(self) -> at | None:
        """The site at which it is looked at; None for the edited value itself."""
        found: at | None = vars(self)["_where"]
        return found

    def __repr__(self) -> str:
        return written(self, short=True)

    def fired(self, value: Tensor, hook: HookPoint, edit: object) -> Tensor:
        """Where it fires, as truth values that broadcast to the value that is edited."""
        if self.where is None:
            return self.holds(value, hook)
        found = hook.given.get(self._note)
        if found is None:
            raise EditError(
                f"{edit!r} looks at {self.site!r}, which is not known yet where {hook.name!r} is computed. A condition "
                "is of the edited value, or of a site that comes before it in the same pass; in ip.sweep, of the "
                "edited value alone."
            )
        return _laid(found, value, hook, edit)

    def note(self, value: Tensor, hook: HookPoint) -> None:
        """Keep where it fires for the edits of this forward pass."""
        held = self.holds(value, hook)
        batch, pos = batch_axis(hook.axes), hook.pos_axis if hook.axes else 1
        if batch != 0 or pos != 1 or value.ndim < 2:
            raise EditError(
                f"{self!r}: {hook.name!r} is {hook.axes or tuple(value.shape)}, and not [batch, pos, ...]."
            )
        hook.given[self._note] = held.flatten(2).any(-1) if held.ndim > 2 else held

    @property
    def _note(self) -> str:
        return f"when {id(self)}"

    def holds(self, value: Tensor, hook: HookPoint) -> Tensor:
        """Where it fires in a value at its own site: of the value's axes, with one entry for the units."""
        axis = unit_axis(hook.axes, value.ndim)
        value = value.movedim(axis, -1)
        if self.head is not None:
            if "head" not in hook.axes:
                raise ValueError(
                    f"{self!r}: {hook.name!r} has no axis of heads: it is {hook.axes}."
                )
            heads = hook.axes.index("head")
            chosen = along(self.head, value.shape[heads], "head", repr(self), hook.name)
            value = value.index_select(heads, chosen.to(value.device))
        score = self._score(value, hook) + self.bias
        held = torch.ones_like(score, dtype=torch.bool)
        if self.above is not None:
            held = held & (score > self.above)
        if self.below is not None:
            held = held & (score < self.below)
        held = held.any(-1, keepdim=True)
        if self.head is not None:
            held = held.any(heads, keepdim=True)
        return held.movedim(-1, axis)

    def _score(self, value: Tensor, hook: HookPoint) -> Tensor:
        """What is compared, [..., 1 or neuron], in float32 at least."""
        wide = value.float() if value.itemsize < 4 else value
        if self.direction is None:
            chosen = along(self.neuron, value.shape[-1], "neuron", repr(self), hook.name)
            return wide.index_select(-1, chosen.to(value.device))
        found = looked_up(self.direction, hook, self)
        if found.shape != wide.shape[-1:]:
            raise EditShapeError(
                f"{self!r} has a direction of shape {tuple(found.shape)}; {hook.name!r} has {wide.shape[-1]} units."
            )
        return (wide @ found.to(wide))[..., None]


def _laid(found: Tensor, value: Tensor, hook: HookPoint, edit: object) -> Tensor:
    """Truth values [batch, pos] along the axes of another value."""
    batch, pos = batch_axis(hook.axes), hook.pos_axis if hook.axes else 1
    there = None if batch is None or pos is None else (value.shape[batch], value.shape[pos])
    if batch is None or pos is None or there != tuple(found.shape):
        raise EditShapeError(
            f"{edit!r}: its condition is of {tuple(found.shape)} rows and positions, and {hook.name!r} is "
            f"{hook.axes or ''}{tuple(value.shape)}."
        )
    shape = [value.shape[axis] if axis in (batch, pos) else 1 for axis in range(value.ndim)]
    return (found if batch < pos else found.mT).reshape(shape)
