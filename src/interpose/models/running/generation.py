"""Generating text with hooks on: positions stay absolute, whether a KV cache is used or not."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.models.running.rows import as_arguments, read, tokens_of
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


def _given(
    model: TransformerModel, texts: Any, prepend_bos: bool | None, padding_side: str | None
) -> dict[str, Any]:
    """What transformers' generate takes. A decoder goes on from the last column, so that no padding may be there."""
    encodes = getattr(model.module.config, "is_encoder_decoder", False)
    if is_text(texts):
        side = padding_side or ("right" if encodes else "left")
        return model.prepare(texts, prepend_bos=prepend_bos, padding_side=side)
    given = as_arguments(model, texts) if isinstance(texts, Mapping) else model.prepare(texts)
    tokens, mask = given.get("input_ids"), given.get("attention_mask")
    if tokens is not None and mask is None:
        mask = model.mask_of(tokens)
    alone = set(given) <= {"input_ids", "attention_mask", "position_ids"}
    if encodes or mask is None or not alone or bool((mask[:, -1] != 0).all()):
        return given
    rows = read(model, {"input_ids": tokens, "attention_mask": mask})
    return model._with_mask(*model._as_batch([tokens_of(row).tolist() for row in rows], "left"))


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
    given = _given(model, input, prepend_bos, padding_side)
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
