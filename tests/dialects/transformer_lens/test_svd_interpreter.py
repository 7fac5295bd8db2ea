"""`SVDInterpreter` against dense decompositions written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.dialects.transformer_lens import SVDInterpreter
from tests.models import tiny


def expected(matrix: Tensor, W_U: Tensor, count: int) -> Tensor:
    """Tokens of a matrix's right singular vectors; signs are arbitrary, so none are kept."""
    directions = torch.linalg.svd(matrix.double()).Vh[:count]
    return (directions @ W_U.double()).T[:, None].abs().float()


def wrapped(model_type: str) -> Any:
    return ip.wrap(tiny.build(model_type))


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.abs(), wanted, rtol=1e-3, atol=1e-4)


def test_tokens_of_a_head_and_of_an_mlp() -> None:
    model = ip.load("pocket")
    interpreter = SVDInterpreter(model)
    block = model.module.transformer.h[3]
    W_U = model.module.lm_head.weight.T
    W_V, W_O = block.attn.c_attn.weight[:, 384:], block.attn.c_proj.weight
    head = slice(2 * 32, 3 * 32)
    found = interpreter.get_singular_vectors("OV", 3, num_vectors=4, head_index=2)
    assert found.shape == (2808, 1, 4)
    close(found, expected(W_V[:, head] @ W_O[head], W_U, 4))
    into = block.ln_2.weight[:, None] * block.mlp.c_fc.weight
    close(interpreter.get_singular_vectors("w_in", 3, 5), expected(into.T, W_U, 5))
    close(interpreter.get_singular_vectors("w_out", 3), expected(block.mlp.c_proj.weight, W_U, 10))
    assert not found.requires_grad


def test_heads_that_share_values_have_circuits_of_their_own() -> None:
    model = wrapped("llama")
    attention = model.module.model.layers[1].self_attn
    heads, shared, d_head = model.cfg.n_heads, model.cfg.n_key_value_heads, model.cfg.d_head
    assert 1 < shared < heads
    W_U = model.module.lm_head.weight.T
    for head in range(heads):
        group = head // (heads // shared)
        W_V = attention.v_proj.weight[group * d_head : (group + 1) * d_head].T
        W_O = attention.o_proj.weight[:, head * d_head : (head + 1) * d_head].T
        found = SVDInterpreter(model).get_singular_vectors("OV", 1, 2, head_index=head)
        close(found, expected(W_V @ W_O, W_U, 2))


@pytest.mark.parametrize(("model_type", "offset"), [("llama", 0.0), ("gemma", 1.0)])
def test_the_norm_counts_as_it_acts(model_type: str, offset: float) -> None:
    model = wrapped(model_type)
    layer = model.module.model.layers[0]
    gain = offset + layer.post_attention_layernorm.weight
    assert (gain - 1).abs().max() > 0.05  # so that leaving it out would show
    into = layer.mlp.up_proj.weight * gain
    found = SVDInterpreter(model).get_singular_vectors("w_in", 0, 3)
    close(found, expected(into, model.module.lm_head.weight.T, 3))


def test_a_norm_in_the_stream_is_not_the_mlps() -> None:
    model = ip.wrap(tiny.build("bert", "masked"))
    layer = model.module.bert.encoder.layer[0]
    W_U = model.module.cls.predictions.decoder.weight.T
    found = SVDInterpreter(model).get_singular_vectors("w_in", 0, 3)
    close(found, expected(layer.intermediate.dense.weight, W_U, 3))


def test_what_is_not_there_is_said() -> None:
    interpreter = SVDInterpreter(ip.load("pocket"))
    with pytest.raises(ValueError, match="vector_type is one of OV, w_in, w_out; got 'QK'"):
        interpreter.get_singular_vectors("QK", 0)
    with pytest.raises(ValueError, match="give head_index=0"):
        interpreter.get_singular_vectors("OV", 0)
    with pytest.raises(IndexError, match="there is no layer 7: the model has layers 0 to 6"):
        interpreter.get_singular_vectors("w_in", 7)
    with pytest.raises(IndexError, match="there is no head -1: the model has heads 0 to 5"):
        interpreter.get_singular_vectors("OV", 0, head_index=-1)
    with pytest.raises(
        ValueError, match="OV of layer 0 has 32 singular vectors; got num_vectors=33"
    ):
        interpreter.get_singular_vectors("OV", 0, num_vectors=33, head_index=0)
