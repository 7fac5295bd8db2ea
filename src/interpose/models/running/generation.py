"""Generating text with hooks on: positions stay absolute, whether a KV cache is used or not."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.models.running.text import is_text
from interpose.taps.context import current

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

_PROMPT: contextvars.ContextVar[int | None] = contextvars.ContextVar("prompt", default=None)


def whereabouts(arguments: Mapping[str, Any]) -> tuple[int, int | None]:
    """How many positions a KV cache holds already, and how many positions the prompt has."""
    past = arguments.get("past_key_values")
    length = getattr(past, "get_seq_length", None)
    return (int(length()) if length is not None else 0), _PROMPT.get()


def generate(
    model: TransformerModel,
    input: str | list[str] | Tensor | Mapping[str, Any],  # noqa: A002 - TransformerLens's name
    *,
    return_type: str = "input",
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    **options: Any,
) -> Any:
    """What `TransformerModel.generate` does."""
    if return_type not in ("input", "str", "tokens"):
        raise ValueError(f"return_type is 'input', 'str' or 'tokens'; got {return_type!r}")
    encodes = getattr(model.module.config, "is_encoder_decoder", False)
    padding_side = padding_side or ("right" if encodes else "left")
    given = (
        dict(input)
        if isinstance(input, Mapping)
        else model.prepare(input, prepend_bos=prepend_bos, padding_side=padding_side)
    )
    given.pop("position_ids", None)  # transformers derives them from the mask, step by step
    if "attention_mask" not in given and "input_ids" in given:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    if current().scopes or model.list_hooks():
        # A static cache makes transformers compile the forward, which would not see hooks.
        options.setdefault("disable_compile", True)
    prompt = given.get("input_ids")
    length = 1 if encodes else None if prompt is None else int(prompt.shape[1])
    token = _PROMPT.set(length)
    try:
        module: Any = model.module
        tokens = module.generate(**given, **options)
    finally:
        _PROMPT.reset(token)
    if return_type == "tokens" or (return_type == "input" and not is_text(input)):
        return tokens
    texts = model.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return texts if isinstance(input, (list, tuple)) or len(texts) > 1 else texts[0]
