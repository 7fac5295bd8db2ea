"""Models from scratch against `old_models`: TransformerLens's layout and arithmetic, written out by hand."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from interpose.dialects.transformer_lens import (
    HookedTransformer,
    HookedTransformerConfig,
    head_detector,
    patching,
    utils,
)
from interpose.errors import Unsupported
from interpose.models import loading
from tests.dialects.transformer_lens import old_models
from tests.dialects.transformer_lens.old_models import SMALL, Config, Run, State

ROTARY = {"positional_embedding_type": "rotary", "rotary_base": 20}
NTK = {
    "use_NTK_by_parts_rope": True,
    "NTK_by_parts_low_freq_factor": 1.0,
    "NTK_by_parts_high_freq_factor": 4.0,
    "NTK_by_parts_factor": 8.0,
    "NTK_original_ctx_len": 30,
}
T5 = {
    "positional_embedding_type": "relative_positional_bias",
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 7,
}
LLAMA = {
    **ROTARY,
    "normalization_type": "RMS",
    "gated_mlp": True,
    "act_fn": "silu",
    "n_heads": 4,
    "n_key_value_heads": 2,
}
GEMMA = {
    **LLAMA,
    "act_fn": "gelu_pytorch_tanh",
    "use_normalization_before_and_after": True,
    "attn_scores_soft_cap": 1.5,
    "output_logits_soft_cap": 2.0,
    "use_local_attn": True,
    "attn_types": ["local", "global"],
    "window_size": 3,
}
GROKKING = {"normalization_type": None, "n_layers": 1, "d_vocab_out": 11}
PLAIN = {"positional_embedding_type": "none"}

CASES: dict[str, tuple[Config, list[Config]]] = {
    "gpt2": ({"act_fn": "gelu_new"}, [{"normalization_type": "LNPre"}, PLAIN, {"act_fn": "silu"}]),
    "othello": ({"normalization_type": "LNPre", "act_fn": "gelu"}, [{"normalization_type": None}]),
    "grokking": (GROKKING, [{"normalization_type": "LNPre"}, {"act_fn": "gelu"}]),
    "rms": ({"normalization_type": "RMS"}, [{"normalization_type": "RMSPre"}]),
    "rms pre": ({"normalization_type": "RMSPre"}, [{"normalization_type": "LNPre"}]),
    "final rms": ({"final_rms": True}, [{"final_rms": False, "normalization_type": "RMS"}]),
    "final rms pre": ({"final_rms": True, "normalization_type": "LNPre"}, [{"final_rms": False}]),
    "eps": ({"eps": 0.3, "act_fn": "gelu_fast"}, [{"eps": 1e-5}]),
    "attn only": ({"attn_only": True, "act_fn": None, "d_mlp": None}, [PLAIN]),
    "induction": (
        {"attn_only": True, "normalization_type": None, "positional_embedding_type": "shortformer"},
        [PLAIN, {"positional_embedding_type": "standard"}],
    ),
    "shortformer": (
        {"positional_embedding_type": "shortformer", "n_heads": 4, "n_key_value_heads": 2},
        [PLAIN, {"positional_embedding_type": "standard"}],
    ),
    "nowhere": (PLAIN, [{"positional_embedding_type": "standard"}]),
    "rotary": (ROTARY, [PLAIN, {"rotary_base": 21}, {"rotary_adjacent_pairs": True}]),
    "neox": (
        {**ROTARY, "d_head": 8, "rotary_dim": 4, "parallel_attn_mlp": True, "n_heads": 2},
        [{"rotary_dim": 8}, {"parallel_attn_mlp": False}],
    ),
    "gptj": (
        {**ROTARY, "d_head": 6, "rotary_dim": 4, "rotary_adjacent_pairs": True},
        [{"rotary_adjacent_pairs": False}, {"rotary_dim": 6}],
    ),
    "llama": (LLAMA, [{"act_fn": "relu"}, PLAIN, {"normalization_type": "RMSPre"}]),
    "llama 3.1": ({**LLAMA, **NTK, "d_head": 8}, [{"use_NTK_by_parts_rope": False}]),
    "gemma 2": (
        GEMMA,
        [
            {"use_normalization_before_and_after": False},
            {"attn_scores_soft_cap": -1.0},
            {"output_logits_soft_cap": -1.0},
            {"use_local_attn": False},
            {"window_size": 2},
        ],
    ),
    "bloom": (
        {"positional_embedding_type": "alibi", "post_embedding_ln": True, "act_fn": "gelu_new"},
        [PLAIN, {"post_embedding_ln": False}],
    ),
    "alibi bidirectional": (
        {"positional_embedding_type": "alibi", "attention_dir": "bidirectional"},
        [PLAIN, {"attention_dir": "causal"}],
    ),
    "t5": (T5, [PLAIN, {"relative_attention_max_distance": 60}]),
    "t5 bidirectional": ({**T5, "attention_dir": "bidirectional"}, [PLAIN]),
    "brackets": ({"attention_dir": "bidirectional"}, [{"attention_dir": "causal"}]),
    "local": (
        {"use_local_attn": True, "attn_types": ["global", "local"], "window_size": 2},
        [{"use_local_attn": False}, {"attn_types": ["local", "global"]}],
    ),
    "unscaled": ({"use_attn_scale": False}, [{"use_attn_scale": True}]),
    "scaled": ({"attn_scale": 1.2}, [{"attn_scale": None}]),
    "by layer": (
        {"scale_attn_by_inverse_layer_idx": True},
        [{"scale_attn_by_inverse_layer_idx": False}],
    ),
    "capped": (
        {"attn_scores_soft_cap": 1.0, "positional_embedding_type": "alibi"},
        [{"attn_scores_soft_cap": -1.0}],
    ),
    "qk norm": ({"use_qk_norm": True}, [{"use_qk_norm": False}]),
    "qwen 3": ({**LLAMA, "use_qk_norm": True}, [{"use_qk_norm": False}]),
    "one key": ({"n_key_value_heads": 1}, [PLAIN]),
    "gated": ({"gated_mlp": True, "act_fn": "gelu"}, [{"act_fn": "silu"}]),
    "parallel": ({"parallel_attn_mlp": True}, [{"parallel_attn_mlp": False}]),
    "solu": ({"act_fn": "solu"}, [{"act_fn": "relu"}]),
    "solu ln": ({"act_fn": "solu_ln"}, [{"act_fn": "solu"}]),
    "solu ln pre": ({"act_fn": "solu_ln", "normalization_type": "LNPre"}, [{"act_fn": "solu"}]),
    "twice": (
        {"use_normalization_before_and_after": True, "parallel_attn_mlp": True},
        [{"use_normalization_before_and_after": False}],
    ),
    "wide heads": ({"d_head": 7, "n_heads": 5, "n_layers": 3}, [PLAIN]),
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [16, 5, 0, 3, 5, 8, 9]])
ASKED_FOR = ("attn_in", "mlp_in", "q_input", "k_input", "v_input", "result")

each_case = pytest.mark.parametrize("case", CASES)


def make(options: Config, seed: int = 0) -> tuple[HookedTransformer, State]:
    """A model with the weights of an old state dict, and that dict."""
    cfg = {k: v for k, v in {**SMALL, **options}.items() if v is not None or k in _MAY_BE_NONE}
    model = HookedTransformer(HookedTransformerConfig(**cfg, device=TOKENS.device))
    state = old_models.state_dict(options, seed)
    model.load_state_dict(state)
    return model, state


_MAY_BE_NONE = ("normalization_type", "act_fn", "d_mlp")


def truth(state: State, options: Config, tokens: Tensor = TOKENS, **edits: Any) -> Run:
    """The same computed by hand, in float64."""
    return Run({name: value.double() for name, value in state.items()}, options, tokens, **edits)


def off(found: Tensor, expected: Tensor) -> float:
    """How far a value is from another, relative to the other's largest; not-finite ones must be the same."""
    assert found.shape == expected.shape
    finite = expected.isfinite()
    assert torch.equal(found.isfinite(), finite)
    assert torch.equal(found[~finite].double(), expected[~finite].double())
    size = expected[finite].abs().max()
    return float(((found[finite] - expected[finite]).abs().max() / size).detach())


