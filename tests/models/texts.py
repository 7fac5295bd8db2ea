"""Small tokenizers, and tiny models that read text."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from interpose.models.transformer import TransformerModel
from tests.models import tiny

TEXTS = [
    "the cat sat on the mat",
    "a dog ran in the park and the cat saw it",
    "when the dog ran the cat sat",
]
PAD, BOS, EOS = 0, 1, 2


@functools.cache
def _trained() -> str:
    """Byte-level BPE, small enough for the tiny models' 99 tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=special, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    return made.to_str()


def tokenizer(*, adds_bos: bool = False, pad: bool = True, **options: Any) -> Any:
    """A tokenizer that begins texts with BOS or does not, with a pad token or without."""
    made = Tokenizer.from_str(_trained())
    if adds_bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
        )
    if pad:
        options["pad_token"] = "<pad>"
    options = {"bos_token": "<s>", "eos_token": "</s>"} | options
    return PreTrainedTokenizerFast(tokenizer_object=made, **options)


@functools.cache
def _trained_like_gpt2() -> str:
    """Byte-level BPE with one special token, as GPT-2 has."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    made.add_special_tokens(["<|endoftext|>"])
    return made.to_str()


def like_gpt2(**options: Any) -> Any:
    """A tokenizer with one token for beginnings and ends, none for padding, and no habit of beginning texts."""
    one = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    made = Tokenizer.from_str(_trained_like_gpt2())
    return PreTrainedTokenizerFast(tokenizer_object=made, **one, **options)


def speaking(model_type: str, kind: str = "causal", *, layers: int = 2, **options: Any) -> Any:
    """A tiny model with a tokenizer."""
    return TransformerModel(tiny.build(model_type, kind, layers=layers), tokenizer(**options))
