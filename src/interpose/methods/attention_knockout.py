"""`ip.attention_knockout`: which layers carry something from one place of a text to another (Geva et al. 2023).

Queries no longer see keys in a window of layers: their scores become -inf before the softmax, and the rest of the
pattern still sums to one.

    effect(layer) = metric(run without the edges query -> key in the layers around it) - metric(run as it is)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.batches import floor_of, work_of
from interpose.methods.layers import Layers, around, chosen_layers, heads_of, sites_in
from interpose.models.selection import Some, entries
from interpose.progress import Progress, ShowProgress

_EVIDENCE = (
    "Evidence that the metric needs what these queries read from these keys in these layers; not that all of it goes "
    "this way: the same may come round through other positions, and attention moves to the keys that are left."
)
Positions = int | str | Sequence[int] | Sequence[str]


@torch.no_grad()
def attention_knockout(
    model: ip.TransformerModel,
    texts: Any,
    *,
    metric: Any,
    query: Positions,
    key: Positions | None = None,
    window: int = 1,
    over: str | Sequence[str] = ("layer",),
    layer: Layers = None,
    head: Some = None,
    batch_size: int = 16,
    max_rows: int | None = None,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> ip.Scores:
    """How far the metric moves when queries cannot see keys in the layers around each layer.

    ```python
    model = ip.load("pocket")
    paris = ip.metrics.probability(" Paris")
    text = "The Eiffel Tower is in"
    ip.attention_knockout(model, text, metric=paris, query=-1, key="Eiffel Tower", window=3)
    ip.attention_knockout(model, text, metric=paris, query=-1, over=("layer", "key"))
    ```

    The text without a cut also runs from each layer on, beside those with one, and they are compared with it. Keys
    behind every query are never seen; their effect is an exact zero, and they are not run.

    Args:
        model: a causal model of transformers, in eval mode.
        texts: a text, several, or tokens [batch, pos].
        metric: one of `ip.metrics`, or a function of logits that gives a number for each example.
        query: the positions that look: numbers (negative from the end), or texts (wherever they are).
        key: the positions they no longer see, likewise; with ``over=("layer", "key")`` one at a time, by default all.
        window: in how many layers, around each.
        over: ``layer``, or ``("layer", "key")``.
        layer: which are in the middle of windows; by default all that have attention.
        head: which no longer see; by default all.
        batch_size: how many texts run together, at most.
        max_rows: how many rows (texts times cuts) run together, at most; by default as many as fit in memory.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    axes = (over,) if isinstance(over, str) else tuple(over)
    if axes not in (("layer",), ("layer", "key")):
        raise ValueError(f"over is 'layer' or ('layer', 'key'); got {over!r}.")
    if window < 1:
        raise ValueError(f"window is at least 1; got {window}.")
    if key is None and "key" not in axes:
        raise ValueError("say which keys are not seen: key=..., or over=('layer', 'key') for each.")
    batches = ip.batches(model, texts, batch_size=batch_size, prepend_bos=prepend_bos)
    there = sites_in(model, "attn_scores", None, "attention")
    layers = chosen_layers(layer, list(there), len(model.blocks), "attention")
    windows = [[n for n in around(middle, window) if n in there] for middle in layers]
    seeing = entries(head, heads_of(model), "head", "the model")
    keys = _keys(batches, key) if "key" in axes else None
    each = torch.full((len(layers), len(keys or [0]), batches[0].total), torch.nan, device="cpu")
    every: list[ip.VariantRuns] = []
    with Progress(progress, each.numel(), "cut", keeps=True) as advance:
        for batch in batches:
            edges = [_edges(batch, query, one) for one in ([key] if keys is None else keys)]
            cuts = _Cuts(windows, edges, seeing)
            more = {"metric": metric, "return_type": None, "max_rows": max_rows}
            every.append(ip.run_variants(model, batch, cuts.variants, **more, progress=False))
            every[-1].tally.one_per_cell -= cuts.idle * batch.clean.numel() * len(model.blocks)
            for row, number, effect in cuts.effects(every[-1]):
                each[row, number, list(batch.numbers)] = effect.cpu()
                advance.step(len(batch))
    noise_floor = floor_of(every, advance)
    clean = torch.cat([runs.base.measured for runs in every])
    said = {
        "metric": ip.metrics.label(metric),
        "clean": float(clean.mean()),
        "window": window,
        **({} if head is None else {"head": seeing}),
        **work_of(every),
    }
    found = ip.Scores.averaged(
        each if keys is not None else each[:, 0],
        title=f"Attention knockout: query {query!r}, {'each key' if key is None else f'key {key!r}'}",
        axes={"layer": list(layers), **({} if keys is None else {"key": keys})},
        unit="change of the metric",
        protocol=said,
        evidence=_EVIDENCE,
        tokens=batches[0].str_tokens,
        noise_floor=noise_floor,
    )
    return advance.whole(found)


