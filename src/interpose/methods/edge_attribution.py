"""Edge attribution patching: how much every edge between two parts of a model matters, all of them at once.

The stream is a sum, so every head, every MLP and the logits read the part of each head and MLP before them. What would
the metric become if one such part came from the corrupt text? To first order, from one gradient:

    score(u -> v) = (u on the corrupt text - u on the clean text) . d metric / d (input of v),  at the clean run

A negative score is an edge that the answer needs. With ``steps`` above 1 the gradient is the mean over points on the
straight line from the corrupt to the clean input (EAP-IG), which sees past places where the metric is flat. Gradients
at the inputs of single heads come from those at q, k and v, through the head's weights and the norm before them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.batches import must_read_text
from interpose.methods.gradient_attribution import must_have_gradient
from interpose.methods.wiring import INPUT, Graph, Layer, Wiring, same, wiring
from interpose.precision import wide
from interpose.progress import ShowProgress, tracked
from interpose.render.labelled import Labelled

_MOST = 2**25  # numbers of writers and readers held at a time
_PROVEN = 16  # tokens for which the gradients of readers must add up
EVIDENCE = (
    "A first-order guess of what one edge alone would change: evidence for where to look, and a good order in which to "
    "keep edges; not for what the edge really does (test that with ip.faithfulness), and small scores may hide edges "
    "that back each other up or sit where the metric is flat."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class EdgeScores(ip.Scores):
    """A number for every edge: ``values`` is [writer, reader], zero where no edge can be.

    ```python
    scores.at(writer="a5.h3", reader="a6.h0.q")
    scores.top(10)                # the strongest edges
    scores.nodes()                # of heads and MLPs: the sums of their outgoing edges
    scores.circuit(edges=200)     # a part of the model, for ip.faithfulness
    ```

    Attributes:
        reach: for each reader, how many writers come before it: the first so many.
    """

    reach: list[int]

    @property
    def graph(self) -> Graph:
        """All edges that there can be."""
        return Graph(
            writers=tuple(self.axes["writer"]),
            readers=tuple(self.axes["reader"]),
            reach=tuple(self.reach),
        )

    def nodes(self) -> ip.Scores:
        """The score of each writer: the sum of its outgoing edges, as attribution patching gives it."""
        return ip.Scores(
            title=f"{self.title}, by node",
            values=self.values.sum(1),
            axes={"node": self.axes["writer"]},
            unit=self.unit,
            protocol=self.protocol,
            evidence=self.evidence,
        )

    def places(self) -> Iterable[int]:
        """The edges that there can be, as numbers in ``values.flatten()``."""
        wide = len(self.axes["reader"])
        return sorted(w * wide + r for r, many in enumerate(self.reach) for w in range(many))

    def circuit(self, edges: int) -> ip.Circuit:
        """The part of the model with the strongest edges that lead somewhere.

        From the logits backwards: of all edges into what is already there, the strongest, up or down, comes next, until
        there are as many as asked for. Those to which no path leads from the input carry nothing and are left out, so
        there may be fewer.

        Args:
            edges: how many to choose; `ip.faithfulness` tells how many are needed.
        """
        graph, strength = self.graph, self.values.abs().tolist()
        waiting: list[tuple[float, int, int]] = []
        into: dict[str, list[int]] = {}
        for place, name in enumerate(graph.readers):
            for node in graph.nodes_of(name):
                into.setdefault(node, []).append(place)
        open_readers, chosen = set[int](), list[tuple[str, str]]()

        def enter(node: str) -> None:
            for place in set(into.get(node, ())) - open_readers:
                open_readers.add(place)
                for writer in range(graph.reach[place]):
                    heapq.heappush(waiting, (-strength[writer][place], writer, place))

        enter("logits")
        while waiting and len(chosen) < edges:
            _, writer, place = heapq.heappop(waiting)
            chosen.append((graph.writers[writer], graph.readers[place]))
            enter(graph.writers[writer])
        kept = graph.connected(chosen)
        return ip.Circuit(
            graph=graph,
            edges=tuple(kept),
            scores=tuple(float(self.values[place]) for place in graph.places(kept)),
        )

    def shuffled(self, seed: int = 0) -> EdgeScores:
        """The same numbers dealt out to the edges at random: circuits of it are what others are compared with.

        Args:
            seed: of the draw.
        """
        possible = self.graph.possible
        draw = torch.Generator().manual_seed(seed)
        values = self.values.clone()
        there = values[possible]
        values[possible] = there[torch.randperm(len(there), generator=draw)]
        return replace(self, title=f"{self.title}, shuffled", values=values)

    def lines(self) -> list[str]:
        """What is said above the numbers."""
        return [*ip.Scores.lines(self), "map: the sizes of the edges from layer to layer, added up"]

    def view(self) -> Labelled:
        """How much goes from layer to layer: the sizes of the edges between two, added up."""
        writers, readers = (
            list(dict.fromkeys(name.partition(".")[0] for name in self.axes[axis]))
            for axis in ("writer", "reader")
        )
        total = torch.zeros(len(writers), len(readers))
        rows = torch.tensor([writers.index(n.partition(".")[0]) for n in self.axes["writer"]])
        columns = torch.tensor([readers.index(n.partition(".")[0]) for n in self.axes["reader"]])
        total.index_put_((rows[:, None], columns[None]), self.values.abs(), accumulate=True)
        return Labelled(values=total, labels={"from": writers, "to": readers}, what=self.unit)


def edge_attribution(
    model: ip.TransformerModel,
    clean: Any,
    corrupt: Any,
    *,
    metric: Any,
    steps: int = 1,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> EdgeScores:
    """How much the metric would change if an edge carried what it carries on the corrupt text, for all edges.

    ```python
    lead = ip.metrics.logit_difference(" Mary", " John")
    scores = ip.edge_attribution(model, clean, corrupt, metric=lead, steps=5)
    scores.circuit(edges=200).save("circuit.svg")
    ```

    Scores are means over the texts, and sums over positions. One forward pass on the corrupt text; one forward and one
    backward pass for each step.

    Args:
        model: a model of transformers, in eval mode.
        clean: a text, several, or tokens [batch, pos]: where gradients are taken.
        corrupt: the texts to compare with, of the same lengths.
        metric: one of `ip.metrics`, or a differentiable function of logits [batch, pos, d_vocab] to [batch].
        steps: 1 is EAP; more take the mean gradient over that many points on the way from the corrupt to the clean
            input, the clean one included (EAP-IG).
        batch_size: how many rows run together, at most: texts times steps.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    if steps < 1:
        raise ValueError(f"steps is 1 or more, the number of gradients to average; got {steps}.")
    if corrupt is None:
        raise ValueError(
            "edges are compared with their values on a corrupt text: give corrupt, as long as clean."
        )
    if steps == 1 and isinstance(metric, ip.metrics.kl):
        raise ValueError(
            "kl is at its minimum on the clean run, where its gradient is zero: give steps=5 or so."
        )
    must_have_gradient(metric)
    must_read_text(model)
    wires = wiring(model)
    graph = wires.graph
    parts = ip.batches(
        model, clean, corrupt, batch_size=max(1, batch_size // steps), prepend_bos=prepend_bos
    )
    total = torch.zeros(len(graph.writers), len(graph.readers), device=model.device)
    forwards = backwards = 0
    for batch in tracked(parts, progress):
        runs = _add(total, wires, batch, metric, steps, batch_size)
        forwards, backwards = forwards + 1 + runs, backwards + runs
    return EdgeScores(
        title=f"edge attribution of {ip.metrics.label(metric)}"
        if steps == 1
        else f"edge attribution (IG) of {ip.metrics.label(metric)}",
        values=(total / (parts[0].total * steps)).cpu() * graph.possible,
        axes={"writer": list(graph.writers), "reader": list(graph.readers)},
        unit="change of the metric",
        protocol={
            "metric": ip.metrics.label(metric),
            "steps": steps,
            "score": "(corrupt - clean) . "
            + ("gradient at the clean run" if steps == 1 else "mean gradient on the way"),
            "edges": len(graph),
            "examples": parts[0].total,
            "forwards": forwards,
            "backwards": backwards,
        },
        evidence=EVIDENCE,
        reach=list(graph.reach),
    )


def _add(
    total: Tensor, wires: Wiring, batch: ip.Batch, metric: Any, steps: int, batch_size: int
) -> int:
    """Add the scores of a batch, summed over steps, and tell in how many runs they were found."""
    assert batch.corrupt is not None
    _, corrupt = wires.reference(batch.corrupt)
    # The clean run comes first: its values are the writers', and its logits what `kl` compares with.
    shares = [1 - step / steps for step in range(steps)]
    size = max(1, batch_size // len(batch))
    kept = batch.last_logits(metric)
    clean: dict[str, Tensor] = {}
    measure: Callable[[Tensor], Tensor] | None = None

    def metric_of(logits: Tensor) -> Tensor:
        nonlocal measure
        rows = logits.split(len(batch))
        measure = measure or batch.measure(metric, rows[0].detach())
        return torch.stack([measure(some).sum() for some in rows]).sum()

    for at in range(0, steps, size):
        some = shares[at : at + size]
        values, grads = _gradients(wires, batch.clean, corrupt[INPUT], some, metric_of, kept)
        clean = clean or {name: values[name][: len(batch)] for name in wires.sites}
        _contract(total, wires, clean, corrupt, values, grads, len(some))
    return -(-steps // size)


def _gradients(
    wires: Wiring,
    tokens: Tensor,
    start: Tensor,
    shares: list[float],
    metric_of: Callable[[Tensor], Tensor],
    kept: dict[str, Any],
) -> tuple[dict[str, Tensor], Mapping[str, Tensor]]:
    """Values and gradients of a run with a row for each share of the way to the clean input and each text."""
    values: dict[str, Tensor] = {}
    way = torch.tensor(shares, device=start.device, dtype=start.dtype)[:, None, None, None]

    def between(value: Tensor, hook: ip.HookPoint) -> Tensor:  # noqa: ARG001
        return torch.lerp(start, value.unflatten(0, (len(shares), -1)), way).flatten(0, 1)

    def keep(value: Tensor, hook: ip.HookPoint) -> None:
        values[hook.name] = value.detach()

    differentiated, looked_at = [wires.final], list(wires.sites)
    for layer in wires.layers:
        differentiated += [layer.site(f"attn.hook_{role}") for role in "qkv"]
        differentiated += [layer.site("hook_attn_in")]
        differentiated += [layer.mlp_site] if layer.mlp_site else []
        looked_at += [layer.site("ln1.hook_scale")] if layer.norm else []
    with torch.enable_grad():
        _, cache = wires.model.run_with_cache(
            tokens.repeat(len(shares), 1),
            names_filter=differentiated,
            fwd_hooks=[(INPUT, between)] * (shares != [1]) + [(name, keep) for name in looked_at],
            incl_bwd=metric_of,
            return_type="logits",
            **kept,
        )
    values |= {name: cache[name] for name in differentiated if name.endswith("hook_attn_in")}
    return values, {name: cache.grad[name] for name in differentiated}


@torch.no_grad()
def _contract(
    total: Tensor,
    wires: Wiring,
    clean: Mapping[str, Tensor],
    corrupt: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    steps: int,
) -> None:
    """Multiply what writers change with the gradients of readers: some tokens at a time, layer by layer."""
    tokens, width = clean[INPUT][..., 0].numel(), clean[INPUT].shape[-1]
    most = max(layer.heads + 2 * layer.shared for layer in wires.layers) + 1
    size = max(1, _MOST // (width * (len(wires.graph.writers) + steps * most)))
    for at in range(0, tokens, size):
        some = slice(at, min(at + size, tokens))
        written = _written(wires, corrupt, clean, some).flatten(1)  # [writer, token * d_model]
        whole, rows = (
            [_rows(grads[wires.final], steps, some).sum(0)],
            [len(wires.graph.readers) - 1],
        )
        for layer in wires.layers:
            heads, mlp = _pulled(layer, values, grads, steps, some)
            into = slice(layer.row, layer.row + len(heads))
            total[: layer.first, into] += written[: layer.first] @ heads.flatten(1).T
            if mlp is not None:
                whole.append(mlp)
                rows.append(layer.mlp_row)
        total[:, rows] += written @ torch.stack(whole).flatten(1).T


def _written(
    wires: Wiring, corrupt: Mapping[str, Tensor], clean: Mapping[str, Tensor], some: slice
) -> Tensor:
    """What each writer adds to the stream more on the corrupt text, [writer, token, d_model]."""
    first = wires.difference(INPUT, corrupt, clean, some)
    made = first.new_empty(len(wires.graph.writers), *first.shape)
    made[0] = first
    for layer in wires.layers:
        last = layer.first + layer.heads
        wires.heads(layer, corrupt, clean, some, out=made[layer.first : last])
        if layer.mlp_site:
            made[last] = wires.difference(layer.site("hook_mlp_out"), corrupt, clean, some)
    return made


def _pulled(
    layer: Layer,
    values: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    steps: int,
    some: slice,
) -> tuple[Tensor, Tensor | None]:
    """The gradients at the stream of a layer's queries, keys and values [reader, token, d_model], and of its MLP."""
    stream = layer.site("hook_attn_in")
    whole = _rows(grads[stream], steps, some)  # [step, token, d_model]
    count = layer.heads + 2 * layer.shared
    made = whole.new_empty(count + layer.shares_norm, *whole.shape)
    scale = whole.new_ones(())
    if layer.norm:
        scale = _rows(values[layer.site("ln1.hook_scale")], steps, some)  # [step, token, 1]
    for role, into in layer.rows.items():
        weight = layer.branch.named(f"W_{role.upper()}")
        grad = _rows(grads[layer.site(f"attn.hook_{role}")], steps, some) / scale[..., None]
        rows = made[into.start - layer.row : into.stop - layer.row].flatten(1, 2)
        weight = weight[
            :: len(weight) // (into.stop - into.start)
        ]  # some repeat those that are shared
        torch.bmm(grad.flatten(0, 1).transpose(0, 1), wide(weight).transpose(1, 2), out=rows)
    if layer.shares_norm:
        made[-1] = _rows(grads[layer.mlp_site], steps, some) / scale
    if layer.norm:
        x = _rows(values[stream], steps, some)
        _pull(layer.norm, made.flatten(1, 2), x.flatten(0, 1), scale.flatten(0, 1))
    few = slice(-_PROVEN, None)
    same(made[:, :, few].sum(0), whole[:, few], stream, grads[stream].dtype)
    heads = made.sum(1) if steps > 1 else made[:, 0]
    if layer.shares_norm:
        return heads[:count], heads[-1]
    mlp = _rows(grads[layer.mlp_site], steps, some).sum(0) if layer.mlp_site else None
    return heads, mlp


def _rows(value: Tensor, steps: int, some: slice) -> Tensor:
    """Some tokens of a value [step * batch, pos, ...], as [step, token, ...]."""
    return wide(value.unflatten(0, (steps, -1)).flatten(1, 2)[:, some])


def _pull(norm: ip.Formula, grads: Tensor, x: Tensor, scale: Tensor) -> None:
    """Turn gradients behind a norm, divided by its scale, into those before it; in place.

    The part along the normalised stream, and the mean, cannot be moved by anything before the norm.

    Args:
        norm: which.
        grads: [reader, token, d_model].
        x: what the norm takes, [token, d_model].
        scale: what it divides by, [token, 1].
    """
    fixed = (norm.straight(x) / scale)[:, None]  # [token, 1, d_model]
    if norm.centred:
        fixed = torch.cat([fixed, torch.ones_like(fixed)], 1)
    rows = grads.mul_(norm.factor).transpose(0, 1)  # [token, reader, d_model]
    along = torch.bmm(rows, fixed.mT) / x.shape[-1]
    rows.baddbmm_(along, fixed, alpha=-1)
