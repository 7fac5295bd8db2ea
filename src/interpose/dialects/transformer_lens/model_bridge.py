"""Where TransformerLens has `TransformerBridge`."""

from interpose.dialects.transformer_lens.hooked_transformer import TransformerBridge

__all__ = ["TransformerBridge"]
