"""Where TransformerLens has `FactoredMatrix`."""

from interpose.dialects.transformer_lens.factored_matrix import FactoredMatrix

__all__ = ["FactoredMatrix"]
