"""Hashes that tell whether a store is of this model and of these texts."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from interpose.models.transformer import TransformerModel
from interpose.store.records import ModelAbout

_AT_ONCE = 2**21
_QUICK = 2**28
"""How many weights are compared on a CPU whenever a method takes a store."""
_ODD = 0x9E3779B97F4A7C15 - 2**64
"""An odd number without a pattern, as a signed one of 64 bits."""


def of_model(model: TransformerModel) -> ModelAbout:
    """Which model it is, down to the bits of its parameters."""
    return ModelAbout(**_quick(model), weights=of_weights(model.root))


def _quick(model: TransformerModel) -> dict[str, str]:
    """What can be told without looking at weights."""
    module = model.root
    config: Any = getattr(module, "config", None)
    plain = config.to_dict() if hasattr(config, "to_dict") else {}
    first = next(iter(module.parameters()), torch.empty(0))
    return {
        "name": str(getattr(config, "_name_or_path", "") or "").rstrip("/").rpartition("/")[2],
        "kind": type(module).__name__,
        "config": _hash(json.dumps(_told(plain), sort_keys=True, default=str)),
        "dtype": str(first.dtype).removeprefix("torch."),
    }


def differs(model: TransformerModel, about: ModelAbout) -> str | None:
    """In what a model is not the one of a store, in words; None if nothing was found.

    Weights are compared where that takes seconds: on an accelerator, and of small models.

    Args:
        model: the one in memory.
        about: the one of the store.
    """
    there = _quick(model)
    for name, mine in there.items():
        if name != "name" and mine != (said := getattr(about, name)):
            return f"its {name} is {_short(said)} there, and {_short(mine)} here"
    size = sum(one.numel() for one in model.root.state_dict().values() if isinstance(one, Tensor))
    if model.device.type == "cpu" and size > _QUICK:
        return None
    same = of_weights(model.root) == about.weights
    return None if same else "its weights are others"


def _short(said: str) -> str:
    return repr(said if len(said) < 64 else said[:8])


# What a config says of where it is from and who wrote it, and not of what the model computes.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "_commit_hash")


def _told(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}


def of_weights(module: torch.nn.Module) -> str:
    """A hash of every parameter and buffer, the same on every device: whole numbers do not round."""
    made = hashlib.sha256()
    with torch.no_grad():
        for name, tensor in sorted(module.state_dict().items()):
            if not isinstance(tensor, Tensor):
                continue
            sums = "" if tensor.is_meta else _sum(tensor)
            made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {sums}\n".encode())
    return made.hexdigest()


def _sum(tensor: Tensor) -> int:
    """A sum of a tensor's bits, eight bytes at a time, each weighted by its place, modulo 2**64."""
    whole = getattr(tensor, "full_tensor", None)  # of one that is spread over processes
    content = (
        (whole() if whole is not None else tensor)
        .detach()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
    )
    even = len(content) // 8 * 8
    place = torch.arange(1, min(_AT_ONCE, even // 8) + 1, device=content.device)
    weights = ((place * _ODD) ^ (place << 7)) | 1
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    # A view of eight bytes as one number begins where such numbers do; a copy always does.
    start = content if content.data_ptr() % 8 == 0 else content.clone()
    for part in start[:even].view(torch.int64).split(_AT_ONCE) if even else ():
        total = total * _ODD + (part * weights[: len(part)]).sum()
    for byte in content[even:].tolist():
        total = total * _ODD + byte
    return int(total)


def of_tokenizer(model: TransformerModel) -> str | None:
    """A hash of how a model's tokenizer reads texts; None without one."""
    tokenizer = model._tokenizer_or_none()
    if tokenizer is None:
        return None
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(backend, "to_str"):
        read = json.loads(backend.to_str())
        read.pop("truncation", None), read.pop("padding", None)  # set anew by every call
        return _hash(json.dumps(read, sort_keys=True))
    return _hash(json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()], sort_keys=True))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
