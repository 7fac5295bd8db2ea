"""Processed weights: the model computes what it did, and its values are what the definitions say."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from interpose.errors import Unsupported
from interpose.models.processing import fold, heads, linear
from interpose.models.processing.process import STEPS, exact_flags, processed
from interpose.models.transformer import TransformerModel
from tests.models import tiny
from tests.models.test_weights import Adapted
from tests.models.wired import wired

LN, WRITE, UNEMBED, VALUES, FACTORS = STEPS
RMS = (LN, UNEMBED, VALUES)
CENTRED = (LN, WRITE, UNEMBED, VALUES)
EXACT = {
    "gpt2": tuple(STEPS),
    "gpt_neo": tuple(STEPS),
    "opt": tuple(STEPS),
    "bloom": tuple(STEPS),
    "mpt": tuple(STEPS),
    "biogpt": tuple(STEPS),
    "gpt_neox": CENTRED,
    "gptj": CENTRED,
    "falcon": CENTRED,
    "phi": CENTRED,
    "cohere": CENTRED,
    "stablelm": CENTRED,
    "starcoder2": CENTRED,
    "gpt_bigcode": CENTRED,
    "nemotron": CENTRED,
    "olmo": CENTRED,
    "llama": RMS,
    "qwen2": RMS,
    "mistral": RMS,
    "gemma": RMS,
    "phi3": RMS,
    "mixtral": RMS,
    "mamba": RMS,
    "gemma2": (LN, VALUES),
    "gpt_oss": (LN, UNEMBED),
    "olmo2": (UNEMBED, VALUES),
    "phimoe": (UNEMBED, VALUES),
    "xglm": CENTRED,
}
TYPES = list(EXACT)
FOLDED = [kind for kind in TYPES if LN in EXACT[kind]]
WRITTEN = [kind for kind in TYPES if WRITE in EXACT[kind]]
BALANCED = [kind for kind in TYPES if FACTORS in EXACT[kind]]
# Values have a bias: their own, or one that a norm before them leaves.
BIASED = ["gpt2", "gpt_neo", "opt", "bloom", "gpt_neox", "gptj", "phi", "qwen2", "starcoder2"]

known = functools.cache(wired)


@functools.cache
def simple(model_type: str) -> Any:
    """A model with all that is exact on it done to it."""
    return processed(known(model_type), **only(*EXACT[model_type]))


def only(*flags: str) -> Any:
    return {flag: flag in flags for flag in STEPS}


def logits(model: Any, seed: int = 5) -> Tensor:
    with torch.no_grad():
        return tiny.outputs(model.module(**tiny.inputs(model.module, seed=seed)))


def cached(model: Any, *names: str) -> list[Tensor]:
    with torch.no_grad():
        _, cache = model.run_with_cache(**tiny.inputs(model.module), names_filter=list(names))
    return [cache[name] for name in names]


def far(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def moved(before: Any, after: Any) -> float:
    """The largest change of a parameter that both have."""
    old, new = before.module.state_dict(), after.module.state_dict()
    return max(float((new[name] - old[name]).abs().max()) for name in old)


def refusal(model: Any, flag: str) -> str:
    with pytest.raises(Unsupported) as caught:
        processed(model, **only(flag))
    return str(caught.value)


# The model computes what it did.


@pytest.mark.parametrize("model_type", TYPES)
def test_the_flags_that_are_exact_are_told_from_those_that_are_not(model_type: str) -> None:
    found = exact_flags(known(model_type))
    assert tuple(flag for flag, reason in found.items() if reason is None) == EXACT[model_type]
    assert list(found) == list(STEPS)


@pytest.mark.parametrize("model_type", TYPES)
def test_all_that_is_exact_leaves_the_log_probabilities(model_type: str) -> None:
    before, after = logits(known(model_type)), logits(simple(model_type))
    assert before.std() > 0.05
    if UNEMBED in EXACT[model_type]:
        shift = (before - after).mean(-1, keepdim=True)
        assert shift.abs().max() > 1e-2
        after = after + shift
        assert after.mean(-1).sub(shift.squeeze(-1)).abs().max() < 1e-4 * before.abs().max()
    assert far(after, before) < 1e-4


@pytest.mark.parametrize(("model_type", "flag"), [(t, flag) for t in TYPES for flag in EXACT[t]])
def test_each_step_changes_weights_and_nothing_else(model_type: str, flag: str) -> None:
    model = known(model_type)
    made = processed(model, **only(flag))
    if flag != VALUES:
        assert moved(model, made) > 1e-2
    before, after = logits(model), logits(made)
    if flag == UNEMBED:
        before, after = before.log_softmax(-1), after.log_softmax(-1)
    assert far(after, before) < 1e-4


def test_the_users_module_stays_as_it_is() -> None:
    model = wired("gpt2")
    model.add_hook("blocks.0.hook_resid_post", lambda value, hook: value * 2)
    model.module.transformer.ln_f.register_forward_hook(lambda *_: None)
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    config = copy.deepcopy(model.module.config.to_dict())
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.module.modules()]
    made = processed(model, **only(*STEPS))
    assert made.module is not model.module
    assert {name: bool(torch.equal(state[name], value)) for name, value in
            model.module.state_dict().items()} == dict.fromkeys(state, True)  # fmt: skip
    assert model.module.config.to_dict() == config
    assert model.module.lm_head.weight is model.module.transformer.wte.weight
    assert hooks == [
        (dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.module.modules()
    ]
    assert not made.list_hooks()
    model.reset_hooks()
    assert far(logits(made).log_softmax(-1), logits(model).log_softmax(-1)) < 1e-4


def test_a_refusal_leaves_nothing_behind() -> None:
    model = wired("llama")
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    refusal(model, WRITE)
    after = model.module.state_dict()
    assert list(state) == list(after)
    assert all(torch.equal(state[name], after[name]) for name in state)


def test_class_tokenizer_modes_and_gradients_are_kept() -> None:
    class Mine(TransformerModel):
        pass

    module = tiny.build("gptj").train()
    module.lm_head.weight.requires_grad_(False)
    tokenizer = object()
    made = processed(Mine(module, tokenizer))
    assert type(made) is Mine
    assert made.tokenizer is tokenizer
    assert made.module.training
    assert not made.module.lm_head.weight.requires_grad
    assert made.module.transformer.h[0].attn.out_proj.bias.requires_grad


def test_a_module_that_nobody_else_holds_can_be_processed_itself() -> None:
    model = wired("gpt2")
    before = logits(model).log_softmax(-1)
    module = model.module
    made = processed(model, copy=False)
    assert made.module is module
    assert (module.transformer.h[0].ln_1.weight == 1).all()
    assert far(logits(made).log_softmax(-1), before) < 1e-4


def test_without_flags_it_is_a_copy() -> None:
    model = known("gpt2")
    made = processed(model, **only())
    assert made.module is not model.module
    assert torch.equal(logits(made), logits(model))


def test_processing_twice_is_processing_once() -> None:
    once = simple("gpt_neox")
    twice = processed(once, **only(*EXACT["gpt_neox"]))
    assert moved(once, twice) < 1e-5


# Norms.


@pytest.mark.parametrize("model_type", FOLDED)
def test_folded_norms_do_nothing_but_normalise(model_type: str) -> None:
    before, model = known(model_type), processed(known(model_type), **only(LN))
    names = ["blocks.0.ln1", "blocks.1.ln1", "ln_final"]
    streams = ["blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre", "blocks.1.hook_resid_post"]
    for norm, stream in zip(names, streams):
        x, made = cached(model, stream, f"{norm}.hook_normalized")
        x_before, made_before = cached(before, stream, f"{norm}.hook_normalized")
        assert far(x, x_before) < 1e-5
        if model_type != "olmo":  # its norms have no weights
            assert far(made, made_before) > 1e-2
        x = x.double()
        if WRITE in EXACT[model_type]:
            x = x - x.mean(-1, keepdim=True)
        length = x.square().mean(-1, keepdim=True)
        eps = next((n.eps for n in [model.anatomy.towers[0].final_norm] if not n.why_not), 1e-5)
        assert far(made.double(), x / (length + eps).sqrt()) < 1e-5


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "bloom", "falcon", "starcoder2"])
def test_what_reads_a_centred_norm_has_no_mean_over_the_stream(model_type: str) -> None:
    before, after = known(model_type), simple(model_type)
    for name in ("W_Q", "W_K", "W_V", "W_in", "W_U"):
        old, new = getattr(before, name), getattr(after, name)
        assert old.mean(-2).abs().max() > 1e-2
        assert new.mean(-2).abs().max() < 1e-6


def test_norms_after_a_branch_stay() -> None:
    before, after = known("gemma2").blocks[1], simple("gemma2").blocks[1]
    assert (before.ln1_post.w - after.ln1_post.w).abs().max() == 0
    assert (after.ln1.w == 0).all()  # gemma adds 1
    assert (before.ln1.w.abs() > 1e-2).any()


def test_a_norm_is_folded_into_the_router_and_all_experts() -> None:
    before, after = known("mixtral").module, processed(known("mixtral"), **only(LN)).module
    old, new = (m.model.layers[0] for m in (before, after))
    factor = old.post_attention_layernorm.weight
    assert (factor - 1).abs().max() > 0.1
    torch.testing.assert_close(new.mlp.gate.weight, old.mlp.gate.weight * factor)
    torch.testing.assert_close(new.mlp.experts.gate_up_proj, old.mlp.experts.gate_up_proj * factor)
    assert torch.equal(new.mlp.experts.down_proj, old.mlp.experts.down_proj)


def test_a_decoder_reads_what_was_folded_of_the_encoder() -> None:
    model = wired("pegasus", "encoder_decoder")
    made = processed(model, **only(*STEPS))
    norm = made.module.model.encoder.layer_norm
    assert (norm.weight == 1).all()
    assert (model.module.model.encoder.layer_norm.weight - 1).abs().max() > 0.1
    assert far(logits(made).log_softmax(-1), logits(model).log_softmax(-1)) < 1e-4


# The stream.


@pytest.mark.parametrize("model_type", WRITTEN)
def test_the_stream_is_what_it_was_without_its_mean(model_type: str) -> None:
    names = [f"blocks.{i}.hook_resid_{at}" for i in (0, 1) for at in ("pre", "post")]
    alone = processed(known(model_type), **only(WRITE))
    for model in (alone, simple(model_type)):
        pairs = zip(cached(known(model_type), *names), cached(model, *names))
        for before, after in pairs:
            mean = before.mean(-1, keepdim=True)
            assert mean.abs().max() > 1e-2
            if model_type in ("bloom", "xglm"):  # a norm, or sinusoids, write a mean that stays
                after = after - after.mean(-1, keepdim=True)
            assert after.mean(-1).abs().max() < 1e-5
            assert far(after, before - mean) < 1e-5


@pytest.mark.parametrize("model_type", [t for t in TYPES if UNEMBED in EXACT[t]])
def test_the_unembedding_sums_to_zero_over_the_vocabulary(model_type: str) -> None:
    before, after = known(model_type), simple(model_type)
    assert before.W_U.sum(-1).abs().max() > 1e-1
    assert after.W_U.sum(-1).abs().max() < 1e-4
    assert after.b_U.sum().abs() < 1e-4
    assert logits(after).mean(-1).abs().max() < 1e-5


# Heads.


@pytest.mark.parametrize("model_type", BIASED)
def test_biases_of_values_go_to_the_output(model_type: str) -> None:
    start = processed(known(model_type), **only(LN))
    made = processed(start, **only(VALUES))
    assert start.b_V.abs().max() > 1e-2
    assert (made.b_V == 0).all()
    assert far(made.b_O, start.b_O) > 1e-2 or start.b_O.abs().max() == 0
    names = [f"blocks.{i}.hook_attn_out" for i in (0, 1)]
    for old, new in zip(cached(start, *names), cached(made, *names)):
        assert far(new, old) < 1e-5
    assert torch.equal(made.W_V, start.W_V)
    shared = start.W_O.shape[1] // start.b_V.shape[1]
    each = start.b_V.repeat_interleave(shared, 1)
    torch.testing.assert_close(
        made.b_O, start.b_O + torch.einsum("lhd,lhdm->lm", each, start.W_O), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("model_type", BALANCED)
def test_balanced_factors_leave_patterns_and_results(model_type: str) -> None:
    before, after = known(model_type), processed(known(model_type), **only(FACTORS))
    assert far(after.W_Q, before.W_Q) > 1e-2
    assert far(after.W_V, before.W_V) > 1e-2
    assert (after.b_V == 0).all()
    for at in ("blocks.0.attn", "blocks.1.attn"):
        layer = int(at[7])
        names = (f"{at}.hook_pattern", f"{at}.hook_result", f"{at}.hook_z")
        pattern, result, z = cached(before, *names)
        pattern_after, result_after, z_after = cached(after, *names)
        assert far(pattern_after, pattern) < 1e-4
        assert far(z_after, z) > 1e-2
        share = torch.einsum("hd,hdm->hm", before.b_V[layer], before.W_O[layer])
        assert far(result_after + share, result) < 1e-4


@pytest.mark.parametrize("model_type", BALANCED)
def test_balanced_factors_are_orthogonal_and_of_equal_size(model_type: str) -> None:
    model = simple(model_type)
    q = torch.cat([model.W_Q, model.b_Q[..., None, :]], -2).double()
    k = torch.cat([model.W_K, model.b_K[..., None, :]], -2).double()
    within_q, within_k = q.mT @ q, k.mT @ k
    assert far(within_q, within_k) < 1e-5
    sizes = within_q.diagonal(dim1=-2, dim2=-1)
    assert far(within_q, torch.diag_embed(sizes)) < 1e-5
    assert (sizes[..., :-1] >= sizes[..., 1:]).all()
    w_v, w_o = model.W_V.double(), model.W_O.double()
    assert far(w_o @ w_o.mT, torch.eye(w_o.shape[-2]).expand(*w_o.shape[:-1], -1)) < 1e-5
    inner = w_v.mT @ w_v
    assert far(inner, torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))) < 1e-5


# An oracle that knows nothing of transformers.


def normalised(x: Any, eps: float) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def softmax(x: Any) -> Any:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def gpt2_by_hand(model: Any, tokens: Any) -> Any:
    """GPT-2 in numpy from TransformerLens's weights, with norms that have none."""
    names = "W_E W_pos W_U b_U W_Q b_Q W_K b_K W_V b_V W_O b_O W_in b_in W_out b_out".split()
    w = {name: getattr(model, name).double().numpy() for name in names}
    length, eps = tokens.shape[1], model.cfg.eps
    x = w["W_E"][tokens] + w["W_pos"][:length]
    mask = np.triu(np.full((length, length), -np.inf), 1)
    for i in range(model.cfg.n_layers):
        n = normalised(x, eps)
        q, k, v = (
            np.einsum("bpm,hmd->bhpd", n, w[f"W_{r}"][i]) + w[f"b_{r}"][i][:, None] for r in "QKV"
        )
        pattern = softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]) + mask)
        x = x + np.einsum("bhpd,hdm->bpm", pattern @ v, w["W_O"][i]) + w["b_O"][i]
        inner = normalised(x, eps) @ w["W_in"][i] + w["b_in"][i]
        gelu = 0.5 * inner * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        x = x + gelu @ w["W_out"][i] + w["b_out"][i]
    return normalised(x, eps) @ w["W_U"] + w["b_U"]


