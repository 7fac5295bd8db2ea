"""Small facts about a model's parts that need no probe: linear maps, activations, heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from interpose.models.discovery.anatomy import Endpoint
from interpose.models.reach.lenses import Heads, Squeezed

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": nn.functional.relu,
    "relu2": lambda x: nn.functional.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
}


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """How many features a linear map takes and gives, whoever wrote it; None for other modules."""
    given, made = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(given, int) and isinstance(made, int):
        return given, made
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and weight is not None:
        return int(weight.shape[0]), int(weight.shape[1])
    return None


def heads_of(endpoint: Endpoint) -> Heads | None:
    """The columns of a projection's heads."""
    lens = endpoint.lens.inner if isinstance(endpoint.lens, Squeezed) else endpoint.lens
    return lens if isinstance(lens, Heads) else None


def beside_the_weight(module: nn.Module) -> list[str]:
    """What a linear map has besides weight and bias: the parts of an adapter, scales, a parametrisation."""
    tensors = (*module._parameters.items(), *module._buffers.items())
    others = [key for key, value in tensors if value is not None and key not in ("weight", "bias")]
    return others + list(module._modules)


def why_not_plain(module: nn.Module) -> str | None:
    """Why a linear map's weight does not say what it does; None if it does."""
    others = beside_the_weight(module)
    if others:
        return f"its {type(module).__name__} has {', '.join(others[:3])} besides a weight"
    weight = module._parameters.get("weight")
    if weight is None or not weight.is_floating_point() or weight.element_size() < 2:
        return f"the weight of its {type(module).__name__} is not a plain matrix (quantised?)"
    return None
