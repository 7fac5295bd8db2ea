"""Whether one sentence follows another, as BERT was trained to tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from interpose.errors import Unsupported
from interpose.models.transformer import TransformerModel

_SAID = ("The sentences are sequential", "The sentences are NOT sequential")


class BertNextSentencePrediction:
    """A `HookedEncoder` that is asked about two sentences: ``BertNextSentencePrediction(model)([first, second])``.

    Args:
        model: a BERT with its head for next sentences, as `HookedEncoder.from_pretrained` loads it.
    """

    def __init__(self, model: TransformerModel) -> None:
        self.model = model

    def __call__(
        self,
        input: Sequence[str] | Tensor,
        return_type: str | None = "logits",
        token_type_ids: Tensor | None = None,
        one_zero_attention_mask: Tensor | None = None,
    ) -> Any:
        """Logits [batch, 2] of "it follows" and "it does not", or the likelier of these in words.

        Args:
            input: two sentences, or tokens [batch, pos] of both.
            return_type: ``logits``, ``predictions`` for words, or None to run for the hooks alone.
            token_type_ids: 0 for tokens of the first sentence, 1 for those of the second; of tokens they must be given.
            one_zero_attention_mask: 0 where there is padding.
        """
        given = self._given(input, token_type_ids, one_zero_attention_mask)
        return self._answer(self.model(given), return_type)

    forward = __call__

    def run_with_cache(
        self,
        input: Sequence[str] | Tensor,
        return_type: str | None = "logits",
        token_type_ids: Tensor | None = None,
        one_zero_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """The same, and what was kept on the way: as `HookedTransformer.run_with_cache`."""
        given = self._given(input, token_type_ids, one_zero_attention_mask)
        output, cache = self.model.run_with_cache(given, **kwargs)
        return self._answer(output, return_type), cache

    def to_tokens(
        self, input: Sequence[str], move_to_device: bool = True, truncate: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [batch, pos] of two sentences, of which each token is, and the mask."""
        if isinstance(input, str) or len(input) != 2:
            raise ValueError(f"two sentences are asked about: [first, second]; got {input!r}.")
        made = self.model._tokenizer()(
            *input, return_tensors="pt", return_token_type_ids=True, truncation=truncate
        )
        found = (made["input_ids"], made["token_type_ids"], made["attention_mask"])
        if not move_to_device:
            return found
        tokens, types, mask = (each.to(self.model.device) for each in found)
        return tokens, types, mask

    def _given(self, input: Any, types: Tensor | None, mask: Tensor | None) -> dict[str, Tensor]:
        if isinstance(input, Tensor):
            if types is None:
                raise ValueError("give token_type_ids with tokens: which sentence each is of.")
            tokens = input
        else:
            tokens, of_text, of_pair = self.to_tokens(input)
            types = of_text if types is None else types
            mask = of_pair if mask is None else mask
        mask = torch.ones_like(tokens) if mask is None else mask
        given = {"input_ids": tokens, "token_type_ids": types, "attention_mask": mask}
        return {name: value.to(self.model.device) for name, value in given.items()}

    def _answer(self, output: Any, return_type: str | None) -> Any:
        logits = getattr(output, "seq_relationship_logits", None)
        if logits is None:
            logits = getattr(output, "logits", None)
        if logits is None or logits.ndim != 2 or logits.shape[-1] != 2:
            raise Unsupported(
                f"{type(self.model.root).__name__} has no head for next sentences; load the model as "
                "transformers.BertForPreTraining, and give it as hf_model."
            )
        if return_type == "predictions":
            return _SAID[int(logits[0].argmax())]
        return None if return_type is None else logits


@torch.no_grad()
def predict_next_sentence(model: TransformerModel, first: str, second: str) -> str:
    """Whether a model with a head for next sentences takes the second sentence for the one that follows."""
    said: str = BertNextSentencePrediction(model)([first, second], return_type="predictions")
    return said
