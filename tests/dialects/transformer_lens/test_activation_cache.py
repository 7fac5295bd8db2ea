"""`ActivationCache`: parts of the stream add up, on models of every kind of norm and branch."""

from __future__ import annotations

from functools import cache as once
from typing import Any

import pytest
import torch
from torch import Tensor

from interpose.dialects.transformer_lens import ActivationCache, HookedTransformer
from interpose.errors import Unsupported
from tests.models import tiny

TYPES = [
    "gpt2", "llama", "gemma2", "olmo2", "granite", "gpt_neox", "gptj", "qwen2", "phi", "opt", "cohere", "mistral",
]  # fmt: skip
# Blocks that add attention and MLP at once have no stream between them.
PARALLEL = {"gpt_neox", "gptj", "phi", "cohere"}
CLOSE = {"atol": 2e-4, "rtol": 1e-3}


@once
def model_of(kind: str) -> HookedTransformer:
    if kind == "pocket":
        return HookedTransformer.from_pretrained_no_processing("pocket", device="cpu")
    return HookedTransformer(tiny.build(kind, "causal").requires_grad_(False))


@once
def run_of(kind: str) -> tuple[Tensor, ActivationCache]:
    model = model_of(kind)
    torch.manual_seed(1)
    tokens = torch.randint(1, int(model.W_E.shape[0]), (2, 7))
    return model.run_with_cache(tokens, prepend_bos=False)


ALL = pytest.mark.parametrize("kind", [*TYPES, "pocket"])


@ALL
def test_parts_add_up_to_the_stream(kind: str) -> None:
    _, cache = run_of(kind)
    layers = model_of(kind).cfg.n_layers
    final = cache["resid_post", -1]
    scale = final.abs().max()
    assert scale > 0.1  # there is something to add up
    for parts in (
        cache.decompose_resid(),
        cache.stack_head_results(incl_remainder=True),
        cache.stack_neuron_results(-1, incl_remainder=True),
        cache.get_full_resid_decomposition(),
        cache.get_full_resid_decomposition(expand_neurons=False),
    ):
        torch.testing.assert_close(parts.sum(0), final, **CLOSE)
    for layer in range(layers):
        before = cache["resid_pre", layer]
        torch.testing.assert_close(cache.decompose_resid(layer).sum(0), before, **CLOSE)
        torch.testing.assert_close(
            cache.get_full_resid_decomposition(layer).sum(0), before, **CLOSE
        )


@ALL
def test_heads_and_neurons_are_what_is_left_of_outputs_without_biases(kind: str) -> None:
    """Independently: switch a head off, keep its norm's scale, and see what the branch loses."""
    model, (_, cache) = model_of(kind), run_of(kind)
    stack, labels = cache.stack_head_results(return_labels=True)
    heads = int(model.W_O.shape[1])
    assert labels == model.all_head_labels()
    for layer, head in ((0, 1), (1, 0)):
        block = model.blocks[layer]
        z = cache["z", layer].clone()
        z[:, :, [h for h in range(heads) if h != head]] = 0
        made = torch.einsum("bphd,hdm->bpm", z, torch.as_tensor(block.attn.W_O))
        whole = torch.einsum("bphd,hdm->bpm", cache["z", layer], torch.as_tensor(block.attn.W_O))
        whole = whole + block.attn.b_O
        added = cache["attn_out", layer]
        if kind in ("gemma2", "olmo2"):  # an RMS norm: the share of each feature passes as it is
            expected = made / whole * added
        elif kind == "granite":
            expected = made * (added / whole).median()
        else:
            expected = made
        where = whole.abs() > 1e-3
        got = stack[labels.index(f"L{layer}H{head}")]
        torch.testing.assert_close(got[where], expected[where], atol=1e-3, rtol=1e-2)


