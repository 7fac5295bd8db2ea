"""The places where units are largest, k for each, kept while texts pass by; of equal values the first counts first.

`ip.max_activating` looks for them in texts that it runs, `ip.TopActivating` in whatever else runs the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import interpose as ip
from interpose.models.selection import entries

if TYPE_CHECKING:
    from interpose.methods.max_activating import MaxActivating

_LAST = 2**62  # an order that comes after all
Found = dict[str, Tensor]
"""The best places: ``values`` and ``order`` [unit, k], ``tokens`` and ``around`` [unit, k, window]."""


def units_in(
    value: Tensor, name: str, units: Sequence[int] | None, direction: Tensor | None
) -> tuple[Tensor, list[int]]:
    """What the units are at each position, [example, pos, unit], and their numbers.

    Args:
        value: [example, pos, size].
        name: of its site, for errors.
        units: which elements, None for all.
        direction: [size] or [n, size]; projections on these are the units then.
    """
    if units is not None:
        numbers = entries(units, value.shape[2], "neuron", repr(name))  # from the front, each once
        return value[:, :, numbers], numbers
    if direction is None:
        return value, list(range(value.shape[2]))
    rows = direction if direction.ndim == 2 else direction[None]
    if rows.ndim != 2 or rows.shape[1] != value.shape[2]:
        raise ValueError(
            f"direction is {list(direction.shape)}; the values of {name!r} have {value.shape[2]} elements: "
            f"give [{value.shape[2]}] or [n, {value.shape[2]}]."
        )
    return value @ rows.to(value).mT, list(range(len(rows)))


def best_of(
    values: Tensor,
    tokens: Tensor,
    numbers: Tensor,
    real: Tensor,
    counted: Tensor,
    k: int,
    context: int,
) -> Found:
    """The best places of a batch.

    Args:
        values: [example, pos, unit].
        tokens: [example, pos].
        numbers: of each text, [example].
        real: which of the tokens are no padding, [example, pos]; positions count from each text's first.
        counted: which of them may be among the best, [example, pos].
        k: how many places to keep.
        context: how many tokens to keep on each side.
    """
    _, length, units = values.shape
    at = torch.arange(length, device=values.device) - real.int().argmax(1)[:, None]
    order = ((numbers[:, None] << 32) + at).masked_fill(~counted, _LAST).reshape(-1)
    flat = values.reshape(-1, units).mT.masked_fill(~counted.reshape(-1), -math.inf)
    chosen = _first_of_the_largest(flat, order.expand_as(flat), min(k, flat.shape[1]))
    example, pos = (chosen // length)[..., None], (chosen % length)[..., None]
    window = pos + torch.arange(-context, context + 1, device=values.device)  # [unit, k, window]
    outside = (window < 0) | (window >= length)
    window = window.clamp(0, length - 1)
    outside |= ~real[example, window]
    unit = torch.arange(units, device=values.device)[:, None, None]
    found = {
        "values": flat.gather(1, chosen),
        "order": order[chosen],
        "tokens": tokens[example, window].masked_fill(outside, -1),
        "around": values[example, window, unit].masked_fill(outside, math.nan),
    }
    return {name: part.cpu() for name, part in found.items()}


def no_places(units: int, k: int, context: int) -> Found:
    """Places that anything is better than."""
    places, windows = (units, k), (units, k, 2 * context + 1)
    return {
        "values": torch.full(places, -math.inf, device="cpu"),
        "order": torch.full(places, _LAST, device="cpu"),
        "tokens": torch.full(windows, -1, device="cpu"),
        "around": torch.full(windows, math.nan, device="cpu"),
    }


def merged(one: Found, other: Found) -> Found:
    """The best of both."""
    both = {name: torch.cat([part, other[name]], 1) for name, part in one.items()}
    chosen = _first_of_the_largest(both["values"], both["order"], one["values"].shape[1])
    return {
        name: part.gather(
            1, chosen if part.ndim == 2 else chosen[..., None].expand(-1, -1, part.shape[2])
        )
        for name, part in both.items()
    }


def _first_of_the_largest(values: Tensor, order: Tensor, k: int) -> Tensor:
    """Where the k largest are, [unit, k], the largest first, of equal ones those of lower order.

    ``topk`` alone takes any of equal values, so it only says how large one must be.
    """
    least = values.topk(k).values[:, -1:]
    if bool(values.isnan().any()):
        raise ip.NonFinite("a unit is NaN at some token, which has no place among numbers.")
    rank = torch.where(values > least, -1, torch.where(values == least, order, _LAST + 1))
    chosen = rank.topk(k, largest=False).indices
    chosen = chosen.gather(1, order.gather(1, chosen).argsort(1))
    return chosen.gather(
        1, values.gather(1, chosen).sort(dim=1, descending=True, stable=True).indices
    )


def parts_of(found: Found, sign: int) -> dict[str, Any]:
    """As the result has them."""
    there = found["order"] < _LAST
    return {
        "values": (found["values"] * sign).masked_fill(~there, math.nan),
        "texts": (found["order"] >> 32).masked_fill(~there, -1),
        "positions": (found["order"] & (2**32 - 1)).masked_fill(~there, -1),
        "windows": found["tokens"].masked_fill(~there[..., None], -1),
        "activations": (found["around"] * sign).masked_fill(~there[..., None], math.nan),
    }


def places_of(result: MaxActivating, sign: int, before: int) -> Found:
    """What `parts` made, with text numbers counted on."""
    there = result.texts >= 0
    order = ((result.texts + before) << 32) + result.positions
    return {
        "values": (result.values * sign).masked_fill(~there, -math.inf),
        "order": order.masked_fill(~there, _LAST),
        "tokens": result.windows,
        "around": result.activations * sign,
    }


def words_of(model: ip.TransformerModel, tokens: Tensor) -> dict[str, str]:
    """Tokens as text, by their number as text."""
    known = [token for token in tokens.unique().tolist() if token >= 0]
    if model.tokenizer is None:
        return {str(token): f" {token}" for token in known}
    return {str(token): model.to_single_str_token(token) for token in known}


def texts_in(found: Found) -> list[int]:
    """The numbers of the texts that have a place, ascending."""
    order = found["order"]
    numbers: list[int] = (order[order < _LAST] >> 32).unique().tolist()
    return numbers