# Values.


@each_case
def test_an_old_state_dict_gives_the_old_values(case: str) -> None:
    options, _ = CASES[case]
    model, state = make(options)
    assert str(model.load_state_dict(state, strict=True)) == "<All keys matched successfully>"
    old = truth(state, options)
    for flag in ("attn_result", "split_qkv_input", "attn_in", "hook_mlp_in"):
        getattr(model, f"set_use_{flag}")(True)
    logits, cache = model.run_with_cache(TOKENS)
    assert off(logits, old.logits) < 1e-5
    assert off(model(TOKENS), old.logits) < 1e-5
    assert set(cache) == set(old.seen)
    assert {name: err for name in cache if (err := off(cache[name], old.seen[name])) > 1e-5} == {}


@each_case
def test_every_option_has_an_effect(case: str) -> None:
    options, others = CASES[case]
    state = old_models.state_dict(options)
    old = truth(state, options).logits
    for other in others:
        filled = {**old_models.state_dict({**options, **other}), **state}
        assert off(truth(filled, {**options, **other}).logits, old) > 1e-3, other


@each_case
def test_training_moves_weights_as_by_hand(case: str) -> None:
    options, _ = CASES[case]
    model, state = make(options)
    optimizers = {  # a larger eps, since gradients that are 0 but for rounding would be steps of lr
        "AdamW": functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-2),
        "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    }
    make_optimizer = optimizers["AdamW" if len(case) % 2 else "SGD"]
    own = model.module.can_generate()

    def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
        return old_models.next_token_loss(logits, tokens % model.cfg.d_vocab_out)

    expected = old_models.trained(state, options, TOKENS, loss_of, make_optimizer)
    optimizer = make_optimizer(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(TOKENS, return_type="loss") if own else loss_of(model(TOKENS), TOKENS)
        loss.backward()
        optimizer.step()
    trained = dict(model.named_parameters())
    assert set(expected) - set(trained) <= {"pos_embed.W_pos"}  # where nothing reads it
    for name, value in trained.items():
        assert (value - expected[name]).abs().max() < 1e-5, name
        if "W_" in name:
            assert off(value, state[name].double()) > 1e-4, name


def test_the_buckets_of_distances_are_those_of_t5() -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    ahead = torch.arange(-200, 201)
    for count, farthest, both in [(32, 128, False), (32, 128, True), (6, 7, False), (6, 7, True)]:
        options = {**T5, "attention_dir": "bidirectional" if both else "causal"}
        options["relative_attention_num_buckets"] = count
        options["relative_attention_max_distance"] = farthest
        theirs = t5.T5Attention._relative_position_bucket(ahead, both, count, farthest)
        by_hand = [old_models.bucket(int(distance), count, farthest, both) for distance in ahead]
        ours = make(options)[0].blocks[0].attn.rel_pos_bias._range_of(ahead)
        assert by_hand == theirs.tolist() == ours.tolist()


# Hooks.

SITES = ["gpt2", "induction", "gemma 2", "neox", "brackets", "bloom", "solu ln"]


def nudged(value: Tensor) -> Tensor:
    """Another value of the same shape, different for each feature and head."""
    ramp = torch.linspace(0.6, 1.3, value[0].numel(), dtype=value.dtype).view_as(value[0])
    return value * ramp


@pytest.mark.parametrize("case", SITES)
def test_an_edit_of_any_site_does_what_it_does_by_hand(case: str) -> None:
    options, _ = CASES[case]
    model, state = make(options)
    old = truth(state, options)
    for name in old.seen:
        expected = truth(state, options, edits={name: nudged}).logits
        assert off(expected, old.logits) > 1e-4, name
        returned = model.run_with_hooks(
            TOKENS, fwd_hooks=[(name, lambda value, hook: nudged(value))]
        )
        assert off(returned, expected) < 1e-5, name
        in_place = model.run_with_hooks(TOKENS, fwd_hooks=[(name, _nudge)])
        assert torch.equal(in_place, returned), name


def _nudge(value: Tensor, hook: Any) -> None:
    value.copy_(nudged(value))


@pytest.mark.parametrize("case", SITES)
def test_gradients_at_any_site_are_those_by_hand(case: str) -> None:
    options, _ = CASES[case]
    model, state = make(options)
    old = truth(state, options)
    towards = torch.randn(old.logits.shape)
    found: dict[str, Tensor] = {}

    def keep(grad: Tensor, hook: Any) -> None:
        found[hook.name] = grad.clone()

    logits = model.run_with_hooks(TOKENS, bwd_hooks=[(list(old.seen), keep)])
    (logits * towards).sum().backward()
    for name, value in old.seen.items():
        leaf = value.detach().clone().requires_grad_()
        by_hand = truth(state, options, edits={name: lambda _, leaf=leaf: leaf}).logits
        (expected,) = torch.autograd.grad((by_hand * towards).sum(), leaf)
        assert off(found[name], expected) < 1e-5, name


def test_hooks_by_name_by_filter_and_on_the_part_itself_do_the_same() -> None:
    model, state = make({})
    zeroed = {**state, "blocks.0.attn.W_O": state["blocks.0.attn.W_O"].clone()}
    zeroed["blocks.0.attn.W_O"][1] = 0
    expected = truth(zeroed, {}).logits
    clean = model(TOKENS)
    heard: list[Any] = []

    def ablate(z: Tensor, hook: Any) -> Tensor:
        heard.append((hook.name, hook.layer()))
        hook.ctx["seen"] = z
        z[:, :, 1] = 0.0
        return z

    name = utils.get_act_name("z", 0)
    ways = [name, lambda site: site == name, [name], "blocks.0.attn.hook_z"]
    for way in ways:
        assert off(model.run_with_hooks(TOKENS, fwd_hooks=[(way, ablate)]), expected) < 1e-5
        assert torch.equal(model(TOKENS), clean)
    for add in (
        lambda: model.blocks[0].attn.hook_z.add_hook(ablate),
        lambda: model.add_hook(name, ablate),
        lambda: model.hook_dict[name].add_hook(ablate),
    ):
        add()
        assert off(model(TOKENS), expected) < 1e-5
        assert off(model.run_with_cache(TOKENS)[0], expected) < 1e-5
        model.reset_hooks()
        assert torch.equal(model(TOKENS), clean)
    with model.hooks(fwd_hooks=[(name, ablate)]):
        assert off(model(TOKENS), expected) < 1e-5
    assert set(heard) == {(name, 0)}
    point = model.blocks[0].attn.hook_z
    assert (point.name, point.layer(), set(point.ctx)) == (name, 0, {"seen"})
    point.clear_context()
    assert not model.hook_dict[name].ctx


def test_padding_is_masked_by_permanent_hooks_as_courses_do() -> None:
    model, _ = make({"attention_dir": "bidirectional", "use_hook_tokens": True, "d_vocab_out": 2})
    alone = model(TOKENS[:1, :4])
    tokens = torch.cat([TOKENS[:1, :4], torch.full((1, 3), 7)], 1)

    def find(tokens: Tensor, hook: Any) -> None:
        hook.ctx["pads"] = (tokens == 7)[:, None, None]

    def mask(scores: Tensor, hook: Any) -> None:
        scores.masked_fill_(model.hook_dict["hook_tokens"].ctx["pads"], -1e5)
        if hook.layer() == model.cfg.n_layers - 1:
            model.hook_dict["hook_tokens"].clear_context()

    for name, point in model.hook_dict.items():
        if name == "hook_tokens":
            point.add_perma_hook(find)
        elif name.endswith("attn_scores"):
            point.add_perma_hook(mask)
    model.reset_hooks()
    torch.testing.assert_close(model(tokens)[:, :4], alone)
    model.reset_hooks(including_permanent=True)
    assert (model(tokens)[:, :4] - alone).abs().max() > 1e-3


def test_filters_and_flags_say_what_is_kept() -> None:
    model, _ = make({"use_attn_result": True})
    _, everything = model.run_with_cache(TOKENS)
    added = {name.rpartition("hook_")[2] for name in everything} & set(ASKED_FOR)
    assert added == {"result"}
    model.set_use_attn_result(False)
    model.set_use_hook_mlp_in(True)
    _, everything = model.run_with_cache(TOKENS)
    assert {name.rpartition("hook_")[2] for name in everything} & set(ASKED_FOR) == {"mlp_in"}
    z = {f"blocks.{layer}.attn.hook_z" for layer in range(2)}
    for wanted in (sorted(z), lambda name: name.endswith("hook_z")):
        assert set(model.run_with_cache(TOKENS, names_filter=wanted)[1]) == z
    _, one = model.run_with_cache(TOKENS[:1], names_filter="hook_embed", remove_batch_dim=True)
    assert one["embed"].shape == (7, 12)
    with pytest.raises(LookupError, match="hook_zz"):
        model.run_with_cache(TOKENS, names_filter="blocks.0.attn.hook_zz")
    with pytest.raises(LookupError, match="there is no MLP"):
        make({"attn_only": True})[0].run_with_cache(TOKENS, names_filter="blocks.0.mlp.hook_post")


CHECKED = ["attn only", "gemma 2", "qwen 3", "parallel", "brackets", "induction", "solu ln", "t5"]


@pytest.mark.parametrize("case", CHECKED)
def test_every_promise_holds(case: str) -> None:
    report = make(CASES[case][0])[0].check()
    assert "every promise holds" in str(report), str(report)


# Runs.


@pytest.mark.parametrize(
    "case", ["gpt2", "rotary", "bloom", "t5", "induction", "gemma 2", "brackets"]
)
def test_runs_begin_and_end_at_layers(case: str) -> None:
    options, _ = CASES[case]
    model, state = make(options)
    old = truth(state, options)
    stream = model(TOKENS, stop_at_layer=1)
    assert off(stream, old.seen["blocks.1.hook_resid_pre"]) < 1e-5
    assert off(model(TOKENS, stop_at_layer=-1), old.seen["blocks.1.hook_resid_pre"]) < 1e-5
    assert off(model(stream, start_at_layer=1), old.logits) < 1e-5
    _, cache = model.run_with_cache(stream, start_at_layer=1)
    assert "blocks.0.attn.hook_z" not in cache
    ended = model(stream, start_at_layer=1, stop_at_layer=2)
    assert off(ended, old.seen["blocks.1.hook_resid_post"]) < 1e-5


PADDED = [
    *("gpt2", "rotary", "gemma 2", "bloom", "alibi bidirectional", "induction", "shortformer"),
    *("t5", "t5 bidirectional", "brackets", "local"),
]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", PADDED)
def test_padding_changes_nothing(case: str, side: str) -> None:
    options, _ = CASES[case]
    model, state = make(options)
    mask = torch.ones_like(TOKENS)
    mask[1, slice(3) if side == "left" else slice(4, 7)] = 0
    real = mask[1].bool()
    expected = truth(state, options, TOKENS[1:, real]).logits
    logits, cache = model.run_with_cache(TOKENS, attention_mask=mask)
    assert off(logits[1:, real], expected) < 1e-5
    assert off(model.module(TOKENS, attention_mask=mask)[1:, real], expected) < 1e-5
    assert not cache["pattern", 1][1, :, :, ~real].any()  # nobody looks at padding
    assert off(logits[:1], truth(state, options, TOKENS[:1]).logits) < 1e-5
    assert off(model(TOKENS)[1:, real], expected) > 1e-3 or (side == "right" and _causal(model))
    finite: list[bool] = []
    hooks = [("attn_scores", lambda grad, hook: finite.append(bool(grad.isfinite().all())))]
    logits = model.run_with_hooks(TOKENS, attention_mask=mask, bwd_hooks=hooks)
    logits.square().mean().backward()
    assert finite == [True] * model.cfg.n_layers
    assert all(value.grad.isfinite().all() for value in model.parameters())


def _causal(model: HookedTransformer) -> bool:
    return bool(model.cfg.attention_dir == "causal")


def test_inputs_have_their_forms_and_limits() -> None:
    model, _ = make({})
    assert torch.equal(model(TOKENS[0]), model(TOKENS[:1]))
    assert torch.equal(model(TOKENS[0].tolist()), model(TOKENS[:1]))
    logits, loss = model(TOKENS, return_type="both")
    assert torch.equal(logits, model(TOKENS))
    torch.testing.assert_close(loss, old_models.next_token_loss(logits, TOKENS))
    each = model(TOKENS, return_type="loss", loss_per_token=True)
    torch.testing.assert_close(each.mean(), loss)
    assert model(TOKENS, return_type=None) is None
    with pytest.raises(ValueError, match=r"11 tokens, and the model has 10 positions \(n_ctx\)"):
        model(torch.zeros(1, 11, dtype=torch.long))
    for options in ({"positional_embedding_type": "alibi"}, ROTARY):
        with pytest.raises(ValueError, match=r"11 tokens, and the model has 10 positions"):
            make(options)[0](torch.zeros(1, 11, dtype=torch.long))


def test_a_model_without_blocks_is_its_embeddings() -> None:
    model, state = make({"n_layers": 0})
    assert off(model(TOKENS), truth(state, {"n_layers": 0}).logits) < 1e-5
    assert {"hook_embed", "hook_pos_embed"} <= set(model.run_with_cache(TOKENS)[1])


# Caches and weights.

PARTS = ["gpt2", "grokking", "attn only", "induction", "neox", "gemma 2", "bloom", "final rms"]


@pytest.mark.parametrize("case", PARTS)
def test_the_stream_comes_apart_and_adds_up(case: str) -> None:
    options, _ = CASES[case]
    model, state = make(options)
    old = truth(state, options)
    layers = model.cfg.n_layers
    _, cache = model.run_with_cache(TOKENS)
    final = old.seen[f"blocks.{layers - 1}.hook_resid_post"]
    parts, labels = cache.decompose_resid(return_labels=True)
    assert len(labels) == len(parts)
    assert off(parts.sum(0), final) < 1e-5
    heads, names = cache.stack_head_results(return_labels=True)
    assert names == model.all_head_labels()
    if not model.cfg.use_normalization_before_and_after:
        written = [old.seen[f"blocks.{n}.attn.hook_result"] for n in range(layers)]
        assert off(heads, torch.cat([w.movedim(2, 0) for w in written])) < 1e-5
    assert off(cache.stack_head_results(incl_remainder=True).sum(0), final) < 1e-5
    for grain in (True, False):
        assert off(cache.get_full_resid_decomposition(expand_neurons=grain).sum(0), final) < 1e-5
    stack, labels = cache.accumulated_resid(return_labels=True)
    assert labels == [*(f"{n}_pre" for n in range(layers)), "final_post"]
    assert off(stack[-1], final) < 1e-5
    normed = cache.accumulated_resid(apply_ln=True)[-1]
    uncapped = truth(state, {**options, "output_logits_soft_cap": -1.0}).logits
    assert off(model.unembed(normed), uncapped) < 1e-5

    # Of one token's lead over another, all parts together leave only what biases add.
    attrs = cache.logit_attrs(parts, tokens=3, incorrect_tokens=5).sum(0)
    W_U, lead = model.W_U, (uncapped - state["unembed.b_U"])
    bias = state.get("ln_final.b", torch.zeros(12)) @ (W_U[:, 3] - W_U[:, 5])
    assert off(attrs + bias, lead[..., 3] - lead[..., 5]) < 1e-5


def test_the_logit_lens_needs_no_tokenizer() -> None:
    model, _ = make({})
    logits, cache = model.run_with_cache(TOKENS)
    torch.testing.assert_close(cache.logit_lens().values[-1], logits[:, -1])


@pytest.mark.parametrize("case", ["gpt2", "llama", "attn only"])
def test_circuits_scores_and_biases(case: str) -> None:
    model, state = make(CASES[case][0])
    heads = model.cfg.n_heads
    group = heads // (model.cfg.n_key_value_heads or heads)
    shared = "_" if group > 1 else ""
    W_Q, W_O = (state[f"blocks.1.attn.W_{role}"] for role in "QO")
    W_K, W_V = (state[f"blocks.1.attn.{shared}W_{role}"] for role in "KV")
    for head in range(heads):
        OV, QK = W_V[head // group] @ W_O[head], W_Q[head] @ W_K[head // group].T
        torch.testing.assert_close(model.OV[1, head].AB, OV)
        torch.testing.assert_close(model.QK[1, head].AB, QK)
        torch.testing.assert_close(model.blocks[1].attn.OV[head].AB, OV)
        torch.testing.assert_close(model.blocks[1].attn.QK[head].AB, QK)
    out, read = model.OV[0, 1].AB, model.QK[1, 2].AB
    for mode, right in (("Q", read), ("K", read.T), ("V", model.OV[1, 2].AB)):
        score = (out @ right).norm() / out.norm() / right.norm()
        torch.testing.assert_close(model.all_composition_scores(mode)[0, 1, 1, 2], score)
    biases = ("blocks.0.attn.b_O", "blocks.0.mlp.b_out")
    added = [state[name] for name in biases if name in state]
    torch.testing.assert_close(model.accumulated_bias(1), sum(added, torch.zeros(12)))
    torch.testing.assert_close(model.accumulated_bias(1, include_mlp_biases=False), added[0])
    assert torch.equal(model.tokens_to_residual_directions(TOKENS), model.W_U.T[TOKENS])
    assert model.all_head_labels()[-1] == f"L1H{heads - 1}"


def test_weights_are_the_parameters_themselves() -> None:
    model, state = make({})
    names = {name for name in state if not name.endswith((".mask", ".IGNORE"))}
    assert {name for name, _ in model.named_parameters()} == names == set(model.module.state_dict())
    assert set(model.tl_parameters()) == names
    (model.W_E.sum() + 2 * model.W_Q[1].sum()).backward()
    assert (model.embed.W_E.grad == 1).all()
    assert (model.blocks[1].attn.W_Q.grad == 2).all()
    assert not model.blocks[0].attn.W_Q.grad.any()
    model.blocks[0].attn.W_O.data[1] = 0.0
    state["blocks.0.attn.W_O"][1] = 0.0
    assert off(model(TOKENS), truth(state, {}).logits) < 1e-5
    model.embed.W_E = torch.nn.Parameter(2 * state["embed.W_E"])
    state["embed.W_E"] *= 2
    assert off(model(TOKENS), truth(state, {}).logits) < 1e-5
    for name, value in model.named_parameters():
        value.requires_grad_("b_" not in name)
    model.zero_grad()
    model(TOKENS, return_type="loss").backward()
    fixed = {name for name, value in model.named_parameters() if value.grad is None}
    assert fixed == {name for name in names if "b_" in name}


def test_keys_that_heads_share_are_shown_once_for_each() -> None:
    options = {"n_heads": 4, "n_key_value_heads": 2}
    model, state = make(options)
    attn = model.blocks[0].attn
    assert torch.equal(attn.W_K, state["blocks.0.attn._W_K"].repeat_interleave(2, 0))
    assert model.W_V.shape == (2, 4, 12, 4)
    attn.W_V.sum().backward()
    assert (attn._W_V.grad == 2).all()
    attn._W_K.data.mul_(2)
    state["blocks.0.attn._W_K"] *= 2
    assert off(model(TOKENS), truth(state, options).logits) < 1e-5


# Configs and initial weights.


def config(**options: Any) -> HookedTransformerConfig:
    return HookedTransformerConfig(**{**SMALL, "device": TOKENS.device, **options})


def test_what_a_config_does_not_say_is_the_usual() -> None:
    cfg = HookedTransformerConfig(
        n_layers=2, d_model=64, n_ctx=9, d_head=16, act_fn="relu", d_vocab=7
    )
    assert (cfg.n_heads, cfg.d_mlp, cfg.d_vocab_out) == (4, 256, 7)
    assert (cfg.attn_scale, cfg.initializer_range) == (4.0, 0.1)
    assert (cfg.normalization_type, cfg.positional_embedding_type) == ("LN", "standard")
    assert (cfg.attention_dir, cfg.eps, cfg.dtype) == ("causal", 1e-5, torch.float32)
    assert (cfg.seed, cfg.init_mode, cfg.default_prepend_bos) == (None, "gpt2", True)
    assert config(init_mode="xavier_normal").initializer_range == 1.0
    assert config(**ROTARY).rotary_dim == 4
    assert config(attn_only=True, act_fn=None, d_mlp=None).d_mlp is None
    assert config(dtype="float64").dtype == torch.float64


def test_a_config_is_a_dict_and_back() -> None:
    cfg = config(normalization_type="RMS")
    again = HookedTransformerConfig.from_dict(cfg.to_dict())
    assert again == cfg
    assert HookedTransformerConfig.unwrap(cfg) is cfg
    assert HookedTransformerConfig.unwrap(cfg.to_dict()) == cfg
    assert "d_model=12" in repr(cfg)
    assert copy.deepcopy(cfg) == pickle.loads(pickle.dumps(cfg)) == cfg
    assert HookedTransformer({**SMALL, "device": TOKENS.device}).cfg.d_model == 12
    with pytest.raises(TypeError, match="n_layer"):
        HookedTransformerConfig.from_dict({**SMALL, "n_layer": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"act_fn": None}, "act_fn is one of relu"),
        ({"act_fn": "swish"}, "got 'swish'"),
        ({"normalization_type": "ln"}, "normalization_type is one of"),
        ({"positional_embedding_type": "sinusoidal"}, "positional_embedding_type is one of"),
        ({"attention_dir": "backwards"}, "attention_dir is one of"),
        ({"init_mode": "zeros"}, "init_mode is one of"),
        ({"n_key_value_heads": 2}, "3 heads cannot share 2"),
        ({**ROTARY, "rotary_dim": 3}, "rotary_dim is even"),
        ({**ROTARY, "rotary_dim": 6}, "at most d_head"),
        ({"gated_mlp": True, "act_fn": "solu_ln"}, "needs gated_mlp=False"),
        ({"use_local_attn": True}, "window_size and attn_types"),
        ({"use_local_attn": True, "window_size": 2, "attn_types": ["local"]}, "each of 2 layers"),
        ({"positional_embedding_type": "relative_positional_bias"}, "num_buckets"),
        ({"num_experts": 4}, "no mixtures of experts"),
        ({"n_devices": 2}, "on one device"),
        ({"d_vocab": -1}, "needs d_vocab, or a tokenizer"),
    ],
)
def test_contradictions_are_refused(options: Config, message: str) -> None:
    with pytest.raises((ValueError, Unsupported), match=message):
        HookedTransformer(config(**options))


