"""`model.cfg`: sizes and habits, as transformers' configs say them in their many words."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interpose.models.transformer import TransformerModel
from interpose.models.weights.config import ModelConfig, describe
from tests.models import tiny
from tests.models.wired import wired

# n_heads, n_key_value_heads, d_head, d_mlp, act_fn, norm, positions, parallel, gated
EXPECTED: dict[str, tuple[Any, ...]] = {
    "gpt2": (4, 4, 8, 128, "gelu_new", "LN", "standard", False, False),
    "llama": (4, 2, 8, 64, "silu", "RMS", "rotary", False, True),
    "gpt_neox": (4, 4, 8, 64, "gelu", "LN", "rotary", True, False),
    "gptj": (4, 4, 8, 128, "gelu_new", "LN", "rotary", True, False),
    "falcon": (4, 1, 8, 64, "gelu", "LN", "rotary", True, False),
    "bloom": (4, 4, 8, 128, "gelu_tanh", "LN", "alibi", False, False),
    "mpt": (4, 4, 8, 128, "gelu", "LN", "alibi", False, False),
    "phi3": (4, 2, 8, 64, "silu", "RMS", "rotary", False, True),
    "gemma2": (4, 2, 8, 64, "gelu_pytorch_tanh", "RMS", "rotary", False, True),
    "opt": (4, 4, 8, 64, "relu", "LN", "standard", False, False),
    "qwen2": (4, 2, 8, 64, "silu", "RMS", "rotary", False, True),
    "olmo2": (4, 2, 8, 64, "silu", "RMS", "rotary", False, True),
    "mixtral": (4, 2, 8, None, "silu", "RMS", "rotary", False, None),
    "deepseek_v3": (4, 4, 16, 64, "silu", "RMS", "rotary", False, True),
    "mamba2": (None, None, None, None, "silu", "RMS", "none", None, None),
}


@pytest.mark.parametrize("model_type", EXPECTED)
def test_a_model_is_described_as_it_is(model_type: str) -> None:
    cfg = wired(model_type).cfg
    found = (
        cfg.n_heads,
        cfg.n_key_value_heads,
        cfg.d_head,
        cfg.d_mlp,
        cfg.act_fn,
        cfg.normalization_type,
        cfg.positional_embedding_type,
        cfg.parallel_attn_mlp,
        cfg.gated_mlp,
    )
    assert found == EXPECTED[model_type]
    assert (cfg.n_layers, cfg.d_model, cfg.d_vocab, cfg.d_vocab_out) == (2, 32, 99, 99)
    assert cfg.attn_only is False


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gpt_neox", "gemma2", "opt", "olmo2"])
def test_what_is_read_from_modules_agrees_with_the_config(model_type: str) -> None:
    model = wired(model_type)
    cfg, said = model.cfg, model.module.config
    assert cfg.n_layers == said.num_hidden_layers
    assert cfg.n_heads == said.num_attention_heads
    assert cfg.d_model == said.hidden_size
    assert cfg.d_vocab == said.vocab_size
    assert cfg.n_ctx == said.max_position_embeddings
    names = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")
    eps = next((getattr(said, name) for name in names if hasattr(said, name)), 1e-5)
    assert cfg.eps == eps
    assert cfg.original_architecture == type(model.module).__name__
    assert cfg.n_params == sum(p.numel() for p in model.module.parameters())
    assert (cfg.dtype, cfg.device) == (torch.float32, model.module.device)
    assert cfg.final_rms is (cfg.normalization_type == "RMS")


def test_names_come_from_where_the_model_was_loaded() -> None:
    module = tiny.build("gpt2")
    cfg = TransformerModel(module).cfg
    assert (cfg.model_name, cfg.tokenizer_name) == (None, None)
    module.config.name_or_path = "somebody/gpt2"
    cfg = TransformerModel(module, tokenizer=SimpleNamespace(name_or_path="somebody/words")).cfg
    assert (cfg.model_name, cfg.tokenizer_name) == ("somebody/gpt2", "somebody/words")


def test_dtype_is_the_parameters_own_at_the_moment() -> None:
    model = wired("llama")
    assert describe(model).dtype == torch.float32
    model.module.to(torch.float64)
    assert describe(model).dtype == torch.float64


def test_describing_draws_no_random_numbers() -> None:
    model = wired("bloom")  # its config names no activation: modules are tried
    model.module.train()
    before = torch.get_rng_state()
    assert model.cfg.act_fn == "gelu_tanh"
    assert torch.equal(before, torch.get_rng_state())
    assert model.module.training


def test_a_config_cannot_be_changed_but_copied() -> None:
    cfg = wired("gpt2").cfg
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.n_layers = 3
    assert dataclasses.replace(cfg, n_layers=3).n_layers == 3
    assert set(dataclasses.asdict(cfg)) == {field.name for field in dataclasses.fields(ModelConfig)}


def test_alibi_wins_over_a_rotary_that_is_not_used() -> None:
    chosen = tiny.model_class("falcon", "causal")
    options: Any = {"layers": 2, "dropout": 0.0, "kind": "causal", "alibi": True}
    module = chosen(tiny.shrink(chosen.config_class, **options)).eval()
    tiny.randomise(module)
    assert TransformerModel(module).cfg.positional_embedding_type == "alibi"


def test_the_decoder_stands_for_an_encoder_and_decoder() -> None:
    cfg = wired("t5", "encoder_decoder", layers=3).cfg
    assert (cfg.n_layers, cfg.n_heads, cfg.d_model, cfg.d_mlp) == (3, 4, 32, 64)
    assert cfg.normalization_type == "RMS"
    assert cfg.n_ctx is None
    assert cfg.positional_embedding_type is None  # a relative bias is none of the words there are


def test_what_a_vision_model_has_not_is_none() -> None:
    cfg = wired("vit", "vision").cfg
    assert (cfg.d_vocab, cfg.d_vocab_out, cfg.n_ctx) == (None, None, None)
    assert (cfg.n_layers, cfg.n_heads, cfg.d_model) == (2, 4, 32)


@pytest.mark.parametrize(("model_type", "first"), [("opt", 64), ("roberta", 63), ("bart", 64)])
def test_rows_for_padding_are_no_positions(model_type: str, first: int) -> None:
    assert wired(model_type).cfg.n_ctx == first


def test_hybrid_models_are_described_by_the_first_layer_that_has_the_part() -> None:
    model = wired("jamba", layers=4)
    attention = next(b.attentions[0] for b in model.anatomy.towers[0].blocks if b.attentions)
    assert (model.cfg.n_heads, model.cfg.n_key_value_heads) == (4, 2)
    assert model.cfg.d_head == attention.d_head == 8
    assert model.cfg.n_layers == 4
    assert model.cfg.attn_only is False


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        made: Tensor = self.o(z.transpose(1, 2).flatten(-2))
        return made


class Attends(nn.Module):
    """A block with attention and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), Attention()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.attention(self.norm(x))
        return made


class OnlyAttends(nn.Module):
    """A model nobody has seen before."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=20)
        self.table = nn.Embedding(20, 16)
        self.layers = nn.ModuleList([Attends(), Attends()])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        made: Tensor = x
        return made


def test_a_model_of_ones_own_is_described_as_far_as_it_goes() -> None:
    cfg = TransformerModel(OnlyAttends()).cfg
    assert cfg.original_architecture == "OnlyAttends"
    assert (cfg.n_layers, cfg.n_heads, cfg.d_head, cfg.d_model) == (2, 2, 8, 16)
    assert cfg.attn_only is True
    assert (cfg.d_mlp, cfg.act_fn, cfg.n_ctx, cfg.final_rms, cfg.model_name) == (None,) * 5
    assert cfg.positional_embedding_type is None
    assert cfg.normalization_type == "LN"