@ALL
def test_parts_through_the_final_norm_give_the_logits(kind: str) -> None:
    model, (logits, cache) = model_of(kind), run_of(kind)
    parts = cache.get_full_resid_decomposition(expand_neurons=False)
    through = cache.apply_ln_to_stack(parts, layer=-1)
    normed = cache["ln_final.hook_normalized"]
    bias = getattr(model.ln_final.module, "bias", None)
    expected = normed if bias is None else normed - bias
    torch.testing.assert_close(through.sum(0), expected, **CLOSE)

    right, wrong = 3, 5
    attributed = cache.logit_attrs(parts, tokens=right, incorrect_tokens=wrong).sum(0)
    # The logits themselves, a multiplier (granite, cohere) included; of gemma2 those before the softcap.
    unembedded = model.unembed(normed) if kind == "gemma2" else logits
    times = (logits / model.unembed(normed)).median().item() if kind != "gemma2" else 1.0
    assert (abs(times - 1) > 0.1) == (kind in ("granite", "cohere"))
    lead = unembedded[..., right] - unembedded[..., wrong]
    unembed = torch.as_tensor(model.W_U)
    offset = model.b_U[right] - model.b_U[wrong]
    if bias is not None:
        offset = offset + bias @ (unembed[:, right] - unembed[:, wrong])
    torch.testing.assert_close(attributed + offset * times, lead, **CLOSE)


@ALL
def test_a_norms_weight_is_taken_into_account(kind: str) -> None:
    """A version that only divides by the scale, as for folded weights, must be caught."""
    _, cache = run_of(kind)
    final = cache["resid_post", -1][None]
    scale = cache["ln_final.hook_scale"]
    folded = (
        final - final.mean(-1, keepdim=True)
        if cache.model.cfg.normalization_type == "LN"
        else final
    ) / scale
    right = cache.apply_ln_to_stack(final)
    assert (right - folded).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "pocket"])
def test_labels_match_and_the_stream_accumulates(kind: str) -> None:
    _, cache = run_of(kind)
    layers = cache.model.cfg.n_layers
    stack, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    expected = [f"{layer}_{place}" for layer in range(layers) for place in ("pre", "mid")]
    assert labels == [*expected, "final_post"]
    assert torch.equal(stack[2], cache["resid_pre", 1])
    assert torch.equal(stack[3], cache["resid_mid", 1])
    assert torch.equal(stack[-1], cache["resid_post", -1])
    stack, labels = cache.accumulated_resid(1, mlp_input=True, return_labels=True)
    assert labels == ["0_pre", "1_pre", "1_mid"]
    assert torch.equal(stack[-1], cache["resid_mid", 1])
    _, labels = cache.decompose_resid(1, mlp_input=True, return_labels=True)
    embeds = labels[:-3]
    assert labels == [*embeds, "0_attn_out", "0_mlp_out", "1_attn_out"]
    assert cache.decompose_resid(mode="attn", incl_embeds=False).shape[0] == layers
    _, labels = cache.stack_neuron_results(1, neuron_slice=(3, 6), return_labels=True)
    assert labels == ["L0N3", "L0N4", "L0N5"]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "granite", "pocket"])
@pytest.mark.parametrize("pos", [-1, 2, (1, 4), [0, 3], None])
def test_slicing_before_and_after_is_the_same(kind: str, pos: Any) -> None:
    _, cache = run_of(kind)
    index: Any = slice(*pos) if isinstance(pos, tuple) else slice(None) if pos is None else pos
    for made in (
        lambda **k: cache.accumulated_resid(apply_ln=True, **k),
        lambda **k: cache.decompose_resid(apply_ln=True, **k),
        lambda **k: cache.stack_head_results(apply_ln=True, incl_remainder=True, **k),
        lambda **k: cache.stack_neuron_results(1, apply_ln=True, **k),
        lambda **k: cache.get_full_resid_decomposition(expand_neurons=False, apply_ln=True, **k),
    ):
        torch.testing.assert_close(made(pos_slice=pos), made()[:, :, index], **CLOSE)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "granite", "pocket"])
def test_neurons_projected_are_neurons_times_the_direction(kind: str) -> None:
    _, cache = run_of(kind)
    width = cache["resid_pre", 0].shape[-1]
    for onto in (torch.randn(width), torch.randn(width, 3)):
        whole = cache.get_neuron_results(0) @ onto
        torch.testing.assert_close(
            cache.get_neuron_results(0, project_output_onto=onto), whole, **CLOSE
        )
        stacked = cache.stack_neuron_results(1, project_output_onto=onto, incl_remainder=True)
        expected = cache.stack_neuron_results(1, incl_remainder=True) @ onto
        torch.testing.assert_close(stacked, expected, **CLOSE)


