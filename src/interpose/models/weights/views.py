"""Weights of one block, and of a model's ends, as views of its parameters.

A projection's weight is shown as ``[in, out]`` through the same lens that shows its output, so that
``x @ W_Q[h] + b_Q[h]`` is ``hook_q`` at head ``h`` whatever the layout of the fused matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from interpose.errors import Unsupported
from interpose.models.discovery.anatomy import (
    Anatomy,
    Attention,
    Block,
    Endpoint,
    FeedForward,
    Norm,
)
from interpose.models.discovery.parts import beside_the_weight, heads_of, linear_shape
from interpose.models.reach.derived import weight_of
from interpose.models.reach.lenses import Heads, Part
from interpose.models.spread import is_spread
from interpose.models.weights.readonly import ReadOnly

Getter = Callable[[], Tensor]

_MADE = {"q": "queries", "k": "keys", "v": "values"}


def block_weights(block: Block) -> dict[str, Getter]:
    """What gives each weight of a block, by name (``attn.W_Q``). A weight that cannot be shown says why when called."""
    if block.weights:
        return dict(block.weights)
    found: dict[str, Getter] = {}
    for attention in block.attentions:
        at = attention.name
        for role in "qkv":
            found[f"{at}.W_{role.upper()}"] = partial(_to_heads, attention, role)
            found[f"{at}.b_{role.upper()}"] = partial(_heads_bias, attention, role)
        found[f"{at}.W_O"] = partial(_from_heads, attention)
        found[f"{at}.b_O"] = partial(_output_bias, attention)
    if block.mlp is not None:
        gated = block.mlp.pre_linear is not None
        for which in ("in", "gate", "out") if gated else ("in", "out"):
            found[f"mlp.W_{which}"] = partial(_mlp_weight, block.mlp, which)
            found[f"mlp.b_{which}"] = partial(_mlp_bias, block.mlp, which)
    for name, norm in block.norms.items():
        found |= _norm_weights(f"{name}.", norm)
    return found


def end_weights(anatomy: Anatomy, n_ctx: Callable[[], int | None]) -> dict[str, Getter]:
    """What gives each weight outside the blocks: embeddings, final norms, unembedding.

    Args:
        anatomy: the model's.
        n_ctx: how many positions there are, if that is known.
    """
    if anatomy.weights:
        return dict(anatomy.weights)
    found: dict[str, Getter] = {}
    if anatomy.embed is not None:
        found["embed.W_E"] = partial(_tokens, anatomy.embed)
    if anatomy.pos_embed is not None:
        found["pos_embed.W_pos"] = partial(_positions, anatomy.pos_embed, n_ctx)
    for tower in anatomy.towers:
        if tower.final_norm is not None:
            found |= _norm_weights(f"{tower.prefix}ln_final.", tower.final_norm)
    if anatomy.unembed is not None:
        found["unembed.W_U"] = partial(_weight, anatomy.unembed)
        found["unembed.b_U"] = partial(_bias, anatomy.unembed)
    return found


def why_missing(block: Block, name: str) -> str:
    """Why a block has no weight of a name that others have."""
    if not name.startswith("mlp."):
        mixer = f"; it has {block.mixer}" if block.mixer else ""
        return f"no attention was found here{mixer}."
    return "no MLP was found here." if block.mlp is None else "the MLP has no gate."


# One parameter.


def parameter(endpoint: Endpoint, name: str) -> Tensor | None:
    """A parameter that is all there is to it: no adapter, scale or parametrisation stands behind it."""
    module = endpoint.module
    others = beside_the_weight(module)
    if others:
        raise Unsupported(
            f"{endpoint.path} ({type(module).__name__}) has {', '.join(others)} besides a weight: an "
            "adapter, a scale or a parametrisation, without which the weight says little. Merge or "
            "remove it first."
        )
    found = module._parameters.get(name)
    return found if found is None else _viewable(endpoint, name, found)


def _viewable(endpoint: Endpoint, name: str, found: Tensor) -> Tensor:
    """A parameter whose numbers are what they seem."""
    if found.is_meta:
        raise Unsupported(
            f"the {name} of {endpoint.path} is on the meta device (offloaded?): it has no numbers here."
        )
    ordinary = type(found) in (Tensor, nn.Parameter) and found.is_floating_point()
    ordinary &= not is_spread(endpoint.module)
    if not ordinary or found.dtype.itemsize == 1:
        raise Unsupported(
            f"{endpoint.path} ({type(endpoint.module).__name__}) keeps its {name} as "
            f"{type(found).__name__} of {found.dtype}: quantised, or spread over devices. Its "
            "activations can be hooked; its weight cannot be viewed."
        )
    return found


def matrix(endpoint: Endpoint) -> Tensor:
    """A linear map's weight, ``[in, out]``."""
    if parameter(endpoint, "weight") is None:
        raise Unsupported(
            f"{endpoint.path} ({type(endpoint.module).__name__}) has no weight of its own."
        )
    return weight_of(endpoint.module)


