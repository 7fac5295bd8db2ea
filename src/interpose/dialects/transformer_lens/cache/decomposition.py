"""The parts of the residual stream: what embeddings, heads and neurons put into it, and how norms pass them on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.utilities.slices import Slice
from interpose.models.stream.branch import Branch
from interpose.models.stream.formula import formula_at, norm_at
from interpose.taps.context import unheard

if TYPE_CHECKING:
    from interpose.dialects.transformer_lens.cache.activation_cache import ActivationCache
    from interpose.models.transformer import TransformerModel

Parts = list[tuple[Tensor, str]]
"""Values [..., d_model], each with its label."""


def as_slice(given: Any) -> Slice:
    """What a user gave for some positions, texts or neurons."""
    return given if isinstance(given, Slice) else Slice(given)


def embeds(cache: ActivationCache, pos_slice: Any) -> Parts:
    """The embeddings; where something else happens to them too (a scale, a norm), the first block's input as one."""
    if cache.has_embed and cache.model.stream.embedding_multiplier == 1:
        names = ["embed", *(["pos_embed"] if cache.has_pos_embed else [])]
        found = [
            cache[name].expand_as(cache["embed"]) for name in names
        ]  # positions are one for all texts
        return [(cache._sliced(value, pos_slice), name) for value, name in zip(found, names)]
    return [(cache._sliced(cache["resid_pre", 0], pos_slice), "embed")]


def head_results(cache: ActivationCache, layer: int, pos_slice: Any = None) -> Tensor:
    """What each head adds to its attention's output, [..., head, d_model]."""
    if f"blocks.{layer}.attn.hook_result" in cache:
        return cache._sliced(cache["result", layer], pos_slice, dim=-3)
    z = cache._sliced(cache["z", layer], pos_slice, dim=-3)
    return torch.einsum("...hd,hdm->...hm", z, cache.model.blocks[layer].attn.W_O)


def heads(cache: ActivationCache, last: int, pos_slice: Any) -> Parts:
    """What each head of the layers before ``last`` adds to the stream."""
    parts: Parts = []
    for layer in range(last):
        branch = _branch(cache, layer, "attn")
        scale = _scale(cache, branch, pos_slice)
        written = head_results(cache, layer, pos_slice)
        made = branch.writes.through(written, None if scale is None else scale.unsqueeze(-2))
        written = made.to(written.dtype)
        parts += [(part, f"L{layer}H{head}") for head, part in enumerate(written.unbind(-2))]
    return parts


def has_mlp(cache: ActivationCache, layer: int) -> bool:
    """Whether a block has an MLP."""
    return f"blocks.{layer}.hook_mlp_out" in cache.model.tree.table.sites


def neuron_results(
    cache: ActivationCache, layer: int, neuron_slice: Any, pos_slice: Any, onto: Tensor | None
) -> Tensor:
    """What each neuron adds to the stream, [..., neuron, d_model], or its product with ``onto``."""
    layer %= cache._layers
    branch = _branch(cache, layer, "mlp")
    active = cache._sliced(cache["post", layer], pos_slice)
    weight = cache.model.blocks[layer].mlp.W_out
    if neuron_slice is not None:
        chosen = as_slice(neuron_slice)
        active, weight = chosen.apply(active, dim=-1), chosen.apply(weight, dim=0)
        if chosen.mode == "int":
            active, weight = active.unsqueeze(-1), weight.unsqueeze(0)
    scale = _scale(cache, branch, pos_slice)
    if scale is not None:
        active = (active / scale).to(active.dtype)
    written = branch.writes.through(weight).to(weight.dtype)
    if onto is None:
        return active.unsqueeze(-1) * written
    projected = written @ onto
    return active * projected if onto.ndim == 1 else active.unsqueeze(-1) * projected


def neurons(
    cache: ActivationCache, last: int, neuron_slice: Any, pos_slice: Any, onto: Tensor | None
) -> Parts:
    """What each neuron of the layers before ``last`` adds to the stream."""
    parts: Parts = []
    axis = -1 if onto is not None and onto.ndim == 1 else -2
    for layer in filter(lambda number: has_mlp(cache, number), range(last)):
        found = neuron_results(cache, layer, neuron_slice, pos_slice, onto)
        width = int(cache.model.blocks[layer].mlp.W_out.shape[0])
        numbers = torch.arange(width)
        if neuron_slice is not None:
            numbers = as_slice(neuron_slice).apply(numbers, dim=0).reshape(-1)
        each = zip(found.unbind(axis), numbers.tolist())
        parts += [(part, f"L{layer}N{number}") for part, number in each]
    return parts


def _branch(cache: ActivationCache, layer: int, kind: str) -> Branch:
    """A branch that can be taken apart, of a stream that can."""
    cache.model.stream.must_add_up()
    branch = cache.model.stream.branch(layer, kind)
    branch.must_have_parts()
    return branch


def _scale(cache: ActivationCache, branch: Branch, pos_slice: Any) -> Tensor | None:
    if branch.norm is None:
        return None
    return cache._sliced(cache[branch.writes.scale_site], pos_slice)


def through_norm(
    cache: ActivationCache,
    stack: Tensor,
    at: tuple[int, bool],
    pos_slice: Any,
    batch_slice: Any,
    has_batch_dim: bool,
    recompute: bool,
) -> Tensor:
    """Parts of the stream as the norm before a layer (or the final one) passes them on; see `apply_ln_to_stack`."""
    layer, mlp_input = at
    if has_batch_dim and batch_slice is not None:
        stack = as_slice(batch_slice).apply(stack, dim=1)
    name = "ln_final" if layer == cache._layers else f"blocks.{layer}.ln{2 if mlp_input else 1}"
    norm, formula = norm_at(cache.model, name), formula_at(cache.model, name)
    if norm is None or formula is None:
        return stack  # the stream is read as it is
    if recompute:
        with unheard():
            made: Tensor = norm.endpoint.module.forward(stack)
        return made
    scale = cache._sliced(cache[f"{name}.hook_scale"], pos_slice)
    if cache.has_batch_dim and batch_slice is not None:
        scale = as_slice(batch_slice).apply(scale, dim=0)
    return formula.through(stack, scale).to(stack.dtype)


def read_through_norm(
    cache: ActivationCache, onto: Tensor, at: tuple[int, bool], pos_slice: Any
) -> tuple[Tensor, Tensor | None]:
    """What to project parts of the stream onto, and to divide by, for their products behind a norm with ``onto``."""
    layer, mlp_input = at
    name = "ln_final" if layer == cache._layers else f"blocks.{layer}.ln{2 if mlp_input else 1}"
    formula = formula_at(cache.model, name)
    if formula is None:
        return onto, None
    onto = torch.as_tensor(onto)
    read = formula.before(onto) if onto.ndim == 1 else formula.before(onto.T).T
    scale = cache._sliced(cache[f"{name}.hook_scale"], pos_slice)
    return read.to(onto.dtype), scale[..., 0] if onto.ndim == 1 else scale


def directions(model: TransformerModel, tokens: Any) -> Tensor:
    """The direction of the normed stream that a token's logit is read from, [..., d_model]."""
    if isinstance(tokens, str):
        tokens = model.to_single_token(tokens)
    chosen = torch.as_tensor(tokens, device=model.device)
    return torch.as_tensor(model.W_U).T[chosen.reshape(()) if chosen.numel() == 1 else chosen]
