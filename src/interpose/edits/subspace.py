"""Edits along directions: take a subspace out, cap a coordinate, turn towards one, exchange or turn coordinates.

Directions are rows over a value's units (its last axis; the channels of an image). Low precision is
computed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from interpose.edits.edit import Edit, Spot, Value
from interpose.edits.other_values import brought, check_source_pos
from interpose.edits.selector import Numbers
from interpose.edits.sources import as_source, looked_up
from interpose.errors import EditError, EditShapeError


def _wide(value: Tensor, axis: int) -> Tensor:
    """A value with its units last, precise enough for sums over them."""
    value = value.movedim(axis, -1)
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _directions(given: Any, spot: Spot, like: Tensor) -> Tensor:
    """Directions [k, units] where a value is, in a precision for solving."""
    found = looked_up(given, spot.hook, spot.edit) if isinstance(given, Mapping) else given
    found = found.weight if isinstance(found, nn.Module) else found
    if not isinstance(found, Tensor):
        raise TypeError(f"{spot.edit!r}: directions are a tensor; got {type(found).__name__}.")
    found = found[None] if found.ndim == 1 else found
    if found.ndim != 2 or found.shape[1] != like.shape[-1]:
        raise EditShapeError(
            f"{spot.edit!r} has directions of shape {tuple(found.shape)}; what it selects of "
            f"{spot.hook.name!r} has {like.shape[-1]} units."
        )
    precise = torch.float32 if like.device.type == "mps" else torch.float64
    return found.to(device=like.device, dtype=precise)


def orthonormal(rows: Tensor, edit: object) -> Tensor:
    """Rows [rank, d] of length one at right angles that span the same subspace."""
    found: Tensor
    if rows.shape[0] <= rows.shape[1]:
        found, upper = torch.linalg.qr(rows.mT)
        sizes = upper.detach().diagonal().abs()
        if bool(sizes.min() > 1e-9 * sizes.max()):
            return found.mT
    _, sizes, found = torch.linalg.svd(rows, full_matrices=False)
    kept = sizes > 1e-9 * sizes.max().clamp_min(1e-300)
    if not bool((sizes > 0).any()):
        raise EditError(f"{edit!r}: its direction is zero, so it points nowhere.")
    return found[kept]


@dataclass(frozen=True, eq=False, repr=False)
class project_out(Edit):
    """Take directions out of a value: ``ip.project_out("resid_post", direction, layer=4)``.

    What is left has no component along any of them; what is at right angles to them stays.

    Args:
        site: where, as in every edit.
        direction: one [units], or several [k, units], of any length and angle; by site name if a mapping.
        mean: what to count components from, [units]: they are set to those of the mean instead of zero.
    """

    direction: Any
    mean: Any = field(default=None, kw_only=True)

    def new(self, part: Tensor, spot: Spot) -> Any:
        """The value without its component."""
        wide = _wide(part, spot.units)
        rows = orthonormal(_directions(self.direction, spot, wide), self).to(wide.dtype)
        centred = wide
        if self.mean is not None:
            centred = wide - _directions(self.mean, spot, wide)[0].to(wide.dtype)
        return (wide - (centred @ rows.mT) @ rows).movedim(-1, spot.units)


@dataclass(frozen=True, eq=False, repr=False)
class project_cap(Edit):
    """Keep a value's coordinate along a direction within bounds: ``ip.project_cap("resid_post", axis, high=3.0)``.

    The coordinate is that along the direction of length one; everything at right angles stays. With
    ``mean`` [units], coordinates are counted from it.
    """

    direction: Any
    low: float | Tensor | None = None
    high: float | Tensor | None = None
    mean: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is None and self.high is None:
            raise TypeError(f"{self!r}: say low, high or both.")
        if any(isinstance(bound, Tensor) and bound.numel() != 1 for bound in (self.low, self.high)):
            raise EditShapeError(f"{self!r}: low and high are one number each.")
        if self.low is not None and self.high is not None and bool(self.low > self.high):
            raise ValueError(f"{self!r}: low is above high.")

    def new(self, part: Tensor, spot: Spot) -> Any:
        """The value, moved along the direction as far as the bounds ask."""
        wide = _wide(part, spot.units)
        rows = _directions(self.direction, spot, wide)
        if len(rows) != 1:
            raise EditShapeError(f"{self!r}: one direction has one coordinate; got {len(rows)}.")
        unit = rows[0] / rows[0].norm()
        if not bool(torch.isfinite(unit.detach()).all()):
            raise EditError(f"{self!r}: its direction is zero, so it points nowhere.")
        unit = unit.to(wide.dtype)
        centred = wide
        if self.mean is not None:
            centred = wide - _directions(self.mean, spot, wide)[0].to(wide.dtype)
        coordinate = centred @ unit
        capped = coordinate
        if self.low is not None:
            capped = torch.maximum(capped, torch.as_tensor(self.low).to(capped).reshape(()))
        if self.high is not None:
            capped = torch.minimum(capped, torch.as_tensor(self.high).to(capped).reshape(()))
        moved = wide + (capped - coordinate)[..., None] * unit
        return moved.movedim(-1, spot.units)


@dataclass(frozen=True, eq=False, repr=False)
class add_keeping_norm(Edit):
    """Add a vector and give the value its length back: ``ip.add_keeping_norm("resid_post", direction, layer=4)``.

    Only where the value points changes. The strength scales what is added, and the length stays at any strength. It is
    that of the selected units; a value that adding makes zero stays as it was.
    """

    value: Value

    def reached(self, part: Tensor, spot: Spot) -> Tensor:
        """The value turned towards the vector."""
        wide = _wide(part, spot.units)
        added = spot.fitting(spot.given(self.value), part)
        if self.strength is not None:
            added = spot.strength() * added
        moved = wide + _wide(added, spot.units)
        length, now = (one.norm(dim=-1, keepdim=True) for one in (wide, moved))
        nowhere = now == 0
        moved = torch.where(nowhere, wide, moved * (length / now.masked_fill(nowhere, 1.0)))
        return moved.movedim(-1, spot.units).to(part.dtype)


class Rotation(nn.Module):
    """Orthonormal directions [k, units] that can be trained, for `ip.rotate`.

    They are made from a free matrix ``raw`` by Gram and Schmidt's way (QR), so any optimizer may change it
    and they stay orthonormal.

    Args:
        units: how wide the value is.
        k: how many directions; by default all, a rotation of the whole space.
        seed: of the first directions.
    """

    def __init__(self, units: int, k: int | None = None, *, seed: int = 0) -> None:
        super().__init__()
        k = units if k is None else k
        if not 0 <= k <= units:
            raise ValueError(f"a space of {units} units has 0 to {units} directions; got {k}.")
        generator = torch.Generator("cpu").manual_seed(seed)
        drawn = torch.randn(units, k, generator=generator, device="cpu")
        self.raw = nn.Parameter((torch.linalg.qr(drawn)[0] if k else drawn).mT.contiguous())

    @property
    def weight(self) -> Tensor:
        """The directions, [k, units]."""
        if not len(self.raw):
            return self.raw
        found, upper = torch.linalg.qr(self.raw.mT)
        turned: Tensor = found * upper.diagonal().sign()  # one choice of signs: it moves smoothly
        return turned.mT

    def forward(self, value: Tensor) -> Tensor:
        """The coordinates of a value."""
        return value @ self.weight.to(value).mT

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"units={self.raw.shape[1]}, k={self.raw.shape[0]}"


@dataclass(frozen=True, eq=False, repr=False)
class rotate(Edit):
    """Exchange coordinates along trained directions with another run's: distributed interchange (DAS).

    ```python
    turn = ip.Rotation(model.cfg.d_model, k=1)
    swap = ip.rotate("resid_post", turn, cache, layer=3, pos=-1)
    optimizer = torch.optim.Adam(swap.parameters())
    ```

    Args:
        site: where, as in every edit.
        rotation: `ip.Rotation`, a module with such a ``weight``, or a tensor with orthonormal rows.
        source: as in `ip.patch`: what the first k coordinates are taken from. None turns the value
            itself: ``rotation`` is then a matrix [m, m] that acts on the coordinates in ``subspace``.
        k: how many of the directions; by default all of them.
        subspace: without a source, the directions [m, units] whose coordinates are turned; by default
            all units.
        source_pos: as in `ip.patch`.
    """

    rotation: Any
    source: Any = None
    k: int | None = field(default=None, kw_only=True)
    subspace: Any = field(default=None, kw_only=True)
    source_pos: Numbers | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        vars(self)["source"] = as_source(self.source, "ip.rotate")
        super().__post_init__()
        rows = self.rotation.weight if isinstance(self.rotation, nn.Module) else self.rotation
        if not isinstance(rows, Tensor) or rows.ndim != 2:
            raise TypeError(
                f"{self!r}: rotation is ip.Rotation, or a matrix with orthonormal rows."
            )
        exact = rows.detach().double() if rows.device.type != "mps" else rows.detach().float()
        off = exact @ exact.mT - torch.eye(len(rows), dtype=exact.dtype, device=exact.device)
        if rows.numel() and bool(off.abs().max() > 1e-2):
            raise EditError(
                f"{self!r}: the rows of its rotation are not orthonormal (off by {off.abs().max():.2g}). "
                "Train an ip.Rotation, or make them so: torch.linalg.qr(matrix.T)[0].T"
            )
        if self.k is not None and not 0 <= self.k <= len(rows):
            raise ValueError(f"{self!r}: k is 0 to {len(rows)}.")
        if self.source is None and (self.k is not None or rows.shape[0] != rows.shape[1]):
            raise TypeError(
                f"{self!r}: without a source the coordinates are turned, by a square matrix and "
                "without k. Give source=cache to exchange them."
            )
        if self.source is not None and self.subspace is not None:
            raise TypeError(f"{self!r}: subspace is for turning, without a source.")
        if self.source_pos is not None:
            check_source_pos(self, self.source_pos)

    def new(self, part: Tensor, spot: Spot) -> Any:
        """The value with other coordinates."""
        wide = _wide(part, spot.units)
        if self.source is None:
            return self._turned(wide, spot).movedim(-1, spot.units)
        found = brought(looked_up(self.source, spot.hook, self), spot, self.source_pos)
        other = _wide(found.expand(part.shape), spot.units)
        rows = _directions(self.rotation, spot, wide)[: self.k].to(wide.dtype)
        return (wide + ((other - wide) @ rows.mT) @ rows).movedim(-1, spot.units)

    def _turned(self, wide: Tensor, spot: Spot) -> Tensor:
        module = isinstance(self.rotation, nn.Module)
        turn: Tensor = (self.rotation.weight if module else self.rotation).to(wide)
        if self.subspace is None:
            if turn.shape[1] != wide.shape[-1]:
                raise EditShapeError(
                    f"{self!r} turns {turn.shape[1]} coordinates; what it selects of "
                    f"{spot.hook.name!r} has {wide.shape[-1]} units. Say which with subspace=..."
                )
            return wide @ turn.mT
        rows = orthonormal(_directions(self.subspace, spot, wide), self).to(wide)
        if len(rows) != len(turn):
            raise EditShapeError(
                f"{self!r} turns {len(turn)} coordinates, and its subspace has {len(rows)}."
            )
        coordinates = wide @ rows.mT
        return wide + (coordinates @ turn.mT - coordinates) @ rows
