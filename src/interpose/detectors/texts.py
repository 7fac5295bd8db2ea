"""What stands at the positions of a value: the tokens of whole texts, for detectors that count them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interpose.engine.points import HookPoint
from interpose.errors import Unsupported
from interpose.models.batching import packed
from interpose.models.running.masks import mask_at, side_of


def special_ids(model: Any) -> set[int]:
    """The tokens of which a model's tokenizer says that they are special, such as BOS."""
    return set(getattr(model._tokenizer_or_none(), "all_special_ids", ()))


def tokens_at(who: str, value: Tensor, hook: HookPoint) -> tuple[Tensor, Tensor]:
    """The tokens at the positions of a value [batch, pos, ...], and which of them are no padding; both [batch, pos].

    Args:
        who: the detector that asks, for errors.
        value: as it came.
        hook: where.
    """
    name, axes = hook.name, hook.axes
    tokens: Tensor | None = hook.given.get("input_ids")
    own = not axes and tokens is not None and value.ndim > 2 and value.shape[:2] == tokens.shape
    if hook.pos_axis != 1 and not own:  # a module's own path says nothing of its axes
        raise ValueError(
            f"{who!r} looks at a vector at each position; {name!r} is {list(axes) or list(value.shape)}. "
            "Choose another site."
        )
    side = side_of(hook.sequence(1), hook)
    tokens = None if side is None else hook.given.get(f"{side}input_ids")
    if tokens is None:
        raise Unsupported(f"{who!r} needs the tokens, and this run has none at {name!r}.")
    if hook.offset or hook.prompt is not None or packed._HERE.get() is not None:
        raise Unsupported(
            f"{who!r} reads whole texts, and this forward pass goes on from another, as in generating. "
            "Generate first, then run the text that was made in one pass."
        )
    if hook.call and "#" not in name:
        raise Unsupported(
            f"{name!r} is computed several times in one forward pass; say which: '{name}#0'."
        )
    if tokens.shape != value.shape[:2]:
        raise Unsupported(
            f"{name!r} has values {list(value.shape)} for tokens {list(tokens.shape)}."
        )
    mask = mask_at(hook, 1)
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask != 0
    return tokens, real.to(tokens.device)