class _Cuts:
    """Every cut in every window, as variants; first of each window's, a run in which nothing is cut.

    Args:
        windows: the layers of each.
        edges: of each cut, [example, query, key].
        heads: which no longer see.
    """

    def __init__(
        self, windows: Sequence[Sequence[int]], edges: Sequence[Tensor], heads: Sequence[int]
    ) -> None:
        self.edges, self.heads = edges, list(heads)
        seen = [number for number, edge in enumerate(edges) if bool(edge.any())]
        numbers = [-1, *seen] if seen else []
        self.cells = [(row, number) for row in range(len(windows)) for number in numbers]
        self.idle = sum(number < 0 for _, number in self.cells)
        self.unseen = [
            (row, n) for row in range(len(windows)) for n in range(len(edges)) if n not in seen
        ]
        self.variants = [
            ip.Variant([(("attn_scores", n), self._blinding(cell)) for n in windows[cell[0]]])
            for cell in self.cells
        ]
        self.moved: set[tuple[int, int]] = set()

    def effects(self, runs: ip.VariantRuns) -> Iterator[tuple[int, int, Tensor]]:
        """How far each cut moves the metric, by window and number; exactly 0 where there was nothing to cut."""
        whole: dict[int, Tensor] = {}
        nothing = torch.zeros_like(runs.base.measured)
        for row, number in self.unseen:
            yield row, number, nothing
        for run in runs:
            row, number = cell = self.cells[run.number]
            if number < 0:
                whole[row] = run.measured
            else:
                yield row, number, run.measured - whole[row] if cell in self.moved else nothing

    def _blinding(self, cell: tuple[int, int]) -> Any:
        def blind(scores: Tensor, hook: Any) -> Tensor | None:  # [example, head, query, key]
            if cell[1] < 0:
                return None
            gone = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
            gone[:, self.heads] = self.edges[cell[1]][:, None].to(scores.device)
            lowered = scores.masked_fill(gone, float("-inf"))
            least = torch.finfo(scores.dtype).min / 2
            if bool((gone & (scores > least)).any()):
                self.moved.add(cell)
            blinded = (scores.amax(-1) > least) & (lowered.amax(-1) <= least)
            if bool(blinded.any()):
                place = int(blinded.nonzero()[0][-1])
                raise ip.EditError(
                    f"position {place} has no key left to look at in {hook.name!r}. Leave it one: a query sees itself, "
                    "unless key=... has it too."
                )
            return lowered

        return blind


def _edges(batch: ip.Batch, query: Positions, key: Any) -> Tensor:
    """The edges of one cut, of those that there are: [example, query, key]."""
    length = batch.clean.shape[1]
    mask = torch.zeros(len(batch), length, length, dtype=torch.bool, device="cpu")
    for row, queries, keys in zip(mask, batch.positions(query), batch.positions(key)):
        if not (queries and keys):
            raise ValueError(f"no place looks, or none is seen: query={query!r}, key={key!r}.")
        for place in queries:
            row[place, keys] = True
    return mask.tril()  # later keys are never seen


def _keys(batches: Sequence[Any], key: Positions | None) -> list[int]:
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
