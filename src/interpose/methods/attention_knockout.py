"""`ip.attention_knockout`: which layers carry something from one place of a text to another (Geva et al. 2023).

Queries no longer see keys in a window of layers: their scores become -inf before the softmax, and the rest of the
pattern still sums to one.

    effect(layer) = metric(run without the edges query -> key in the layers around it) - metric(run as it is)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.layers import Layers, chosen_layers, sites_in

_EVIDENCE = (
    "Evidence that the metric needs what these queries read from these keys in these layers; not that all of it goes "
    "this way: the same may come round through other positions, and attention moves to the keys that are left."
)
Places = int | str | Sequence[int] | Sequence[str]


@torch.no_grad()
def attention_knockout(
    model: Any,
    text: Any,
    *,
    metric: Any,
    query: Places,
    key: Places | None = None,
    window: int = 1,
    over: str | Sequence[str] = ("layer",),
    layers: Layers = None,
    heads: Sequence[int] | None = None,
    batch_size: int = 16,
    max_rows: int = 64,
    prepend_bos: bool | None = None,
) -> ip.Scores:
    """How far the metric moves when queries cannot see keys in the layers around each layer.

    ```python
    model = ip.load("pocket")
    paris = ip.metrics.probability(" Paris")
    text = "The Eiffel Tower is in"
    ip.attention_knockout(model, text, metric=paris, query=-1, key="Eiffel Tower", window=3)
    ip.attention_knockout(model, text, metric=paris, query=-1, over=("layer", "key"))
    ```

    Every pass has the text without a cut beside those with one, and its metric is what the others are compared with.
    Keys behind every query are never seen; their effect is an exact zero, and they are not run.

    Args:
        model: a causal model of transformers, in eval mode.
        text: a text, several, or tokens [batch, pos].
        metric: one of `ip.metrics`, or a function of logits that gives a number for each example.
        query: the positions that look: numbers (negative from the end), or texts (wherever they are).
        key: the positions they no longer see, likewise; with ``over=("layer", "key")`` one at a time, by default all.
        window: in how many layers, around each.
        over: ``layer``, or ``("layer", "key")``.
        layers: which are in the middle of windows; by default all that have attention.
        heads: which no longer see; by default all.
        batch_size: how many texts run together, at most.
        max_rows: how many rows (texts times cuts) run together, at most; the texts of a cut always do.
        prepend_bos: as in ``to_tokens``, for texts.
    """
    axes = (over,) if isinstance(over, str) else tuple(over)
    if axes not in (("layer",), ("layer", "key")):
        raise ValueError(f"over is 'layer' or ('layer', 'key'); got {over!r}.")
    if window < 1:
        raise ValueError(f"window is at least 1; got {window}.")
    if key is None and "key" not in axes:
        raise ValueError("say which keys are not seen: key=..., or over=('layer', 'key') for each.")
    batches = ip.batches(model, text, batch_size=batch_size, prepend_bos=prepend_bos)
    there = sites_in(model, "attn_scores", None, "attention")
    layers = chosen_layers(layers, list(there), len(model.blocks), "attention")
    windows = [
        [n for n in range(layer - window // 2, layer + (window + 1) // 2) if n in there]
        for layer in layers
    ]
    keys = _keys(batches, key) if "key" in axes else None
    each = torch.zeros(len(layers), len(keys or [0]), batches[0].total, device="cpu")
    clean, forwards = 0.0, 0
    for batch in batches:
        cuts = _Cuts(model, batch, metric, heads)
        edges = [cuts.edges(query, one) for one in ([key] if keys is None else keys)]
        each[..., list(batch.numbers)] = cuts.everywhere(windows, edges, max_rows)
        clean += float(cuts.clean.sum()) / batch.total
        forwards += cuts.forwards
    said = {
        "metric": ip.metrics.label(metric),
        "clean": clean,
        "window": window,
        "forwards": forwards,
    }
    return ip.Scores.averaged(
        each if keys is not None else each[:, 0],
        title=f"Attention knockout: query {query!r}, {'each key' if key is None else f'key {key!r}'}",
        axes={"layer": list(layers), **({} if keys is None else {"key": keys})},
        unit="change of the metric",
        protocol=said if heads is None else {**said, "heads": list(heads)},
        evidence=_EVIDENCE,
        tokens=batches[0].str_tokens,
    )


class _Cuts:
    """Some texts of one length, and runs in which edges of attention are cut."""

    def __init__(self, model: Any, batch: Any, metric: Any, heads: Sequence[int] | None) -> None:
        self.model, self.batch = model, batch
        self.chosen = torch.ones(model.cfg.n_heads, dtype=torch.bool, device="cpu")
        if heads is not None:
            count = len(self.chosen)
            if not heads or any(not -count <= head < count for head in heads):
                raise IndexError(f"heads={list(heads)}; the model has heads 0 to {count - 1}.")
            self.chosen = torch.zeros_like(self.chosen)
            self.chosen[list(heads)] = True
        self.last = batch.last_logits(metric)
        logits, self.streams = model.run_with_cache(
            batch.clean, names_filter="resid_pre", **self.last
        )
        self.measure = batch.measure(metric, logits)
        self.clean = self.measure(logits)
        self.forwards = 1

    def edges(self, query: Places, key: Any) -> Tensor:
        """The edges of one cut, of those that there are: [example, query, key]."""
        length = self.batch.clean.shape[1]
        mask = torch.zeros(len(self.batch), length, length, dtype=torch.bool, device="cpu")
        for row, queries, keys in zip(mask, self.batch.positions(query), self.batch.positions(key)):
            if not (queries and keys):
                raise ValueError(f"no place looks, or none is seen: query={query!r}, key={key!r}.")
            for place in queries:
                row[place, keys] = True
        return mask.tril()  # later keys are never seen

    def everywhere(
        self, windows: Sequence[Sequence[int]], edges: Sequence[Tensor], max_rows: int
    ) -> Tensor:
        """The effect of every cut in every window, [window, cut, example]; exactly 0 where there is nothing to cut."""
        found = torch.zeros(len(windows), len(edges), len(self.batch), device="cpu")
        seen = [number for number, edge in enumerate(edges) if bool(edge.any())]
        size = max(1, max_rows // len(self.batch) - 1)
        for row, layers in zip(found, windows):
            for at in range(0, len(seen), size):
                some = seen[at : at + size]
                row[some] = self.effects(layers, [edges[number] for number in some]).cpu()
        return found

    def effects(self, layers: Sequence[int], edges: Sequence[Tensor]) -> Tensor:
        """How far each cut moves the metric, in a pass that also has the texts without one: [cut, example]."""
        cut = torch.cat([torch.zeros_like(edges[0]), *edges])  # [row, query, key], the uncut first

        def blind(scores: Tensor, hook: Any) -> Tensor:  # [row, head, query, key]
            gone = (cut[:, None] & self.chosen[:, None, None]).to(scores.device)
            lowered = scores.masked_fill(gone, float("-inf"))
            least = torch.finfo(scores.dtype).min / 2
            blinded = (scores.amax(-1) > least) & (lowered.amax(-1) <= least)
            if bool(blinded.any()):
                place = int(blinded.nonzero()[0][-1])
                raise ip.EditError(
                    f"position {place} has no key left to look at in {hook.name!r}. Leave it one: a query sees itself, "
                    "unless key=... has it too."
                )
            return lowered

        times = len(edges) + 1
        hooks = [(("attn_scores", layer), blind) for layer in layers]
        self.forwards += 1
        stream = self.streams["resid_pre", layers[0]]
        logits = self.batch.run_from(layers[0], stream, times=times, fwd_hooks=hooks, **self.last)
        found = torch.stack([self.measure(part) for part in logits.split(len(self.batch))])
        return found[1:] - found[0]


def _keys(batches: Sequence[Any], key: Places | None) -> list[int]:
    """The keys to go through, which must be the same places in all texts."""
    found = [
        places
        for batch in batches
        for places in batch.positions(range(batch.clean.shape[1]) if key is None else key)
    ]
    if any(places != found[0] for places in found):
        raise ValueError(
            "the texts have the keys at different positions, or are of different lengths: an axis of keys needs the "
            "same places in all. Give over='layer', or one text."
        )
    return list(found[0])
