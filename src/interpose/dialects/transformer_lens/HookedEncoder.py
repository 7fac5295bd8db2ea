"""Where TransformerLens has `HookedEncoder`."""

from interpose.dialects.transformer_lens.hooked_transformer import HookedEncoder

__all__ = ["HookedEncoder"]