@pytest.mark.parametrize("flags", [(LN,), (LN, WRITE), CENTRED, tuple(STEPS)])
def test_gpt2_written_by_hand_without_norm_weights_gives_the_same_logits(flags: Any) -> None:
    model = processed(known("gpt2"), **only(*flags))
    tokens = tiny.inputs(model.module)["input_ids"]
    found = torch.from_numpy(gpt2_by_hand(model, tokens.numpy()))
    with torch.no_grad():
        assert far(found, model.module(tokens).logits.double()) < 1e-5
    wrong = torch.from_numpy(gpt2_by_hand(known("gpt2"), tokens.numpy()))
    assert far(wrong, found) > 0.1


# Layouts and dtypes.


def test_heads_that_lie_unevenly_are_written_where_they_lie() -> None:
    chosen = tiny.model_class("falcon", "causal")
    options = {"new_decoder_architecture": True, "num_kv_heads": 2}
    config = tiny.shrink(
        chosen.config_class, layers=2, dropout=0.0, kind="causal", bias=True, **options
    )
    module = chosen(config).eval()
    tiny.randomise(module)
    model = TransformerModel(module)
    made = processed(model)
    assert model.b_V.abs().max() > 1e-2
    assert (made.b_V == 0).all()
    assert far(logits(made).log_softmax(-1), logits(model).log_softmax(-1)) < 1e-4