def test_results_by_head_are_those_of_the_site() -> None:
    model = model_of("pocket")
    tokens = torch.randint(1, 2000, (1, 6))
    model.set_use_attn_result(True)
    try:
        _, with_results = model.run_with_cache(tokens)
    finally:
        model.set_use_attn_result(False)
    _, cache = model.run_with_cache(tokens)
    assert "blocks.3.attn.hook_result" in with_results
    assert "blocks.3.attn.hook_result" not in cache
    cache.compute_head_results()
    for layer in (0, 6):
        torch.testing.assert_close(cache["result", layer], with_results["result", layer], **CLOSE)


def test_the_batch_axis_can_go_and_be_sliced() -> None:
    model = model_of("pocket")
    tokens = torch.randint(1, 2000, (3, 6))
    _, cache = model.run_with_cache(tokens)
    one = cache.apply_slice_to_batch_dim(1)
    assert not one.has_batch_dim
    assert torch.equal(one["z", 2], cache["z", 2][1])
    some = cache.apply_slice_to_batch_dim((0, 2))
    assert torch.equal(some["z", 2], cache["z", 2][:2])
    _, single = model.run_with_cache(tokens[:1])
    dropped = single.remove_batch_dim()
    assert dropped is single
    assert single["resid_pre", 0].shape == (6, 192)
    with pytest.raises(AssertionError, match="batch axis"):
        cache.remove_batch_dim()
    _, removed = model.run_with_cache(tokens[:1], remove_batch_dim=True)
    torch.testing.assert_close(
        removed.stack_head_results(pos_slice=-1, apply_ln=True),
        cache.stack_head_results(pos_slice=-1, apply_ln=True)[:, 0],
        **CLOSE,
    )


def test_names_of_every_kind_find_a_value() -> None:
    _, cache = run_of("pocket")
    assert cache["k6"] is cache["k", 6]
    assert cache["blocks.6.attn.k.hook_out"] is cache["k", 6]
    assert cache["pattern", -1] is cache["blocks.6.attn.hook_pattern"]
    assert cache["scale", 3, "ln1"] is cache["blocks.3.ln1.hook_scale"]
    assert cache["post", 0, "mlp"] is cache["blocks.0.mlp.hook_post"]
    assert cache["embed"] is cache["hook_embed"]
    assert cache["scale"] is cache["ln_final.hook_scale"]
    assert cache.has_embed
    assert cache.has_pos_embed
    assert set(cache.cache_dict) == set(cache.keys())
    assert cache.stack_activation("z", 3).shape == (3, 2, 7, 6, 32)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "pocket"])
def test_the_logit_lens_ends_with_the_models_own_logits(kind: str) -> None:
    model, (logits, cache) = model_of(kind), run_of(kind)
    found = cache.logit_lens()
    torch.testing.assert_close(found.values[-1], logits[:, -1], **CLOSE)
    assert found.labels[-1] == "final_post"
    if model.tokenizer is None:
        assert found.top[-1][0] == str(
            int(logits[0, -1].argmax())
        )  # numbers, without words for them
        return
    early = cache.logit_lens(layers=[2, 5], return_type="probs", targets=[" Paris", 7])
    assert early.values.shape == (2, 2, 2)
    assert early.labels == ["2_pre", "5_pre"]
    assert found.top[-1][0] == model.to_string([int(logits[0, -1].argmax())])  # of the first text
    numbers: list[int] = []
    cache.logit_lens(layers=[2, 5], lens=lambda entry, number: (numbers.append(number), entry)[1])
    assert numbers == list(range(8))  # a tuned lens sees every entry by its own number


def test_what_cannot_be_is_refused() -> None:
    _, cache = run_of("gpt2")
    with pytest.raises(ValueError, match="layer is from 0 to"):
        cache.decompose_resid(99)
    with pytest.raises(ValueError, match="mode is"):
        cache.decompose_resid(mode="everything")
    with pytest.raises(ValueError, match="must have one shape"):
        cache.logit_attrs(cache.decompose_resid(), tokens=torch.tensor([1, 2]), incorrect_tokens=3)


