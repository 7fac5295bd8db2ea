"""Edits that bring in values from elsewhere: the mean of others, another row's, another run's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from interpose.edits.blocks import batch_axis, unit_axis
from interpose.edits.edit import Edit, Spot
from interpose.edits.positions import along
from interpose.edits.selector import Numbers
from interpose.edits.sources import as_source, looked_up
from interpose.engine.points import HookPoint
from interpose.errors import EditError, EditShapeError
from interpose.models.batching import packed
from interpose.models.running.masks import mask_at


@dataclass(frozen=True, eq=False, repr=False)
class patch(Edit):
    """Put in the values of another run, at the same places: ``ip.patch("resid_pre", cache, layer=3, pos=2)``.

    The source is a cache, a mapping from site names to tensors, or a tensor. It has the value's rows, or
    one row for all of them, and is whole or cut by the same selector. Where its positions are others,
    ``source_pos`` says which of them take the place of ``pos``, in this order.
    """

    source: Any
    source_pos: Numbers | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        vars(self)["source"] = as_source(self.source, f"ip.{type(self).__name__}")
        super().__post_init__()
        if self.source_pos is not None:
            check_source_pos(self, self.source_pos)

    def new(self, part: Tensor, spot: Spot) -> Any:  # noqa: ARG002
        """The source's values."""
        return brought(looked_up(self.source, spot.hook, self), spot, self.source_pos)


def check_source_pos(edit: Edit, source_pos: Any) -> None:
    """Refuse positions that mean nothing in a source."""
    if isinstance(source_pos, str) or (
        isinstance(source_pos, (list, tuple)) and any(isinstance(x, str) for x in source_pos)
    ):
        raise TypeError(
            f"{edit!r}: the source's tokens are not known here; give source_pos as numbers "
            "(model.get_token_position(text, source_text))."
        )
    if edit.pos is None:
        raise TypeError(f"{edit!r}: source_pos goes with pos.")


def brought(given: Tensor, spot: Spot, source_pos: Any = None) -> Tensor:
    """A source's value as the selected part needs it: its own positions first, then as any tensor."""
    block, hook, axis = spot.block, spot.hook, spot.block.pos
    given = given.to(device=spot.whole.device, dtype=spot.whole.dtype)
    if axis is None or given.ndim != spot.whole.ndim:
        if source_pos is not None:
            raise EditShapeError(
                f"{spot.edit!r}: source_pos needs a source of {spot.whole.ndim} axes as "
                f"{hook.name!r} has them; it is {tuple(given.shape)}."
            )
        return spot.cut(given)
    spot.must_have_rows(given)
    length, here = given.shape[axis], spot.whole.shape[axis]
    if source_pos is not None:
        wanted = _in_order(source_pos, length, spot.edit, hook)
        if block.ordinal is None or len(wanted) != block.total:
            raise EditShapeError(
                f"{spot.edit!r}: source_pos has {len(wanted)} positions, and pos {block.total} in "
                f"{hook.name!r}."
            )
        given = block.at_positions(given, wanted[block.ordinal])
    elif length != 1 and not hook.window(spot.whole.shape, axis).is_all:
        given = _of_the_whole_text(given, spot, length)
    elif length not in (1, here, block.sizes()[axis]):
        raise EditShapeError(
            f"{spot.edit!r}: the source has {length} positions and {hook.name!r} {here}. Say which of the "
            "source's go there: source_pos=..., as many as pos has."
        )
    return spot.fitted(given)


def _in_order(source_pos: Any, length: int, edit: Edit, hook: HookPoint) -> Tensor:
    if isinstance(source_pos, slice):
        return along(source_pos, length, "pos", repr(edit), "its source")
    wanted = torch.as_tensor(source_pos, device="cpu").reshape(-1)
    if wanted.dtype == torch.bool:
        return along(wanted, length, "pos", repr(edit), "its source")
    if bool(((wanted >= length) | (wanted < -length)).any()):
        raise IndexError(f"{edit!r}: its source has {length} positions at {hook.name!r}.")
    return wanted % length


def _of_the_whole_text(given: Tensor, spot: Spot, length: int) -> Tensor:
    """While text is generated: a source's positions are those of the whole text, or just the selected ones."""
    block, hook = spot.block, spot.hook
    assert block.pos is not None
    own = block.by_row if block.by_row is not None else block.index.get(block.pos)
    own = torch.arange(spot.whole.shape[block.pos], device="cpu") if own is None else own
    found = own + hook.window(spot.whole.shape, block.pos).first
    last = int(found.max())
    if (
        block.rank is not None
        and block.total == length
        and (length != hook.prompt or last >= length)
    ):
        found = block.rank
    elif last >= length:
        raise EditError(
            f"{spot.edit!r}: the source has {length} positions, and position {last} of {hook.name!r} is "
            "selected. Narrow it with pos=... or phase='prompt'."
        )
    return block.at_positions(given, found)


