"""Which indices along an axis are meant, the same whether a KV cache is used or not."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from interpose.edits import texts
from interpose.engine.points import HookPoint, Window
from interpose.models.selection import PLURAL, absent

MOST = 2**22
"""How many places one word may mean, where they are counted one by one."""


class Chosen(NamedTuple):
    """Places along an axis, in ascending order, and which of the selected positions each one is.

    ``ordinal`` counts them as they were given, ``rank`` in ascending order; ``total`` is how many there
    are in the whole text, if that is known.
    """

    places: Tensor
    ordinal: Tensor
    rank: Tensor
    total: int | None


def pos_axis(value: Tensor, hook: HookPoint) -> int:
    """The axis of positions: by its name, or the second of ``[batch, pos, ...]``."""
    found = hook.pos_axis
    if found is not None:
        return found
    if hook.axes or value.ndim < 3:
        raise ValueError(
            f"{hook.name!r} has no axis of positions: it is {hook.axes or tuple(value.shape)}. "
            "Say which part you mean with at=..."
        )
    return 1


def along(given: Any, count: int, word: str, label: str, name: str) -> Tensor:
    """Indices along an axis of some size: ascending, each once."""
    what = PLURAL[word]
    if isinstance(given, slice):
        return torch.arange(count, device="cpu")[given]
    wanted = torch.as_tensor(given, device="cpu").reshape(-1)
    if wanted.dtype == torch.bool:
        if len(wanted) != count:
            raise IndexError(
                f"{label}: a mask of {len(wanted)} {what}; {name!r} has {count} {what}."
            )
        return wanted.nonzero().flatten()
    if wanted.is_floating_point():
        raise TypeError(f"{label}: {what} are whole numbers; got {given!r}.")
    outside = wanted[(wanted >= count) | (wanted < -count)]
    if len(outside):
        raise IndexError(f"{label}: {absent(word, int(outside[0]), count, repr(name))}")
    found: Tensor = torch.unique(wanted % count)
    return found


def wanted_positions(
    where: Any, pos: Any, window: Window, hook: HookPoint, value: Tensor, batch: int
) -> Tensor | list[Tensor]:
    """The positions that are meant, in the order they were given; a list of them if rows differ."""
    if pos is None:
        return torch.arange(window.first, window.end, device="cpu")
    if isinstance(pos, slice):
        bounds = [
            bound if bound is None or bound >= 0 else max(0, bound + window.total)
            for bound in (pos.start, pos.stop)
        ]
        # What is not here may still come, unless this is all of the text.
        known = [window.end] if window.is_all else [window.end, window.total, *bounds]
        line = range(max(bound for bound in known if bound is not None))
        line = line[slice(bounds[0], bounds[1], pos.step)]
        if len(line) > max(MOST, window.end):
            raise IndexError(
                f"{where.label} selects {len(line)} positions; no text has so many. Leave the end open: slice(start, "
                "None)."
            )
        return line.start + line.step * torch.arange(len(line), device="cpu")
    if texts.is_text(pos):
        said = [pos] if isinstance(pos, str) else list(pos)
        return texts.by_row(where, said, window, hook, value, batch)
    wanted = torch.as_tensor(pos, device="cpu")
    if wanted.dtype == torch.bool:
        return _masked(where, wanted, window, hook, batch)
    if wanted.is_floating_point():
        raise TypeError(f"{where.label}: positions are whole numbers; got {pos!r}.")
    wanted = wanted.reshape(-1)
    found = torch.where(wanted < 0, wanted + window.total, wanted)
    outside = wanted[(found >= window.end) | (found < 0)]
    if window.is_all and len(outside):
        wrong = absent("pos", int(outside[0]), window.end, repr(hook.name))
        raise IndexError(f"{where.label}: {wrong}")
    return found


def _masked(
    where: Any, mask: Tensor, window: Window, hook: HookPoint, batch: int
) -> Tensor | list[Tensor]:
    fits = mask.shape[-1] == window.total or window.offset > 0
    if not fits or mask.ndim not in (1, 2) or (mask.ndim == 2 and mask.shape[0] not in (1, batch)):
        raise IndexError(
            f"{where.label}: a mask of shape {tuple(mask.shape)}; {hook.name!r} has {batch} rows of "
            f"{window.total} positions."
        )
    if mask.ndim == 1 or mask.shape[0] == 1:
        return mask.reshape(-1).nonzero().flatten()
    return [row.nonzero().flatten() for row in mask]


def choose(
    wanted: Tensor, gone: Tensor | None, window: Window, where: Any, *, counted: bool
) -> Chosen:
    """Of the positions that are meant, those that are here: in the right phase and not excluded."""
    if where.phase is not None:
        if window.prompt is None and (where.phase == "generated" or window.offset):
            raise ValueError(
                f"{where.label}: which positions are the prompt's is known inside model.generate only."
            )
        wanted = wanted[
            wanted < window.total if where.phase == "prompt" else wanted >= window.total
        ]
    if gone is not None:
        wanted = wanted[~torch.isin(wanted, gone)]
    each, ordinal = torch.sort(wanted, stable=True)
    fresh = torch.ones_like(each, dtype=torch.bool)
    fresh[1:] = each[1:] != each[:-1]
    each, ordinal = each[fresh], ordinal[fresh]
    rank = ((each >= window.first) & (each < window.end)).nonzero().flatten()
    total = len(each) if counted else None
    return Chosen(each[rank] - window.first, ordinal[rank], rank, total)
