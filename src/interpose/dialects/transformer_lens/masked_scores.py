"""Masked scores as TransformerLens shows them: minus infinity, where models of transformers have a very low number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from interpose.engine.hooks import caller_of
from interpose.engine.points import HookPoint


def shown(scores: Tensor) -> Tensor:
    """Scores with minus infinity in place of the lowest numbers of their dtype."""
    return scores.masked_fill(scores <= torch.finfo(scores.dtype).min / 2, -torch.inf)


def showing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that sees masked scores as minus infinity. What it leaves so stays a number: no row becomes NaN."""
    call = caller_of(function)

    @functools.wraps(function)
    def with_infinities(value: Tensor, hook: HookPoint) -> Any:
        if not hook.canonical.endswith("hook_attn_scores"):
            return call(value, hook)
        given = shown(value)
        before = None if given.is_inference() else given._version
        made = call(given, hook)
        if made is None and before is not None and given._version == before:
            return None
        made = given if made is None else made
        if not isinstance(made, Tensor) or not made.is_floating_point():
            return made  # the engine says what is wrong with it
        return made.clamp(min=torch.finfo(made.dtype).min)

    return with_infinities