def _weight(endpoint: Endpoint, see: Callable[[Tensor], Tensor] = lambda x: x) -> ReadOnly:
    return ReadOnly.of(see(matrix(endpoint)), f"{endpoint.path}.weight")


def _bias(endpoint: Endpoint, see: Callable[[Tensor], Tensor] = lambda x: x) -> ReadOnly:
    """A bias; zeros where there is none."""
    bias = parameter(endpoint, "bias")
    if bias is None:
        return ReadOnly.of(see(matrix(endpoint).new_zeros(matrix(endpoint).shape[1])))
    return ReadOnly.of(see(bias), f"{endpoint.path}.bias")


# Attention.


def projection(attention: Attention, role: str) -> tuple[Endpoint, Heads]:
    """The projection that makes queries, keys or values from the stream."""
    made = _MADE[role]
    endpoint = attention.projections.get(role)
    if endpoint is None:
        raise Unsupported(f"no projection of this layer's own makes its {made}.")
    heads = heads_of(endpoint)
    if heads is None:
        raise Unsupported(f"the heads of {endpoint.path} are not known.")
    if role not in attention.direct and not _crosses(attention, role, endpoint):
        raise Unsupported(
            f"{endpoint.path}, which makes the {made}, is not known to read the stream or its norm as "
            "they are (low-rank, or mixed first), so no one matrix leads from the stream to them. "
            f"Its own is model.module.get_parameter('{endpoint.path}.weight')."
        )
    return endpoint, heads


def _crosses(attention: Attention, role: str, endpoint: Endpoint) -> bool:
    """Whether a projection of cross attention reads a stream: its own tower's for queries, else another's."""
    if not attention.name.startswith("cross_attn") or attention.out is None:
        return False
    reads, back = linear_shape(endpoint.module), linear_shape(attention.out.module)
    return role != "q" or (reads is not None and back is not None and reads[0] == back[1])


def _to_heads(attention: Attention, role: str) -> ReadOnly:
    endpoint, heads = projection(attention, role)
    return _weight(endpoint, lambda matrix: heads.read(matrix, None).permute(1, 0, 2))


def _heads_bias(attention: Attention, role: str) -> ReadOnly:
    endpoint, heads = projection(attention, role)
    return _bias(endpoint, lambda bias: heads.read(bias, None))


def _output(attention: Attention) -> Endpoint:
    if attention.out is None:
        raise Unsupported("no output projection follows attention.")
    return attention.out


def _from_heads(attention: Attention) -> ReadOnly:
    endpoint = _output(attention)
    heads = heads_of(endpoint)
    if heads is None:
        raise Unsupported(
            f"what {endpoint.path} takes is not {attention.n_heads} heads side by side."
        )
    return _weight(endpoint, lambda matrix: heads.read(matrix.T, None).permute(1, 2, 0))


def _output_bias(attention: Attention) -> ReadOnly:
    return _bias(_output(attention))


# MLP.


