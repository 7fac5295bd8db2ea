"""Patchscopes: let a model say what is in one of its own activations (Ghandeharioun et al., 2024).

The stream at one token of a source prompt, after a layer, is put into another prompt at a token and a layer of choice,
and the model goes on from there:

    run(into, with resid_post[into layer, into pos] := resid_post[source layer, source pos] of run(source))

What it says next is read off as a metric, as the likeliest token, or as generated text. With the last layer and the
last position of the other prompt this is the logit lens of the source.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.batches import work_of
from interpose.models.selection import entries
from interpose.progress import Progress, ShowProgress
from interpose.render.html import html_table
from interpose.render.text import table

_EVIDENCE = (
    "What this model can read from the activation with this prompt's help, not what it makes of it in the source. The "
    "other prompt says things of its own, and a vector in a layer that is not its own may be misread: compare with "
    "other sources, and put them into other prompts."
)
_TOGETHER = 32  # cells that are generated at once
Layers = int | Sequence[int] | slice | str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Patchscope(ip.Scores):
    """What a model says when an activation of one prompt is put into another, by layers.

    Attributes:
        says: the likeliest next token of each cell, in the order of ``values.flatten()``; ids if there is no tokenizer.
        generated: what each cell goes on with, if text was generated.
    """

    says: list[Any]
    generated: list[Any] | None = None

    def columns(self) -> dict[str, Sequence[Any]]:
        """What there is of every cell, by name: also what it says, and goes on with."""
        more = {} if self.generated is None else {"generated": self.generated}
        return {**ip.Scores.columns(self), "says": self.says, **more}

    def words(self) -> tuple[list[str], list[list[str]]]:
        """What is said, as a table: its head and its rows. Source layers are rows; others, if any, columns."""
        shown = [repr(said) if isinstance(said, str) else str(said) for said in self.says]
        if len(self.axes) == 2:
            layers, columns = self.axes.values()
            lines = [shown[at : at + len(columns)] for at in range(0, len(shown), len(columns))]
            head = ["source / into", *map(str, columns)]
            return head, [[str(layer), *line] for layer, line in zip(layers, lines)]
        numbers = [f"{value:.3f}" for value in self.values.tolist()]
        texts = [repr(text) for text in self.generated or ()]
        rows = zip(map(str, self.axes["layer"]), numbers, shown, *([texts] if texts else []))
        return ["layer", self.unit, "says", "generated"][: 4 if texts else 3], [
            list(r) for r in rows
        ]

    def text_body(self, high: int) -> str:
        """What each cell says.

        Args:
            high: how many lines there are for it.
        """
        return "\n" + table(*self.words(), most=high - 3)

    def html_body(self) -> str:
        """A heat map of the metric, and what each cell says."""
        parts = [self.view().html(), html_table(*self.words(), title="What it says")]
        if self.generated and len(self.axes) == 2:
            places = ((cell["source_layer"], cell["into_layer"]) for cell in self.records())
            cells = [(*map(str, at), repr(text)) for at, text in zip(places, self.generated)]
            parts.append(html_table(("source", "into", "generated"), cells, most=2000))
        return "".join(parts)


@torch.no_grad()
def patchscope(
    model: ip.TransformerModel,
    source: Any,
    into: Any,
    *,
    source_pos: int | str = -1,
    into_pos: int | str = -1,
    source_layer: Layers | None = None,
    into_layer: Layers | None = None,
    site: str = "resid_post",
    answer: Any = None,
    metric: Any = None,
    generate: int = 0,
    max_rows: int | None = None,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> Patchscope:
    """What a model says when the stream at a token of one prompt is put into another prompt, by layers.

    ```python
    ip.patchscope(
        model, "People in France speak", "The capital of Japan is",
        source_pos=" France", into_pos=" Japan", answer=" Paris", into_layer="all",
    )
    ```

    Args:
        model: a model of transformers, in eval mode.
        source: the text, or the tokens of one, whose activation is read.
        into: the text, or the tokens of one, that it is put into.
        source_pos: which token of the source: a number (negative from the end), or the token, where it is first.
        into_pos: which token of the other text, likewise.
        source_layer: which layers are read: a number, several, a slice; by default all.
        into_layer: which layers each is put into: likewise, or ``all``; by default its own layer.
        site: what is read and written.
        answer: the token whose probability is measured; by default that of the likeliest token.
        metric: what to measure instead: one of `ip.metrics`, or a function of logits.
        generate: how many tokens each cell goes on with, greedily. The patch is in the prompt alone.
        max_rows: how many cells run together, at most; by default as many as fit in memory.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    measured, said = _metric(answer, metric)
    read = _one(model, source, "source", prepend_bos)
    other = _one(model, into, "into", prepend_bos)
    moves = _Moves(
        model=model,
        text=other,
        sources=_sites(model, site, source_layer),
        targets=_sites(model, site, source_layer if into_layer is None else into_layer),
        same=into_layer is None,
        pos=_place(model, other, into_pos, "into"),
    )
    from_pos = _place(model, read, source_pos, "source")
    wanted = ip.at(list(moves.sources.values()), pos=from_pos)
    _, cache = model.run_with_cache(read.clean, names_filter=wanted, return_type=None)
    values = torch.full((len(moves.cells),), torch.nan, device="cpu")
    says: list[Any] = [None] * len(values)
    texts: list[Any] = [None] * len(values) if generate else []
    with Progress(progress, len(values) * (2 if generate else 1), "cell", keeps=True) as advance:
        runs = moves.runs(cache, metric=measured, max_rows=max_rows, progress=advance)
        for run in runs:
            values[run.number] = float(run.measured)
            says[run.number] = _token(model, int(run.logits[0, -1].argmax()))
        for some in _chunks(range(len(texts)), max_rows or _TOGETHER):
            texts[some.start : some.stop] = moves.generated(some, cache, generate)
            advance.step(len(some))
    protocol = {"metric": said, "without_a_patch": float(runs.base.measured)}
    protocol |= work_of([runs], read.clean)
    protocol |= {"generated": f"{generate} tokens in each cell"} if generate else {}
    found = Patchscope(
        title=f"What {_shown(model, other)} says with {site} of {_shown(model, read)}, position {from_pos}, put "
        f"into position {moves.pos}",
        values=values.reshape([len(numbers) for numbers in moves.axes.values()]),
        axes=moves.axes,
        unit="probability" if metric is None else "metric",
        protocol=protocol,
        evidence=_EVIDENCE,
        says=says,
        generated=texts or None,
    )
    return advance.whole(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moves:
    """What is moved from where to where: names of sites by layer, and the position that it is put into."""

    model: ip.TransformerModel
    text: ip.Batch
    sources: dict[int, str]
    targets: dict[int, str]
    same: bool
    pos: int

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Pairs of the layer that is read and the layer that it is put into."""
        every = itertools.product(self.sources, self.targets)
        return [(one, other) for one, other in every if one == other or not self.same]

    @property
    def axes(self) -> dict[str, list[Any]]:
        """The axes of the result: one where each layer goes into itself."""
        if self.same:
            return {"layer": list(self.sources)}
        return {"source_layer": list(self.sources), "into_layer": list(self.targets)}

    def runs(self, cache: ip.Cache, **more: Any) -> ip.VariantRuns:
        """A run for each cell."""
        variants = [
            ip.Variant([ip.fill(self.targets[to], cache[self.sources[of]], pos=self.pos)])
            for of, to in self.cells
        ]
        return ip.run_variants(self.model, self.text, variants, **more)

    def generated(self, some: range, cache: ip.Cache, count: int) -> list[Any]:
        """What some cells go on with; each row of a target layer has the value of its own source layer."""
        cells, edits = self.cells[some.start : some.stop], []
        for layer, name in self.targets.items():
            own = [row for row, (_, to) in enumerate(cells) if to == layer]
            if own:
                values = torch.cat([cache[self.sources[cells[row][0]]] for row in own])
                edits.append(ip.fill(name, values, rows=own, pos=self.pos, phase="prompt"))
        rows = self.text.clean.expand(len(cells), -1)
        tokens = ip.batches(self.model, rows, batch_size=len(cells))[0].clean
        with self.model.hooks(hooks=edits):
            made = self.model.generate(tokens, max_new_tokens=count, do_sample=False)
        return _said(self.model, made[:, tokens.shape[1] :])


def _metric(answer: Any, metric: Any) -> tuple[Any, str]:
    """What is measured, and how it is written."""
    if answer is not None and metric is not None:
        raise ValueError("give answer=... or metric=..., not both.")
    if answer is not None:
        metric = ip.metrics.probability(answer)
    if metric is None:
        return ip.metrics.function(_surest, last=1), "of the likeliest token"
    return metric, ip.metrics.label(metric)


def _surest(logits: Tensor) -> Tensor:
    """The probability of the likeliest token, [batch]."""
    return logits[:, -1].float().softmax(-1).amax(-1)


def _sites(model: ip.TransformerModel, site: str, layers: Layers | None) -> dict[int, str]:
    """The names of a kind of site by layer."""
    found = model.sites.select(site if layers is None else ip.at(site, layer=layers))
    return {place.layer: name for name, place in found.items() if place.layer is not None}


def _one(model: ip.TransformerModel, text: Any, what: str, prepend_bos: bool | None) -> ip.Batch:
    """A single text."""
    parts = ip.batches(model, text, prepend_bos=prepend_bos)
    if parts[0].total > 1:
        raise ValueError(f"{what} is one text; got {parts[0].total}. Call patchscope for each.")
    return parts[0]


def _place(model: ip.TransformerModel, text: ip.Batch, pos: int | str, what: str) -> int:
    """A position in a text, counted from the front."""
    if isinstance(pos, str):
        return int(model.get_token_position(pos, text.clean[0].tolist()))
    (place,) = entries(pos, text.clean.shape[1], "pos", what)
    return place


def _token(model: ip.TransformerModel, token: int) -> Any:
    return token if model.tokenizer is None else model.to_single_str_token(token)


def _said(model: ip.TransformerModel, tokens: Tensor) -> list[Any]:
    """Tokens [row, pos] as texts without special tokens, or as they are if there is no tokenizer."""
    if model.tokenizer is None:
        return tokens.tolist()
    return [model.tokenizer.decode(row, skip_special_tokens=True) for row in tokens.tolist()]


def _shown(model: ip.TransformerModel, text: ip.Batch) -> str:
    tokens = text.clean[0]
    return repr(tokens.tolist() if model.tokenizer is None else model.to_string(tokens))


def _chunks(numbers: range, size: int) -> Iterator[range]:
    return (numbers[at : at + size] for at in range(0, len(numbers), size))