def test_texts_and_positions_have_their_own_tokens() -> None:
    model, (_, cache) = model_of("pocket"), run_of("pocket")
    parts = cache.decompose_resid()
    for_texts = cache.logit_attrs(parts, torch.tensor([10, 20]))
    for text, token in enumerate((10, 20)):
        alone = cache.logit_attrs(parts, token)[:, text]
        torch.testing.assert_close(for_texts[:, text], alone)
    last = cache.decompose_resid(pos_slice=-1)
    torch.testing.assert_close(
        cache.logit_attrs(last, torch.tensor([10, 20]), pos_slice=-1), for_texts[:, :, -1], **CLOSE
    )
    assert model.tokens_to_residual_directions(torch.tensor([5])).shape == (192,)


def test_a_batch_slice_takes_texts_from_stack_and_scale() -> None:
    _, cache = run_of("pocket")
    parts = cache.decompose_resid()
    whole = cache.apply_ln_to_stack(parts)
    torch.testing.assert_close(cache.apply_ln_to_stack(parts, batch_slice=1), whole[:, 1])
    torch.testing.assert_close(cache.apply_ln_to_stack(parts, batch_slice=(0, 1)), whole[:, :1])
    alone = cache.apply_ln_to_stack(parts[:, 1], batch_slice=1, has_batch_dim=False)
    torch.testing.assert_close(alone, whole[:, 1])


def test_the_accumulated_stream_through_the_final_norm_is_the_logit_lens() -> None:
    model, (_, cache) = model_of("pocket"), run_of("pocket")
    shown = cache.accumulated_resid(apply_ln=True)
    torch.testing.assert_close(shown[3], model.ln_final(cache["resid_pre", 3]))
    torch.testing.assert_close(shown[-1], cache["ln_final.hook_normalized"])
    before = cache.accumulated_resid(2, apply_ln=True)[-1]
    torch.testing.assert_close(
        before + model.blocks[2].ln1.b, cache["normalized", 2, "ln1"], **CLOSE
    )


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "llama"])
def test_low_precision_models_can_be_taken_apart(kind: str) -> None:
    dtype = torch.float16  # some CPUs have no bfloat16 product
    model = HookedTransformer(tiny.build(kind, "causal").requires_grad_(False).to(dtype))
    _, cache = model.run_with_cache(torch.tensor([[1, 2, 3, 4]]))
    for parts in (
        cache.stack_head_results(incl_remainder=True),
        cache.get_full_resid_decomposition(),
    ):
        assert parts.dtype == dtype
        final = cache["resid_post", -1].float()
        room = 0.05 * float(final.abs().max())
        assert (parts.float().sum(0) - final).abs().max() < room


def test_streams_that_are_no_sums_are_refused() -> None:
    bert = HookedTransformer(tiny.build("bert", "masked"))
    _, cache = bert.run_with_cache(torch.tensor([[3, 4, 5]]))
    for made in (
        cache.decompose_resid,
        cache.stack_head_results,
        cache.get_full_resid_decomposition,
    ):
        with pytest.raises(Unsupported, match="norms the stream itself"):
            made()
    _, cache = run_of("gpt_neox")
    for made in (
        cache.decompose_resid,
        cache.accumulated_resid,
        cache.get_full_resid_decomposition,
    ):
        with pytest.raises(Unsupported, match="read the same stream"):
            made(1, mlp_input=True)
    with pytest.raises(ValueError, match="layer is from 0 to 1"):
        run_of("gpt2")[1].decompose_resid(None, mlp_input=True)


def test_a_users_dict_stays_theirs_and_empty_stacks_have_shapes() -> None:
    model, (_, cache) = model_of("pocket"), run_of("pocket")
    mine = dict(cache.items())
    wrapped = ActivationCache(mine, model)
    assert wrapped.cache_dict is mine
    onto = torch.randn(192, 2)
    assert cache.stack_neuron_results(0, project_output_onto=onto).shape == (0, 2, 7, 2)
    torch.testing.assert_close(cache.get_neuron_results(-1), cache.get_neuron_results(6))