@dataclass(frozen=True, eq=False, repr=False)
class mean(Edit):
    """Replace values by their mean over other data: ``ip.mean("z", cache, layer=3, head=5)``.

    Args:
        site: where, as in every edit.
        mean: a cache (or a mapping from site names to values), of which the mean over rows and
            positions is taken; statistics (`ip.activation_statistics`), which have the mean of each unit;
            or a tensor that is the mean. None takes the mean over the batch at hand, padding left out.
        per_position: each position keeps a mean of its own, over rows alone.
    """

    mean: Any = None
    per_position: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        vars(self)["mean"] = as_source(self.mean, "ip.mean")
        super().__post_init__()

    def new(self, part: Tensor, spot: Spot) -> Any:  # noqa: ARG002
        """The mean."""
        if isinstance(self.mean, Tensor):
            return brought(self.mean, spot)
        if self.mean is None:
            return spot.cut(self._of_this_batch(spot))
        found = looked_up(self.mean, spot.hook, self)
        if found.ndim == 1 and spot.whole.ndim > 1:
            return spot.cut(_of_units(found, spot))
        if found.ndim != spot.whole.ndim:
            raise EditShapeError(
                f"{self!r}: its source has {tuple(found.shape)} for {spot.hook.name!r}, which is "
                f"{tuple(spot.whole.shape)}: the axes to average over are not known. Give the mean itself."
            )
        axes = _others(spot, found.ndim, self.per_position)
        return brought(found.mean(axes, keepdim=True), spot)

    def _of_this_batch(self, spot: Spot) -> Tensor:
        hook, whole = spot.hook, spot.whole
        if hook.prompt is not None or hook.offset or packed._HERE.get() is not None:
            raise EditError(
                f"{self!r}: while text is generated a pass has one position of each text, and its mean "
                "says nothing. Give a reference: mean=cache."
            )
        axes = _others(spot, whole.ndim, self.per_position)
        if all(whole.shape[axis] == 1 for axis in axes):
            raise EditError(
                f"{self!r}: the mean over one value is that value; {hook.name!r} is "
                f"{tuple(whole.shape)}. Give a larger batch, or mean=cache."
            )
        batch, pos = batch_axis(hook.axes), spot.block.pos
        mask = mask_at(hook, pos)
        if mask is None or batch is None or pos is None or mask.ndim != 2:
            return whole.mean(axes, keepdim=True)
        if mask.shape != (whole.shape[batch], whole.shape[pos]) or "query" in hook.axes:
            return whole.mean(axes, keepdim=True)
        real = (mask != 0).to(whole.device)
        real = real.reshape([whole.shape[i] if i in (batch, pos) else 1 for i in range(whole.ndim)])
        total = torch.where(real, whole, torch.zeros_like(whole)).sum(axes, keepdim=True)
        made: Tensor = total / real.sum(axes, keepdim=True).clamp_min(1)
        return made


def _others(spot: Spot, ndim: int, per_position: bool) -> list[int]:
    """The axes to average over: rows, and positions (of an image, its places) unless they stay apart."""
    axes = spot.hook.axes
    batch = batch_axis(axes)
    found = [] if batch is None else [batch]
    if per_position:
        return found
    if axes:
        pos = spot.hook.pos_axis
        return found if pos is None else [*found, pos]
    units = unit_axis(axes, ndim)
    return [axis for axis in range(ndim) if axis != units]


def _of_units(found: Tensor, spot: Spot) -> Tensor:
    """Statistics have one number for each unit: of a token, along the last axis, or the channels of an image."""
    hook, ndim = spot.hook, spot.whole.ndim
    units = spot.whole.shape[2:]
    if hook.axes[:1] == ("batch",) and hook.pos_axis == 1 and len(found) == units.numel():
        return found.reshape(1, 1, *units)
    axis = unit_axis(hook.axes, ndim)
    if "head" in hook.axes or len(found) != spot.whole.shape[axis]:
        raise EditShapeError(
            f"{spot.edit!r}: its source has {len(found)} numbers for {hook.name!r}, which is "
            f"{hook.axes or ''}{tuple(spot.whole.shape)}. Give a cache, whose mean is taken along the "
            "right axes."
        )
    return found.reshape([-1 if i == axis else 1 for i in range(ndim)])


@dataclass(frozen=True, eq=False, repr=False)
class resample(Edit):
    """Give each row the values of another row: ``ip.resample("z", layer=3, head=5, seed=0)``.

    Of the batch at hand, or of a source (a cache, a mapping or a tensor). Which row is drawn by the
    seed: the same for all sites and in every run, and never its own.
    """

    source: Any = None
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        vars(self)["source"] = as_source(self.source, "ip.resample")
        super().__post_init__()

    def new(self, part: Tensor, spot: Spot) -> Any:  # noqa: ARG002
        """The other rows' values."""
        axis, hook = spot.batch, spot.hook
        given = spot.whole if self.source is None else looked_up(self.source, hook, self)
        rows = spot.whole.shape[axis]
        if self.source is None and rows == 1:
            raise EditError(
                f"{self!r}: {hook.name!r} has one row, so there is no other to take. Run a batch, or "
                "give source=cache."
            )
        if given.ndim != spot.whole.ndim:
            raise EditShapeError(
                f"{self!r}: its source has {tuple(given.shape)} for {hook.name!r}, which is "
                f"{tuple(spot.whole.shape)}."
            )
        mask = mask_at(hook, spot.block.pos)
        if self.source is None and mask is not None and not bool(mask.all()):
            raise EditError(
                f"{self!r}: the texts of the batch have different lengths, so that some would get the padding of "
                "others. Give texts of one length, or source=cache of such texts."
            )
        chosen = other_rows(rows, given.shape[axis], self.seed)
        given = given.index_select(axis, chosen.to(given.device))
        return brought(given, spot)


def other_rows(rows: int, there: int, seed: int) -> Tensor:
    """For each row another one of those there are; if these are as many, each is taken once."""
    generator = torch.Generator("cpu").manual_seed(seed)
    if there == rows:
        order = torch.randperm(rows, generator=generator, device="cpu")
        chosen = torch.empty_like(order)
        chosen[order] = order.roll(1)  # each takes the one before it in a random ring
        return chosen
    own = torch.arange(rows, device="cpu")
    has_own = (own < there) & (there > 1)
    drawn = torch.rand(rows, generator=generator, device="cpu", dtype=torch.float64)
    chosen = (drawn * (there - has_own.long())).long()
    return torch.where(has_own & (chosen >= own), chosen + 1, chosen)
