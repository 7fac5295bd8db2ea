"""Direct path patching: what one head hands to another, and to nobody else.

The head's change, its clean output less its corrupted one, is added to what the other head reads of the
stream for its query, key or value; every other reader gets the corrupted stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.patching.patching_result import (
    Cell,
    Hook,
    MetricFn,
    Metrics,
    kept,
    require_eval,
    run_cells,
)
from interpose.names import of_kind

Component = Literal["q", "k", "v"]


def get_act_patch_direct_path(
    model: Any,
    corrupted_tokens: Tensor,
    clean_cache: Mapping[str, Tensor],
    corrupted_cache: Mapping[str, Tensor],
    patching_metric: MetricFn,
    src_layer: int,
    src_head: int,
    component: Component = "q",
    verbose: bool = True,
) -> Tensor:
    """Patch the path from one head straight to each head of later layers: [layer, head].

    Layers up to the source's have no such path; their numbers are 0.0 and mean nothing. Keys and values have
    n_key_value_heads heads, so with grouped queries the last axis is shorter for them.

    Args:
        model: the model, in eval mode.
        corrupted_tokens: tokens of the corrupted run, [batch, pos].
        clean_cache: values of the clean run; it needs ``z`` of the source's layer.
        corrupted_cache: values of the corrupted run; it needs the same.
        patching_metric: takes logits [batch, pos, d_vocab] and returns a number.
        src_layer: the layer of the source head.
        src_head: the source head.
        component: what the other head reads: ``q``, ``k`` or ``v``.
        verbose: whether to show a progress bar.
    """
    given = (model, corrupted_tokens, clean_cache, corrupted_cache, patching_metric)
    return _from_heads(
        *given, sources=[(src_layer, src_head)], component=component, verbose=verbose
    )[0]


def get_act_patch_direct_path_all_sources(
    model: Any,
    corrupted_tokens: Tensor,
    clean_cache: Mapping[str, Tensor],
    corrupted_cache: Mapping[str, Tensor],
    patching_metric: MetricFn,
    component: Component = "q",
    verbose: bool = True,
) -> Tensor:
    """Patch the path from every head to every head of later layers: [layer, head, layer, head], sources first.

    One run for each pair; where there is no path, the number is 0.0. See `get_act_patch_direct_path`.
    """
    layers, heads = model.cfg.n_layers, model.cfg.n_heads
    sources = [(layer, head) for layer in range(layers) for head in range(heads)]
    given = (model, corrupted_tokens, clean_cache, corrupted_cache, patching_metric)
    found = _from_heads(*given, sources=sources, component=component, verbose=verbose)
    return found.view(layers, heads, *found.shape[1:])


def _from_heads(
    model: Any,
    corrupted_tokens: Tensor,
    clean_cache: Mapping[str, Tensor],
    corrupted_cache: Mapping[str, Tensor],
    metric: MetricFn,
    *,
    sources: list[tuple[int, int]],
    component: str,
    verbose: bool,
) -> Tensor:
    """The metric for each source and each head, [source, layer, head]."""
    require_eval(model)
    tokens = corrupted_tokens if corrupted_tokens.ndim > 1 else corrupted_tokens[None]
    if component not in ("q", "k", "v"):
        raise ValueError(f"component is 'q', 'k' or 'v'; got {component!r}")
    layers, heads = model.cfg.n_layers, model.cfg.n_heads
    for layer, head in sources:
        if not (0 <= layer < layers and 0 <= head < heads):
            raise IndexError(
                f"there is no head {layer}.{head}: layers are 0 to {layers - 1}, heads 0 to {heads - 1}."
            )
    _require_plain_sum(model, tokens, sorted({layer for layer, _ in sources}))
    if component != "q":
        heads = getattr(model.cfg, "n_key_value_heads", None) or heads
    cells = [
        (source, layer, head)
        for source, (src_layer, _) in enumerate(sources)
        for layer in range(src_layer + 1, layers)
        for head in range(heads)
    ]
    changes = [_change(model, clean_cache, corrupted_cache, *source) for source in sources]

    def hook_of(cell: Cell) -> tuple[str, Hook]:
        source, layer, head = cell

        def add(value: Tensor, hook: Any) -> Tensor:  # noqa: ARG001
            value[:, :, head] += changes[source].to(value)
            return value

        return of_kind(f"{component}_input", layer), add

    metrics = Metrics.of(metric, reduce="scalar", batch=len(tokens))
    found = run_cells(model, tokens, cells, hook_of, metrics, progress=verbose)
    kind = found[0] if found else torch.zeros(1, device=tokens.device)
    values = kind.new_zeros(len(sources), layers, heads)
    for cell, value in zip(cells, found):
        values[cell] = value[0]
    return values


def _change(
    model: Any, clean: Mapping[str, Tensor], corrupted: Mapping[str, Tensor], layer: int, head: int
) -> Tensor:
    """What the head adds to the stream in the clean run, less that in the corrupted one: [batch, pos, d_model]."""
    name = of_kind("z", layer)
    after = kept(clean, name, which="clean_cache")[..., head, :]
    before = kept(corrupted, name, which="corrupted_cache")[..., head, :]
    weights: Tensor = model.blocks[layer].attn.W_O[head]
    return (after - before).detach() @ weights.detach().to(before)


def _require_plain_sum(model: Any, tokens: Tensor, layers: list[int]) -> None:
    """Refuse layers that do something to the heads' sum before it is added: a head has no share of its own then."""
    pairs = [(of_kind("attn_out", layer), f"blocks.{layer}.attn.hook_out") for layer in layers]
    names = [name for pair in pairs for name in pair]
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=names)
    for added, projected in pairs:
        if not torch.allclose(cache[added], cache[projected], rtol=1e-4, atol=1e-6):
            raise ValueError(
                f"{added!r} is not what the output projection returns: a norm or a multiplier "
                "comes between, so what one head adds to the stream is not z @ W_O. Direct paths "
                "are not offered for such layers."
            )
