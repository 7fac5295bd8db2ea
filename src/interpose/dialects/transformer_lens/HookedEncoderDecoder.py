"""Where TransformerLens has `HookedEncoderDecoder`."""

from interpose.dialects.transformer_lens.hooked_transformer import HookedEncoderDecoder

__all__ = ["HookedEncoderDecoder"]
