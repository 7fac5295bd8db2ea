"""The MLP of a block, with a gate or without."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from interpose.dialects.transformer_lens.config import HookedTransformerConfig
from interpose.dialects.transformer_lens.scratch.norms import make_norm
from interpose.dialects.transformer_lens.scratch.points import Point
from interpose.dialects.transformer_lens.utilities.activations import ACTIVATIONS


class MLP(nn.Module):
    """``act(x @ W_in + b_in) @ W_out + b_out``; gated, ``(act(x @ W_gate) * (x @ W_in) + b_in) @ W_out + b_out``."""

    def __init__(self, cfg: HookedTransformerConfig) -> None:
        super().__init__()
        assert cfg.d_mlp is not None
        assert cfg.act_fn is not None
        self.cfg = cfg
        self.act_fn = ACTIVATIONS[cfg.act_fn]
        self.W_in = nn.Parameter(torch.empty(cfg.d_model, cfg.d_mlp, dtype=cfg.dtype))
        self.W_out = nn.Parameter(torch.empty(cfg.d_mlp, cfg.d_model, dtype=cfg.dtype))
        if cfg.gated_mlp:
            self.W_gate = nn.Parameter(torch.empty(cfg.d_model, cfg.d_mlp, dtype=cfg.dtype))
            self.hook_pre_linear = Point()  # [batch, pos, d_mlp]
        self.b_in = nn.Parameter(torch.zeros(cfg.d_mlp, dtype=cfg.dtype))
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model, dtype=cfg.dtype))
        self.hook_pre = Point()  # [batch, pos, d_mlp]
        self.hook_post = Point()
        if cfg.is_layer_norm_activation():
            self.hook_mid = Point()  # [batch, pos, d_mlp]
            learned = cfg.normalization_type == "LN"
            self.ln = make_norm(cfg, cfg.d_mlp, kind="LN" if learned else "LNPre")

    def forward(self, normed: Tensor) -> Tensor:
        """What the MLP adds to the stream, [batch, pos, d_model]."""
        if self.cfg.gated_mlp:
            gate = self.act_fn(self.hook_pre(normed @ self.W_gate))
            post = gate * self.hook_pre_linear(normed @ self.W_in) + self.b_in
        else:
            post = self.act_fn(self.hook_pre(normed @ self.W_in + self.b_in))
        if self.cfg.is_layer_norm_activation():
            post = self.ln(self.hook_mid(post))
        return self.hook_post(post) @ self.W_out + self.b_out
