"""`Edit`: a controller that is plain data. Where it applies is a selector; what it makes is one method.

An edit gets the selected part of a value and says what takes its place. Everything else is here: the
selection, tensors that move and cast themselves, the strength, and how it prints and is saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from interpose.edits.blocks import Block, batch_axis, find, unit_axis
from interpose.edits.conditions import when as Condition
from interpose.edits.expressions import written
from interpose.edits.saving import Saved
from interpose.edits.selector import FIELDS, Layers, Numbers, Positions, at, merged
from interpose.edits.sources import looked_up
from interpose.engine.hooks import Controller
from interpose.engine.points import HookPoint
from interpose.errors import EditShapeError, NothingSelected
from interpose.sites.tree import Filter

Value = float | Tensor | Mapping[Any, Tensor]
"""A number, a tensor, or a tensor for each site by name."""


@dataclass(frozen=True, eq=False, repr=False)
class Edit(Saved, Controller):
    """A controller that is plain data: what it does is its fields.

    All edits take the words of `ip.at` that say where: a selector in place of ``site``, the words
    themselves, or both (then the words count). A subclass says what takes the place of the selected
    part:

    ```python
    @dataclass(frozen=True, eq=False, repr=False)
    class negate(ip.Edit):
        def new(self, part, spot):
            return -part
    ```

    Args:
        site: a selector, or what selects sites.
        strength: how far to go from the value to the edited one: a number, or one for each row of the
            batch. 1 is the edit itself, 0 nothing, 2 twice as far.
        when: an `ip.when`: the positions at which it does not hold stay as they are.
    """

    site: Filter
    at: Any = field(default=..., kw_only=True)
    layer: Layers | None = field(default=None, kw_only=True)
    head: Numbers | None = field(default=None, kw_only=True)
    neuron: Numbers | None = field(default=None, kw_only=True)
    pos: Positions | None = field(default=None, kw_only=True)
    occurrence: str = field(default="all", kw_only=True)
    rows: Numbers | None = field(default=None, kw_only=True)
    phase: str | None = field(default=None, kw_only=True)
    exclude: Any = field(default=None, kw_only=True)
    strength: float | Tensor | None = field(default=None, kw_only=True)
    when: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        given = {name: vars(self)[name] for name in FIELDS}
        site: Any = self.site
        where = merged(site, given) if isinstance(site, at) else at(site, **given)
        if where.layer is not None and where.site is None:
            raise TypeError(f"{where!r}: a layer goes with a kind of site, such as 'z'.")
        vars(self).update({name: getattr(where, name) for name in FIELDS}, site=where)
        if not isinstance(self.when, (Condition, NoneType)):
            raise TypeError(f"when is an ip.when(...); got {type(self.when).__name__}.")
        if self.when is not None and self.when.where is not None:
            vars(where)["_beside"] = self.when.where
        for one in (where, *(where.exclude or ())):
            vars(one)["_label"] = repr(self)
        strength: Any = self.strength
        if not isinstance(strength, (int, float, Tensor, NoneType)):
            vars(self)["strength"] = torch.as_tensor(strength)
        if isinstance(self.strength, Tensor) and self.strength.ndim > 1:
            raise EditShapeError(f"{self!r}: strength is a number, or one for each row [batch].")

    @property
    def where(self) -> at:
        """Where it applies."""
        assert isinstance(self.site, at)
        return self.site

    @property
    def label(self) -> str:
        """What errors call it: itself."""
        return repr(self)

    def __repr__(self) -> str:
        return written(self, short=True)

    def parameters(self) -> Iterator[Tensor]:
        """What can be trained: tensors that require gradients, and parameters of modules."""
        for option in fields(self):
            yield from _trainable(getattr(self, option.name))

    def new(self, part: Tensor, spot: Spot) -> Any:
        """What takes the place of the selected part: a number, or a tensor that broadcasts to it."""
        raise NotImplementedError

    def on_value(self, value: Tensor, hook: HookPoint) -> Tensor | None:
        """Change a value; the whole of it comes, whatever the selector says."""
        if self.when is None:
            return self.change(value, hook)
        if hook.part is not None and hook.part is self.when.where:
            self.when.note(value, hook)
            return None
        fired = self.when.fired(value, hook, self)
        made = self.change(value, hook)
        return None if made is None else torch.where(fired, made, value)

    def change(self, value: Tensor, hook: HookPoint) -> Tensor | None:
        """Replace the selected part and leave the rest."""
        places = find(self.where, value, hook)
        if places is None:
            return None
        made = value
        for block in places.blocks:
            made = block.put(made, self._edited(Spot(self, block, value, hook)))
        return made if places.spared is None else torch.where(places.spared, value, made)

    def _edited(self, spot: Spot) -> Tensor:
        index, part, inner = self.where.at, spot.part, spot.inner
        if inner.numel() == 0:
            raise NothingSelected(
                f"{self!r} selects nothing of {spot.hook.name!r}, which is {tuple(spot.whole.shape)}."
            )
        new = self.reached(inner, spot)
        if index is ...:
            # Not `new` itself: earlier values keep their place in the graph, with gradients of zero.
            true = torch.ones((), dtype=torch.bool, device=part.device)
            return torch.where(true, new, part) if part.requires_grad else new
        made = part.clone()
        made[index] = new
        return made

    def reached(self, part: Tensor, spot: Spot) -> Tensor:
        """What takes the place of the selected part, as far as the strength says."""
        new = spot.fitting(self.new(part, spot), part)
        if self.strength is None:
            return new
        return (part + spot.strength() * (new - part)).to(part.dtype)


class Spot:
    """Where an edit is at work: one block of one value, and how other tensors are brought to it."""

    def __init__(self, edit: Edit, block: Block, whole: Tensor, hook: HookPoint) -> None:
        self.edit = edit
        self.block = block
        self.whole = whole
        self.hook = hook
        self.part = block.take(whole)
        self.inner = self.part if edit.where.at is ... else self.part[edit.where.at]

    @property
    def batch(self) -> int:
        """The axis of rows."""
        axis = batch_axis(self.hook.axes)
        if axis is None or not self.whole.ndim:
            raise ValueError(
                f"{self.edit!r} needs rows, and {self.hook.name!r} has no axis of them: it is "
                f"{self.hook.axes or tuple(self.whole.shape)}."
            )
        return axis

    @property
    def units(self) -> int:
        """The axis that counts the units of a part."""
        if self.edit.where.at is not ...:
            return -1
        return unit_axis(self.hook.axes, self.whole.ndim)

    def given(self, what: Any) -> Any:
        """A number as it is, a tensor as the selected part needs it; of a mapping this site's own."""
        if isinstance(what, Mapping):
            what = looked_up(what, self.hook, self.edit)
        if isinstance(what, Tensor):
            return self.cut(what)
        if not isinstance(what, (int, float, complex)):
            raise TypeError(f"an edit takes a number or a tensor; got {type(what).__name__}.")
        return what

    def cut(self, given: Tensor) -> Tensor:
        """A tensor with the shape of the whole value or of the part, as the part needs it.

        Each axis may have the size of the value's (then the selection is cut out), of the part's, or
        one. It comes back on the part's device and in its dtype.
        """
        if self.edit.where.at is ... and given.ndim == self.whole.ndim:
            self.must_have_rows(given)
        return self.fitted(given)

    def fitted(self, given: Tensor) -> Tensor:
        """The same for a tensor of which the rows are known to be the part's."""
        given = given.to(device=self.whole.device, dtype=self.whole.dtype)
        sizes, index = self.block.sizes(), self.edit.where.at
        if index is not ... and given.shape != self.whole.shape:
            if _fits(given.shape, self.inner.shape):
                return given
        if given.ndim > len(sizes):
            raise self._misfit(given)
        wide = given.reshape((1,) * (len(sizes) - given.ndim) + given.shape)
        wide = self.block.take(wide)
        if not _fits(wide.shape, sizes):
            raise self._misfit(given)
        return wide if index is ... else wide.expand(sizes)[index]

    def must_have_rows(self, given: Tensor) -> None:
        """Refuse a tensor with the value's axes whose rows belong to no rows that are known."""
        batch = self.block.batch
        if batch is not None and not self.block.has_place_for_rows(given.shape[batch]):
            raise EditShapeError(
                f"{self.edit!r} has a value of shape {tuple(given.shape)}, for {given.shape[batch]} rows; "
                f"{self.hook.name!r} has {self.whole.shape[batch]}."
            )

    def _misfit(self, given: Tensor) -> EditShapeError:
        return EditShapeError(
            f"{self.edit!r} has a value of shape {tuple(given.shape)}; what it selects of "
            f"{self.hook.name!r} is {tuple(self.inner.shape)}."
        )

    def fitting(self, new: Any, part: Tensor) -> Tensor:
        """What an edit made, as a tensor of the part's shape."""
        if not isinstance(new, Tensor):
            return torch.full_like(part, new)
        if not _fits(new.shape, part.shape):
            raise self._misfit(new)
        return new.to(part.dtype).expand(part.shape)

    def strength(self) -> float | Tensor:
        """The strength, for each row of the selected part."""
        given, part = self.edit.strength, self.part
        if not isinstance(given, Tensor) or given.ndim == 0:
            return given.to(part) if isinstance(given, Tensor) else float(given or 0.0)
        given = given.to(device=part.device, dtype=part.dtype)
        if not self.block.has_place_for_rows(len(given)):
            raise EditShapeError(
                f"{self.edit!r} has a strength for each of {len(given)} rows; {self.hook.name!r} has "
                f"{self.whole.shape[self.batch]}."
            )
        given = self.block.own_rows(given, 0)
        given = given.reshape([-1 if axis == self.batch else 1 for axis in range(part.ndim)])
        return given if self.edit.where.at is ... else given.expand(part.shape)[self.edit.where.at]


def _fits(shape: torch.Size, place: torch.Size) -> bool:
    """Whether a tensor can be written to a place, repeated where it has size one or no axis."""
    return len(shape) <= len(place) and all(
        size in (1, room) for size, room in zip(reversed(shape), reversed(place))
    )


def _trainable(given: Any) -> Iterator[Tensor]:
    if isinstance(given, nn.Module):
        yield from given.parameters()
    elif isinstance(given, Tensor) and given.requires_grad:
        yield given
    elif isinstance(given, Mapping):
        for one in given.values():
            yield from _trainable(one)
