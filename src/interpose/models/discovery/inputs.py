"""Small inputs that any model of transformers takes, made from its config."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from interpose.engine.model import device_of
from interpose.errors import Unsupported

BATCH, LENGTH = 2, 11


def foreign_sizes(module: nn.Module) -> list[tuple[int, int]]:
    """Two pairs of a batch size and a length that no part of the model has: an axis of such a size counts these.

    Sizes are what the config says and the parameters' dimensions.
    """
    taken = {size for parameter in module.parameters() for size in parameter.shape}
    taken |= set(_whole_numbers(getattr(module, "config", None)))
    batches = islice((n for n in range(BATCH, 64) if n not in taken), 2)
    lengths = islice((n for n in range(LENGTH, 64) if n not in taken), 2)
    return list(zip(batches, lengths))


def _whole_numbers(part: Any) -> Iterator[int]:
    """Every whole number in a config, its parts and its lists included."""
    if isinstance(part, int):
        yield int(part)
    elif isinstance(part, dict):
        for value in part.values():
            yield from _whole_numbers(value)
    elif isinstance(part, list | tuple):
        for value in part:
            yield from _whole_numbers(value)
    elif hasattr(part, "to_dict") and hasattr(part, "__dict__"):
        yield from _whole_numbers(vars(part))


def probe_inputs(module: nn.Module, *, batch: int = BATCH, length: int = LENGTH) -> dict[str, Any]:
    """Small inputs that a model's forward takes.

    Args:
        module: whose.
        batch: how many texts, images or sounds.
        length: how many tokens each text has, where the model takes as many.
    """
    config: Any = getattr(module, "config", None)
    if config is None:
        raise Unsupported(f"{type(module).__name__} has no config to make probe inputs from.")
    device = device_of(module)
    if device.type == "meta":
        raise Unsupported(
            "a model on the meta device has no numbers to probe. Load its weights first: from_pretrained, or "
            "to_empty and load_state_dict."
        )
    accepted = inspect.signature(module.forward).parameters
    main = str(getattr(module, "main_input_name", "input_ids"))
    sense = _MAKERS.get(main)
    made = {main: _tokens(config, batch, length) if sense is None else sense(config, batch)}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        made["decoder_input_ids"] = _tokens(config, batch, length, seed=1)
    if main != "input_ids" and "input_ids" in accepted and main not in ("input_features",):
        made.setdefault("input_ids", _tokens(config, batch, length))
    given: dict[str, Any] = {
        name: value.to(
            device, next(module.parameters()).dtype if value.is_floating_point() else None
        )
        for name, value in made.items()
    }
    if "use_cache" in accepted or any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        given["use_cache"] = False
    return given


def every_sense(module: nn.Module) -> dict[str, Any] | None:
    """The same with images or sound beside the text, for a model that runs on both together; None for another."""
    accepted = inspect.signature(module.forward).parameters
    main = str(getattr(module, "main_input_name", "input_ids"))
    senses = [name for name in _MAKERS if name in accepted and name != main]
    if not senses or main != "input_ids":
        return None
    config: Any = module.config
    found = probe_inputs(module)
    like = next(p for p in module.parameters() if p.is_floating_point())
    for name in senses:
        found[name] = _MAKERS[name](_part(config, name), BATCH).to(like.device, like.dtype)
    return found


def _part(config: Any, name: str) -> Any:
    """The part of a config that is about a sense."""
    return getattr(config, "vision_config" if name == "pixel_values" else "audio_config", config)


def _tokens(config: Any, batch: int, length: int, seed: int = 0) -> Tensor:
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
    length = min(length, longest) if isinstance(longest, int) and longest > 0 else length
    picked = torch.randint(
        len(ordinary), (batch, length), generator=torch.Generator().manual_seed(seed)
    )
    return torch.tensor(ordinary)[picked]


def _pixels(config: Any, batch: int) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size[-2:]
    channels = getattr(vision, "num_channels", 3)
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(0))


def _spectrum(config: Any, batch: int) -> Tensor:
    bins = getattr(config, "num_mel_bins", 80)
    frames = 2 * getattr(config, "max_source_positions", 50)
    return torch.randn(batch, bins, frames, generator=torch.Generator().manual_seed(0))


def _sound(config: Any, batch: int) -> Tensor:  # noqa: ARG001
    return torch.randn(batch, 4000, generator=torch.Generator().manual_seed(0))


_MAKERS = {"pixel_values": _pixels, "input_features": _spectrum, "input_values": _sound}