def test_one_head_can_be_wider_than_the_stream() -> None:
    config = tiny.shrink(
        tiny.model_class("gpt2", "causal").config_class, layers=2, dropout=0.0, kind="causal"
    )
    config.n_embd, config.n_head = 4, 1
    module = tiny.model_class("gpt2", "causal")(config).eval()
    tiny.randomise(module)
    model = TransformerModel(module)
    made = processed(model, **only(FACTORS))
    assert far(logits(made), logits(model)) < 1e-4


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "qwen2", "gemma", "starcoder2"])
def test_half_precision_stays_half(model_type: str) -> None:
    model = TransformerModel(tiny.build(model_type).half())
    made = processed(model, **only(*EXACT[model_type]))
    assert {p.dtype for p in made.module.parameters()} == {torch.float16}
    wide, exact = (logits(m).double().log_softmax(-1) for m in (made, model))
    assert far(wide, exact) < 1e-2
    exact = logits(known(model_type)).double().log_softmax(-1)
    assert far(wide, exact) < 1e-2


# Tied embeddings, and saving.


def test_tied_embeddings_are_parted_and_load_again(tmp_path: Path) -> None:
    model = wired("gpt2")
    made = processed(model, fold_ln=False, refactor_factored_attn_matrices=True)
    assert model.module.config.tie_word_embeddings
    assert not made.module.config.tie_word_embeddings
    assert far(made.W_U, made.W_E.T) > 0.01
    made.module.save_pretrained(tmp_path)
    again = type(made.module).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(TransformerModel(again)), logits(made))


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("gemma", "causal"), ("bert", "masked"), ("t5", "encoder_decoder")],
)
def test_other_ties_load_again_too(model_type: str, kind: str, tmp_path: Path) -> None:
    model = wired(model_type, kind)
    flags = {flag: reason is None for flag, reason in exact_flags(model).items()}
    made = processed(model, **flags)
    made.module.save_pretrained(tmp_path)
    again = type(made.module).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(TransformerModel(again)), logits(made))


