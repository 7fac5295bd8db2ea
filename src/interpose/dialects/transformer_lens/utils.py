"""What `utilities` was called until TransformerLens 4; notebooks and courses still say so."""

from interpose.dialects.transformer_lens import utilities
from interpose.dialects.transformer_lens.utilities import *  # noqa: F403 - all of it, by its __all__

__all__ = utilities.__all__
