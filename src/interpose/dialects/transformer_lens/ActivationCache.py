"""Where TransformerLens has `ActivationCache`."""

from interpose.dialects.transformer_lens.cache.activation_cache import ActivationCache

__all__ = ["ActivationCache"]
