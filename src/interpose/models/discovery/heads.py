"""Queries, keys, values and heads of one attention computation: which projection makes them, and where in it.

The kernel's own inputs tell: at the first position rotary embedding turns nothing, so each head of a
query, key or value is found, number for number, among the columns of the projection that made it.
That finds every fused layout without knowing its name. Where something stands between (a norm over
all heads, a rotation of another kind), the projection's name decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from torch import nn

from interpose.models.discovery.anatomy import Attention, Endpoint
from interpose.models.discovery.parts import heads_of, linear_shape
from interpose.models.discovery.record import Array, Event, KernelCall, Value
from interpose.models.discovery.stream import is_norm
from interpose.models.reach.lenses import Heads, Squeezed
from interpose.sites.grammar import OUTPUT, Tail
from interpose.sites.lens import Lens

NAMED = {
    "q": r"(q|query|queries|wq|to_q|q_lin|q_proj|q_b_proj|query_proj|linear_q|q_net|c_q|q_up_proj|wq_b)",
    "k": r"(k|key|keys|wk|to_k|k_lin|k_proj|key_proj|linear_k|k_net|kv_b_proj|c_k|kv_proj|wkv)",
    "v": r"(v|value|values|wv|to_v|v_lin|v_proj|value_proj|linear_v|v_net|kv_b_proj|c_v|kv_proj|wkv)",
}


def linears(events: Sequence[Event]) -> list[Event]:
    """Calls of linear maps, without those inside another one (an adapter's parts)."""
    found = [event for event in events if linear_shape(event.module) is not None and event.made]
    return [
        event
        for event in found
        if not any(event.path.startswith(f"{other.path}.") for other in found)
    ]


def describe(kernel: KernelCall, inside: Sequence[Event], core: nn.Module) -> Attention:
    """Find the parts of one attention computation among the calls in and around its module."""
    q, k, v = kernel.q, kernel.k, kernel.v
    n_heads = q.shape[0] if q is not None else 1
    d_head = q.shape[-1] if q is not None else 0
    found = Attention(
        name="attn",
        path=kernel.path,
        core=core,
        scores_ndim=kernel.scores_ndim,
        shapes=kernel.shapes,
        by=kernel.by,
        n_heads=n_heads,
        n_key_value_heads=k.shape[0] if k is not None else n_heads,
        d_head=d_head,
        d_value=v.shape[-1] if v is not None else d_head,
    )
    maps = linears(inside)
    before = [event for event in maps if event.start < kernel.time]
    after = [event for event in maps if event.start > kernel.time]
    norms = [e for e in inside if is_norm(e) and e.made and e.start < kernel.time]
    for role, value in (("v", v), ("k", k), ("q", q)):
        endpoint = _projection(role, value, before, norms, found)
        if endpoint is not None:
            found.projections[role] = endpoint
            if value is not None and _reaches_kernel(endpoint, value, before):
                found.unturned.add(role)
    if "k" in found.projections:
        columns = heads_of(found.projections["k"])
        if columns is not None:
            found.n_key_value_heads = len(columns.offsets)
    width = n_heads * found.d_value
    fitting = [e for e in after if (linear_shape(e.module) or (0, 0))[0] == width]
    out = (fitting or after)[-1] if after else None
    if out is not None:
        heads = Heads(tuple(range(0, width, found.d_value)), found.d_value) if fitting else None
        name = str(out.given[0].leaf[0])
        tail = Tail(port="input", leaf=(name,))
        shape, found.out_shape = out.given[0].shape, out.made[0].shape
        found.out = Endpoint(path=out.path, module=out.module, tail=tail, lens=heads, shape=shape)
    return found


def _projection(
    role: str,
    value: Value | None,
    before: Sequence[Event],
    norms: Sequence[Event],
    about: Attention,
) -> Endpoint | None:
    """The projection that makes the queries, keys or values, and the columns of its heads."""
    heads = None
    if value is not None and len(value.row):
        heads = value.row.reshape(value.shape)
        for target in (heads, *_before_norms(heads, norms)):
            for event in reversed(before):
                offsets = _find(target, event.made[0].row)
                if offsets is not None:
                    return _columns(event, Heads(offsets, target.shape[1]))
    size = about.d_head if role != "v" else about.d_value
    named = [e for e in before if re.fullmatch(NAMED[role], e.path.rsplit(".", 1)[-1])]
    for event in named:
        width = (linear_shape(event.module) or (0, 0))[1]
        if role == "q" and size and width == size * about.n_heads:
            about.named.add(role)
            return _columns(event, Heads(tuple(range(0, width, size)), size))
    for event in reversed(before):
        found = None if heads is None else _find_beginning(value, event.made[0])
        if found is not None:
            return _columns(event, found)
    for event in named:
        width = (linear_shape(event.module) or (0, 0))[1]
        if size and not width % size:
            about.named.add(role)
            return _columns(event, Heads(tuple(range(0, width, size)), size))
    return None


def _columns(event: Event, heads: Heads) -> Endpoint:
    """Heads among a projection's columns; an axis of one that some models put in is left out."""
    shape = event.made[0].shape
    lens: Lens = heads
    if len(shape) == 4 and shape[1] == 1:
        lens = Squeezed(1, heads)
    return Endpoint(path=event.path, module=event.module, tail=OUTPUT, lens=lens, shape=shape)


def _reaches_kernel(endpoint: Endpoint, value: Value, before: Sequence[Event]) -> bool:
    """Whether the kernel gets the last token's heads as they were projected, number for number."""
    columns = heads_of(endpoint)
    made = next(event.made[0].last for event in before if event.path == endpoint.path)
    if columns is None or value.shape != (len(columns.offsets), columns.size):
        return False
    there = np.concatenate([made[o : o + columns.size] for o in columns.offsets])
    return bool(np.array_equal(there, value.last))


def _find_beginning(value: Value | None, made: Value) -> Heads | None:
    """Heads of which only the first part comes from this projection (the rest is shared, or turned otherwise)."""
    assert value is not None
    heads, last, row = value.row.reshape(value.shape), value.last.reshape(value.shape), made.row
    shortest = 4
    offsets = _find(heads[:, :shortest], row) if heads.shape[1] > shortest else None
    if offsets is None:
        return None
    width = heads.shape[1]
    if all(_same_numbers(head, row[at : at + width]) for head, at in zip(heads, offsets)):
        return Heads(offsets, width)  # all of it, in an order of rotary's own
    size = shortest
    while size < heads.shape[1] and _find(heads[:, : size + 1], row) == offsets:
        ends = [made.last[offset + size] for offset in offsets]
        if len(ends) == len(last) and not np.allclose(ends, last[:, size], rtol=1e-3):
            break  # in place at the first position only: rotary begins here
        size += 1
    return Heads(offsets, size)


def _before_norms(heads: Array, norms: Sequence[Event]) -> list[Array]:
    """What a norm was given, if what it made is what the kernel got."""
    return [
        event.given[0].row.reshape(heads.shape)
        for event in norms
        if event.given[0].row.size == event.made[0].row.size == heads.size
        and _collinear(heads.ravel(), event.made[0].row)
    ]


def _same_numbers(a: Array, b: Array) -> bool:
    """Whether two rows have the same numbers, in whatever order."""
    return len(a) == len(b) and bool(np.allclose(np.sort(a), np.sort(b), rtol=1e-4, atol=1e-6))


def _collinear(a: Array, b: Array) -> bool:
    size = np.linalg.norm(a) * np.linalg.norm(b)
    return bool(size > 0 and abs(abs(a @ b) / size - 1) < 1e-5)


def _find(heads: Array, row: Array) -> tuple[int, ...] | None:
    """Where in a row of columns each head lies, up to a common factor."""
    size = heads.shape[1]
    if len(row) < size or size < 2:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(row, size)
    lengths = np.linalg.norm(windows, axis=1)
    offsets: list[int] = []
    for head in heads:
        length = np.linalg.norm(head)
        if length == 0:
            return None
        alike = np.abs(windows @ head) / (lengths * length + 1e-30)
        best = int(np.argmax(alike))
        if alike[best] < 1 - 1e-4:
            return None
        if best not in offsets:
            offsets.append(best)
    return tuple(offsets)
