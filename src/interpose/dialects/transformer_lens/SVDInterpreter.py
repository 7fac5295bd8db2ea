"""Where TransformerLens has `SVDInterpreter`."""

from interpose.dialects.transformer_lens.svd_interpreter import SVDInterpreter

__all__ = ["SVDInterpreter"]
