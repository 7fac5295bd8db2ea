"""What a sweep starts from: the base run's stream at every layer, its keys and values, and the other run's values."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.models.discovery.anatomy import Tower
from interpose.models.running import padding
from interpose.models.running.start import Passed
from interpose.models.running.trial import first_tensor
from interpose.sweeps.answers import Kept
from interpose.sweeps.narrowing import Looks

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

Inputs = Mapping[str, Tensor]
"""What the module takes, each [batch, pos]."""


@dataclass(slots=True, kw_only=True)
class Reference:
    """The run that every cell of a sweep changes one thing of, and the one that values come from.

    Attributes:
        inputs: what the module takes, each [batch, pos].
        streams: the stream that enters each block, [batch, pos, d_model].
        logits: those that metrics look at, [batch, kept, d_vocab].
        kept: at which positions; None for all.
        source: the other run's values by site, [batch, pos, ...]; empty if there is none.
        other: the other run's logits; the base's if there is none.
        shells: what each block returns, without tensors.
        sizes: every size of an axis that blocks were given, the batch's left out.
        forwards: how many forward passes this took.
    """

    inputs: dict[str, Tensor]
    streams: list[Tensor]
    logits: Tensor
    source: dict[str, Tensor]
    other: Tensor
    shells: list[Any]
    sizes: set[int]
    kept: Kept | None = None
    forwards: int = 1
    cache: Any = None
    _prefixes: dict[int, Any] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """How many examples."""
        return self.inputs["input_ids"].shape[0]

    @property
    def length(self) -> int:
        """How many positions."""
        return self.inputs["input_ids"].shape[1]

    @property
    def grows(self) -> bool:
        """Whether the KV cache of a part is the first part of the KV cache: not where it drops what is far back."""
        layers = getattr(self.cache, "layers", [])
        return bool(layers) and all(type(layer).__name__ == "DynamicLayer" for layer in layers)

    def see(self, looks: Looks, *, picked: bool) -> None:
        """Keep the logits that are looked at, of all."""
        one = self.other is self.logits
        self.kept = Kept(looks.positions, picked=picked)
        self.logits = looks.of(self.logits)
        self.other = self.logits if one else looks.of(self.other)

    def prefix(self, model: TransformerModel, end: int) -> Any:
        """A KV cache of the positions before ``end``."""
        if self.grows:
            return self.cache
        if end not in self._prefixes:
            given = {name: value[:, :end] for name, value in self.inputs.items()}
            output = model.module(**given, **wanted_logits(model, 1), use_cache=True)
            self._prefixes[end] = output.past_key_values
        return self._prefixes[end]

    def forget(self, end: int) -> None:
        """Let go of a KV cache that was made for a position."""
        self._prefixes.pop(end, None)


def refer(
    model: TransformerModel,
    tower: Tower,
    base: Inputs,
    kept: Kept | None,
    *,
    other: Inputs | None = None,
    sites: Sequence[str] = (),
    cached: bool = False,
    apart: bool = False,
    behind: bool = False,
) -> Reference:
    """Run the base, and the other texts with it, and keep what rows begin with.

    Args:
        model: the model, in eval mode; gradients off.
        tower: its blocks.
        base: the texts that are changed.
        kept: which positions' logits metrics look at; None for all.
        other: the texts that values come from.
        sites: of which values.
        cached: also keep keys and values.
        apart: run the two one after the other, where rows must not meet or other hooks are on the model.
        behind: whether streams are to be read behind other hooks of ours, as values of sites are.
    """
    together = other is not None and set(other) == set(base) and not apart
    given = {name: torch.cat([base[name], other[name]]) for name in base} if together else base  # type: ignore[index]
    passed = Passed(tower)
    caching = {"use_cache": True} if cached else no_cache(model)
    extra = {**wanted_logits(model, kept), **caching}
    # Behind the hooks of others the stream is another one than rows begin with.
    kept_anyway = () if behind else {site for site in sites if site.endswith("hook_resid_pre")}
    read = [] if other is None else [site for site in sites if site not in kept_anyway]
    with passed.listening():
        output, found = _run(model, given, read if together else [], extra)
    logits, batch = _taken(output, kept), base["input_ids"].shape[0]
    made = Reference(
        inputs=dict(base),
        streams=[stream[:batch] for stream in passed.streams.values()],
        logits=logits[:batch],
        source={},
        other=logits[batch:] if together else logits,
        shells=list(passed.shells.values()),
        sizes=passed.sizes,
        kept=kept,
        cache=_of_rows(getattr(output, "past_key_values", None), batch) if cached else None,
    )
    if other is not None and not together:
        passed = Passed(tower)
        with passed.listening():
            output, found = _run(
                model, other, read, {**wanted_logits(model, kept), **no_cache(model)}
            )
        made.other, made.forwards, batch = _taken(output, kept), 2, 0
    for site in sites if other is not None else ():
        layer = site.removesuffix(".hook_resid_pre").rpartition(".")[2]
        value = passed.streams[int(layer)] if site in kept_anyway else found[site]
        made.source[site] = value[batch:]
    return made


def _run(
    model: TransformerModel, inputs: Inputs, sites: Sequence[str], extra: dict[str, Any]
) -> tuple[Any, Mapping[str, Tensor]]:
    if not sites:
        return model.module(**inputs, **extra), {}
    output, cache = model.run_with_cache(names_filter=list(sites), **inputs, **extra)
    return output, cache


def _taken(output: Any, kept: Kept | None) -> Tensor:
    logits = first_tensor(output)
    return logits if kept is None else kept.taken(logits)


# Arguments and KV caches.


def wanted_logits(model: TransformerModel, kept: Kept | int | None) -> dict[str, Any]:
    """The argument that asks for the last logits alone, where the module has it; None asks for all."""
    if kept is None or not padding.accepts(model, "logits_to_keep"):
        return {}
    return {"logits_to_keep": kept.count if isinstance(kept, Kept) else kept}


def no_cache(model: TransformerModel) -> dict[str, Any]:
    """The argument that keeps a module from filling a KV cache, where it has it."""
    return {"use_cache": False} if padding.accepts(model, "use_cache", outright=False) else {}


def _of_rows(cache: Any, batch: int) -> Any:
    """A KV cache of the first rows."""
    layers = getattr(cache, "layers", None)
    if layers is None or not all(hasattr(layer, "batch_select_indices") for layer in layers):
        return None
    return rows_of_cache(cache, [torch.arange(batch)] * len(layers))


def rows_of_cache(cache: Any, examples: Sequence[Tensor], end: int | None = None) -> Any:
    """A KV cache with other rows in each layer: the given examples, repeated or left out.

    Args:
        cache: not changed.
        examples: for each layer.
        end: cut the positions from here on, in a cache that `Reference.grows`.
    """
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    for layer, index in zip(made.layers, examples, strict=True):
        if end is not None:
            layer.keys, layer.values = layer.keys[..., :end, :], layer.values[..., :end, :]
        layer.batch_select_indices(index.to(layer.keys.device))
    return made
