"""`ModelConfig`: a model's sizes and habits under TransformerLens's names, read from its live modules.

transformers' configs call one thing by many names; the modules have one shape. Only what no module
shows (the longest text, the activation's name) is looked up in the config.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from interpose.models.discovery.anatomy import (
    Anatomy,
    Attention,
    Endpoint,
    FeedForward,
    Norm,
    Tower,
)
from interpose.models.discovery.parts import ACTIVATIONS, linear_shape
from interpose.models.spread import is_spread
from interpose.models.weights.views import first_row
from interpose.models.weights.weights import main_tower

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

_LENGTH = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "max_target_positions",
)
_ACTIVATION = (
    "hidden_activation",
    "hidden_act",
    "activation_function",
    "activation",
    "mlp_hidden_act",
    "dense_act_fn",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a model is like. None where that is not known, or where the model has no such thing.

    Of a model with several towers this is the language model's, or the decoder's. Where layers differ
    (heads, the MLP's width), it is the first layer that has attention, or a plain MLP: see
    ``model.anatomy`` for each.
    """

    model_name: str | None
    original_architecture: str
    n_layers: int | None
    n_heads: int | None
    n_key_value_heads: int | None
    d_model: int | None
    d_head: int | None
    """Of queries and keys; values may be of another size."""
    d_mlp: int | None
    """Of MLPs that are no mixture of experts."""
    d_vocab: int | None
    d_vocab_out: int | None
    n_ctx: int | None
    """The longest text the config allows; None for models without a limit."""
    act_fn: str | None
    normalization_type: str | None
    """``LN`` or ``RMS``."""
    eps: float | None
    positional_embedding_type: str | None
    """``standard`` (a table that is looked up), ``rotary``, ``alibi`` or ``none``."""
    parallel_attn_mlp: bool | None
    gated_mlp: bool | None
    attn_only: bool | None
    final_rms: bool | None
    """Whether the norm before the unembedding is RMS; None where there is no such norm."""
    tokenizer_name: str | None
    dtype: torch.dtype | None
    device: torch.device
    n_params: int
    """All of them, embeddings too; shared ones once."""


def describe(model: TransformerModel) -> ModelConfig:
    """Describe a model."""
    anatomy, root = model.anatomy, model.root
    config: Any = getattr(root, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    tower = main_tower(anatomy)
    attention = _first_attention(tower)
    mlp = _first_mlp(tower)
    norms = list(_norms(tower))
    final = tower.final_norm if tower is not None else None
    floats = [p.dtype for p in root.parameters() if p.is_floating_point()]
    d_model = _d_model(tower, attention, mlp, text)
    spread = is_spread(root)

    def whole(name: str, found: int | None) -> int | None:
        """A number that each process finds a part of, where a model is spread over several."""
        return getattr(text, name, found) if spread else found

    return ModelConfig(
        model_name=getattr(config, "name_or_path", None) or None,
        original_architecture=type(root).__name__,
        n_layers=len(tower.blocks) if tower is not None else None,
        n_heads=whole("num_attention_heads", getattr(attention, "n_heads", None)),
        n_key_value_heads=whole(
            "num_key_value_heads", getattr(attention, "n_key_value_heads", None)
        ),
        d_model=d_model,
        d_head=attention.d_head if attention is not None else None,
        d_mlp=_shape(mlp.down)[0] if mlp is not None else None,
        d_vocab=_rows(anatomy.embed) or _named(text, ("vocab_size",), int),
        d_vocab_out=_shape(anatomy.unembed)[1],
        n_ctx=_n_ctx(anatomy, text),
        act_fn=_named(text, _ACTIVATION, str) or _activation(tower),
        normalization_type=_kind(norms),
        eps=next((norm.eps for norm in norms if not norm.why_not), None),
        positional_embedding_type=_positions(root, anatomy, text, d_model),
        parallel_attn_mlp=_parallel(tower),
        gated_mlp=mlp.pre_linear is not None if mlp is not None and mlp.pre is not None else None,
        attn_only=_attn_only(tower),
        final_rms=None if final is None or _kind([final]) is None else _kind([final]) == "RMS",
        tokenizer_name=getattr(model.tokenizer, "name_or_path", None) or None,
        dtype=floats[0] if floats else None,
        device=model.device,
        n_params=sum(parameter.numel() for parameter in root.parameters()),
    )


def _named(config: Any, names: Iterable[str], kind: type) -> Any:
    """The first of several attributes that a config has, if it is of the right kind."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, kind) and value), None)


def _shape(endpoint: Endpoint | None) -> tuple[int | None, int | None]:
    """How many features a linear map takes and gives."""
    shape = linear_shape(endpoint.module) if endpoint is not None else None
    return shape or (None, None)


def _rows(endpoint: Endpoint | None) -> int | None:
    module = endpoint.module if endpoint is not None else None
    return int(module.weight.shape[0]) if isinstance(module, nn.Embedding) else None


# The parts that stand for all.


def _first_attention(tower: Tower | None) -> Attention | None:
    blocks = tower.blocks if tower is not None else []
    found = (a for block in blocks for a in block.attentions if a.name == "attn")
    return next((attention for attention in found if attention.d_head), None)


def _first_mlp(tower: Tower | None) -> FeedForward | None:
    blocks = tower.blocks if tower is not None else []
    return next((b.mlp for b in blocks if b.mlp is not None and b.mlp.down is not None), None)


def _norms(tower: Tower | None) -> Iterator[Norm]:
    """A tower's norms, the blocks' own first."""
    if tower is not None:
        for block in tower.blocks:
            yield from block.norms.values()
        if tower.final_norm is not None:
            yield tower.final_norm


def _kind(norms: list[Norm]) -> str | None:
    """Of which kind norms are. On one text a mean may be nearly zero, so one that is taken off anywhere decides."""
    if any(norm.centred or isinstance(norm.endpoint.module, nn.LayerNorm) for norm in norms):
        return "LN"
    return "RMS" if any(not norm.why_not for norm in norms) else None


# What takes some looking.


def _d_model(
    tower: Tower | None, attention: Attention | None, mlp: FeedForward | None, config: Any
) -> int | None:
    """The stream's width: what is written to it, or else what norms read of it."""
    written = _shape(attention.out if attention is not None else None)[1]
    written = written or _shape(mlp.down if mlp is not None else None)[1]
    weights = (getattr(norm.endpoint.module, "weight", None) for norm in _norms(tower))
    read = next((weight.numel() for weight in weights if weight is not None), None)
    return written or read or _named(config, ("hidden_size", "d_model"), int)


def _n_ctx(anatomy: Anatomy, config: Any) -> int | None:
    """The longest text: what the config says, or as far as a table of positions goes if that is less."""
    said = _named(config, _LENGTH, int)
    rows = _rows(anatomy.pos_embed)
    if rows is not None and anatomy.pos_embed is not None:
        rows -= first_row(anatomy.pos_embed.module)
    known = [length for length in (said, rows) if length is not None and length > 0]
    return min(known, default=None)


def _activation(tower: Tower | None) -> str | None:
    """Which activation stands in the first block that has an MLP, by what it does to numbers."""
    blocks = tower.blocks if tower is not None else []
    block = next((block for block in blocks if block.mlp is not None), None)
    x = torch.linspace(-3, 3, 25, device="cpu")
    for module in block.module.modules() if block is not None else ():
        if not list(module.parameters()) and not list(module.children()):
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):  # dropout draws
                    made = type(module).forward(module, x)
            except Exception:  # not a function of one tensor
                continue
            for name, function in ACTIVATIONS.items():
                if isinstance(made, torch.Tensor) and torch.allclose(made, function(x), atol=1e-6):
                    return name
    return None


