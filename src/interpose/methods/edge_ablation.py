"""A run in which some edges are live and all others carry what they carry on the corrupt text.

The input of a reader is its stream on the corrupt text, plus, for each kept edge, what its writer adds now more than it
did there. The stream of this run itself is read by no one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

import interpose as ip
from interpose.methods.wiring import INPUT, Layer, Values, Wiring, forward_of
from interpose.precision import wide

Hook = tuple[str, Callable[..., Tensor | None]]


class AblatedRun:
    """A run in which edges outside of a circuit carry the values of the corrupt text.

    Only nodes whose outgoing edges are kept are given their inputs: nobody reads the others.
    """

    def __init__(self, wires: Wiring, kept: Tensor, corrupt: Values) -> None:
        self.wires = wires
        self.corrupt = corrupt
        self.used: list[int] = kept.any(1).nonzero().flatten().tolist()
        # [used writer, reader], and what they write more than on the corrupt text, [used writer, token, d_model].
        self.first = wide(corrupt[INPUT].flatten(0, 1))
        self.kept = kept[self.used].to(self.first)
        self.moved = self.first.new_empty(0)
        self.live: dict[str, Tensor] = {}

    @property
    def variant(self) -> ip.Variant:
        """What makes it differ from the run on the clean text."""
        last = len(self.wires.graph.readers) - 1
        hooks = [
            (INPUT, self._begin),
            *self._writes_stream(INPUT, 0),
            (self.wires.final, self._reads(slice(last, last + 1), self.wires.final)),
        ]
        for layer in self.wires.layers:
            heads = range(layer.first, layer.first + layer.heads)
            if not set(heads).isdisjoint(self.used):
                hooks += self._attention(layer)
            if layer.mlp_site and heads.stop in self.used:
                hooks += self._mlp(layer)
        return ip.Variant([*hooks, (self.wires.final, self._end)])

    def _begin(self, value: Tensor, hook: ip.HookPoint) -> None:  # noqa: ARG002
        self.moved = self.first.new_zeros(len(self.used), *self.first.shape)

    def _end(self, value: Tensor, hook: ip.HookPoint) -> None:  # noqa: ARG002
        self.moved = self.first.new_empty(0)
        self.live.clear()

    def _attention(self, layer: Layer) -> Iterable[Hook]:
        stream = layer.site("hook_attn_in")
        for role, rows in layer.rows.items():
            yield layer.site(f"hook_{role}_input"), self._reads(rows, stream)
        yield from ((site, self._keep) for site in layer.branch.sites)

        def write(value: Tensor, hook: ip.HookPoint) -> None:  # noqa: ARG001
            made = self.wires.heads(layer, self.live, self.corrupt, slice(None))
            for head in range(layer.heads):
                self._set(layer.first + head, made[head])

        yield layer.site("hook_attn_out"), write

    def _mlp(self, layer: Layer) -> Iterable[Hook]:
        row = slice(layer.mlp_row, layer.mlp_row + 1)
        if layer.shares_norm:
            norm = forward_of(self.wires.model.blocks[layer.number].ln1)
            yield layer.mlp_site, self._reads(row, layer.site("hook_attn_in"), norm)
        else:
            yield layer.mlp_site, self._reads(row, layer.mlp_site)
        yield from self._writes_stream(layer.site("hook_mlp_out"), layer.first + layer.heads)

    def _keep(self, value: Tensor, hook: ip.HookPoint) -> None:
        self.live[hook.name] = value

    def _writes_stream(self, site: str, writer: int) -> Iterable[Hook]:
        def write(value: Tensor, hook: ip.HookPoint) -> None:  # noqa: ARG001
            now = {site: value}
            self._set(writer, self.wires.difference(site, now, self.corrupt, slice(None)))

        if writer in self.used:
            yield site, write

    def _set(self, writer: int, moved: Tensor) -> None:
        if writer in self.used:
            self.moved[self.used.index(writer)] = moved

    def _reads(
        self, rows: slice, stream: str, norm: Callable[[Tensor], Tensor] | None = None
    ) -> Callable[[Tensor, ip.HookPoint], Tensor]:
        """A hook that gives readers their input: what is kept, on top of the stream on the corrupt text."""
        reach = self.wires.graph.reach[rows.start]
        before = sum(writer < reach for writer in self.used)

        def read(value: Tensor, hook: ip.HookPoint) -> Tensor:  # noqa: ARG001
            base = self.corrupt[stream].unsqueeze(-2)  # [batch, pos, 1, d_model]
            moved = self.kept[:before, rows].T @ self.moved[:before].flatten(1)
            found = base + moved.view(-1, *self.corrupt[stream].shape).movedim(0, -2)
            found = found.reshape(value.shape).to(value.dtype)
            return found if norm is None else norm(found)

        return read
