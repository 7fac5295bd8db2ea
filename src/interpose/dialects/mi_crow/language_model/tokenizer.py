"""`LanguageModelTokenizer`: texts as tokens, padded to one length."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from interpose.dialects.mi_crow.language_model.context import LanguageModelContext
from interpose.models.transformer import TransformerModel


class LanguageModelTokenizer:
    """Makes tokens of texts with the model's tokenizer."""

    def __init__(self, context: LanguageModelContext) -> None:
        self.context = context

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; an error if there is none."""
        if self.context.tokenizer is None:
            raise ValueError(
                "Tokenizer must be initialized: this language model was made without one. Give it: "
                "LanguageModel(model, tokenizer, store)."
            )
        return self.context.tokenizer

    def tokenize(self, texts: Sequence[str], **options: Any) -> Any:
        """Texts as the tokenizer returns them: tensors of tokens and of what is padding, [batch, pos].

        Args:
            texts: some texts.
            **options: for the tokenizer; by default it pads to the longest, and cuts at the model's last position.
        """
        tokenizer, longest = self.tokenizer, self.longest()
        texts = [texts] if isinstance(texts, str) else list(texts)
        options = {
            "padding": True,
            "truncation": longest is not None,
            "return_tensors": "pt",
        } | options
        if options["truncation"] and options.get("max_length") is None:
            options["max_length"] = longest
        if options.get("max_length") is None:
            options.pop("max_length", None)
        return tokenizer(texts, **options)

    def rows(self, texts: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """The tokens of each text, none padded."""
        known = [one for one in (max_length, self.longest()) if one is not None]
        options = {"truncation": True, "max_length": min(known)} if known else {}
        made = self.tokenizer(list(texts), return_attention_mask=False, **options)
        return [list(row) for row in made["input_ids"]]

    def longest(self) -> int | None:
        """How many tokens a text may have; None for any number."""
        tokenizer, view = self.tokenizer, self.context.view
        if isinstance(view, TransformerModel):
            return view._longest_text()
        most = getattr(tokenizer, "model_max_length", None)
        return most if isinstance(most, int) and 0 < most < 10**9 else None

    def split_to_tokens(
        self, text: str | Sequence[str], add_special_tokens: bool = False
    ) -> list[str] | list[list[str]]:
        """A text as its tokens, each as a string; of several texts a list each."""
        if not isinstance(text, str):
            return [self._split(one, add_special_tokens) for one in text]
        return self._split(text, add_special_tokens)

    def _split(self, text: str, special: bool) -> list[str]:
        tokens = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return [str(self.tokenizer.decode([token])) for token in tokens]


def that_pads(tokenizer: Any, filler: int) -> Any:
    """A copy of a tokenizer that has a token for padding: its own, its last one, or any the model has."""
    if tokenizer is None or getattr(tokenizer, "pad_token", "") is not None:
        return tokenizer
    made = copy.deepcopy(tokenizer)
    made.pad_token = made.eos_token or made.convert_ids_to_tokens(filler)
    return made
