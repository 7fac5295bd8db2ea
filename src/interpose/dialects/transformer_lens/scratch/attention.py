"""Attention, written out so that every step has its point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from interpose.dialects.transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from interpose.dialects.transformer_lens.config import HookedTransformerConfig
from interpose.dialects.transformer_lens.factored_matrix import FactoredMatrix
from interpose.dialects.transformer_lens.scratch.norms import make_norm
from interpose.dialects.transformer_lens.scratch.points import Point
from interpose.dialects.transformer_lens.scratch.positions import RelativeBias, Rotary, alibi


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What attention needs to know besides the stream.

    Attributes:
        positions: of queries, [pos] or [batch, pos].
        of_keys: positions of keys, where there are more of them than queries.
        past: the keys and values of what was read before, if this run goes on from it.
        mask: of keys, [batch, pos], 0 where there is padding; None if there is none.
        embedded: position embeddings that queries and keys read besides the stream (shortformer).
        bias: [head, query, key], added to scores.
    """

    positions: Tensor
    of_keys: Tensor | None = None
    past: TransformerLensKeyValueCache | None = None
    mask: Tensor | None = None
    embedded: Tensor | None = None
    bias: Tensor | None = None


_SHARED = ("W_K", "W_V", "b_K", "b_V")


class Attention(nn.Module):
    """Attention with a weight for each head: W_Q, W_K, W_V [head, d_model, d_head], W_O [head, d_head, d_model].

    Where heads share keys and values, the parameters are ``_W_K``, ``_W_V``, ``_b_K`` and ``_b_V``, and the names
    without underscore show them once for every head.
    """

    def __init__(self, cfg: HookedTransformerConfig, layer: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.layer = layer
        self.local = bool(
            cfg.use_local_attn and cfg.attn_types and cfg.attn_types[layer] == "local"
        )
        self.scale = cfg.attn_scale if cfg.use_attn_scale else 1.0
        if cfg.scale_attn_by_inverse_layer_idx:
            self.scale *= layer + 1
        shared = cfg.n_key_value_heads
        self.repeats = 1 if shared is None else cfg.n_heads // shared
        of_keys = (shared or cfg.n_heads, cfg.d_model, cfg.d_head)
        self.W_Q = _empty(cfg, cfg.n_heads, cfg.d_model, cfg.d_head)
        self.W_O = _empty(cfg, cfg.n_heads, cfg.d_head, cfg.d_model)
        self.b_Q = _zeros(cfg, cfg.n_heads, cfg.d_head)
        self.b_O = _zeros(cfg, cfg.d_model)
        for name in ("K", "V"):
            self.register_parameter(self._own(f"W_{name}"), _empty(cfg, *of_keys))
        for name in ("K", "V"):
            self.register_parameter(self._own(f"b_{name}"), _zeros(cfg, of_keys[0], cfg.d_head))
        if cfg.use_qk_norm:
            self.q_norm = make_norm(cfg, cfg.d_head, "RMS")
            self.k_norm = make_norm(cfg, cfg.d_head, "RMS")
        self._make_points(cfg)

    def _make_points(self, cfg: HookedTransformerConfig) -> None:
        self.hook_q = Point()  # [batch, pos, head, d_head]
        self.hook_k = Point()
        self.hook_v = Point()
        if cfg.positional_embedding_type == "rotary":
            self.rotary = Rotary(cfg)
            self.hook_rot_q = Point()  # [batch, pos, head, d_head]
            self.hook_rot_k = Point()
        elif cfg.positional_embedding_type == "relative_positional_bias" and self.layer == 0:
            self.rel_pos_bias = RelativeBias(cfg)
        self.hook_attn_scores = Point()  # [batch, head, query, key]
        self.hook_pattern = Point()
        self.hook_z = Point()  # [batch, pos, head, d_head]
        self.hook_result = Point()  # [batch, pos, head, d_model]

    def _own(self, name: str) -> str:
        """What the parameter of keys or values is called."""
        return name if self.cfg.n_key_value_heads is None else f"_{name}"

    def __setattr__(self, name: str, value: Any) -> None:
        shared = name in _SHARED and f"_{name}" in self.__dict__.get("_parameters", ())
        super().__setattr__(f"_{name}" if shared else name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _SHARED and f"_{name}" in self._parameters:
            return self._parameters[f"_{name}"].repeat_interleave(self.repeats, dim=0)  # type: ignore[union-attr]
        return super().__getattr__(name)

    @property
    def OV(self) -> FactoredMatrix:
        """What each head reads and writes: ``W_V @ W_O``."""
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def QK(self) -> FactoredMatrix:
        """Which pairs each head looks for: ``W_Q @ W_K^T``."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    def forward(self, normed: Tensor, inputs: dict[str, Any], context: Context) -> Tensor:
        """What attention adds to the stream, [batch, pos, d_model].

        Args:
            normed: what it reads, [batch, pos, d_model].
            inputs: for each of ``q``, ``k`` and ``v`` how the stream of single heads was edited, or None: a pair of
                values [batch, pos, head, d_model], before and after.
            context: positions and masks.
        """
        q, k, v = (self._projected(role, normed, inputs.get(role), context) for role in "qkv")
        if context.past is not None:
            k, v = context.past[self.layer].append(k, v)
        pattern = self._pattern(q, k, context).to(v.dtype)
        z = self.hook_z((pattern @ self._per_head(v).transpose(1, 2)).transpose(1, 2))
        out = functional.linear(z.flatten(-2), self.W_O.flatten(0, 1).T, self.b_O)
        if not self.hook_result.heard:
            return out
        written = torch.einsum("bphd,hdm->bphm", z, self.W_O)
        # As a difference: a result that is only read moves no bit.
        return out + (self.hook_result(written) - written).sum(-2)

    def _projected(self, role: str, normed: Tensor, edited: Any, context: Context) -> Tensor:
        """Queries, keys or values, [batch, pos, head, d_head]."""
        weight: Tensor = self.parameter("W", role)
        bias: Tensor = self.parameter("b", role)
        if self.cfg.ungroup_grouped_query_attention and role != "q":
            weight, bias = (getattr(self, f"{kind}_{role.upper()}") for kind in "Wb")
        if context.embedded is not None and role != "v":
            normed = normed + context.embedded
        flat = weight.transpose(0, 1).flatten(1).T
        made = functional.linear(normed, flat, bias.flatten()).unflatten(-1, bias.shape)
        if edited is not None:
            before, after = edited
            made = made + torch.einsum("bphm,hmd->bphd", after - before, weight)
        point: Point = getattr(self, f"hook_{role}")
        return point(made)

    def parameter(self, kind: str, role: str) -> nn.Parameter:
        """The parameter of a role (``q``, ``k``, ``v``): its weight (``W``) or bias (``b``), shared ones once."""
        name = f"{kind}_{role.upper()}"
        found = self._parameters[name if role == "q" else self._own(name)]
        assert found is not None
        return found

    def _pattern(self, q: Tensor, k: Tensor, context: Context) -> Tensor:
        """Attention probabilities, [batch, head, query, key]."""
        cfg = self.cfg
        if cfg.use_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if cfg.positional_embedding_type == "rotary":
            q = self.hook_rot_q(self.rotary(q, context.positions))
            of_keys = context.positions if context.of_keys is None else context.of_keys
            k = self.hook_rot_k(self.rotary(k, of_keys))
        if q.dtype.itemsize < 4:
            q, k = q.float(), k.float()
        scores = q.transpose(1, 2) @ self._per_head(k).permute(0, 2, 3, 1) / self.scale
        if cfg.attn_scores_soft_cap > 0:
            scores = cfg.attn_scores_soft_cap * (scores / cfg.attn_scores_soft_cap).tanh()
        if cfg.positional_embedding_type == "alibi":
            scores = scores + alibi(cfg.n_heads, *scores.shape[-2:]).to(scores)
        if context.bias is not None:
            scores = scores + context.bias
        allowed = self._allowed(scores, context.mask)
        if allowed is None:
            return self.hook_pattern(self.hook_attn_scores(scores).softmax(-1))
        # A row of padding may look at nothing. Its scores stay finite, so that gradients do, and its pattern is 0.
        idle = ~allowed.any(-1, keepdim=True)
        scores = self.hook_attn_scores(scores.masked_fill(~(allowed | idle), -torch.inf))
        return self.hook_pattern(scores.softmax(-1).masked_fill(idle, 0.0))

    def _allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor | None:
        """Who may look at whom, [batch or 1, 1, query, key]; None if everybody at everybody."""
        places = torch.arange(scores.shape[-1], device=scores.device)
        back = places[-scores.shape[-2] :, None] - places
        found: Tensor | None = None
        if self.cfg.attention_dir == "causal":
            found = back >= 0
        if self.local and self.cfg.window_size is not None:
            near = back.abs() < self.cfg.window_size
            found = near if found is None else found & near
        if found is not None:
            found = found[None, None]
        if mask is not None:
            real = mask.bool()[:, None, None, :]
            found = real.expand(-1, -1, scores.shape[-2], -1) if found is None else found & real
        return found

    def _per_head(self, x: Tensor) -> Tensor:
        """Keys or values, repeated for every head that shares them."""
        repeats = self.cfg.n_heads // x.shape[2]
        return x if repeats == 1 else x.repeat_interleave(repeats, dim=2)


def _empty(cfg: HookedTransformerConfig, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=cfg.dtype))


def _zeros(cfg: HookedTransformerConfig, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=cfg.dtype))