def test_embeddings_stay_tied_where_nobody_writes_to_them() -> None:
    made = processed(known("gpt2"), **only(VALUES, FACTORS))
    assert made.module.lm_head.weight is made.module.transformer.wte.weight
    assert made.module.config.tie_word_embeddings


def test_a_forward_that_depends_on_the_tie_is_refused() -> None:
    found = exact_flags(wired("umt5", "encoder_decoder"))
    assert found[VALUES] is None
    assert found[UNEMBED] == (
        "its forward computes something else once embedding and unembedding are two (it looks at "
        "config.tie_word_embeddings)."
    )


def test_a_model_with_new_biases_refuses_to_be_saved(tmp_path: Path) -> None:
    made = processed(wired("gpt2"))
    with pytest.raises(Unsupported) as caught:
        made.module.save_pretrained(tmp_path)
    assert str(caught.value) == (
        "this GPT2LMHeadModel has lm_head.bias, which transformers would leave out when it loads "
        "the model again. Save the model as it was before processing, and process it after loading; "
        "or keep the numbers: torch.save(model.state_dict(), path), and load_state_dict into a model "
        "processed in the same way."
    )
    assert not list(tmp_path.iterdir())
    again = copy.deepcopy(made.module)
    again.load_state_dict(made.module.state_dict())
    assert torch.equal(logits(TransformerModel(again)), logits(made))


