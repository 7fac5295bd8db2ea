"""`TransformerLensKeyValueCacheEntry`: the keys and values of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class TransformerLensKeyValueCacheEntry:
    """The keys and values of one layer, [batch, pos, head, d_head]; heads that share them have them once.

    Those of a model of transformers are as its own cache has them: keys already turned by their positions.
    """

    past_keys: Tensor
    past_values: Tensor
    frozen: bool = False

    @classmethod
    def init_cache_entry(
        cls, cfg: Any, device: str | torch.device | None, batch_size: int = 1
    ) -> TransformerLensKeyValueCacheEntry:
        """An entry of no positions yet."""
        shared = None if cfg.ungroup_grouped_query_attention else cfg.n_key_value_heads
        shape = (batch_size, 0, shared or cfg.n_heads, cfg.d_head)
        empty = torch.empty(shape, device=device, dtype=cfg.dtype)
        return cls(empty, empty.clone())

    def append(self, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values with new ones behind them, which are kept unless the entry is frozen."""
        keys = torch.cat([self.past_keys, new_keys], dim=1)
        values = torch.cat([self.past_values, new_values], dim=1)
        if not self.frozen:
            self.past_keys, self.past_values = keys, values
        return keys, values
