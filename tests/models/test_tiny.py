"""The tiny models are what other tests take them for: finite, alive, random and repeatable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tests.models import tiny

NAMES = """
    bailing_hybrid bart bert bloom cohere2 deepseek_v3 deepseek_v4 falcon gemma2 gemma3
    gemma3n_text gemma4_text gpt2 gpt_neox gpt_oss gptj granite jamba llama llama4_text mamba2
    mistral mixtral mllama olmo2 opt phi3 qwen3_moe qwen3_next rwkv
"""
SOME = NAMES.split()
OTHERS = (
    ("bert", "masked"),
    ("t5", "encoder_decoder"),
    ("whisper", "encoder_decoder"),
    ("vit", "vision"),
    ("wav2vec2", "audio"),
    ("gpt2", "classifier"),
)
EVERY = [*((model_type, "causal") for model_type in SOME), *OTHERS]


def run(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return tiny.outputs(model(**tiny.inputs(model, **options)))


def attributes(config: PreTrainedConfig) -> dict[str, Any]:
    """Every value of a config and of its parts."""
    values: dict[str, Any] = {}
    for name, value in vars(config).items():
        part = attributes(value) if isinstance(value, PreTrainedConfig) else {"": value}
        values |= {f"{name}.{key}".rstrip("."): item for key, item in part.items()}
    return values


@pytest.mark.parametrize(("model_type", "kind"), EVERY)
def test_outputs_are_finite_and_depend_on_the_inputs(model_type: str, kind: str) -> None:
    model = tiny.build(model_type, kind)
    one, two = run(model, seed=0), run(model, seed=1)
    assert not model.training
    assert one.dtype == torch.float32
    assert one.isfinite().all()
    assert 0.01 < one.std() < 50
    assert (one - two).abs().mean() > 0.01


@pytest.mark.parametrize(("model_type", "kind"), EVERY)
def test_the_seed_decides_every_parameter(model_type: str, kind: str) -> None:
    one, same, other = (tiny.build(model_type, kind, seed=seed) for seed in (0, 0, 1))
    assert all(map(torch.equal, one.parameters(), same.parameters()))
    for (name, mine), its in zip(one.named_parameters(), other.parameters()):
        assert not torch.equal(mine, its) or "embed_positions" in name, name
    assert torch.equal(run(one), run(same))


@pytest.mark.parametrize("model_type", SOME)
def test_dropout_is_on_wherever_the_config_has_it(model_type: str) -> None:
    model = tiny.build(model_type)
    rates = {k: v for k, v in attributes(model.config).items() if "dropout" in k or "pdrop" in k}
    rates = {name: rate for name, rate in rates.items() if isinstance(rate, int | float)}
    assert all(rate == 0.1 for rate in rates.values()), rates
    torch.manual_seed(0)
    model.train()
    assert not rates or not torch.equal(run(model), run(model))


@pytest.mark.parametrize("model_type", SOME)
def test_more_layers_longer_texts_and_other_batches_work(model_type: str) -> None:
    model = tiny.build(model_type, layers=5, dropout=0.0)
    assert run(model, batch=3, length=11).isfinite().all()


def test_groups_of_queries_share_keys_and_values() -> None:
    config = tiny.build("llama").config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)


def test_windows_are_shorter_than_the_text() -> None:
    config = tiny.build("gemma2").config
    assert config.sliding_window < 7
    assert config.layer_types == ["sliding_attention", "full_attention"]


def test_multipliers_are_not_one() -> None:
    config = tiny.build("granite").config
    factors = (config.residual_multiplier, config.attention_multiplier, config.logits_scaling)
    assert (*factors, config.embedding_multiplier) == (0.5, 0.3, 3.0, 0.7)


def test_token_ids_are_not_special() -> None:
    model = tiny.build("qwen4_exp_text")
    ids = tiny.inputs(model, batch=8, length=64)["input_ids"]
    special = {v for k, v in attributes(model.config).items() if "token_id" in k and v is not None}
    assert special
    assert not special & set(ids.flatten().tolist())


def test_almost_every_causal_type_can_be_built() -> None:
    assert set(tiny.UNBUILDABLE) <= set(tiny.CAUSAL)
    assert len(tiny.CAUSAL) - len(tiny.UNBUILDABLE) >= 165
