"""Where TransformerLens has `HookedRootModule`."""

from interpose.dialects.transformer_lens.hooked_root_module import HookedRootModule

__all__ = ["HookedRootModule"]
