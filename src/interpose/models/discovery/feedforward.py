"""The MLP of a block: which projection is the gate, which goes up, which comes down; or its router and experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from interpose.models.discovery.anatomy import Endpoint, FeedForward
from interpose.models.discovery.heads import linears
from interpose.models.discovery.parts import ACTIVATIONS, linear_shape
from interpose.models.discovery.record import Array, Event, Value
from interpose.models.reach.lenses import Part
from interpose.sites.grammar import OUTPUT, Tail
from interpose.sites.lens import Lens


def describe(path: str, events: Sequence[Event]) -> FeedForward:
    """Find the parts of an MLP among the calls between two values of the stream."""
    found = FeedForward(path=path)
    experts = next((event for event in events if _is_experts(event.module)), None)
    if experts is not None:
        found.experts = _output(experts)
        found.expert_arguments = _choices(experts)
    router = next((event for event in events if _routes(event)), None)
    if router is not None:
        found.router = _output(router)
        chosen = next(value for value in router.made if not value.is_float)
        for value in router.made:
            kind = "indices" if value is chosen else _router_kind(value, chosen)
            found.router_leaves.setdefault(kind, (value.leaf, value.shape))
    if found.experts is not None or router is not None:
        return found
    maps = linears(events)
    if len(maps) < 2:
        return found
    down, before = maps[-1], maps[:-1]
    given = down.given[0]
    tail = Tail(port="input", leaf=given.leaf)
    found.down = Endpoint(path=down.path, module=down.module, tail=tail, shape=given.shape)
    width = (linear_shape(down.module) or (0, 0))[0]
    halves = _halves([e for e in before if e.end < down.start], width)
    if len(halves) == 1:
        found.pre = halves[0][0]
    elif len(halves) >= 2:
        order = _gate_first(halves, events, down.given[0].row)
        if order is not None:
            found.pre, found.pre_linear = order
    return found


def _output(event: Event) -> Endpoint:
    value = event.made[0]
    tail = Tail(leaf=value.leaf) if value.leaf else OUTPUT
    return Endpoint(path=event.path, module=event.module, tail=tail, shape=value.shape)


def _is_experts(module: nn.Module) -> bool:
    """Whether a module holds many experts: three-dimensional weights, or a list called so."""
    weights = [p for p in module.parameters(recurse=False) if p.ndim == 3]
    return bool(weights) and not isinstance(module, nn.Conv1d)


def _routes(event: Event) -> bool:
    """Whether a module chooses: for each token whole numbers, besides others."""
    kinds = {value.is_float for value in event.made}
    tokens = event.given[0].shape[:-1] if event.given else ()
    chosen = [value.shape for value in event.made if not value.is_float]
    return kinds == {True, False} and all(
        len(shape) >= 2 and int(np.prod(shape[:-1])) == int(np.prod(tokens)) for shape in chosen
    )


def _choices(experts: Event) -> tuple[str, str] | None:
    """The arguments that tell experts which of them are chosen, and how much each counts."""
    chosen = [v for v in experts.given if not v.is_float and len(v.shape) == 2 and len(v.leaf) == 1]
    for index in chosen:
        for weights in experts.given:
            if weights.is_float and weights.shape == index.shape and len(weights.leaf) == 1:
                return str(index.leaf[0]), str(weights.leaf[0])
    return None


def _router_kind(value: Value, chosen: Value) -> str:
    """Weights come one for each chosen expert, logits one for each expert there is."""
    return "weights" if value.shape == chosen.shape else "logits"


def _halves(maps: Sequence[Event], width: int) -> list[tuple[Endpoint, Array]]:
    """The values as wide as the MLP's inside, each with its first row; two of them in a fused projection."""
    found = []
    for event in maps:
        row = event.made[0].row
        lenses: list[tuple[Lens | None, Array]] = []
        if len(row) == width:
            lenses = [(None, row)]
        elif len(row) == 2 * width:
            lenses = [
                (Part(0, width), row[:width]),
                (Part(width, 2 * width), row[width:]),
                (Part(0, 2 * width, 2), row[::2]),
                (Part(1, 2 * width, 2), row[1::2]),
            ]
        for lens, part in lenses:
            shape = event.made[0].shape
            endpoint = Endpoint(
                path=event.path, module=event.module, tail=OUTPUT, lens=lens, shape=shape
            )
            found.append((endpoint, part))
    return found


def _gate_first(
    halves: list[tuple[Endpoint, Array]], events: Sequence[Event], post: Array
) -> tuple[Endpoint, Endpoint] | None:
    """Which of two goes through the activation: the one for which the product comes out."""
    made = [e for e in events if not list(e.module.parameters()) and e.given and e.made]
    for gate, a in halves:
        activated = [e.made[0].row for e in made if np.array_equal(e.given[0].row, a)]
        activated += [f(torch.from_numpy(a)).numpy() for f in ACTIVATIONS.values()]
        for up, b in halves:
            if up is not gate and any(
                len(x) == len(b) == len(post) and _close(x * b, post) for x in activated
            ):
                return gate, up
    return None


def _close(a: Array, b: Array) -> bool:
    return bool(np.abs(a - b).max() <= 2e-2 * (np.abs(b).max() + 1e-9)) and bool(
        np.corrcoef(a, b)[0, 1] > 0.9999
    )
