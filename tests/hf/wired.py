"""A tiny model with weights, config and parts as attributes."""

from __future__ import annotations

from typing import Any

from interpose.models.transformer import TransformerModel
from interpose.models.weights.attributes import part_of
from interpose.models.weights.config import ModelConfig, describe
from interpose.models.weights.weights import Weights
from tests.hf import tiny

if issubclass(TransformerModel, Weights):
    Wired = TransformerModel
else:

    class Wired(Weights, TransformerModel):  # type: ignore[no-redef]
        @property
        def cfg(self) -> ModelConfig:
            return describe(self)

        def __getattr__(self, name: str) -> Any:
            found = None if name == "module" else part_of(self, name)
            return super().__getattr__(name) if found is None else found


def wired(model_type: str, kind: str = "causal", **options: Any) -> Any:
    """A tiny model, wrapped."""
    return Wired(tiny.build(model_type, kind, **options))