def _positions(root: nn.Module, anatomy: Anatomy, config: Any, d_model: int | None) -> str | None:
    """How positions come in, by the evidence there is."""
    kinds = {type(module) for module in root.modules()}
    made = any("alibi" in name for kind in kinds for name in vars(kind))
    if getattr(config, "alibi", False) or made:
        return "alibi"
    table = anatomy.pos_embed.module if anatomy.pos_embed is not None else None
    if isinstance(table, nn.Embedding) and table.embedding_dim == d_model:
        return "standard"
    turns = any("rotary" in kind.__name__.lower() for kind in kinds)
    said = any(getattr(config, name, None) for name in ("rope_parameters", "rope_theta"))
    if getattr(config, "rotary_dim", None) or (turns and (said or len(anatomy.towers) == 1)):
        return "rotary"
    attends = any(block.attentions for tower in anatomy.towers for block in tower.blocks)
    words = {kind.__name__ for kind in kinds} | {name for name, _ in root.named_parameters()}
    words |= {name for kind in kinds for name in inspect.signature(kind.forward).parameters}
    named = any("posit" in word.lower() for word in words)
    return None if attends or named or not anatomy.towers else "none"


def _parallel(tower: Tower | None) -> bool | None:
    """Whether attention and MLP are added to the stream at once, in the first block that has both."""
    for block in tower.blocks if tower is not None else ():
        added = [set(names) for _, names, _ in block.sums]
        if {"hook_attn_out", "hook_mlp_out"} <= set().union(*added):
            return any({"hook_attn_out", "hook_mlp_out"} <= names for names in added)
    return None


def _attn_only(tower: Tower | None) -> bool | None:
    """Whether blocks have attention, and no linear map outside it."""
    if tower is None:
        return None
    if any(block.mlp is not None or block.mixer for block in tower.blocks):
        return False
    for block in tower.blocks:
        inside = [attention.path for attention in block.attentions]
        for attention in block.attentions:
            endpoints = (*attention.projections.values(), attention.out)
            inside += [endpoint.path for endpoint in endpoints if endpoint is not None]
        maps = [name for name, m in block.module.named_modules() if linear_shape(m) is not None]
        at = (f"{block.path}.{name}." for name in maps)
        if not inside or any(not path.startswith(tuple(f"{p}." for p in inside)) for path in at):
            return False
    return True
