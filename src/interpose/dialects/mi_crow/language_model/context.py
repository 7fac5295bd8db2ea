"""`LanguageModelContext`: what the parts of a language model know of each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interpose.dialects.mi_crow.language_model.language_model import LanguageModel
    from interpose.engine.model import Model


@dataclass(eq=False, repr=False)
class LanguageModelContext:
    """What the parts of a language model share, and hooks are told.

    Attributes:
        language_model: the whole.
        model_id: how it is called.
        device: where it runs.
        model: the module, which is not changed.
        tokenizer: a copy of the one that was given, which can pad.
        store: where things are kept; None if nowhere.
        special_token_ids: tokens that are no text.
        view: the module as interpose sees it.
    """

    language_model: LanguageModel
    model_id: str | None
    device: str
    model: Any
    tokenizer: Any
    store: Any
    view: Model
    special_token_ids: set[int] = field(default_factory=set)
