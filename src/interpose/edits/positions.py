"""Which rows of a value belong to positions in the text, the same whether a KV cache is used or not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from interpose.engine.points import HookPoint

Positions = int | slice | Sequence[int] | Tensor
"""Positions in the whole text, counted from its first token (from the end, if negative)."""


def pos_axis(value: Tensor, hook: HookPoint) -> int:
    """The axis of positions: by its name, or the second of ``[batch, pos, ...]``."""
    for name in ("pos", "query"):
        if name in hook.axes:
            return hook.axes.index(name)
    if hook.axes or value.ndim < 3:
        raise ValueError(
            f"{hook.name!r} has no axis of positions: it is {hook.axes or tuple(value.shape)}. "
            "Say which part you mean with at=..."
        )
    return 1


def rows_of(
    length: int, hook: HookPoint, pos: Positions | None, phase: str | None, edit: object
) -> Tensor:
    """The rows of a value of some length that are at given positions and in a given phase."""
    first, end = hook.offset, hook.offset + length
    here = torch.arange(first, end)
    chosen = torch.ones(length, dtype=torch.bool)
    if phase is not None:
        if hook.prompt is None and (phase == "generated" or hook.offset):
            raise ValueError(
                f"{edit!r}: which positions are the prompt's is known inside model.generate only."
            )
        prompt = end if hook.prompt is None else hook.prompt
        chosen &= (here < prompt) if phase == "prompt" else (here >= prompt)
    if pos is not None:
        chosen &= torch.isin(here, _absolute(pos, hook, end, edit))
    return chosen.nonzero().flatten()


def _absolute(pos: Positions, hook: HookPoint, end: int, edit: object) -> Tensor:
    total = end if hook.prompt is None else hook.prompt
    if isinstance(pos, slice):
        stop = pos.stop if pos.stop is not None else max(end, total)
        start = pos.start or 0
        start, stop = (total + bound if bound < 0 else bound for bound in (start, stop))
        return torch.arange(int(start), int(stop), int(pos.step or 1))
    wanted = torch.as_tensor(pos).reshape(-1)
    wanted = torch.where(wanted < 0, wanted + total, wanted)
    if hook.prompt is None and hook.offset == 0 and bool(((wanted >= end) | (wanted < 0)).any()):
        raise IndexError(f"{edit!r}: {hook.name!r} has {end} positions here.")
    return wanted


def heads_of(
    value: Tensor, hook: HookPoint, head: int | Sequence[int], edit: object
) -> tuple[int, Tensor]:
    """The axis of heads, and the chosen ones."""
    if "head" not in hook.axes:
        raise ValueError(
            f"{edit!r}: {hook.name!r} has no axis of heads: it is {hook.axes or tuple(value.shape)}."
        )
    axis = hook.axes.index("head")
    count = value.shape[axis]
    wanted = torch.as_tensor(head).reshape(-1)
    if bool(((wanted >= count) | (wanted < -count)).any()):
        raise IndexError(f"{edit!r}: {hook.name!r} has {count} heads.")
    return axis, wanted % count
