"""Processed weights: what TransformerLens's flags make of a model, and that nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from interpose.dialects.transformer_lens import (
    FactoredMatrix,
    HookedTransformer,
    HookedTransformerConfig,
    TransformerBridge,
)
from interpose.errors import Unsupported
from tests.models import tiny

PROMPT = "The capital of France is Paris"
USUAL = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")


def pocket(**flags: Any) -> HookedTransformer:
    return HookedTransformer.from_pretrained("pocket", device="cpu", **flags)


@pytest.fixture(scope="module")
def plain() -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing("pocket", device="cpu")


@pytest.fixture(scope="module")
def usual() -> HookedTransformer:
    return pocket()


def log_probabilities(model: Any, given: Any) -> Tensor:
    with torch.no_grad():
        return model(given, return_type="logits").double().log_softmax(-1)


def scratch(**fields: Any) -> HookedTransformer:
    """A model from scratch in which no weight is one or zero."""
    usual = {"n_layers": 2, "d_model": 24, "d_head": 6, "n_ctx": 9, "d_vocab": 17, "act_fn": "gelu"}
    model = HookedTransformer(HookedTransformerConfig(**{**usual, "seed": 1, **fields}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


TOKENS = torch.arange(18).reshape(2, 9) % 17


# Of models that are loaded.


def test_a_model_loaded_by_name_is_processed_as_in_transformer_lens(
    plain: HookedTransformer, usual: HookedTransformer
) -> None:
    apart = (log_probabilities(plain, PROMPT) - log_probabilities(usual, PROMPT)).abs().max()
    assert apart < 1e-4
    assert usual.cfg.normalization_type == "LNPre"
    assert plain.cfg.normalization_type == "LN"
    assert (usual(PROMPT) - plain(PROMPT)).abs().max() > 0.1  # the shift of the centred unembedding
    assert usual.default_prepend_bos is True


def test_weights_show_what_the_flags_say(
    plain: HookedTransformer, usual: HookedTransformer
) -> None:
    for name in ("W_E", "W_pos", "W_O", "b_O", "W_out", "b_out"):
        before, after = (torch.as_tensor(getattr(model, name)) for model in (plain, usual))
        assert after.mean(-1).abs().max() < 1e-6
        assert before.mean(-1).abs().max() > 1e-4, name
    assert torch.as_tensor(usual.W_U).mean(-1).abs().max() < 1e-6
    assert torch.as_tensor(usual.b_V).abs().max() == 0
    assert torch.as_tensor(plain.b_V).abs().max() > 1e-3
    norm = plain.blocks[2].ln1
    folded = torch.as_tensor(plain.W_Q[2]) * norm.w[:, None]
    folded = folded - folded.mean(1, keepdim=True)
    assert torch.allclose(torch.as_tensor(usual.W_Q[2]), folded, atol=1e-5)
    summand = torch.einsum("m,hmd->hd", torch.as_tensor(norm.b), torch.as_tensor(plain.W_Q[2]))
    expected = torch.as_tensor(plain.b_Q[2]) + summand
    assert torch.allclose(torch.as_tensor(usual.b_Q[2]), expected, atol=1e-5)


def test_caches_show_processed_values(plain: HookedTransformer, usual: HookedTransformer) -> None:
    _, before = plain.run_with_cache(PROMPT)
    _, after = usual.run_with_cache(PROMPT)
    for layer in range(7):
        stream = before["resid_post", layer]
        centred = stream - stream.mean(-1, keepdim=True)
        assert torch.allclose(after["resid_post", layer], centred, atol=2e-4)
        assert (centred - stream).abs().max() > 1e-3
        assert torch.allclose(after["pattern", layer], before["pattern", layer], atol=1e-4)
        normed = after["normalized", layer, "ln1"]
        assert torch.allclose(normed.mean(-1), torch.zeros(()), atol=1e-5)
        assert torch.allclose(normed.square().mean(-1), torch.ones(()), atol=5e-3)  # eps takes some


def test_a_published_way_to_attribute_logits_holds(usual: HookedTransformer) -> None:
    """With folded weights, the stream over its scale times W_U are the logits, up to b_U."""
    logits, cache = usual.run_with_cache(PROMPT)
    final = cache["resid_post", -1] / cache["scale"]
    assert torch.allclose(final @ usual.W_U + usual.b_U, logits, atol=1e-3)
    parts, _ = cache.decompose_resid(return_labels=True)
    direction = usual.tokens_to_residual_directions(" Paris")
    each = cache.apply_ln_to_stack(parts) @ direction
    token = usual.to_single_token(" Paris")
    assert torch.allclose(each.sum(0) + usual.b_U[token], logits[..., token], atol=1e-3)


def test_factors_are_balanced_and_multiply_to_the_same(usual: HookedTransformer) -> None:
    balanced = pocket(refactor_factored_attn_matrices=True)
    w_q, w_k = (torch.as_tensor(getattr(balanced, name)[3]) for name in ("W_Q", "W_K"))
    b_q, b_k = (torch.as_tensor(getattr(balanced, name)[3]) for name in ("b_Q", "b_K"))
    sizes = [w.square().sum(1) + b.square() for w, b in ((w_q, b_q), (w_k, b_k))]
    assert torch.allclose(*sizes, rtol=1e-3)
    assert torch.allclose(balanced.OV.AB[3], usual.OV.AB[3], atol=1e-4)
    before = FactoredMatrix(torch.as_tensor(usual.W_V[3]), torch.as_tensor(usual.W_O[3]))
    after = torch.as_tensor(balanced.W_O[3])
    assert torch.allclose(after @ after.transpose(-2, -1), torch.eye(32), atol=1e-4)
    assert torch.allclose(before.S, torch.as_tensor(balanced.W_V[3]).norm(dim=1), rtol=1e-3)


def test_a_users_module_stays_as_it_is() -> None:
    module = tiny.build("gpt2", "causal")
    before = copy.deepcopy(module.state_dict())
    tokens = torch.tensor([[1, 2, 3]])
    expected = log_probabilities(HookedTransformer(module), tokens)
    model = HookedTransformer.from_pretrained("pocket", hf_model=module)
    assert model.module is not module
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.allclose(log_probabilities(model, tokens), expected, atol=1e-4)


def test_what_is_not_exact_is_left_out_or_refused() -> None:
    module = tiny.build("llama", "causal")
    model = HookedTransformer.from_pretrained("pocket", hf_model=module)
    assert model._processed == ("fold_ln", "center_unembed", "fold_value_biases")
    assert model.cfg.normalization_type == "RMSPre"
    with pytest.raises(Unsupported, match="center_writing_weights is not exact on LlamaFor"):
        HookedTransformer.from_pretrained("pocket", hf_model=module, center_writing_weights=True)
    softcap = tiny.build("gemma2", "causal")
    with pytest.raises(Unsupported, match="center_unembed is not exact"):
        HookedTransformer.from_pretrained("pocket", hf_model=softcap, center_unembed=True)


def test_a_bridge_is_processed_in_compatibility_mode() -> None:
    bridge = TransformerBridge.boot_transformers("pocket", device="cpu")
    assert bridge._processed == ()
    expected = log_probabilities(bridge, bridge.to_tokens(PROMPT, prepend_bos=True))
    bridge.enable_compatibility_mode()
    assert bridge._processed == USUAL
    assert bridge.compatibility_mode
    assert bridge.default_prepend_bos is True
    assert torch.allclose(log_probabilities(bridge, PROMPT), expected, atol=1e-4)
    other = TransformerBridge.boot_transformers("pocket", device="cpu")
    other.enable_compatibility_mode(no_processing=True)
    assert other._processed == ()


def test_hooks_must_be_off_while_weights_are_processed(plain: HookedTransformer) -> None:
    model = HookedTransformer(plain.module, tokenizer=plain.tokenizer)
    model.add_hook("blocks.0.hook_resid_pre", lambda value, hook: None)
    with pytest.raises(Unsupported, match="reset_hooks"):
        model.process_weights_()
    model.reset_hooks()
    model.process_weights_(fold_ln=True, center_writing_weights=False, center_unembed=False)
    assert model._processed == ("fold_ln", "fold_value_biases")
    assert torch.allclose(model(PROMPT), plain(PROMPT), atol=1e-3)


# Of models from scratch.

SCRATCH = {
    "LN": {},
    "RMS, gated, rotary, shared keys": {
        "normalization_type": "RMS",
        "gated_mlp": True,
        "act_fn": "silu",
        "n_key_value_heads": 2,
        "positional_embedding_type": "rotary",
    },
    "attention alone": {"attn_only": True},
    "a norm among neurons": {"act_fn": "solu_ln"},
    "side by side": {"parallel_attn_mlp": True},
    "bidirectional": {"attention_dir": "bidirectional"},
    "a softcap": {"output_logits_soft_cap": 4.0},
    "final RMS": {"final_rms": True},
    "two norms": {"use_normalization_before_and_after": True, "normalization_type": "RMS"},
    "no norm": {"normalization_type": None},
    "alibi": {"positional_embedding_type": "alibi"},
    "shortformer": {"positional_embedding_type": "shortformer"},
}


@pytest.mark.parametrize("refactor", [False, None])
@pytest.mark.parametrize("name", SCRATCH)
def test_models_from_scratch_compute_the_same(name: str, refactor: bool | None) -> None:
    model = scratch(**SCRATCH[name])
    before, weights = log_probabilities(model, TOKENS), copy.deepcopy(model.module.state_dict())
    trained = model.module
    model.process_weights_(refactor_factored_attn_matrices=refactor)
    after = log_probabilities(model, TOKENS)
    assert (before - after).abs().max() / before.abs().max() < 1e-4
    moved = [
        float((value - weights[key]).abs().max())
        for key, value in model.module.state_dict().items()
    ]
    assert max(moved) > 1e-2
    assert all(torch.equal(value, weights[key]) for key, value in trained.state_dict().items())
    assert ("fold_ln" in model._processed) == str(model.cfg.normalization_type).endswith("Pre")


def test_refusals_on_models_from_scratch_have_reasons() -> None:
    refusals = {
        ("shortformer", "fold_ln"): "shortformer",
        ("no norm", "fold_ln"): "no norms to fold",
        ("no norm", "center_writing_weights"): "the mean of the stream is read",
        ("final RMS", "center_writing_weights"): "the mean of the stream is read",
        ("a softcap", "center_unembed"): "softcap",
        ("RMS, gated, rotary, shared keys", "refactor_factored_attn_matrices"): "projections",
    }
    for (name, flag), reason in refusals.items():
        with pytest.raises(Unsupported, match=reason):
            scratch(**SCRATCH[name]).process_weights_(**{flag: True})
    gated = scratch(gated_mlp=True, act_fn="silu")  # its norm adds something, inside the gate
    with pytest.raises(Unsupported, match="inside the gate"):
        gated.process_weights_(fold_ln=True)


def test_a_state_dict_is_loaded_and_processed() -> None:
    source, other = scratch(), scratch(seed=9)
    expected = log_probabilities(source, TOKENS)
    other.load_and_process_state_dict(source.state_dict())
    assert torch.allclose(log_probabilities(other, TOKENS), expected, atol=1e-4)
    assert other._processed == USUAL
    assert not any(".ln1." in name for name in other.state_dict())


def test_a_wrong_fold_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from interpose.dialects.transformer_lens.scratch import processing

    def forgetful(state: dict[str, Tensor], cfg: HookedTransformerConfig) -> dict[str, Tensor]:
        made = processing.fold_layer_norm(state, cfg)
        return {**made, "blocks.1.attn.W_K": state["blocks.1.attn.W_K"]}

    monkeypatch.setitem(processing.STEPS, "fold_ln", forgetful)
    with pytest.raises(Unsupported, match="change log-probabilities"):
        scratch().process_weights_()