# Refusals.


def test_norms_that_stand_in_the_stream_are_refused() -> None:
    model = wired("bert", "masked")
    assert refusal(model, LN) == (
        "fold_ln is not exact on BertForMaskedLM: no norm stands before a branch of a block. They "
        "stand in the stream or after a branch: bert.encoder.layer.0.attention.output.LayerNorm, ..."
    )
    assert refusal(model, WRITE) == (
        "center_writing_weights is not exact on BertForMaskedLM: "
        "bert.encoder.layer.0.attention.output.LayerNorm stands in the stream, or after a branch: "
        "what it writes has a mean that no weight before it can take off."
    )
    assert "no norm stands before a branch of a block." in refusal(known("olmo2"), LN)


@pytest.mark.parametrize(
    ("model_type", "flag", "reason"),
    [
        (
            "llama",
            WRITE,
            (
                "model.layers.0.input_layernorm (LlamaRMSNorm) does not take off the mean of the stream "
                "(an RMS norm), so the mean counts."
            ),
        ),
        (
            "gemma2",
            UNEMBED,
            (
                "the logits are no multiple of what lm_head makes (a softcap?), so that a number added "
                "to all of them does not cancel in the softmax."
            ),
        ),
        (
            "gpt_oss",
            VALUES,
            (
                "the pattern of blocks.0.attn does not sum to 1 (attention sinks?), so that a bias of "
                "its values is not constant."
            ),
        ),
        (
            "gpt_neox",
            FACTORS,
            (
                "queries of blocks.0.attn do not reach the attention kernel as they were projected "
                "(rotary positions, or a norm), so that another factor would be turned otherwise."
            ),
        ),
        (
            "starcoder2",
            FACTORS,
            (
                "the 4 heads of blocks.0.attn share 2 keys and values (grouped queries): no head has "
                "factors of its own."
            ),
        ),
        (
            "phimoe",
            LN,
            (
                "model.layers.0.post_attention_layernorm adds something, and model.layers.0.mlp.experts "
                "(PhimoeExperts), which reads it, has no bias that could take it."
            ),
        ),
        (
            "phimoe",
            WRITE,
            "model.layers.0.mlp is a mixture of experts: many maps write there.",
        ),
        ("mamba", FACTORS, "no attention was found."),
        (
            "gpt_neox_japanese",
            LN,
            (
                "how gpt_neox_japanese.layers.1 adds to the stream is not known, nor so which of its "
                "norms stand before a branch."
            ),
        ),
    ],
)
def test_a_refusal_says_why(model_type: str, flag: str, reason: str) -> None:
    model = known(model_type)
    assert refusal(model, flag) == f"{flag} is not exact on {type(model.module).__name__}: {reason}"
    assert exact_flags(model)[flag] == reason


