"""What hooks, attributes and values a module has, and which tensors live: to compare before and after."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

_DICTIONARIES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def hooks_on(module: nn.Module) -> list[Any]:
    """Every torch hook on a module and its parts, and every forward of its own."""
    return [
        (name, kind, list(getattr(part, kind).items()))
        for name, part in module.named_modules(remove_duplicate=False)
        for kind in _DICTIONARIES
    ] + [(name, "forward" in vars(part)) for name, part in module.named_modules()]


def state_of(module: nn.Module) -> dict[str, Any]:
    """Everything a run must leave as it was."""
    return {
        "hooks": hooks_on(module),
        "ids": [id(part) for part in module.modules()],
        "attributes": [sorted(vars(part)) for part in module.modules()],
        "training": [part.training for part in module.modules()],
        "values": {name: value.clone() for name, value in module.state_dict().items()},
        "random": torch.get_rng_state(),
    }


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether nothing changed."""
    return (
        all(one[key] == other[key] for key in ("hooks", "ids", "attributes", "training"))
        and one["values"].keys() == other["values"].keys()
        and all(torch.equal(one["values"][k], other["values"][k]) for k in one["values"])
        and torch.equal(one["random"], other["random"])
    )


def living() -> dict[int, Tensor]:
    """Every tensor that someone holds."""
    gc.collect()
    return {id(thing): thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)}
