"""What a nickname means, and which checkpoints of training there are; also as ``loading``."""

from interpose.dialects.transformer_lens.loading.nicknames import checkpoints_of, on_hub, own_file


def get_official_model_name(model_name: str) -> str:
    """The repository that a nickname means; any other name comes back as it is."""
    return own_file(model_name) or on_hub(model_name)


def get_checkpoint_labels(model_name: str) -> tuple[list[int], str]:
    """The steps of training at which a model has checkpoints, and what they count: ``step``."""
    name = get_official_model_name(model_name)
    steps = checkpoints_of(name)
    if steps is None:
        raise ValueError(f"no checkpoints of training are known of {name!r}.")
    return steps, "step"


__all__ = ["get_checkpoint_labels", "get_official_model_name"]
