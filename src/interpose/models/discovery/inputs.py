"""Small inputs that any model of transformers takes, made from its config."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from interpose.errors import Unsupported

BATCH, LENGTH = 2, 11


def probe_inputs(module: nn.Module) -> dict[str, Any]:
    """Small inputs that a model's forward takes."""
    config: Any = getattr(module, "config", None)
    if config is None:
        raise Unsupported(f"{type(module).__name__} has no config to make probe inputs from.")
    device = next(module.parameters()).device
    if device.type == "meta":
        raise Unsupported("a model on the meta device has no numbers to probe.")
    accepted = inspect.signature(module.forward).parameters
    main = str(getattr(module, "main_input_name", "input_ids"))
    made: dict[str, Any] = {main: _MAKERS.get(main, _tokens)(config)}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        made["decoder_input_ids"] = _tokens(config, seed=1)
    if main != "input_ids" and "input_ids" in accepted and main not in ("input_features",):
        made.setdefault("input_ids", _tokens(config))
    made = {
        name: value.to(
            device, next(module.parameters()).dtype if value.is_floating_point() else None
        )
        for name, value in made.items()
    }
    if "use_cache" in accepted or any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        made["use_cache"] = False
    return made


def _tokens(config: Any, seed: int = 0) -> Tensor:
    """Token ids that mean nothing special."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = int(getattr(text, "vocab_size", 0) or getattr(config, "vocab_size", 0) or 32)
    special = {
        value
        for part in (config, text)
        for name, value in vars(part).items()
        if name.endswith(("_token_id", "_token_index", "_id")) and isinstance(value, int)
    }
    ordinary = [token for token in range(min(size, 4096)) if token not in special]
    longest = getattr(text, "max_position_embeddings", None)
    length = min(LENGTH, longest) if isinstance(longest, int) and longest > 0 else LENGTH
    picked = torch.randint(
        len(ordinary), (BATCH, length), generator=torch.Generator().manual_seed(seed)
    )
    return torch.tensor(ordinary)[picked]


def _pixels(config: Any) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size[-2:]
    channels = getattr(vision, "num_channels", 3)
    return torch.randn(BATCH, channels, height, width, generator=torch.Generator().manual_seed(0))


def _spectrum(config: Any) -> Tensor:
    bins = getattr(config, "num_mel_bins", 80)
    frames = 2 * getattr(config, "max_source_positions", 50)
    return torch.randn(BATCH, bins, frames, generator=torch.Generator().manual_seed(0))


def _sound(config: Any) -> Tensor:  # noqa: ARG001
    return torch.randn(BATCH, 4000, generator=torch.Generator().manual_seed(0))


_MAKERS = {"pixel_values": _pixels, "input_features": _spectrum, "input_values": _sound}
