"""What `cache` was called until TransformerLens 3."""

from interpose.dialects.transformer_lens.cache import (
    TransformerLensKeyValueCache as HookedTransformerKeyValueCache,
)
from interpose.dialects.transformer_lens.cache import (
    TransformerLensKeyValueCacheEntry as HookedTransformerKeyValueCacheEntry,
)

__all__ = ["HookedTransformerKeyValueCache", "HookedTransformerKeyValueCacheEntry"]
