"""Weights of heads: values' biases go to the output's, and factored matrices are balanced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from interpose.errors import Unsupported
from interpose.models.discovery.anatomy import Attention, Block, Endpoint
from interpose.models.discovery.parts import heads_of
from interpose.models.processing import linear, observed
from interpose.models.reach.lenses import Heads
from interpose.models.transformer import TransformerModel
from interpose.models.weights import views

Projection = tuple[Endpoint, Heads]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """One attention: what makes its values and takes its heads back; queries and keys where they are wanted."""

    name: str
    v: Projection
    out: Projection
    q: Projection | None = None
    k: Projection | None = None


# Biases of values.


def plan_values(model: TransformerModel) -> list[Mixing]:
    """Every attention whose values have a bias, or would have one after folding; an error if one cannot go."""
    chosen = {
        name: attention
        for name, block, attention in _attentions(model)
        if _has_value_bias(block, attention)
    }
    found = [_mixing(name, attention) for name, attention in chosen.items()]
    _check_values(model, list(chosen), sums_to_one=set(chosen))
    return _once(found)


def _once(mixings: list[Mixing]) -> list[Mixing]:
    """Attention that several blocks share is one."""
    return list({id(mixing.out[0].module): mixing for mixing in mixings}.values())


def _attentions(model: TransformerModel) -> Iterator[tuple[str, Block, Attention]]:
    for tower in model.anatomy.towers:
        for block in tower.blocks:
            for attention in block.attentions:
                yield f"{tower.prefix}blocks.{block.index}.{attention.name}", block, attention


def _has_value_bias(block: Block, attention: Attention) -> bool:
    """Whether values have a bias of their own, or a norm before them adds something."""
    endpoint = attention.projections.get("v")
    own = endpoint is not None and getattr(endpoint.module, "bias", None) is not None
    before = [norm for norm in block.norms.values() if not norm.reads_sum]
    return own or any(getattr(norm.endpoint.module, "bias", None) is not None for norm in before)


def _mixing(name: str, attention: Attention, roles: str = "v") -> Mixing:
    parts: dict[str, Projection] = {role: views.projection(attention, role) for role in roles}
    if attention.out is None or heads_of(attention.out) is None:
        raise Unsupported(f"the output projection of {name} does not take its heads side by side.")
    heads = heads_of(attention.out)
    assert heads is not None
    if len(heads.offsets) % len(parts["v"][1].offsets) or heads.size != parts["v"][1].size:
        raise Unsupported(f"it is not known which values each head of {name} reads.")
    for endpoint in (attention.out, *(endpoint for endpoint, _ in parts.values())):
        linear.matrix(endpoint)
    return Mixing(name=name, out=(attention.out, heads), **parts)


def _check_values(model: TransformerModel, attentions: list[str], sums_to_one: set[str]) -> None:
    """Refuse attention whose heads are not its pattern times its values, as far as its sites can tell.

    Args:
        model: whose.
        attentions: their names.
        sums_to_one: those whose pattern must sum to 1 too.
    """
    known = model.tree.table.sites
    kinds = ("pattern", "v", "z")
    sites = {at: [f"{at}.hook_{kind}" for kind in kinds] for at in attentions}
    sites = {at: names for at, names in sites.items() if all(name in known for name in names)}
    cache = observed.cached(model, [name for names in sites.values() for name in names])
    close = observed.tolerance(model)
    for at, names in sites.items():
        if any(name not in cache for name in names):
            continue
        pattern, v, z = (linear.wide(cache[name]) for name in names)
        if at in sums_to_one and not (pattern.sum(-1) - 1).abs().max() <= max(close, 1e-3):
            raise Unsupported(
                f"the pattern of {at} does not sum to 1 (attention sinks?), so that a bias of its "
                "values is not constant."
            )
        if pattern.ndim != 4 or v.shape[-1] != z.shape[-1] or pattern.shape[-1] != v.shape[-3]:
            continue
        v = _for_each_head(v, z.shape[-2], dim=-2)
        made = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
        if made.shape != z.shape or not (made - z).abs().max() <= close * z.abs().max():
            raise Unsupported(
                f"something stands between pattern times values and the output projection of {at} "
                "(a gate, a norm)."
            )


def _for_each_head(values: Tensor, heads: int, *, dim: int) -> Tensor:
    """What each head reads, where neighbouring heads share values."""
    return values.repeat_interleave(heads // values.shape[dim], dim=dim)


def fold_value_biases(mixings: list[Mixing]) -> None:
    """Move the biases of values, which every position gets in full, to the output projections."""
    for mixing in mixings:
        b_v, w_o = linear.heads_bias(*mixing.v), linear.from_heads(*mixing.out)
        each = _for_each_head(b_v, len(w_o), dim=0)
        linear.add_to_bias(mixing.out[0], torch.einsum("hd,hdm->m", each, w_o))
        linear.put_heads_bias(*mixing.v, torch.zeros_like(b_v))


# Factored matrices.


def plan_factors(model: TransformerModel) -> list[Mixing]:
    """Every attention with its queries and keys; an error where they are no plain factors."""
    found: list[Mixing] = []
    turned: list[tuple[str, str]] = []
    biased: set[str] = set()
    for name, block, attention in _attentions(model):
        if attention.n_heads != attention.n_key_value_heads:
            raise Unsupported(
                f"the {attention.n_heads} heads of {name} share {attention.n_key_value_heads} keys "
                "and values (grouped queries): no head has factors of its own."
            )
        found.append(_mixing(name, attention, "qkv"))
        turned += [(name, role) for role in "qk" if role not in attention.unturned]
        biased |= {name} if _has_value_bias(block, attention) else set()
    if not found:
        raise Unsupported("no attention was found.")
    _check_only_scaled(model, turned)
    _check_values(model, [mixing.name for mixing in found], biased)
    return _once(found)


def _check_only_scaled(model: TransformerModel, turned: list[tuple[str, str]]) -> None:
    """Refuse queries or keys that are more than scaled on their way to the kernel."""
    sites = [(f"{at}.hook_{role}", f"{at}.hook_rot_{role}") for at, role in turned]
    known = [name for pair in sites for name in pair if name in model.tree.table.sites]
    cache = observed.cached(model, known)
    close = observed.tolerance(model)
    for (at, role), (made, got) in zip(turned, sites):
        if made in cache and got in cache:
            x, y = linear.wide(cache[made]), linear.wide(cache[got])
            if x.shape == y.shape:
                factor = (x * y).sum() / x.square().sum()
                if (factor * x - y).abs().max() <= close * y.abs().max():
                    continue
        raise Unsupported(
            f"{'queries' if role == 'q' else 'keys'} of {at} do not reach the attention kernel as "
            "they were projected (rotary positions, or a norm), so that another factor would be "
            "turned otherwise."
        )


def refactor(mixings: list[Mixing]) -> None:
    """Replace the factors of each head by those of a singular value decomposition of their product."""
    fold_value_biases(mixings)
    for mixing in mixings:
        if mixing.q is not None and mixing.k is not None:
            u, s, v = _decomposed(_with_bias(mixing.q), _with_bias(mixing.k))
            _put_with_bias(mixing.q, u * s.sqrt()[:, None, :])
            _put_with_bias(mixing.k, v * s.sqrt()[:, None, :])
        w_v, w_o = linear.to_heads(*mixing.v), linear.from_heads(*mixing.out)
        u, s, v = _decomposed(w_v, w_o.transpose(1, 2))
        linear.put_to_heads(*mixing.v, u * s[:, None, :])
        linear.put_from_heads(*mixing.out, v.transpose(1, 2))


def _with_bias(projection: Projection) -> Tensor:
    """``[head, d_model + 1, d_head]``: the bias is what a feature that is always 1 would be read with."""
    weight, bias = linear.to_heads(*projection), linear.heads_bias(*projection)
    return torch.cat([weight, bias[:, None, :]], dim=1)


def _put_with_bias(projection: Projection, value: Tensor) -> None:
    linear.put_to_heads(*projection, value[:, :-1])
    had = linear.heads_bias(*projection)
    bias = value[:, -1]
    # Zeros stay zeros, whatever the arithmetic left of them.
    quiet = bias.abs().max() <= 1e-12 * value.abs().max()
    linear.put_heads_bias(*projection, torch.zeros_like(had) if quiet else bias)


def _decomposed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The singular value decomposition of ``a @ b.T`` for each head, as wide as the heads are."""
    q_a, r_a = torch.linalg.qr(a)
    q_b, r_b = torch.linalg.qr(b)
    u, s, vh = torch.linalg.svd(r_a @ r_b.transpose(-1, -2), full_matrices=False)
    left, right = q_a @ u, q_b @ vh.transpose(-1, -2)
    missing = a.shape[-1] - s.shape[-1]
    pad = torch.nn.functional.pad
    return pad(left, (0, missing)), pad(s, (0, missing)), pad(right, (0, missing))
