"""`TransformerLensKeyValueCache`: the keys and values of every layer, on top of transformers' own caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.cache.key_value_cache_entry import (
    TransformerLensKeyValueCacheEntry,
)


@dataclass
class TransformerLensKeyValueCache:
    """What a model has read, so that a run goes on from it: ``model(tokens, past_kv_cache=cache)``.

    ```python
    cache = TransformerLensKeyValueCache.init_cache(model.cfg, model.cfg.device, batch_size=1)
    model("The capital of", past_kv_cache=cache)
    cache.freeze()                                     # later runs read it and add nothing
    model(" France is", prepend_bos=False, past_kv_cache=cache)
    ```

    Attributes:
        entries: the keys and values of each layer.
        previous_attention_mask: [batch, pos], 0 where what was read is padding.
        frozen: whether runs leave it as it is.
    """

    entries: list[TransformerLensKeyValueCacheEntry]
    previous_attention_mask: Tensor
    frozen: bool = False

    @classmethod
    def init_cache(
        cls, cfg: Any, device: str | torch.device | None, batch_size: int = 1
    ) -> TransformerLensKeyValueCache:
        """A cache of a model that has read nothing yet."""
        made = TransformerLensKeyValueCacheEntry.init_cache_entry
        return cls(
            entries=[made(cfg, device, batch_size) for _ in range(cfg.n_layers)],
            previous_attention_mask=torch.empty((batch_size, 0), device=device, dtype=torch.long),
        )

    def __getitem__(self, layer: int) -> TransformerLensKeyValueCacheEntry:
        return self.entries[layer]

    def freeze(self) -> None:
        """Keep the cache as it is in later runs."""
        self._set_frozen(True)

    def unfreeze(self) -> None:
        """Let later runs add to the cache."""
        self._set_frozen(False)

    def _set_frozen(self, frozen: bool) -> None:
        self.frozen = frozen
        for entry in self.entries:
            entry.frozen = frozen

    def append_attention_mask(self, attention_mask: Tensor) -> Tensor:
        """The mask of all tokens, with that of new ones behind it, which is kept unless the cache is frozen."""
        before = self.previous_attention_mask.to(attention_mask)
        whole = torch.cat([before, attention_mask], dim=-1)
        if not self.frozen:
            self.previous_attention_mask = whole
        return whole

    def get_seq_length(self) -> int:
        """How many positions have been read."""
        return int(self.previous_attention_mask.shape[-1])

    def as_transformers_has_it(self) -> Any:
        """A cache of transformers with these keys and values."""
        from transformers import DynamicCache

        made = DynamicCache()
        for layer, entry in enumerate(self.entries):
            if entry.past_keys.shape[1]:
                keys, values = entry.past_keys.transpose(1, 2), entry.past_values.transpose(1, 2)
                made.update(keys, values, layer)
        return made

    def take(self, grown: Any) -> None:
        """Go over to the keys and values of a cache of transformers, unless frozen."""
        for entry, layer in zip(self.entries, grown.layers):
            if not entry.frozen and layer.keys is not None:
                entry.past_keys = layer.keys.transpose(1, 2)
                entry.past_values = layer.values.transpose(1, 2)
