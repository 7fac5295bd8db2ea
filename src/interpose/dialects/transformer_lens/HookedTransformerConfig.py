"""Where TransformerLens has `HookedTransformerConfig`."""

from interpose.dialects.transformer_lens.config import HookedTransformerConfig

__all__ = ["HookedTransformerConfig"]
