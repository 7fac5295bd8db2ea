"""Runs that go on from what a model has read before."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from interpose.dialects.transformer_lens.utilities.tensors import get_offset_position_ids
from interpose.errors import Unsupported
from interpose.models.running import padding
from interpose.models.running.forward import Output
from interpose.models.running.text import is_text

if TYPE_CHECKING:
    from interpose.dialects.transformer_lens.lens_text import LensText


def run_after(
    model: LensText,
    past: TransformerLensKeyValueCache,
    call: Callable[..., Any],
    given: Any,
    *,
    return_type: str | None = "logits",
    loss_per_token: bool = False,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Run the model over texts or tokens that come behind those in a cache, which grows unless it is frozen.

    Args:
        model: the model.
        past: what it has read.
        call: its own call.
        given: texts, tokens [batch, pos], or embeddings [batch, pos, d_model].
        return_type: as in a call; the loss is that of the new tokens.
        loss_per_token: as in a call.
        prepend_bos: as in ``to_tokens``. A text in the middle has no BOS: say False.
        padding_side: as in ``to_tokens``.
        attention_mask: of the new tokens, [batch, pos]; by default found as for a run without a cache.
        **kwargs: other arguments of a call.
    """
    if not padding.accepts(model, "past_key_values"):
        raise Unsupported(f"{type(model.root).__name__} takes no past_key_values to go on from.")
    tokens = model.to_tokens(given, prepend_bos, padding_side) if is_text(given) else given
    embedded = isinstance(tokens, Tensor) and tokens.is_floating_point()
    tokens = tokens.to(model.device) if embedded else model._tokens(tokens)
    if attention_mask is None and not embedded:
        attention_mask = model._mask_of(tokens, padding_side, prepend_bos)
    if attention_mask is None:
        attention_mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    read = past.get_seq_length()
    whole = past.append_attention_mask(attention_mask.to(tokens.device))
    padded = not bool((whole != 0).all())
    if padded:
        kwargs["attention_mask"] = whole
    if (padded or model._positions_are_looked_at()) and padding.accepts(model, "position_ids"):
        kwargs["position_ids"] = get_offset_position_ids(read, whole)
    grown = past if model.is_from_scratch else past.as_transformers_has_it()
    kwargs["past_key_values"] = grown
    wanted = return_type if return_type is None else "logits"
    logits = call(tokens, return_type=wanted, **kwargs)
    if grown is not past:
        past.take(grown)
    if return_type in ("logits", None) or kwargs.get("stop_at_layer") is not None:
        return logits
    mask = attention_mask if padded else None
    loss = model.loss_fn(logits, tokens, mask, loss_per_token)
    return loss if return_type == "loss" else Output(logits, loss)
