"""Rows in one forward pass of the model's own: all from the first layer on, or as a wavefront.

In a wavefront each row begins at the first layer it changes; what it changes later is done on its own row. The
module is called once with all of them. Before each block, its arguments are narrowed
to the rows that have begun, and those that begin here join with the base run's stream. Layers before a cell's own are
never computed for it, and weights are read once for all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interpose.engine.hooks import Detector
from interpose.engine.points import HookPoint
from interpose.models.discovery.anatomy import Block, Tower
from interpose.models.running.segment import Stopped, stopping
from interpose.models.running.start import HandOn, Here
from interpose.models.running.trial import first_tensor
from interpose.sweeps.answers import Kept
from interpose.sweeps.cells import (
    Change,
    Changes,
    Chosen,
    Row,
    RowChange,
    changed_at,
    in_order,
    sent,
)
from interpose.sweeps.reference import Reference, no_cache, rows_of_cache, wanted_logits
from interpose.taps import bypass, eager, values
from interpose.taps.context import Whereabouts
from interpose.taps.tap import given_arguments, named_arguments

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What some rows gave, in the order they were given, and what it cost.

    Attributes:
        logits: [row, kept, d_vocab]; empty where runs ended before.
        token_layers: how many positions went through how many blocks.
        values: those at sites that were to be read, [row, ...].
    """

    logits: Tensor
    token_layers: int
    values: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What is read of rows, besides logits.

    Attributes:
        sites: by their canonical names, the block each is in.
        base: what the base run had there, [example, ...]: rows that have not begun are like it.
        stop: whether runs end when all is read, without logits.
    """

    sites: Mapping[str, int] = field(default_factory=dict)
    base: Mapping[str, Tensor] = field(default_factory=dict)
    stop: bool = False

    @property
    def end(self) -> int | None:
        """The block before which runs end; None for whole ones."""
        return max(self.sites.values()) + 1 if self.stop else None


class Reader(Detector):
    """Keeps the values of sites."""

    def __init__(self, sites: Sequence[str]) -> None:
        super().__init__(list(sites))
        self.values: dict[str, Tensor] = {}

    def read(self, value: Tensor, hook: HookPoint) -> None:
        """Keep it."""
        self.values[hook.canonical] = value


NOTHING = Reads()


def run_rows(
    model: TransformerModel,
    tower: Tower,
    base: Reference,
    cells: Sequence[Changes],
    rows: Sequence[Row],
    change: Change,
    kept: Kept | None,
    *,
    start: int | None,
    reads: Reads = NOTHING,
) -> Ran:
    """Run rows together.

    Args:
        model: the model, in eval mode.
        tower: its blocks.
        base: the run that rows change something of.
        cells: by number; a row may change several sites.
        rows: in any order.
        change: what each row's cell does at a site.
        kept: which positions' logits are wanted; None for all.
        start: the first position that a wavefront computes; None for whole runs from the first layer on.
        reads: what is read of them besides logits.
    """
    order = in_order(cells, rows)
    ordered = [rows[number] for number in order]
    if start is None:
        ran = _plain(model, tower, base, cells, ordered, change, kept, reads)
    else:
        ran = Wavefront(
            model, tower, base, cells, ordered, start=start, change=change, kept=kept, reads=reads
        ).run()
    if order == list(range(len(order))):
        return ran
    back = sent(order, base.logits.device).argsort()
    values = {site: value[back] for site, value in ran.values.items()}
    logits = ran.logits[back] if reads.end is None else ran.logits
    return Ran(logits=logits, token_layers=ran.token_layers, values=values)


def _plain(
    model: TransformerModel,
    tower: Tower,
    base: Reference,
    cells: Sequence[Changes],
    rows: Sequence[Row],
    change: Change,
    kept: Kept | None,
    reads: Reads,
) -> Ran:
    """Rows that run from the first layer and position on."""
    device = base.logits.device
    prepared, examples = change(rows, device), sent([row.example for row in rows], device)
    given = {name: value[examples] for name, value in base.inputs.items()}
    hooks: list[Any] = [
        (site, _at(prepared, chosen)) for site, chosen in changed_at(cells, rows, device).items()
    ]
    reader = Reader(list(reads.sites))
    given |= {**wanted_logits(model, kept), **no_cache(model)}
    with model.hooks(hooks=[*hooks, reader] if reads.sites else hooks):
        logits = _run(model, tower, given, reads.end)
    layers = len(tower.blocks) if reads.end is None else reads.end
    return Ran(
        logits=logits if kept is None else kept.taken(logits),
        token_layers=len(rows) * base.length * layers,
        values=reader.values,
    )


def _run(
    model: TransformerModel, tower: Tower, given: Mapping[str, Any], end: int | None
) -> Tensor:
    """The module's logits; nothing if the run ends before a block."""
    with stopping(tower, end) as here:
        try:
            return first_tensor(model.module(**given))
        except Stopped as stopped:
            if stopped.here is not here:
                raise
            return torch.empty(0, 0, 0)


