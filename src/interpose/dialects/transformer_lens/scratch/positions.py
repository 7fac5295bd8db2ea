"""Positions in attention: queries and keys turned (rotary), and biases on scores by distance (ALiBi, T5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from interpose.dialects.transformer_lens.config import HookedTransformerConfig


class Rotary(nn.Module):
    """Turns pairs of features by angles that grow with the position.

    The pairs are neighbours (``rotary_adjacent_pairs``), or a feature of the first half with one of the second.
    """

    def __init__(self, cfg: HookedTransformerConfig) -> None:
        super().__init__()
        assert cfg.rotary_dim is not None
        self.size = cfg.rotary_dim
        self.adjacent = cfg.rotary_adjacent_pairs
        wide = torch.float64 if cfg.dtype == torch.float64 else torch.float32
        angles = torch.arange(cfg.n_ctx, dtype=wide)[:, None] * frequencies(cfg, wide)
        angles = angles.repeat_interleave(2, -1) if self.adjacent else angles.repeat(1, 2)
        self.register_buffer("sin", angles.sin().to(cfg.dtype), persistent=False)
        self.register_buffer("cos", angles.cos().to(cfg.dtype), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys [batch, pos, head, d_head] at positions [pos] or [batch, pos]."""
        turned, rest = x[..., : self.size], x[..., self.size :]
        sin = self.get_buffer("sin")[positions].unsqueeze(-2)
        cos = self.get_buffer("cos")[positions].unsqueeze(-2)
        turned = turned * cos + self._across(turned) * sin
        return torch.cat([turned, rest], dim=-1)

    def _across(self, x: Tensor) -> Tensor:
        """Each pair (a, b) as (-b, a)."""
        if self.adjacent:
            return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([-second, first], dim=-1)


def frequencies(cfg: HookedTransformerConfig, dtype: torch.dtype) -> Tensor:
    """By how much each pair turns from one position to the next, [rotary_dim / 2].

    By parts: slow ones are slowed further, fast ones stay, and those between are mixed by how often they turn in the
    context that the model was first trained with.
    """
    assert cfg.rotary_dim is not None
    exponents = torch.arange(0, cfg.rotary_dim, 2, dtype=dtype) / cfg.rotary_dim
    plain = cfg.rotary_base**-exponents
    if not cfg.use_NTK_by_parts_rope:
        return plain
    low, high = cfg.NTK_by_parts_low_freq_factor, cfg.NTK_by_parts_high_freq_factor
    turns = cfg.NTK_original_ctx_len * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (keep + (1 - keep) / cfg.NTK_by_parts_factor)


def alibi(n_heads: int, queries: int, keys: int) -> Tensor:
    """What ALiBi adds to scores, [head, query, key]: a slope for each head, times the distance back."""
    slopes = 2.0 ** (-8.0 / n_heads * torch.arange(1, n_heads + 1))
    distances = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
    return slopes[:, None, None] * distances.clamp(max=0)


class RelativeBias(nn.Module):
    """What T5 adds to scores: a learned number for each head and each range of distances, one table for all layers.

    Half of the ranges (of each direction) are single distances, the others widen until ``max_distance``.
    """

    def __init__(self, cfg: HookedTransformerConfig) -> None:
        super().__init__()
        assert cfg.relative_attention_num_buckets is not None
        assert cfg.relative_attention_max_distance is not None
        self.count = cfg.relative_attention_num_buckets
        self.farthest = cfg.relative_attention_max_distance
        self.both_ways = cfg.attention_dir == "bidirectional"
        self.weight = nn.Parameter(torch.zeros(self.count, cfg.n_heads, dtype=cfg.dtype))

    def forward(self, length: int) -> Tensor:
        """[head, query, key]."""
        places = torch.arange(length, device=self.weight.device)
        return self.weight[self._range_of(places - places[:, None])].permute(2, 0, 1)

    def _range_of(self, ahead: Tensor) -> Tensor:
        """The row of the table for keys that are so far ahead of the query."""
        count, first = self.count, torch.zeros_like(ahead)
        if self.both_ways:
            count //= 2
            first = count * (ahead > 0).long()
        distance = ahead.abs() if self.both_ways else (-ahead).clamp(min=0)
        single = count // 2
        far = (distance.clamp(min=1).float() / single).log() / math.log(self.farthest / single)
        far = (single + (far * (count - single)).long()).clamp(max=count - 1)
        return first + torch.where(distance < single, distance, far)
