"""Which layers a method looks at, read the same way by all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Layers = int | slice | Sequence[int] | None
"""A layer (negative from the end), several, a slice; None for all."""


def chosen_layers(layers: Layers, there: Sequence[int], count: int, what: str) -> list[int]:
    """The layers that were asked for, in that order, each once.

    Args:
        layers: what was asked for.
        there: the layers that have what the method looks at.
        count: how many layers the model has.
        what: what it looks at, for errors.
    """
    if layers is None:
        return list(there)
    if isinstance(layers, slice):
        layers = [layer for layer in range(count)[layers] if layer in there]
    asked = [layers] if isinstance(layers, int) else list(layers)
    wrong = next((one for one in asked if not isinstance(one, int) or isinstance(one, bool)), None)
    if wrong is not None:
        raise TypeError(f"layers are whole numbers; got {wrong!r}.")
    found = list(dict.fromkeys(one + count if one < 0 else one for one in asked))
    if not found:
        raise IndexError(f"layers is empty: {what} is in layers {list(there)}; None means all.")
    if missing := [one for one in asked if (one + count if one < 0 else one) not in there]:
        raise IndexError(f"{what} is in layers {list(there)}, and not in layer {missing[0]}.")
    return found


def sites_in(model: Any, kind: str, layers: Layers, what: str) -> dict[int, str]:
    """The sites of a kind by the layers that were asked for.

    Args:
        model: whose.
        kind: of site, such as ``pattern``.
        layers: which.
        what: what the sites are, for errors.
    """
    there = {model.sites[name].layer: name for name in model.sites.select(kind)}
    return {n: there[n] for n in chosen_layers(layers, list(there), len(model.blocks), what)}
