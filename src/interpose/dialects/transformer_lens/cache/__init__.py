"""The keys and values of tokens that a model has read, for runs that go on from there."""

from interpose.dialects.transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from interpose.dialects.transformer_lens.cache.key_value_cache_entry import (
    TransformerLensKeyValueCacheEntry,
)

__all__ = ["TransformerLensKeyValueCache", "TransformerLensKeyValueCacheEntry"]
