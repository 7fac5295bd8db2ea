"""Patchscopes: let a model say what is in one of its own activations (Ghandeharioun et al., 2024).

The stream at one token of a source prompt, after a layer, is put into another prompt at a token and a layer of choice,
and the model goes on from there:

    run(target, with resid_post[target layer, target pos] := resid_post[source layer, source pos] of run(source))

What it says next is read off as a metric, as the likeliest token, or as generated text. With the last layer and the
last position of the target this is the logit lens of the source.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.render.html import html_table
from interpose.render.text import table

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
        """What is said, as a table: its head and its rows. Source layers are rows; target layers, if any, columns."""
        shown = [repr(said) if isinstance(said, str) else str(said) for said in self.says]
        if len(self.axes) == 2:
            layers, columns = self.axes.values()
            lines = [shown[at : at + len(columns)] for at in range(0, len(shown), len(columns))]
            head = ["source / target", *map(str, columns)]
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
            places = ((cell["source_layer"], cell["target_layer"]) for cell in self.records())
            cells = [(*map(str, at), repr(text)) for at, text in zip(places, self.generated)]
            parts.append(html_table(("source", "target", "generated"), cells, most=2000))
        return "".join(parts)


@torch.no_grad()
def patchscope(
    model: Any,
    source: Any,
    target: Any,
    *,
    source_pos: int | str = -1,
    target_pos: int | str = -1,
    source_layers: Layers | None = None,
    target_layers: Layers | None = None,
    site: str = "resid_post",
    answer: Any = None,
    metric: Any = None,
    generate: int = 0,
    batch_size: int = 32,
    prepend_bos: bool | None = None,
) -> Patchscope:
    """What a model says when the stream at a token of one prompt is put into another prompt, by layers.

    ```python
    ip.patchscope(
        model, "People in France speak", "The capital of Japan is",
        source_pos=" France", target_pos=" Japan", answer=" Paris", target_layers="all",
    )
    ```

    Args:
        model: a model of transformers, in eval mode.
        source: the text, or the tokens of one, whose activation is read.
        target: the text, or the tokens of one, that it is put into.
        source_pos: which token of the source: a number (negative from the end), or the token, where it is first.
        target_pos: which token of the target.
        source_layers: which layers are read: numbers, a slice; by default all.
        target_layers: which layers each is put into: numbers, a slice or ``all``; by default its own layer.
        site: what is read and written.
        answer: the token whose probability is measured; by default that of the likeliest token.
        metric: what to measure instead: one of `ip.metrics`, or a function of logits.
        generate: how many tokens each cell goes on with, greedily. The patch is in the prompt alone.
        batch_size: how many cells run together, at most.
        prepend_bos: as in ``to_tokens``, for texts.
    """
    if answer is not None and metric is not None:
        raise ValueError("give answer=... or metric=..., not both.")
    read = _one(model, source, "source", prepend_bos)
    into = _one(model, target, "target", prepend_bos)
    moves = _Moves(
        sources=_sites(model, site, source_layers),
        targets=_sites(model, site, source_layers if target_layers is None else target_layers),
        same=target_layers is None,
        from_pos=_place(model, read, source_pos, "source"),
        to_pos=_place(model, into, target_pos, "target"),
    )
    measured = ip.metrics.probability(answer) if answer is not None else metric or _surest
    values, says, texts, protocol = moves.run(model, read, into, measured, generate, batch_size)
    axes = {"source_layer": list(moves.sources), "target_layer": list(moves.targets)}
    axes = {"layer": axes["source_layer"]} if moves.same else axes
    return Patchscope(
        title=f"What {_shown(model, into)} says with {site} of {_shown(model, read)}, position {moves.from_pos}, put "
        f"into position {moves.to_pos}",
        values=values.reshape([len(entries) for entries in axes.values()]),
        axes=axes,
        unit="probability" if metric is None else "metric",
        protocol=protocol,
        evidence="What this model can read from the activation with this prompt's help, not what it makes of it in the "
        "source. The target prompt says things of its own, and a vector in a layer that is not its own may be misread: "
        "compare with other sources and other targets.",
        says=says,
        generated=texts or None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moves:
    """What is moved from where to where: names of sites by layer, and positions."""

    sources: dict[int, str]
    targets: dict[int, str]
    same: bool
    from_pos: int
    to_pos: int

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Pairs of a source layer and a target layer."""
        every = itertools.product(self.sources, self.targets)
        return [(one, other) for one, other in every if one == other or not self.same]

    def run(
        self, model: Any, read: Tensor, into: Tensor, measured: Any, generate: int, batch_size: int
    ) -> tuple[Tensor, list[Any], list[Any], dict[str, Any]]:
        """Every cell's number, its likeliest token, its generated text; and how they were made."""
        wanted = ip.at(list(self.sources.values()), pos=self.from_pos)
        _, cache = model.run_with_cache(read, names_filter=wanted, return_type=None)
        plain = model(into)  # [1, pos, d_vocab]
        numbers: list[Tensor] = []
        says: list[Any] = []
        texts: list[Any] = []
        parts = ip.batches(model, into.expand(len(self.cells), -1), batch_size=batch_size)
        for part in parts:
            cells = [self.cells[number] for number in part.numbers]
            logits = model.run_with_hooks(part.clean, hooks=self.patches(cells, cache))
            as_it_is = plain.expand(len(part), -1, -1)
            alike = dataclasses.replace(part, numbers=(0,) * len(part), total=1)  # of one text
            measure = alike.measure(measured, clean_logits=as_it_is)
            numbers.append(measure(logits).cpu())
            says += [_token(model, token) for token in logits[:, -1].argmax(-1).tolist()]
            if generate:
                with model.hooks(hooks=self.patches(cells, cache, phase="prompt")):
                    made = model.generate(part.clean, max_new_tokens=generate, do_sample=False)
                texts += _said(model, made[:, part.clean.shape[1] :])
        protocol = {
            "metric": "of the likeliest token"
            if measured is _surest
            else ip.metrics.label(measured),
            "without_a_patch": float(measure(as_it_is)[0]),
            "forwards": 2 + len(parts),
        }
        if generate:
            protocol["generated"] = f"{generate} tokens in each cell"
        return torch.cat(numbers), says, texts, protocol

    def patches(
        self, cells: Sequence[tuple[int, int]], cache: Any, phase: str | None = None
    ) -> list[ip.Edit]:
        """An edit for each target layer, which gives each row that belongs to it the value of its source layer."""
        made: list[ip.Edit] = []
        for layer, name in self.targets.items():
            rows = [row for row, (_, target) in enumerate(cells) if target == layer]
            if rows:
                values = [
                    cache[self.sources[cells[row][0]]] for row in rows
                ]  # each [1, 1, d_model]
                made.append(
                    ip.fill(name, torch.cat(values), rows=rows, pos=self.to_pos, phase=phase)
                )
        return made


