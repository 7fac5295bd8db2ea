"""Which tokens are text, where a tensor of them does not say so by itself.

Tokens that the library made itself are remembered with their mask, and so are all views of them (rows, slices), for as
long as they live and are not written to. A copy (moved, concatenated, as a list) is remembered no more: then a token
for padding alone tells, or rows that end as padding would are asked about.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from interpose.engine.points import HookPoint
from interpose.models.batching import packed
from interpose.sites.axes import TEXT

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

# By their storage, which views share: the mask, the type of the tokens, and how often they had been written to.
_REMEMBERED: Any = WeakIdKeyDictionary(ref_type=weakref.ref)


def remember(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Remember which of some tokens are text, and return them.

    Args:
        tokens: a new tensor, which nothing else is a view of.
        mask: of the same shape, 0 where there is padding; None if there is none.
    """
    storage = tokens.untyped_storage()
    if tokens.is_contiguous() and tokens.nbytes == storage.nbytes():
        whole = mask is None or bool((mask != 0).all())
        text = None if whole or mask is None else (mask != 0).to(tokens.device).contiguous()
        _REMEMBERED[storage] = (text, tokens.dtype, _version(tokens))
    return tokens


def remembered(tokens: Tensor) -> Tensor | None:
    """Which tokens are text, as `remember` was told of them or of what they are a view of; None if it was not."""
    try:
        found = _REMEMBERED.get(tokens.untyped_storage())
    except (NotImplementedError, RuntimeError):  # a tensor without a storage, inside a transform
        return None
    if found is None or found[1:] != (tokens.dtype, _version(tokens)):
        return None
    text: Tensor | None = found[0]
    if text is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    return text.as_strided(tokens.shape, tokens.stride(), tokens.storage_offset())


def moved(tokens: Tensor, device: torch.device | str) -> Tensor:
    """Tokens on a device, remembered there if they were."""
    there = tokens.to(device)
    known = None if there is tokens else remembered(tokens)
    return there if known is None else remember(there, known)


def _version(tokens: Tensor) -> int:
    return -1 if tokens.is_inference() else tokens._version


def told_by(pad: int, tokens: Tensor) -> Tensor | None:
    """Which of some tokens [batch, pos] are no padding by a token that is for nothing else; None if all are.

    Only at the ends of a row counts; a row of nothing else is text.
    """
    text = tokens != pad
    from_left, from_right = text.cumsum(-1) > 0, text.flip(-1).cumsum(-1).flip(-1) > 0
    mask = (from_left & from_right) | ~text.any(-1, keepdim=True)
    return None if bool(mask.all()) else mask.long()


def must_be_known(model: Any, tokens: Tensor) -> Tensor | None:
    """Which of some tokens [batch, pos] are text; None if all are. An error where it cannot be known.

    Args:
        model: for its tokenizer.
        tokens: as somebody gave them.
    """
    known = remembered(tokens)
    if known is None:
        known = model.mask_of(tokens)
        if known is None:
            _must_not_look_padded(model, tokens)
    return None if known is None or bool((known != 0).all()) else known


def side_of(sequence: str | None, hook: HookPoint) -> str | None:
    """What the names of a sequence's tokens and mask begin with; None if they are no tokens."""
    if sequence not in TEXT:
        return "" if sequence == "encoder" else None
    decodes = hook.canonical.startswith(("decoder.", "unembed."))
    return "decoder_" if decodes and "decoder_input_ids" in hook.given else ""


def mask_at(hook: HookPoint, axis: int | None) -> Tensor | None:
    """The mask of the tokens that an axis counts, None if nothing is padded; an error if it cannot be known."""
    side = None if axis is None else side_of(hook.sequence(axis), hook)
    if side is None:
        return None
    mask: Tensor | None = hook.given.get(f"{side}attention_mask")
    tokens = hook.given.get("input_ids")
    goes_on = hook.where.offset != 0 or hook.prompt is not None or packed._HERE.get() is not None
    if side or mask is not None or tokens is None or goes_on or not hasattr(hook.model, "mask_of"):
        return mask  # a decoder often begins with a token for padding
    if "known mask" not in hook.given:  # looked for once in a run
        hook.given["known mask"] = must_be_known(hook.model, tokens)
    found: Tensor | None = hook.given["known mask"]
    return found


def _must_not_look_padded(model: TransformerModel, tokens: Tensor) -> None:
    """Refuse rows that begin or end with what padding is filled with, in other numbers than all other rows do.

    One such token at the same end of every row is a BOS or an EOS. Two are none in any language.
    """
    fillers = _fillers(model)
    if not fillers or tokens.shape[1] < 2:
        return
    filled = torch.isin(tokens, torch.tensor(fillers, device=tokens.device))
    for side, seen in (("begins", filled), ("ends", filled.flip(-1))):
        runs = seen.long().cumprod(-1).sum(-1)
        if bool((runs > 1).any() | (runs != runs[0]).any()):
            row = int(runs.argmax())
            token = int(tokens[row, 0 if side == "begins" else -1])
            raise ValueError(_question(model, tokens, side, row, int(runs[row]), token))


def _fillers(model: TransformerModel) -> list[int]:
    """The tokens that padding may be of while they may be text as well."""
    if model._pad_alone() is not None:
        return []  # padding is that one
    tokenizer = model._tokenizer_or_none()
    known = [getattr(model._text_config(), "pad_token_id", None)]
    if tokenizer is not None:
        known += [model._filler(), tokenizer.pad_token_id, tokenizer.eos_token_id]
    return sorted({token for token in known if isinstance(token, int) and token >= 0})


def _question(
    model: TransformerModel, tokens: Tensor, side: str, row: int, count: int, token: int
) -> str:
    shown = f"token {token}"
    if model._tokenizer_or_none() is not None:
        shown = repr(model.to_single_str_token(token))
    times = "" if count == 1 else f" {count} times"
    return (
        f"row {row} of the tokens {list(tokens.shape)} {side} with {shown}{times}, which may be text and may be "
        "padding.\n  Give the texts themselves, what model.to_tokens returns (not a copy of it), or the mask: "
        "{'input_ids': tokens, 'attention_mask': mask}, 0 where there is padding; torch.ones_like(tokens) if there is "
        "none."
    )
