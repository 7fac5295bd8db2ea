"""Activation patching with TransformerLens's functions; cells run together."""

from interpose.dialects.transformer_lens.patching import activation_patching
from interpose.dialects.transformer_lens.patching.activation_patching import *  # noqa: F403 - all of it, by its __all__

__all__ = activation_patching.__all__
