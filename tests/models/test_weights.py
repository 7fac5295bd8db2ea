"""Weights by name: they multiply out to what the model computes, share its memory, or say why not."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interpose.errors import Unsupported
from interpose.models.transformer import TransformerModel
from tests.models import tiny
from tests.models.wired import wired

# type and kind -> the output projection, the MLP's projections, the unembedding, by transformers' names.
LLAMA = ("model.layers.{}.", "self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
BERT = ("bert.encoder.layer.{}.", "attention.self.query", "", "intermediate.dense", "output.dense")
OPT = ("model.decoder.layers.{}.", "self_attn.q_proj", "", "fc1", "fc2")
PLACES = {
    "gpt2": ("transformer.h.{}.", "attn.c_attn", "", "mlp.c_fc", "mlp.c_proj"),
    "gptj": ("transformer.h.{}.", "attn.q_proj", "", "mlp.fc_in", "mlp.fc_out"),
    "llama": LLAMA,
    "gpt_neox": (
        "gpt_neox.layers.{}.",
        "attention.query_key_value",
        "",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    "falcon": (
        "transformer.h.{}.",
        "self_attention.query_key_value",
        "",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    "bloom": (
        "transformer.h.{}.",
        "self_attention.query_key_value",
        "",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    "phi3": (
        "model.layers.{}.",
        "self_attn.qkv_proj",
        "mlp.gate_up_proj",
        "mlp.gate_up_proj",
        "mlp.down_proj",
    ),
    "gemma2": LLAMA,
    "opt": OPT,
    "qwen2": LLAMA,
    "olmo2": LLAMA,
    "bert": BERT,
}
KINDS = {"bert": "masked"}
TYPES = list(PLACES)
# What queries, keys and values are made of, where no norm stands before attention.
STREAM = {"olmo2": "hook_resid_pre", "bert": "hook_resid_pre"}
LAYERS, D_MODEL, D_HEAD, VOCAB = 2, 32, 8, 99


def of(model_type: str) -> Any:
    return wired(model_type, KINDS.get(model_type, "causal"))


known = functools.cache(of)  # for tests that change nothing


def cached(model: Any, *names: str) -> list[Tensor]:
    with torch.no_grad():
        _, cache = model.run_with_cache(**tiny.inputs(model.module), names_filter=list(names))
    return [cache[name] for name in names]


def close(found: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 0.05  # zeros would prove nothing
    torch.testing.assert_close(found.reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)


def parameter(model: Any, model_type: str, which: int, layer: int, name: str = "weight") -> Any:
    prefix, *rest = PLACES[model_type]
    return model.module.get_parameter(f"{prefix.format(layer)}{rest[which]}.{name}")


# They are what the model computes with.


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_the_stream_times_a_heads_weight_is_its_query_key_or_value(
    model_type: str, layer: int
) -> None:
    model = known(model_type)
    block = f"blocks.{layer}"
    read = f"{block}.{STREAM.get(model_type, 'ln1.hook_normalized')}"
    x, *made = cached(model, read, *(f"{block}.attn.hook_{role}" for role in "qkv"))
    heads = {"q": model.cfg.n_heads, "k": model.cfg.n_key_value_heads}
    assert x.shape[-1] == D_MODEL
    for role, value in zip("QKV", made):
        weight = getattr(model, f"W_{role}")
        bias = getattr(model, f"b_{role}")
        n_heads = heads["q" if role == "Q" else "k"]
        assert weight.shape == (LAYERS, n_heads, D_MODEL, D_HEAD)
        assert bias.shape == (LAYERS, n_heads, D_HEAD)
        found = torch.einsum("bpm,hmd->bphd", x, weight[layer]) + bias[layer]
        assert type(found) is Tensor
        close(found, value)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_heads_times_the_output_weight_are_what_attention_returns(
    model_type: str, layer: int
) -> None:
    model = known(model_type)
    z, out = cached(model, f"blocks.{layer}.attn.hook_z", f"blocks.{layer}.attn.hook_out")
    assert model.W_O.shape == (LAYERS, model.cfg.n_heads, D_HEAD, D_MODEL)
    assert model.b_O.shape == (LAYERS, D_MODEL)
    close(torch.einsum("bphd,hdm->bpm", z, model.W_O[layer]) + model.b_O[layer], out)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_mlp_weights_lead_to_neurons_and_back(model_type: str, layer: int) -> None:
    model = known(model_type)
    block = f"blocks.{layer}.mlp"
    prefix, _, gate, up, down = PLACES[model_type]
    at = prefix.format(layer)
    d_mlp = model.cfg.d_mlp
    read, post, out = cached(model, f"{at}{up}.input", f"{block}.hook_post", f"{at}{down}")
    assert model.W_in.shape == (LAYERS, D_MODEL, d_mlp)
    assert model.W_out.shape == (LAYERS, d_mlp, D_MODEL)
    close(post @ model.W_out[layer] + model.b_out[layer], out)
    if gate:
        assert model.W_gate.shape == (LAYERS, D_MODEL, d_mlp)
        pre, linear = cached(model, f"{block}.hook_pre", f"{block}.hook_pre_linear")
        close(read @ model.W_gate[layer] + model.b_gate[layer], pre)
        close(read @ model.W_in[layer] + model.b_in[layer], linear)
        close(nn.functional.silu(pre) * linear if model_type != "gemma2" else post, post)
    else:
        close(read @ model.W_in[layer] + model.b_in[layer], *cached(model, f"{block}.hook_pre"))


@pytest.mark.parametrize("model_type", TYPES)
def test_the_unembedding_leads_to_logits(model_type: str) -> None:
    model = known(model_type)
    given, logits = cached(model, "unembed.hook_in", "unembed.hook_out")
    assert model.W_U.shape == (D_MODEL, VOCAB)
    assert model.b_U.shape == (VOCAB,)
    close(given @ model.W_U + model.b_U, logits)


@pytest.mark.parametrize("model_type", [*TYPES, "gemma3", "bart"])
def test_rows_of_the_embedding_are_what_tokens_become(model_type: str) -> None:
    model = known(model_type)  # gemma's table multiplies its rows
    (embedded,) = cached(model, "hook_embed")
    assert model.W_E.shape == (VOCAB, D_MODEL)
    close(model.W_E[tiny.inputs(model.module)["input_ids"]], embedded)


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "bert", "roberta", "bart", "whisper"])
def test_position_embeddings_begin_at_the_first_position(model_type: str) -> None:
    model = known(model_type)
    (embedded,) = cached(model, "hook_pos_embed")
    assert model.W_pos.shape == (model.cfg.n_ctx, D_MODEL)
    close(model.W_pos[: embedded.shape[-2]].expand_as(embedded), embedded)


def test_a_decoders_cross_attention_has_weights() -> None:
    model = wired("bart", "encoder_decoder")
    attn = model.blocks[1].cross_attn
    at = "decoder.blocks.1.cross_attn"
    names = ("model.decoder.layers.1.encoder_attn.q_proj.input", "encoder.blocks.1.hook_resid_post")
    stream, encoded, q, k = cached(model, *names, f"{at}.hook_q", f"{at}.hook_k")
    close(torch.einsum("bpm,hmd->bphd", stream, attn.W_Q) + attn.b_Q, q)
    close(torch.einsum("bpm,hmd->bphd", encoded, attn.W_K) + attn.b_K, k)


def test_layouts_without_even_steps_are_copied_and_right() -> None:
    chosen = tiny.model_class("falcon", "causal")
    config = tiny.shrink(
        chosen.config_class,
        layers=2,
        dropout=0.0,
        kind="causal",
        new_decoder_architecture=True,
        num_kv_heads=2,
    )
    module = chosen(config).eval()
    tiny.randomise(module)
    model = TransformerModel(module)
    x, q, k = cached(model, *(f"blocks.1.{n}" for n in ("ln1.hook_normalized", "attn.hook_q")),
                     "blocks.1.attn.hook_k")  # fmt: skip
    attn = model.blocks[1].attn
    assert (len(attn.W_Q), len(attn.W_K)) == (4, 2)
    close(torch.einsum("bpm,hmd->bphd", x, attn.W_Q), q)
    close(torch.einsum("bpm,hmd->bphd", x, attn.W_K), k)


# They are the model's own.


def shares(view: Tensor, parameter: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


@pytest.mark.parametrize("model_type", TYPES)
def test_a_layers_weights_are_views_of_the_parameters(model_type: str) -> None:
    model = of(model_type)
    block = model.blocks[1]
    for which, view in enumerate((block.attn.W_Q, None, block.mlp.W_in, block.mlp.W_out)):
        if view is not None:
            assert shares(view, parameter(model, model_type, which, 1))
    if PLACES[model_type][2]:
        assert shares(block.mlp.W_gate, parameter(model, model_type, 1, 1))
    assert shares(model.W_U, model.module.get_output_embeddings().weight)
    with torch.no_grad():
        parameter(model, model_type, 0, 1).mul_(2)
    before, after = block.attn.W_Q.clone(), model.blocks[1].attn.W_Q
    assert torch.equal(before, after)  # the view taken before shows the change too


def test_columns_are_those_of_each_layout() -> None:
    gpt2 = of("gpt2")
    fused = gpt2.module.transformer.h[0].attn.c_attn.weight
    assert torch.equal(gpt2.blocks[0].attn.W_K[3], fused[:, 32 + 24 : 32 + 32])
    neox = of("gpt_neox")
    rows = neox.module.gpt_neox.layers[0].attention.query_key_value.weight.view(4, 3, 8, 32)
    assert torch.equal(neox.blocks[0].attn.W_V, rows[:, 2].transpose(1, 2))
    phi3 = of("phi3")
    rows = phi3.module.model.layers[0].mlp.gate_up_proj.weight
    assert torch.equal(phi3.blocks[0].mlp.W_gate, rows[:64].T)
    assert torch.equal(phi3.blocks[0].mlp.W_in, rows[64:].T)


def test_missing_biases_are_zeros() -> None:
    model = of("llama")
    for name, shape in {
        "b_Q": (2, 4, 8),
        "b_K": (2, 2, 8),
        "b_O": (2, 32),
        "b_in": (2, 64),
    }.items():
        assert torch.equal(getattr(model, name), torch.zeros(shape)), name
    assert torch.equal(model.b_U, torch.zeros(VOCAB))
    assert of("qwen2").b_Q.abs().max() > 0.05


def test_weights_follow_the_models_dtype() -> None:
    model = of("llama")
    assert model.W_Q.dtype == model.b_Q.dtype == torch.float32
    model.module.to(torch.bfloat16)
    assert model.W_Q.dtype == model.b_Q.dtype == model.W_E.dtype == torch.bfloat16


# What cannot be shown says why.


def refusal(get: Callable[[], Any]) -> str:
    with pytest.raises(Unsupported) as caught:
        get()
    return str(caught.value)


def test_low_rank_queries_have_no_one_matrix() -> None:
    model = of("deepseek_v3")
    assert refusal(lambda: model.blocks[0].attn.W_Q) == (
        "model.layers.0.self_attn.q_b_proj, which makes the queries, is not known to read the stream "
        "or its norm as they are (low-rank, or mixed first), so no one matrix leads from the stream "
        "to them. Its own is model.module.get_parameter('model.layers.0.self_attn.q_b_proj.weight')."
    )
    assert model.blocks[0].attn.W_O.shape == (4, 8, 32)


def test_experts_have_weights_of_their_own() -> None:
    model = of("mixtral")
    text = refusal(lambda: model.blocks[1].mlp.W_in)
    assert text == (
        "model.layers.1.mlp is a mixture of experts, each with weights of its own: see "
        "model.module.get_submodule('model.layers.1.mlp')."
    )
    assert refusal(lambda: model.W_out).startswith("W_out cannot be stacked:\n  layer 0: model.lay")
    assert model.W_Q.shape == (2, 4, 32, 8)


def test_layers_without_attention_are_named() -> None:
    model = wired("jamba", layers=4)
    have = [block.index for block in model.anatomy.towers[0].blocks if block.attentions]
    lack = [layer for layer in range(4) if layer not in have]
    assert have
    assert lack
    lines = refusal(lambda: model.W_Q).splitlines()
    assert lines[0] == "W_Q cannot be stacked:"
    told = [line for line in lines if "no attention was found here; it has" in line]
    assert [int(n) for line in told for n in re.findall(r"layers? ([\d, ]+):", line)[0].split(", ")
            ] == lack  # fmt: skip
    assert lines[-1] == f"  Ask a layer for its own: model.blocks[{have[0]}].attn.W_Q"
    assert model.blocks[have[0]].attn.W_Q.shape == (4, 32, 8)


def test_layers_of_different_widths_are_named() -> None:
    module = tiny.build("llama")
    config = copy.deepcopy(module.config)
    config.intermediate_size = 48
    module.model.layers[1].mlp = type(module.model.layers[1].mlp)(config)
    tiny.randomise(module.model.layers[1].mlp)
    model = TransformerModel(module.eval())
    assert refusal(lambda: model.W_in) == (
        "W_in cannot be stacked:\n  layer 0: [32, 64]\n  layer 1: [32, 48]\n"
        "  Ask a layer for its own: model.blocks[0].mlp.W_in"
    )
    assert model.W_Q.shape == (2, 4, 32, 8)


def test_an_mlp_without_a_gate_says_so() -> None:
    assert refusal(lambda: of("gpt2").W_gate) == (
        "W_gate cannot be stacked:\n  layers 0, 1: the MLP has no gate."
    )


def test_models_without_the_part_say_so() -> None:
    assert refusal(lambda: of("llama").W_pos) == (
        "no W_pos: positions are not embedded by a module of their own."
    )
    assert refusal(lambda: wired("gpt2", "classifier").W_U) == (
        "no W_U: the model has no unembedding."
    )
    assert refusal(lambda: wired("vit", "vision").W_E).endswith("which looks up no rows.")


def test_a_table_with_rows_nobody_explains_is_refused() -> None:
    assert refusal(lambda: wired("yoso", "masked").W_pos) == (
        "yoso.embeddings.position_embeddings has 66 rows for 64 positions, so it is not known which "
        "is the first position's."
    )


class Adapted(nn.Module):
    """As adapters do: the weight is not all that counts."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.low = nn.Linear(base.in_features, 2, bias=False)
        self.high = nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base_layer(x) + self.high(self.low(x))
        return made