def test_a_model_without_a_head_has_no_unembedding_and_keeps_its_last_norm() -> None:
    model = TransformerModel(wired("gpt2").module.transformer)
    assert refusal(model, UNEMBED).endswith("GPT2Model: the model has no unembedding.")
    made = processed(model, center_unembed=False)
    assert torch.equal(made.module.ln_f.weight, model.module.ln_f.weight)
    assert (made.module.h[0].ln_1.weight == 1).all()
    assert far(logits(made), logits(model)) < 1e-4


def test_adapted_and_quantised_weights_are_refused() -> None:
    module = tiny.build("llama")
    attn = module.model.layers[0].self_attn
    attn.q_proj = Adapted(attn.q_proj)
    assert "q_proj (Adapted) has base_layer, low, high besides a weight" in refusal(
        TransformerModel(module), LN
    )


def test_weights_that_two_maps_share_are_refused() -> None:
    module = tiny.build("llama")
    first, second = (layer.mlp for layer in module.model.layers)
    second.up_proj.weight = first.up_proj.weight
    assert refusal(TransformerModel(module), LN).endswith(
        "model.layers.0.mlp.up_proj shares its weight with model.layers.1.mlp.up_proj."
    )


class Gate(nn.Module):
    """An attention output projection whose input is multiplied first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.c_proj = inner.c_proj

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        made, *rest = self.inner(x, *args, **kwargs)
        return made * torch.sigmoid(x.mean(-1, keepdim=True)), *rest


def test_what_no_structure_shows_is_caught_by_the_proof() -> None:
    module = tiny.build("gpt2")
    block = module.transformer.h[1]
    block.attn = Gate(block.attn)
    reason = exact_flags(TransformerModel(module))[LN]
    assert reason is not None
    assert reason.startswith("on a probe, outputs change by 0.")
    assert reason.endswith(
        "of their size, where float32 allows 1e-04. Something reads what was changed, and was not "
        "found."
    )


# Sabotage.


def test_a_fold_that_forgets_the_keys_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fold.fold_into

    def wrong(place: Any, *args: Any, **options: Any) -> None:
        keys = linear.matrix(place)[:, 32:64] if place.path.endswith("c_attn") else None
        kept = None if keys is None else keys.clone()
        right(place, *args, **options)
        if keys is not None:
            keys.copy_(kept)

    monkeypatch.setattr(fold, "fold_into", wrong)
    assert "outputs change by" in refusal(known("gpt2"), LN)


def test_a_summand_that_is_lost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "add_to_bias", lambda place, summand: None)
    assert "outputs change by" in refusal(known("gpt_neox"), LN)
    assert "outputs change by" in refusal(known("gpt2"), LN)


def test_values_given_to_the_wrong_heads_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = heads._for_each_head

    def wrong(values: Tensor, count: int, *, dim: int) -> Tensor:
        if values.dim() > 2:  # the check of patterns
            return right(values, count, dim=dim)
        return torch.cat([values] * (count // values.shape[dim]), dim)

    monkeypatch.setattr(heads, "_for_each_head", wrong)
    assert "outputs change by" in refusal(known("qwen2"), VALUES)


def test_factors_of_another_product_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = heads._decomposed

    def wrong(a: Tensor, b: Tensor) -> Any:
        u, s, v = right(a, b)
        return u, s, v.flip(-1)

    monkeypatch.setattr(heads, "_decomposed", wrong)
    assert "outputs change by" in refusal(known("gpt2"), FACTORS)


def test_a_mean_that_is_added_after_the_last_map_is_caught() -> None:
    module = tiny.build("gpt2")
    down = module.transformer.h[1].mlp.c_proj
    down.register_forward_hook(lambda m, args, made: made + 0.5)
    assert refusal(TransformerModel(module), WRITE).endswith(
        "transformer.h.1 still adds 0.5 to the mean of the stream: something stands between its last "
        "linear maps and the stream."
    )
