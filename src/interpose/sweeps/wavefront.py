"""The wavefront: all cells of a sweep in one forward pass of the model's own, each from the layer it changes.

Rows of the batch are cells. The module is called once with all of them. Before each block, its arguments are narrowed
to the rows that have begun, and those that begin here join with the base run's stream. Layers before a cell's own are
never computed for it, and weights are read once for all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interpose.engine.points import HookPoint
from interpose.models.discovery.anatomy import Block, Tower
from interpose.models.running.start import Here
from interpose.models.running.trial import first_tensor
from interpose.sweeps.cells import Cell, Change, Row, sent, spans
from interpose.sweeps.reference import Reference, no_cache, rows_of_cache, wanted_logits
from interpose.taps import bypass, eager, values
from interpose.taps.context import Whereabouts
from interpose.taps.tap import given_arguments, named_arguments


class Wavefront:
    """One pass.

    Args:
        model: the model, in eval mode.
        tower: its blocks.
        base: the run that rows begin with.
        cells: by number.
        rows: in the order of their layers, those of a site together.
        start: the first position that is computed; those before come from the base's KV cache.
        change: what each row's cell does at its site.
        keep: how many logits from the end are wanted; None for all from ``start`` on.
    """

    def __init__(
        self,
        model: Any,
        tower: Tower,
        base: Reference,
        cells: Sequence[Cell],
        rows: Sequence[Row],
        *,
        start: int,
        change: Change,
        keep: int | None,
    ) -> None:
        self.model = model
        self.tower = tower
        self.base = base
        self.cells = cells
        self.rows = list(rows)
        self.start = start
        self.keep = keep
        layers = [cells[row.cell].layer for row in rows]
        self.first = layers[0]
        self.here: Here | None = None
        count = len(tower.blocks)
        self.joined = [bisect_right(layers, layer) for layer in range(count)]
        self.size = _unlike(len(rows), base.sizes | {base.length, base.length - start, base.batch})
        self.joined[-1] = self.size  # rows that stand for nothing join last
        device = base.streams[0].device
        examples = [row.example for row in rows] + [0] * (self.size - len(rows))
        self.examples = sent(examples, device)
        self.spans = spans(cells, rows)
        self.change = change(rows, device)

    @property
    def token_layers(self) -> int:
        """How many positions go through how many blocks."""
        return sum(self.joined) * (self.base.length - self.start)

    def run(self) -> Tensor:
        """The logits of every row, [row, kept, d_vocab]."""
        given = self._arguments()
        hooks = [
            (site, self._at(*span))
            for site, span in self.spans.items()
            if not site.endswith("hook_resid_pre")
        ]
        with self.model.hooks(fwd_hooks=hooks), ExitStack() as stack:
            self.here = Here()
            eager.hold()
            stack.callback(eager.release)
            for layer, block in enumerate(self.tower.blocks):
                if layer < self.first:
                    passing = _Pass(self.here, block, self.base.shells[layer])
                    bypass.bypass(block.module, passing)
                    stack.callback(bypass.unbypass, block.module, passing)
                else:
                    handle = block.module.register_forward_pre_hook(
                        self._narrow(layer, block), prepend=True, with_kwargs=True
                    )
                    stack.callback(handle.remove)
            output = self.model.module(**given)
        logits = first_tensor(output)
        return logits[: len(self.rows), -self.keep :] if self.keep else logits[: len(self.rows)]

    def _arguments(self) -> dict[str, Any]:
        """What the module is called with: every row's tokens from the start on."""
        given: dict[str, Any] = {}
        for name, value in self.base.inputs.items():
            rows = value[self.examples]
            given[name] = rows if name == "attention_mask" else rows[:, self.start :]
        given |= wanted_logits(self.model, self.keep)
        if self.start == 0:
            return given | no_cache(self.model)
        cache = self.base.prefix(self.model, self.start)
        end = self.start if self.base.grows else None
        # Layers that no row goes through still tell how long the past is.
        rows_at = [self.examples[: max(1, count)] for count in self.joined]
        return given | {"past_key_values": rows_of_cache(cache, rows_at, end), "use_cache": True}

    def _narrow(self, layer: int, block: Block) -> Callable[..., Any]:
        """A pre-hook that lets this layer's rows join."""
        leaf = block.sites["resid_pre"].tail.leaf
        before = self.joined[layer - 1] if layer > self.first else 0
        now = self.joined[layer]

        def narrow(module: nn.Module, args: Any, *rest: Any) -> Any:
            assert self.here is not None
            if not rest or not self.here.is_now():
                return None
            named: Mapping[str, Any] = named_arguments(module, args, rest[0])
            stream = values.element(named, leaf)
            fresh = self.base.streams[layer][self.examples[before:now], self.start :]
            fresh = self._enter(fresh, layer, before)
            for path, tensor in list(values.leaves(named)):
                if path != leaf:
                    named = values.swap(named, path, self._narrowed(tensor, now))
            stream = fresh if before == 0 else torch.cat([stream, fresh])
            named = values.swap(named, leaf, stream)
            return given_arguments(module, args, rest[0], dict(named))

        return narrow

    def _enter(self, fresh: Tensor, layer: int, before: int) -> Tensor:
        """The stream of rows that join at a layer, changed where that is what their cells change."""
        site = f"blocks.{layer}.hook_resid_pre"
        if site not in self.spans:
            return fresh
        hook = self.model.hook_dict[site]
        hook.where = Whereabouts(self.start)
        first, end = self.spans[site]
        fresh[first - before : end - before] = self.change(
            fresh[first - before : end - before], first, end, hook
        )
        return fresh

    def _at(self, first: int, end: int) -> Callable[..., Tensor]:
        """A hook that changes some rows of a value."""

        def change(value: Tensor, hook: HookPoint) -> Tensor:
            value[first:end] = self.change(value[first:end], first, end, hook)
            return value

        return change

    def _narrowed(self, tensor: Tensor, count: int) -> Tensor:
        """An argument of a block for the first rows."""
        for axis, size in enumerate(tensor.shape):
            if size == self.size:
                return tensor.narrow(axis, 0, count)
        if tensor.ndim and tensor.shape[0] % self.size == 0 and tensor.shape[0] > self.size:
            return tensor.narrow(0, 0, tensor.shape[0] // self.size * count)  # heads of each row
        return tensor


def _unlike(count: int, sizes: set[int]) -> int:
    """The smallest number of rows, at least so many, that no other axis has, nor a multiple."""
    while any(size % count == 0 for size in sizes if size):
        count += 1
    return count


@dataclass(slots=True, eq=False)
class _Pass:
    """Around a block before the first row's: its input is its output."""

    here: Here
    block: Block
    shell: Any

    def is_wanted(self) -> bool:
        return self.here.is_now()

    def output(self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        named = named_arguments(self.block.module, args, kwargs)
        value = values.element(named, self.block.sites["resid_pre"].tail.leaf)
        return values.swap(self.shell, self.block.sites["resid_post"].tail.leaf, value)