def _at(change: RowChange, chosen: Chosen) -> Callable[..., Tensor]:
    """A hook that changes some rows of a value."""

    def hook(value: Tensor, hook: HookPoint) -> Tensor:
        value[chosen.index] = change(chosen.within(value, hook), chosen, hook)
        return value

    return hook


class Wavefront:
    """One pass.

    Args:
        model: the model, in eval mode.
        tower: its blocks.
        base: the run that rows begin with.
        cells: by number.
        rows: in the order of the first layers they change.
        start: the first position that is computed; those before come from the base's KV cache.
        change: what each row's cell does at its site.
        kept: which positions' logits are wanted; None for all from ``start`` on.
        reads: what is read of rows besides logits.
    """

    def __init__(
        self,
        model: TransformerModel,
        tower: Tower,
        base: Reference,
        cells: Sequence[Changes],
        rows: Sequence[Row],
        *,
        start: int,
        change: Change,
        kept: Kept | None,
        reads: Reads = NOTHING,
    ) -> None:
        self.reads = reads
        self.model = model
        self.tower = tower
        self.base = base
        self.cells = cells
        self.rows = list(rows)
        self.start = start
        self.kept = kept
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
        self.changed = changed_at(cells, rows, device)
        self.change = change(rows, device)

    @property
    def token_layers(self) -> int:
        """How many positions go through how many blocks."""
        return sum(self.joined[: self.reads.end]) * (self.base.length - self.start)

    def run(self) -> Ran:
        """The logits of every row, and what was to be read of it."""
        given = self._arguments()
        hooks: list[Any] = [
            (site, _at(self.change, chosen))
            for site, chosen in self.changed.items()
            if not site.endswith("hook_resid_pre")
        ]
        there = [site for site, layer in self.reads.sites.items() if layer >= self.first]
        reader = Reader(there)
        with self.model.hooks(hooks=[*hooks, reader] if there else hooks), ExitStack() as stack:
            self.here = Here()
            eager.hold()
            stack.callback(eager.release)
            for layer, block in enumerate(self.tower.blocks):
                if layer < self.first:
                    passing = HandOn(self.here.is_now, block, self.base.shells[layer])
                    bypass.bypass(block.module, passing)
                    stack.callback(bypass.unbypass, block.module, passing)
                else:
                    handle = block.module.register_forward_pre_hook(
                        self._narrow(layer, block), prepend=True, with_kwargs=True
                    )
                    stack.callback(handle.remove)
            logits = _run(self.model, self.tower, given, self.reads.end)[: len(self.rows)]
        values = {site: self._read(site, reader.values) for site in self.reads.sites}
        return Ran(
            logits=logits if self.kept is None else self.kept.taken(logits),
            token_layers=self.token_layers,
            values=values,
        )

    def _read(self, site: str, found: Mapping[str, Tensor]) -> Tensor:
        """The values of all rows at a site: of those that have not begun there, the base's."""
        begun = min(self.joined[self.reads.sites[site]], len(self.rows))
        rest = self.reads.base[site][self.examples[begun : len(self.rows)], self.start :]
        return torch.cat([found[site][:begun], rest]) if site in found else rest

    def _arguments(self) -> dict[str, Any]:
        """What the module is called with: every row's tokens from the start on."""
        given: dict[str, Any] = {}
        for name, value in self.base.inputs.items():
            rows = value[self.examples]
            given[name] = rows if name == "attention_mask" else rows[:, self.start :]
        given |= wanted_logits(self.model, self.kept)
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
            for path, tensor in list(values.leaves(named)):
                if path != leaf:
                    named = values.swap(named, path, self._narrowed(tensor, now))
            stream = fresh if before == 0 else torch.cat([stream, fresh])
            named = values.swap(named, leaf, self._entering(stream, layer))
            return given_arguments(module, args, rest[0], dict(named))

        return narrow

    def _entering(self, stream: Tensor, layer: int) -> Tensor:
        """The stream before a block, changed where that is what rows change."""
        chosen = self.changed.get(site := f"blocks.{layer}.hook_resid_pre")
        if chosen is not None:
            hook = self.model.hook_dict[site]
            hook.where = Whereabouts(self.start)
            stream[chosen.index] = self.change(stream[chosen.index], chosen, hook)
        return stream

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
