"""The models that the demos load by their published names: the pocket model as GPT-2, and tiny random ones.

The same weights are read here and under TransformerLens, whose hub is a folder that `write_hub` makes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import nn

WORDS = """
    the capital of france is paris . it was a cold night and the man went to the store to buy some milk ?
    hello my name is john , i like apples and she likes pears ! translate english to german : the house is wonderful
    a girl walked to school while the sun came up . unrelated sentences are not sequential
""".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"
REVISION = "0" * 40


def published(name: str) -> tuple[nn.Module, Any]:
    """A model and its tokenizer, under the name that it has on the hub."""
    return MODELS[name]()


@functools.cache
def gpt2() -> tuple[nn.Module, Any]:
    """The pocket model, which is a trained GPT-2: it knows some facts, and solves indirect objects."""
    import interpose

    folder = Path(interpose.__file__).parent / "pocket"
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


@functools.cache
def llama() -> tuple[nn.Module, Any]:
    """Two heads to each head of keys and values."""
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2808,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _random(transformers.LlamaForCausalLM(config)), gpt2()[1]


@functools.cache
def bert() -> tuple[nn.Module, Any]:
    """With a head for masked words and one for next sentences."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *sorted({*WORDS, *LETTERS}), *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **names,
    )
    config = transformers.BertConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=3,
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
        architectures=["BertForMaskedLM"],
    )
    return _random(transformers.BertForPreTraining(config)), tokenizer


@functools.cache
def t5() -> tuple[nn.Module, Any]:
    """An encoder and a decoder with relative positions."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0)]
    pieces += [(f"▁{word}", -3.0) for word in sorted(set(WORDS))]
    pieces += [(letter, -8.0) for letter in ["▁", *LETTERS]]
    made = Tokenizer(models.Unigram(pieces, unk_id=2))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    config = transformers.T5Config(
        num_layers=2,
        num_decoder_layers=2,
        num_heads=3,
        d_model=24,
        d_kv=8,
        d_ff=40,
        vocab_size=len(tokenizer),
        decoder_start_token_id=0,
    )
    return _random(transformers.T5ForConditionalGeneration(config)), tokenizer


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt2": gpt2,
    "01-ai/Yi-6B": llama,
    "google-bert/bert-base-cased": bert,
    "google-t5/t5-small": t5,
}


@torch.no_grad()
def _random(model: nn.Module) -> nn.Module:
    """Weights of usual sizes, none of them zero or one, the same on every machine."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1:
            weight.copy_(("norm" in name.lower() and name.endswith("weight")) + 0.2 * drawn)
        else:
            wide = 1.0 if "emb" in name or "shared" in name else weight.shape[-1] ** -0.5
            weight.copy_(1.3 * wide * drawn)
    return model.eval()


def write_hub(folder: Path) -> None:
    """A hub's cache on disk, in which transformers and TransformerLens find these models by their names."""
    for name in MODELS:
        model, tokenizer = published(name)
        place = folder / ("models--" + name.replace("/", "--"))
        snapshot = place / "snapshots" / REVISION
        for each in (snapshot, place / "refs", place / ".no_exist" / REVISION):
            each.mkdir(parents=True)
        (place / "refs" / "main").write_text(REVISION)
        model.save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)
        config = json.loads((snapshot / "config.json").read_text())
        if name == "google-bert/bert-base-cased":  # as their configs on the hub have it
            config["architectures"] = ["BertForMaskedLM"]
        if name == "gpt2":
            config["n_ctx"] = config["n_positions"]
        if name == "google-t5/t5-small":
            config["n_positions"] = 512
        (snapshot / "config.json").write_text(json.dumps(config))