def _inner(mlp: FeedForward, which: str) -> Endpoint:
    """The projection of an MLP that a weight's name means."""
    if mlp.experts is not None or mlp.router is not None:
        raise Unsupported(
            f"{mlp.path} is a mixture of experts, each with weights of its own: see "
            f"model.module.get_submodule({mlp.path!r})."
        )
    gated = mlp.pre_linear is not None
    up = mlp.pre_linear if gated else mlp.pre
    endpoint = {"gate": mlp.pre if gated else None, "in": up, "out": mlp.down}[which]
    if endpoint is None or mlp.down is None:
        raise Unsupported(
            f"the projections of {mlp.path} do not multiply out to what the last one takes, so it "
            "is not known which is which."
        )
    reads, back = linear_shape(endpoint.module), linear_shape(mlp.down.module)
    if which != "out" and (reads is None or back is None or reads[0] != back[1]):
        raise Unsupported(
            f"{endpoint.path} does not read the stream itself (low-rank, or mixed first)."
        )
    return endpoint


def _mlp_weight(mlp: FeedForward, which: str) -> ReadOnly:
    endpoint = _inner(mlp, which)
    return _weight(endpoint, partial(_half, endpoint))


def _mlp_bias(mlp: FeedForward, which: str) -> ReadOnly:
    endpoint = _inner(mlp, which)
    return _bias(endpoint, partial(_half, endpoint))


def _half(endpoint: Endpoint, whole: Tensor) -> Tensor:
    """The part of a fused projection that an endpoint means."""
    return endpoint.lens.read(whole, None) if isinstance(endpoint.lens, Part) else whole


# Norms and embeddings.


def _norm_weights(prefix: str, norm: Norm) -> dict[str, Getter]:
    return {
        f"{prefix}w": partial(_norm_weight, norm.endpoint),
        f"{prefix}b": partial(_norm_bias, norm.endpoint),
    }


def _norm_weight(endpoint: Endpoint) -> ReadOnly:
    weight = parameter(endpoint, "weight")
    if weight is None:
        raise Unsupported(f"{endpoint.path} ({type(endpoint.module).__name__}) has no weight.")
    return ReadOnly.of(weight, f"{endpoint.path}.weight")


def _norm_bias(endpoint: Endpoint) -> ReadOnly:
    bias = parameter(endpoint, "bias")
    if bias is None:
        return ReadOnly.of(torch.zeros_like(_norm_weight(endpoint)))
    return ReadOnly.of(bias, f"{endpoint.path}.bias")


def _tokens(endpoint: Endpoint) -> ReadOnly:
    """The table of token embeddings as the module gives them, ``[d_vocab, d_model]``."""
    weight, module = _table(endpoint), endpoint.module
    source = f"{endpoint.path}.weight"
    if type(module).forward is nn.Embedding.forward:
        return ReadOnly.of(weight, source)
    # Some tables multiply what they look up, which no view can show.
    some = torch.arange(min(8, len(weight)), device=weight.device)
    with torch.no_grad():
        rows, made = weight[some], type(module).forward(module, some)
    if torch.equal(rows, made):
        return ReadOnly.of(weight, source)
    wide, given = rows.double(), made.double()
    factor = float((wide * given).sum() / wide.square().sum()) if rows.shape == made.shape else 0.0
    if not factor or not torch.allclose(wide * factor, given, rtol=1e-2, atol=1e-6):
        raise Unsupported(f"{endpoint.path} ({type(module).__name__}) does more than look up rows.")
    return ReadOnly.of(weight.detach() * factor, source)


def _positions(endpoint: Endpoint, n_ctx: Callable[[], int | None]) -> ReadOnly:
    """The table of position embeddings from the first position on, ``[n_ctx, d_model]``."""
    rows = _table(endpoint)[first_row(endpoint.module) :]
    expected = n_ctx()
    if expected is not None and len(rows) != expected:
        raise Unsupported(
            f"{endpoint.path} has {len(rows)} rows for {expected} positions, so it is not known which "
            "is the first position's."
        )
    return ReadOnly.of(rows, f"{endpoint.path}.weight")


def first_row(module: Any) -> int:
    """The row of the first position: some tables begin with rows for padding."""
    offset = getattr(module, "offset", None)
    if isinstance(offset, int):
        return offset
    padding = getattr(module, "padding_idx", None)
    return 0 if padding is None else int(padding) + 1


def _table(endpoint: Endpoint) -> Tensor:
    module = endpoint.module
    if not isinstance(module, nn.Embedding):
        raise Unsupported(f"{endpoint.path} is a {type(module).__name__}, which looks up no rows.")
    return _viewable(endpoint, "weight", module.weight)