def test_a_seed_decides_the_weights_and_nothing_else() -> None:
    before = torch.get_rng_state()
    first, same, other = (HookedTransformer(config(seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first(TOKENS), same(TOKENS))
    assert not torch.equal(first(TOKENS), other(TOKENS))
    torch.manual_seed(0)
    unseeded = HookedTransformer(config())
    torch.manual_seed(0)
    assert torch.equal(unseeded(TOKENS), HookedTransformer(config())(TOKENS))
    first.init_weights()
    assert torch.equal(first(TOKENS), same(TOKENS))


@pytest.mark.parametrize(
    "mode", ["gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "muP"]
)
@pytest.mark.parametrize("size", [-1.0, 0.5])
def test_initial_weights_have_the_size_of_their_mode(mode: str, size: float) -> None:
    sizes = {"d_model": 64, "d_head": 16, "n_heads": 8, "d_mlp": 192, "d_vocab": 99, "n_ctx": 50}
    cfg = config(**sizes, init_mode=mode, seed=0, initializer_range=size, use_qk_norm=True)
    gain = size if size > 0 else (0.1 if mode == "gpt2" else 1.0)
    for name, value in HookedTransformer(cfg).named_parameters():
        if "W_" not in name:
            assert (value == float(name.endswith(".w"))).all(), name
            continue
        fan_in, fan_out = value.shape[-2], value.shape[-1] * (len(value) if value.ndim == 3 else 1)
        std = {
            "gpt2": gain,
            "xavier": gain * math.sqrt(2 / (fan_in + fan_out)),
            "kaiming": gain * math.sqrt(2 / fan_in),
            "muP": {"embed": 1.0, "unembed": 1 / fan_in}.get(
                name.split(".")[0].removeprefix("pos_"), fan_in**-0.5
            ),
        }[mode.split("_")[0]]
        assert float(value.detach().std()) == pytest.approx(std, rel=0.06), name
        largest = float(value.detach().abs().max()) / std
        assert largest <= math.sqrt(3) * 1.0001 if mode.endswith("uniform") else largest > 2.5, name


def test_without_initial_weights_nothing_is_drawn() -> None:
    before = torch.get_rng_state()
    model = HookedTransformer(config(init_weights=False))
    assert torch.equal(torch.get_rng_state(), before)
    assert (model.ln_final.w == 1).all()
    assert not model.b_O.any()
    state = old_models.state_dict({})
    model.load_state_dict(state)
    assert off(model(TOKENS), truth(state, {}).logits) < 1e-5


# Copies, files, dtypes.


@pytest.mark.parametrize("case", ["gpt2", "gemma 2", "induction", "t5"])
def test_copies_and_files_hold_the_same_model(case: str, tmp_path: Path) -> None:
    model, _ = make(CASES[case][0])
    expected = model(TOKENS)
    model.save_pretrained(tmp_path)
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    loaded = HookedTransformer(model.cfg)
    loaded.load_state_dict(torch.load(stored))
    copies = {
        "folder": HookedTransformer.from_pretrained(str(tmp_path), device=TOKENS.device),
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "state dict": loaded,
    }
    for how, other in copies.items():
        assert torch.equal(other(TOKENS), expected), how
        assert other.cfg == model.cfg, how
        other.blocks[0].attn.hook_z.add_hook(lambda value, hook: value * 0)
        assert not torch.equal(other(TOKENS), expected), how
        other.reset_hooks()
        other.embed.W_E.data.zero_()
        assert torch.equal(model(TOKENS), expected), how


@pytest.mark.parametrize("case", ["gpt2", "gemma 2", "qwen 3", "bloom", "t5", "induction"])
def test_dtypes(case: str) -> None:
    options, _ = CASES[case]
    model, state = make(options)
    old = truth(state, options).logits
    wide = copy.deepcopy(model).to(torch.float64)
    assert wide.cfg.dtype == torch.float64
    assert off(wide(TOKENS), old) < 1e-6
    half = copy.deepcopy(model).half()
    logits, cache = half.run_with_cache(TOKENS)
    assert logits.dtype == cache["resid_post", 0].dtype == half.cfg.dtype == torch.float16
    assert off(logits.double(), old) < 0.05
    built = HookedTransformer(config(**options, dtype=torch.float16))
    assert built(TOKENS).isfinite().all()
    assert model.cfg.dtype == torch.float32


def test_keys_and_values_load_in_both_layouts() -> None:
    grouped = {"n_heads": 4, "n_key_value_heads": 2}
    shared = old_models.state_dict(grouped)
    whole = {name: value for name, value in shared.items() if "._" not in name}
    for name in set(shared) - set(whole):
        whole[name.replace("._", ".")] = shared[name].repeat_interleave(2, 0)
    expected = truth(shared, grouped).logits
    for options in (grouped, {"n_heads": 4}):
        for state in (shared, whole):
            model = HookedTransformer(config(**options))
            assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
            assert off(model(TOKENS), expected) < 1e-5
    whole["blocks.0.attn.W_K"][1] += 1
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.W_K' differs within groups"):
        HookedTransformer(config(**grouped)).load_state_dict(whole)


def test_a_state_dict_that_does_not_fit_is_an_error_and_stays_as_it_is() -> None:
    model, state = make({})
    keys = list(state)
    model.load_state_dict(state)
    assert list(state) == keys
    for name in ("blocks.1.attn.W_K", "pos_embed.W_pos", "blocks.0.mlp.b_in"):
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({key: value for key, value in state.items() if key != name})
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**state, name: state[name][:-1]})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**state, "blocks.2.attn.W_K": state["blocks.1.attn.W_K"]})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        make({"attn_only": True})[0].load_state_dict(state)


