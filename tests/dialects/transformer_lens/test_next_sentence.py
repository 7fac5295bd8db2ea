"""Two sentences before BERT's head for next sentences; the demos have the numbers of TransformerLens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from interpose.dialects.transformer_lens import BertNextSentencePrediction, HookedEncoder
from interpose.errors import Unsupported
from tests.dialects.transformer_lens.demos.published import bert

PAIR = ["A man walked to school.", "It was cold."]


def test_logits_words_and_caches_are_those_of_the_module() -> None:
    module, tokenizer = bert()
    model = HookedEncoder(module, tokenizer)
    asked = BertNextSentencePrediction(model)
    inputs = tokenizer(*PAIR, return_tensors="pt")
    assert inputs["token_type_ids"].sum() > 0
    expected = module(**inputs).seq_relationship_logits
    torch.testing.assert_close(asked(PAIR), expected)
    words = ["The sentences are sequential", "The sentences are NOT sequential"]
    assert asked(PAIR, return_type="predictions") == words[int(expected.argmax())]
    assert model.predict_next_sentence(*PAIR) == words[int(expected.argmax())]
    assert asked(PAIR, return_type=None) is None
    logits, cache = asked.run_with_cache(PAIR)
    torch.testing.assert_close(logits, expected)
    assert cache["pattern", 1].shape[-1] == inputs["input_ids"].shape[1]
    tokens, types, mask = asked.to_tokens(PAIR)
    torch.testing.assert_close(asked(tokens, token_type_ids=types), expected)
    assert (asked(tokens, token_type_ids=1 - types) - expected).abs().max() > 0.1
    assert bool(mask.all())
    with pytest.raises(ValueError, match="give token_type_ids with tokens"):
        asked(tokens)
    with pytest.raises(ValueError, match="two sentences are asked about"):
        asked(PAIR[:1])
    masked = HookedEncoder(_with_one_head(module), tokenizer)
    with pytest.raises(Unsupported, match="BertForMaskedLM has no head for next sentences"):
        masked.predict_next_sentence(*PAIR)


def _with_one_head(module: Any) -> Any:
    return transformers.BertForMaskedLM(copy.deepcopy(module.config)).eval()


def test_bert_is_loaded_with_both_heads_and_its_weights_as_they_are(tmp_path: Path) -> None:
    module, tokenizer = bert()
    module.save_pretrained(
        tmp_path
    )  # its config names the head for masked words alone, as on the hub
    tokenizer.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path)
    model = HookedEncoder.from_pretrained(str(tmp_path), device="cpu")
    assert type(model.module).__name__ == "BertForPreTraining"
    inputs = tokenizer(*PAIR, return_tensors="pt")
    ours, theirs = model.module(**inputs), module(**inputs)
    assert torch.equal(ours.seq_relationship_logits, theirs.seq_relationship_logits)
    assert torch.equal(ours.prediction_logits, theirs.prediction_logits)


def test_old_names_of_encoders_mean_their_sites() -> None:
    model = HookedEncoder(*bert())
    _, cache = model.run_with_cache(bert()[1]("it was cold", return_tensors="pt")["input_ids"])
    assert torch.equal(cache["hook_full_embed"], cache["blocks.0.hook_resid_pre"])
    assert torch.equal(cache["blocks.0.hook_normalized_resid_post"], cache["resid_pre", 1])
