"""Generating text with a model from scratch: one forward pass of the whole text for each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.utilities.sampling import sample_logits
from interpose.errors import Unsupported
from interpose.models.running.text import is_text


@torch.no_grad()
def generate(
    model: Any,
    input: Any,
    max_new_tokens: int,
    *,
    stop_at_eos: bool = True,
    eos_token_id: int | None = None,
    do_sample: bool = True,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    freq_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    prepend_bos: bool | None = None,
    return_type: str | None = "input",
    use_past_kv_cache: bool = True,  # noqa: ARG001 - the whole text runs at every step
    verbose: bool = True,  # noqa: ARG001
) -> Any:
    """Tokens or text with more tokens behind it. What has ended is filled with the end token.

    Args:
        model: a `HookedTransformer` from scratch.
        input: a text, several, or tokens [batch, pos].
        max_new_tokens: how many to add, at most.
        stop_at_eos: end a text at the end token, if one is known.
        eos_token_id: the end token; by default the tokenizer's.
        do_sample: draw tokens, rather than take the likeliest.
        top_k: draw from this many of the likeliest.
        top_p: draw from the likeliest that have this much probability together.
        temperature: what logits are divided by; 0 takes the likeliest.
        freq_penalty: taken off a token's logit for every time it is there.
        repetition_penalty: makes tokens that are there less likely.
        prepend_bos: as in ``to_tokens``.
        return_type: ``str``, ``tokens`` (or ``tensor``), or ``input`` for whichever was given.
        use_past_kv_cache: accepted.
        verbose: accepted.
    """
    if not model.module.can_generate():
        raise Unsupported(
            "this model does not predict next tokens, so it cannot go on with a text."
        )
    given = model.prepare(input, prepend_bos, "left")
    tokens, mask = given["input_ids"], given.get("attention_mask")
    end = eos_token_id
    if end is None:
        end = getattr(model._tokenizer_or_none(), "eos_token_id", None)
    ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for _ in range(max_new_tokens):
        logits = model(tokens, attention_mask=mask)[:, -1]
        penalties = {"freq_penalty": freq_penalty, "repetition_penalty": repetition_penalty}
        heat = temperature if do_sample else 0.0
        new = sample_logits(logits, top_k, top_p, heat, **penalties, tokens=tokens)
        if stop_at_eos and end is not None:
            new = new.where(~ended, end)
            ended = ended | (new == end)
        tokens = torch.cat([tokens, new[:, None]], dim=1)
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        if bool(ended.all()):
            break
    return _as_asked(model, input, tokens, return_type)


def _as_asked(model: Any, input: Any, tokens: Tensor, return_type: str | None) -> Any:
    if return_type in ("tokens", "tensor") or (return_type == "input" and not is_text(input)):
        return tokens
    texts = model._tokenizer().batch_decode(tokens, skip_special_tokens=True)
    return texts if isinstance(input, (list, tuple)) or len(texts) > 1 else texts[0]