# Generating, text, and the rest of the dialect.


def test_generation_goes_on_with_the_likeliest_token() -> None:
    model, state = make({})
    by_hand = TOKENS[:, :4]
    for _ in range(5):
        best = truth(state, {}, by_hand).logits[:, -1].argmax(-1)
        by_hand = torch.cat([by_hand, best[:, None]], 1)
    for options in ({"do_sample": False}, {"temperature": 0}, {"top_k": 1}):
        assert torch.equal(model.generate(TOKENS[:, :4], 5, verbose=False, **options), by_hand)
    lengths: list[int] = []
    hooks = [("blocks.0.hook_resid_pre", lambda value, hook: lengths.append(value.shape[1]))]
    with model.hooks(fwd_hooks=hooks):
        model.generate(TOKENS[:, :4], 5, temperature=0)
    assert lengths == [4, 5, 6, 7, 8]

    end = int(by_hand[0, 5])  # the first text's second new token
    ended = model.generate(TOKENS[:, :4], 5, temperature=0, eos_token_id=end)
    for row, whole in zip(ended, by_hand):
        found = whole[4:].tolist()
        stop = found.index(end) + 1 if end in found else len(found)
        assert row[4:].tolist() == (found[:stop] + [end] * 5)[: ended.shape[1] - 4]
    kept = model.generate(TOKENS[:, :4], 5, temperature=0, eos_token_id=end, stop_at_eos=False)
    assert torch.equal(kept, by_hand)
    torch.manual_seed(3)
    drawn = model.generate(TOKENS[:, :4], 4)
    torch.manual_seed(3)
    assert torch.equal(model.generate(TOKENS[:, :4], 4), drawn)
    with pytest.raises(Unsupported, match="does not predict next tokens"):
        make({"attention_dir": "bidirectional"})[0].generate(TOKENS, 2)