class Stored(nn.Linear):
    """A linear map that keeps its weight in another dtype than it computes with."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


def test_adapted_parametrised_quantised_and_absent_weights_are_refused() -> None:
    module = tiny.build("llama")
    attn = module.model.layers[0].self_attn
    attn.q_proj = Adapted(attn.q_proj)
    model = TransformerModel(module)
    block = model.blocks[0]
    assert refusal(lambda: block.attn.W_Q).startswith(
        "model.layers.0.self_attn.q_proj (Adapted) has base_layer, low, high besides a weight: an "
        "adapter"
    )
    nn.utils.parametrize.register_parametrization(attn.k_proj, "weight", nn.Identity())
    assert "has parametrizations besides a weight" in refusal(lambda: block.attn.W_K)
    for name in ("v_proj", "o_proj"):
        setattr(getattr(attn, name), "__class__", Stored)  # noqa: B010
    attn.v_proj.weight = nn.Parameter(attn.v_proj.weight.data.to(torch.float8_e4m3fn), False)
    assert "as Parameter of torch.float8_e4m3fn: quantised" in refusal(lambda: block.attn.W_V)
    attn.o_proj.weight = nn.Parameter((20 * attn.o_proj.weight.data).char(), False)
    assert "as Parameter of torch.int8: quantised" in refusal(lambda: block.attn.W_O)
    module.model.layers[0].mlp.to("meta")
    assert "is on the meta device" in refusal(lambda: block.mlp.W_in)
    assert refusal(lambda: block.mlp.b_in) == refusal(lambda: block.mlp.W_in)
