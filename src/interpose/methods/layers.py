"""Which layers a method looks at, read the same way by all of them."""

from __future__ import annotations

from collections.abc import Sequence

import interpose as ip
from interpose.models.selection import Some, entries

Layers = Some


def chosen_layers(layers: Layers, there: Sequence[int], count: int, what: str) -> list[int]:
    """The layers that were asked for, in that order, each once.

    Args:
        layers: what was asked for.
        there: the layers that have what the method looks at.
        count: how many layers the model has.
        what: what it looks at, for errors.
    """
    return entries(layers, there, "layer", what, count=count)


def sites_in(model: ip.TransformerModel, kind: str, layers: Layers, what: str) -> dict[int, str]:
    """The sites of a kind by the layers that were asked for.

    Args:
        model: whose.
        kind: of site, such as ``pattern``.
        layers: which.
        what: what the sites are, for errors.
    """
    found = {name: model.sites[name].layer for name in model.sites.select(kind)}
    there = {layer: name for name, layer in found.items() if layer is not None}
    if not there:
        raise ValueError(
            f"{what} is in no layer. Choose a kind of site that blocks have: what the embeddings make enters the first "
            "as 'resid_pre', layer=0."
        )
    return {n: there[n] for n in chosen_layers(layers, list(there), len(model.blocks), what)}


def heads_of(model: ip.TransformerModel, kind: str = "q") -> int:
    """How many heads attention has at a kind of site: keys and values have fewer with grouped queries."""
    shared = model.cfg.n_key_value_heads if kind in ("k", "v") else None
    count = shared or model.cfg.n_heads
    if count is None:
        raise ip.Unsupported(f"{model.tree.label} has no attention whose heads are known.")
    return count


def around(layer: int, size: int) -> range:
    """So many layers around one; of an even number, one more is before it."""
    return range(layer - size // 2, layer + (size + 1) // 2)