def test_text_goes_in_and_comes_out() -> None:
    tokenizer = loading.tokenizer_of("pocket")
    cfg = config(d_vocab=-1, n_ctx=20, d_model=48, seed=1)  # wide enough that no token wins always
    model = HookedTransformer(cfg, tokenizer)
    assert model.cfg.d_vocab == model.cfg.d_vocab_out == len(tokenizer.get_vocab())
    with_bos = model.to_tokens("The cat sat")
    assert int(with_bos[0, 0]) == tokenizer.bos_token_id
    without = model.to_tokens("The cat sat", prepend_bos=False)
    assert torch.equal(with_bos[:, 1:], without)
    assert torch.equal(model("The cat sat"), model(with_bos))
    assert model.to_string(without[0]) == "The cat sat"
    assert model.to_str_tokens("The cat", prepend_bos=False) == ["The", " cat"]
    text = model.generate("The cat", 4, temperature=0)
    tokens = model.generate("The cat", 4, temperature=0, return_type="tokens")
    assert text == tokenizer.decode(tokens[0], skip_special_tokens=True)
    assert text.startswith("The cat")
    both = model.generate(["The cat", "A much longer text"], 4, temperature=0)
    assert both == [model.generate(t, 4, temperature=0) for t in ("The cat", "A much longer text")]
    for side in ("left", "right"):
        padded = model(["The cat", "A much longer text"], padding_side=side)
        short = model("The cat")
        at = slice(-short.shape[1], None) if side == "left" else slice(short.shape[1])
        torch.testing.assert_close(padded[:1, at], short)
    silent = HookedTransformer(config(d_vocab=-1, default_prepend_bos=False), tokenizer)
    assert torch.equal(silent.to_tokens("The cat sat"), without)
    named = HookedTransformer(config(d_vocab=-1, tokenizer_name="pocket"))
    assert torch.equal(named.to_tokens("The cat sat"), with_bos)


