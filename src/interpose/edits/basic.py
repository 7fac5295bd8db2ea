"""The edits that need nothing but the value itself.

Each is a small frozen dataclass with one method: what it makes of a value. ``at`` narrows it to a
part of the value, written as an index: ``at=(slice(None), 3)`` is ``value[:, 3]``; ``head`` to heads,
``pos`` to positions in the text, ``phase`` to the prompt or to what is generated; ``layer`` goes with a
kind of site: ``ip.zero("z", layer=3, head=5)``. Tensors move to the value's device and
dtype by themselves. The same edit gives the same result each time, so that
activation checkpointing may repeat it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from interpose.edits.positions import Positions, heads_of, pos_axis, rows_of
from interpose.engine.hooks import Controller
from interpose.engine.points import HookPoint
from interpose.errors import EditShapeError
from interpose.sites.tree import Filter

Value = float | Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Edit(Controller):
    """A controller that is plain data: what it does is its fields."""

    sites: Filter
    at: Any = field(default=..., kw_only=True)
    layer: int | None = field(default=None, kw_only=True)
    head: int | Sequence[int] | None = field(default=None, kw_only=True)
    pos: Positions | None = field(default=None, kw_only=True)
    phase: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.phase not in (None, "prompt", "generated"):
            raise ValueError(f"{self!r}: phase is 'prompt' or 'generated'.")
        if isinstance(self.pos, str):
            raise TypeError(
                f"{self!r}: pos is a number; model.get_token_position({self.pos!r}, text) finds it."
            )
        if self.layer is not None:
            if not isinstance(self.layer, int):
                raise TypeError(f"{self!r}: layer is one number; give one edit for each layer.")
            if not isinstance(self.sites, str):
                raise TypeError(f"{self!r}: a layer goes with a kind of site, such as 'z'.")
            vars(self)["sites"] = (self.sites, self.layer)

    @property
    def label(self) -> str:
        """What errors call it: itself."""
        return repr(self)

    def new(self, part: Tensor, hook: HookPoint) -> Value:
        """What takes the place of the selected part."""
        raise NotImplementedError

    def change(self, value: Tensor, hook: HookPoint) -> Tensor | None:
        """Replace the selected part and leave the rest."""
        chosen = []
        if self.pos is not None or self.phase is not None:
            axis = pos_axis(value, hook)
            chosen.append((axis, rows_of(value.shape[axis], hook, self.pos, self.phase, self)))
        if self.head is not None:
            chosen.append(heads_of(value, hook, self.head, self))
        if any(not len(rows) for _, rows in chosen):
            return None
        edit = self
        given = getattr(self, "value", None)
        if chosen and isinstance(given, Tensor) and given.shape == value.shape:
            for axis, rows in chosen:
                given = given.index_select(axis, rows.to(given.device))
            edit = replace(self, value=given, sites="", layer=None)  # type: ignore[call-arg]
        return edit._narrowed(value, hook, chosen)

    def _narrowed(
        self, value: Tensor, hook: HookPoint, chosen: Sequence[tuple[int, Tensor]]
    ) -> Tensor:
        """The value with the chosen rows of some axes changed."""
        if not chosen:
            return self._changed(value, hook)
        (axis, rows), *rest = chosen
        rows = rows.to(value.device)
        part = self._narrowed(value.index_select(axis, rows), hook, rest)
        return value.index_copy(axis, rows, part)

    def _changed(self, value: Tensor, hook: HookPoint) -> Tensor:
        part = value[self.at]
        if part.numel() == 0:
            raise ValueError(
                f"{self!r} selects nothing of {hook.name!r}, which is {tuple(value.shape)}."
            )
        self._must_fit(getattr(self, "value", getattr(self, "by", None)), part, hook)
        new = self.new(part, hook)
        self._must_fit(new, part, hook)
        value[self.at] = new
        return value

    def _must_fit(self, given: Any, part: Tensor, hook: HookPoint) -> None:
        if isinstance(given, Tensor) and not _fits(given.shape, part.shape):
            raise EditShapeError(
                f"{self!r} has a value of shape {tuple(given.shape)}; what it selects of "
                f"{hook.name!r} is {tuple(part.shape)}."
            )


def _fits(shape: torch.Size, place: torch.Size) -> bool:
    """Whether a tensor can be written to a place, repeated where it has size one or no axis."""
    return len(shape) <= len(place) and all(
        size in (1, room) for size, room in zip(reversed(shape), reversed(place))
    )


def _like(what: Value, part: Tensor) -> Value:
    if isinstance(what, Tensor):
        return what.to(device=part.device, dtype=part.dtype)
    if not isinstance(what, (int, float, complex)):
        raise TypeError(f"an edit takes a number or a tensor; got {type(what).__name__}.")
    return what


@dataclass(frozen=True, eq=False, repr=False)
class zero(Edit):
    """Set values to zero: ``ip.zero("layer2")``, or one channel with ``at=(slice(None), 3)``."""

    def new(self, part: Tensor, hook: HookPoint) -> Value:  # noqa: ARG002
        """Zero."""
        return 0


@dataclass(frozen=True, eq=False, repr=False)
class fill(Edit):
    """Set values to a number, or to a tensor that broadcasts to them: ``ip.fill("fc1", mean)``."""

    value: Value

    def new(self, part: Tensor, hook: HookPoint) -> Value:  # noqa: ARG002
        """The given value."""
        return _like(self.value, part)


@dataclass(frozen=True, eq=False, repr=False)
class add(Edit):
    """Add a number or a tensor: ``ip.add("fc1", direction)``."""

    value: Value

    def new(self, part: Tensor, hook: HookPoint) -> Value:  # noqa: ARG002
        """The sum."""
        return part + _like(self.value, part)


@dataclass(frozen=True, eq=False, repr=False)
class scale(Edit):
    """Multiply by a number or a tensor: ``ip.scale("fc1", 0.5)``."""

    by: Value

    def new(self, part: Tensor, hook: HookPoint) -> Value:  # noqa: ARG002
        """The product."""
        return part * _like(self.by, part)


@dataclass(frozen=True, eq=False, repr=False)
class noise(Edit):
    """Add Gaussian noise: ``ip.noise("fc1", 0.1, seed=0)``.

    With a seed, each site gets noise of its own, the same in every run. Without one it is drawn
    from torch's random state.
    """

    std: float
    seed: int | None = field(default=None, kw_only=True)

    def new(self, part: Tensor, hook: HookPoint) -> Value:
        """The value plus noise."""
        generator = None
        if self.seed is not None:
            generator = torch.Generator(part.device)
            generator.manual_seed(self.seed + zlib.crc32(hook.canonical.encode()))
        drawn = torch.randn(part.shape, generator=generator, device=part.device, dtype=part.dtype)
        return part + self.std * drawn
