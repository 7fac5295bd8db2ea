"""Where TransformerLens has `HookedTransformer`."""

from interpose.dialects.transformer_lens.hooked_transformer import HookedTransformer

__all__ = ["HookedTransformer"]
