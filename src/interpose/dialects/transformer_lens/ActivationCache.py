"""Where TransformerLens has `ActivationCache`."""

from interpose.dialects.transformer_lens.activation_cache import ActivationCache

__all__ = ["ActivationCache"]
