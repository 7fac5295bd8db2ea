"""Circuits, and how faithful they are: does a part of the model, alone, do what the whole model does?

A circuit is a set of edges between heads, MLPs, the input and the logits. To test it, the model runs on the clean text
while every other edge carries what it carries on the corrupt text:

    input of v = stream of v on the corrupt text + sum over kept edges u -> v of (u now - u on the corrupt text)
    faithfulness = (metric of the circuit - metric of the corrupt run) / (metric of the clean run - the same)

With all edges kept this is the clean run, with none it is the corrupt run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.batches import work_of
from interpose.methods.circuit_picture import picture
from interpose.methods.edge_ablation import AblatedRun
from interpose.methods.wiring import Edge, Graph, wiring
from interpose.progress import Progress, ShowProgress
from interpose.render.text import table
from interpose.results.result import shown

EVIDENCE = (
    "Evidence for how much of the metric the kept edges carry by themselves, on these texts and against this "
    "corruption; not for the circuit being the only one or the smallest one, and a share above 1 or below 0 means that "
    "edges which work against the answer, or for it, were left out."
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Circuit(ip.Result):
    """A part of a model: the edges that are kept.

    ```python
    circuit = scores.circuit(edges=200)
    len(circuit), circuit.nodes
    circuit.save("circuit.svg")       # or .png, .html, .csv, .json
    ```

    Attributes:
        graph: all edges that there can be in the model.
        edges: those that are kept, each a writer and a reader.
        scores: a number for each, which draws it; empty if there are none.
    """

    graph: Graph
    edges: tuple[Edge, ...]
    scores: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        known = set(self.graph.writers), set(self.graph.readers)
        for writer, reader in self.edges:
            if writer not in known[0] or reader not in known[1]:
                raise ValueError(
                    f"no edge from {writer!r} to {reader!r}: writers are {_some(self.graph.writers)}; readers are "
                    f"{_some(self.graph.readers)}."
                )
        for edge, (at, row) in zip(self.edges, self.graph.places(self.edges)):
            if at >= self.graph.reach[row]:
                raise ValueError(
                    f"no edge from {edge[0]!r} to {edge[1]!r}: it is written after it is read."
                )
        if self.scores and len(self.scores) != len(self.edges):
            raise ValueError(f"{len(self.scores)} scores for {len(self.edges)} edges.")

    def __len__(self) -> int:
        return len(self.edges)

    @property
    def nodes(self) -> list[str]:
        """The heads, MLPs and ends that its edges join, in the order in which they run."""
        there = {writer for writer, _ in self.edges}
        for _, reader in self.edges:
            there.update(self.graph.nodes_of(reader))
        return [name for name in (*self.graph.writers, "logits") if name in there]

    @property
    def mask(self) -> Tensor:
        """Which edges are kept, [writer, reader]."""
        kept = torch.zeros(len(self.graph.writers), len(self.graph.readers), dtype=torch.bool)
        for place in self.graph.places(self.edges):
            kept[place] = True
        return kept

    @classmethod
    def brought_up(cls, words: dict[str, Any]) -> dict[str, Any]:
        """The parts of version 1, where those of the graph lay beside the others."""
        graph = {name: words.pop(name) for name in ("writers", "readers", "reach")}
        return {**words, "graph": graph}

    @property
    def title(self) -> str:
        """Its size, in a line."""
        return f"Circuit of {len(self)} of {len(self.graph)} edges, {len(self.nodes)} nodes"

    def records(self) -> Iterator[dict[str, Any]]:
        """Every edge as a dictionary: its writer, its reader, and its score as its value, where there is one."""
        for edge, score in zip_longest(self.edges, self.scores):
            known = {} if score is None else {"value": score}
            yield {"writer": edge[0], "reader": edge[1], **known}

    def cells(self) -> list[list[str]]:
        """The edges as they are printed, the strongest first."""
        found = self.top(len(self)) if self.scores else self.records()
        return [list(map(shown, record.values())) for record in found]

    def text_body(self, high: int) -> str:
        """A table of the first edges.

        Args:
            high: how many lines there are for it.
        """
        rows = self.cells()
        few = min(12, high - 3)
        more = [["..."] * len(self.names())] if len(rows) > few else []
        return table(self.names(), [*rows[:few], *more])

    def svg(self, title: str | None = None) -> str:
        """A drawing of its nodes by layer, the input at the bottom, and of its edges."""
        return picture(self, self.title if title is None else title)

    def html_body(self) -> str:
        """The drawing, and its edges in a table."""
        drawn = f'<div style="overflow-x:auto">{self.svg("")}</div>'
        return drawn + ip.Result.html_body(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Faithfulness(ip.Scores):
    """How much of the way from the corrupt to the clean metric circuits go, by their number of edges.

    Attributes:
        each: the metric of every circuit and example, [circuit, example].
        clean: the metric of the clean run, [example].
        corrupt: the metric of the corrupt run, [example].
        possible: how many edges the model has.
    """

    each: Tensor
    clean: Tensor
    corrupt: Tensor
    possible: int

    def _area(self, of: Callable[[float], float]) -> float:
        sizes = [min(size, self.possible) for size in self.axes["edges"]]
        points = sorted(zip((0, *sizes, self.possible), (0.0, *self.values.tolist(), 1.0)))
        steps = pairwise(points)
        area = sum((right - left) * (of(a) + of(b)) / 2 for (left, a), (right, b) in steps)
        return float(area / self.possible)

    @property
    def area(self) -> float:
        """The area under the curve over the share of edges that are kept: high is good (MIB's CPR)."""
        return self._area(lambda value: value)

    @property
    def distance(self) -> float:
        """The area between the curve and 1: zero for circuits that do just what the model does (MIB's CMD)."""
        return self._area(lambda value: abs(1 - value))


def faithfulness(
    model: ip.TransformerModel,
    clean: Any,
    corrupt: Any,
    *,
    metric: Any,
    circuits: Circuit | Sequence[Circuit] | None = None,
    scores: ip.EdgeScores | None = None,
    sizes: Sequence[int] | None = None,
    batch_size: int = 16,
    max_rows: int | None = None,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> Faithfulness:
    """How much of the metric circuits keep: 1 as the whole model on the clean text, 0 as on the corrupt text.

    ```python
    scores = ip.edge_attribution(model, clean, corrupt, metric=lead, steps=5)
    curve = ip.faithfulness(model, clean, corrupt, metric=lead, scores=scores, sizes=[50, 100, 200, 400])
    ip.faithfulness(model, clean, corrupt, metric=lead, circuits=scores.circuit(edges=200)).values
    ```

    Of several texts, the means of the metric are compared. Circuits are variants of the clean run, one at a time unless
    ``max_rows`` lets more run together.

    Args:
        model: the model that the circuits are of, in eval mode.
        clean: a text, several, or tokens [batch, pos]: what the circuits run on.
        corrupt: the texts of the same lengths from which the other edges come.
        metric: one of `ip.metrics`, or a function of logits.
        circuits: a circuit, or several; or else
        scores: of edges, from which circuits are made,
        sizes: one of each of these numbers of edges.
        batch_size: how many texts run together, at most.
        max_rows: how many rows (texts times circuits) run together, at most; by default those of one circuit, which
            keeps what every writer adds: [writer, text, pos, d_model].
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    chosen, labels = _chosen(circuits, scores, sizes)
    if corrupt is None:
        raise ValueError(
            "the other edges carry their values on a corrupt text: give corrupt, as long as clean."
        )
    wires = wiring(model)
    for circuit in chosen:
        if circuit.graph != wires.graph:
            raise ValueError(
                f"a circuit of another model: it has {len(circuit.graph.writers)} writers and "
                f"{len(circuit.graph.readers)} readers, this model {len(wires.graph.writers)} and "
                f"{len(wires.graph.readers)}."
            )
    parts = ip.batches(model, clean, corrupt, batch_size=batch_size, prepend_bos=prepend_bos)
    found = torch.full((2 + len(chosen), parts[0].total), torch.nan, device="cpu")
    every: list[ip.VariantRuns] = []
    with torch.no_grad(), Progress(progress, found[2:].numel(), keeps=True) as advance:
        for batch in parts:
            assert batch.corrupt is not None
            numbers = list(batch.numbers)
            without, values = wires.reference(batch.corrupt, "logits", **batch.last_logits(metric))
            assert without is not None
            cut = [AblatedRun(wires, circuit.mask, values).variant for circuit in chosen]
            more = {"metric": metric, "return_type": None, "max_rows": max_rows or len(batch)}
            every.append(ip.run_variants(model, batch, cut, **more, progress=advance))
            runs = every[-1].base
            found[0, numbers] = runs.measured.cpu()
            found[1, numbers] = batch.measure(metric, runs.logits)(without).cpu()
            for run in every[-1]:
                found[2 + run.number, numbers] = run.measured.cpu()
    corrupted = [batch.corrupt for batch in parts[: len(every)] if batch.corrupt is not None]
    protocol = {
        "metric": ip.metrics.label(metric),
        "clean": float(found[0].nanmean()),
        "corrupt": float(found[1].nanmean()),
        "kept": [len(circuit) for circuit in chosen],
        "examples": parts[0].total,
        **work_of(every, *corrupted),
    }
    return advance.whole(_faithfulness(found, labels, chosen, protocol))


def _faithfulness(
    found: Tensor, labels: list[int], circuits: Sequence[Circuit], protocol: dict[str, Any]
) -> Faithfulness:
    return Faithfulness(
        title="faithfulness of circuits",
        values=_shares(found),
        axes={"edges": labels},
        unit="share of the way from corrupt to clean",
        protocol=protocol,
        evidence=EVIDENCE,
        each=found[2:],
        clean=found[0],
        corrupt=found[1],
        possible=len(circuits[0].graph),
    )


def _shares(found: Tensor) -> Tensor:
    clean, corrupt, *circuits = found
    if clean.nanmean() == corrupt.nanmean():
        raise ValueError(
            f"the metric is {float(clean.nanmean()):.4g} on the clean and on the corrupt text: there is nothing that a "
            "circuit could bring back. Give texts, or a metric, that differ."
        )
    there = [~each.isnan() for each in circuits]  # of a run that was ended, what is done
    return torch.stack(
        [
            (each[some] - corrupt[some]).mean() / (clean[some] - corrupt[some]).mean()
            for each, some in zip(circuits, there)
        ]
    )


def _chosen(
    circuits: Circuit | Sequence[Circuit] | None,
    scores: ip.EdgeScores | None,
    sizes: Sequence[int] | None,
) -> tuple[list[Circuit], list[int]]:
    """The circuits to run, and how many edges each was to have."""
    if circuits is not None and scores is None and sizes is None:
        given = [circuits] if isinstance(circuits, Circuit) else list(circuits)
        return given, [len(circuit) for circuit in given]
    if circuits is None and scores is not None and sizes is not None:
        return [scores.circuit(edges=size) for size in sizes], list(sizes)
    raise ValueError(
        "give circuits=..., or scores=... and sizes=[...], such as sizes=[50, 100, 200]."
    )


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}, ..., {names[-1]}"