def _surest(logits: Tensor) -> Tensor:
    """The probability of the likeliest token, [batch]."""
    return logits[:, -1].float().softmax(-1).amax(-1)


def _sites(model: Any, site: str, layers: Layers | None) -> dict[int, str]:
    """The names of a kind of site by layer."""
    found = model.sites.select(site if layers is None else ip.at(site, layer=layers))
    return {place.layer: name for name, place in found.items()}


def _one(model: Any, text: Any, what: str, prepend_bos: bool | None) -> Tensor:
    """The tokens of a single text, [1, pos]."""
    parts = ip.batches(model, text, prepend_bos=prepend_bos)
    if parts[0].total > 1:
        raise ValueError(f"{what} is one text; got {parts[0].total}. Call patchscope for each.")
    tokens: Tensor = parts[0].clean
    return tokens


def _place(model: Any, tokens: Tensor, pos: int | str, what: str) -> int:
    """A position in a text, counted from the front."""
    if isinstance(pos, str):
        return int(model.get_token_position(pos, tokens[0].tolist()))
    length = tokens.shape[1]
    if not -length <= pos < length:
        raise IndexError(f"{what}_pos={pos}; the {what} has {length} tokens, 0 to {length - 1}.")
    return pos % length


def _token(model: Any, token: int) -> Any:
    return token if model.tokenizer is None else model.to_single_str_token(token)


def _said(model: Any, tokens: Tensor) -> list[Any]:
    """Tokens [row, pos] as texts without special tokens, or as they are if there is no tokenizer."""
    if model.tokenizer is None:
        return tokens.tolist()
    return [model.tokenizer.decode(row, skip_special_tokens=True) for row in tokens.tolist()]


def _shown(model: Any, tokens: Tensor) -> str:
    return repr(tokens[0].tolist() if model.tokenizer is None else model.to_string(tokens[0]))
