"""What `from_pretrained` knows of names, and what it can leave out of a model."""

from interpose.dialects.transformer_lens.loading_from_pretrained import (
    get_checkpoint_labels,
    get_official_model_name,
)

__all__ = ["get_checkpoint_labels", "get_official_model_name"]