def test_the_rest_of_the_dialect_takes_a_model_from_scratch() -> None:
    model, state = make({"attn_only": True})
    model.eval()
    clean, corrupted = TOKENS[:1], TOKENS[1:]
    _, cache = model.run_with_cache(clean)

    def metric(logits: Tensor) -> Tensor:
        return logits[0, -1, 3] - logits[0, -1, 5]

    found = patching.get_act_patch_attn_head_out_all_pos(model, corrupted, cache, metric)
    kept = truth(state, {"attn_only": True}, clean).seen["blocks.1.attn.hook_z"]

    def patch(z: Tensor) -> Tensor:
        return torch.stack([z[:, :, 0], z[:, :, 1], kept[:, :, 2]], 2)

    edits = {"blocks.1.attn.hook_z": patch}
    by_hand = truth(state, {"attn_only": True}, corrupted, edits=edits).logits
    torch.testing.assert_close(found[1, 2].double(), metric(by_hand), atol=1e-5, rtol=1e-5)
    resid = patching.get_act_patch_resid_pre(model, corrupted, cache, metric)
    assert resid.shape == (2, 7)

    scores = head_detector.detect_head(model, clean, "previous_token_head")
    pattern = cache["pattern", 1][0, 2]
    assert float(scores[1, 2]) == pytest.approx(
        float(pattern.diagonal(-1).sum() / pattern.sum()), abs=1e-3
    )
    assert utils.get_act_name("resid_mid", 0) == "blocks.0.hook_resid_mid"
    torch.testing.assert_close(
        utils.lm_cross_entropy_loss(model(TOKENS), TOKENS), model(TOKENS, return_type="loss")
    )
    torch.testing.assert_close(
        utils.composition_scores(model.OV[0], model.QK[1], broadcast_dims=True),
        model.all_composition_scores("Q")[0, :, 1],
    )
