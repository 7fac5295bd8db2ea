"""A model without its later layers."""

from __future__ import annotations

import copy as copying
from typing import Any

from torch import nn

from interpose.models.transformer import TransformerModel

_LISTS = ("layer_types", "attention_layers", "mlp_layer_types")
"""What configs say of each layer."""


def first_layers(module: nn.Module, count: int, *, copy: bool) -> nn.Module:
    """A model of transformers with its first layers alone.

    Args:
        module: the model.
        count: how many.
        copy: whether to leave the module as it is, and cut a copy.
    """
    path = TransformerModel(module).anatomy.towers[0].path
    whole: Any = module.get_submodule(path)
    if not 1 <= count <= len(whole):
        raise ValueError(f"first_n_layers is from 1 to {len(whole)}; got {count}.")
    made = copying.deepcopy(module) if copy else module
    owner, _, name = path.rpartition(".")
    parent: Any = made.get_submodule(owner)
    setattr(parent, name, getattr(parent, name)[:count])
    parts: list[Any] = [part for part in (made, parent) if hasattr(part, "config")]
    for part in parts:  # most have one config together
        text = part.config.get_text_config()
        text.num_hidden_layers = count
        for each in _LISTS:
            if isinstance(getattr(text, each, None), list):
                setattr(text, each, getattr(text, each)[:count])
    return made
