"""Tiny models, wrapped."""

from __future__ import annotations

import functools
from typing import Any

from interpose.models.transformer import TransformerModel
from tests.models import tiny

KINDS = {"bert": "masked", "albert": "masked", "t5": "encoder_decoder"}


def wired(model_type: str, kind: str = "causal", **options: Any) -> Any:
    """A model of one's own."""
    return TransformerModel(tiny.build(model_type, kind, **options))


@functools.cache
def of(model_type: str) -> TransformerModel:
    """The model of a type, for tests that change nothing."""
    return TransformerModel(tiny.build(model_type, KINDS.get(model_type, "causal")))
