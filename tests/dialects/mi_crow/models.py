"""Small language models in mi-crow's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from interpose.dialects.mi_crow.language_model import LanguageModel
from interpose.dialects.mi_crow.store import LocalStore
from tests.models import texts, tiny

TEXTS = [
    "the cat sat",
    "a dog ran in the park and the cat saw it",
    "when",
    "the dog sat on the mat",
]


def small(
    kind: str = "llama", store: Path | None = None, *, adds_bos: bool = False, **options: Any
) -> LanguageModel:
    """A tiny model with a tokenizer, and a store if a folder is given."""
    tokenizer = texts.tokenizer(adds_bos=adds_bos, **options)
    return LanguageModel(tiny.build(kind), tokenizer, None if store is None else LocalStore(store))
