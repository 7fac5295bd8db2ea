"""What users of TransformerLens write besides. Numbers and shapes are those of TransformerLens 3.5.1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from interpose.dialects.transformer_lens import (
    FactoredMatrix,
    HookedEncoder,
    HookedTransformer,
    HookedTransformerConfig,
    TransformerBridge,
    utils,
)
from interpose.errors import Unsupported
from tests.dialects.transformer_lens.test_padding import TEXTS, assert_near, both, made
from tests.models import texts

# Hooks of a block.


def test_resetting_removes_the_hooks_of_the_block_around() -> None:
    model = made("eos")
    seen: list[int] = []

    def note(value: Tensor, hook: Any) -> None:
        seen.append(1)

    point = model.hook_dict["blocks.0.hook_resid_pre"]
    with model.hooks(fwd_hooks=[(point.name, note)]):
        assert [handle.user_hook for handle in point.fwd_hooks] == [note]
        assert [handle.context_level for handle in point.fwd_hooks] == [1]
        assert point.has_hooks()
        model(TEXTS)
        model.reset_hooks()
        assert point.fwd_hooks == []
        model(TEXTS)
    assert seen == [1]
    with model.hooks(fwd_hooks=[(lambda name: name.endswith("hook_z"), note)]):
        assert sum(len(each.fwd_hooks) for each in model.hook_dict.values()) == 2
        model.blocks[0].attn.hook_z.remove_hooks()
        model(TEXTS)
    assert seen == [1]
    assert not point.has_hooks()


def test_hooks_by_place_are_heard_at_scores_and_without_a_batch() -> None:
    model = made("eos")
    name = "blocks.0.attn.hook_attn_scores"
    seen: list[int] = []

    def by_place(value: Tensor, point: Any) -> None:
        seen.append(value.ndim)

    model.run_with_hooks(TEXTS[0], fwd_hooks=[(name, by_place)])
    model.run_with_hooks(TEXTS[0], fwd_hooks=[(name, by_place)], remove_batch_dim=True)
    assert seen == [4, 3]


def test_scratch_space_may_be_replaced() -> None:
    model = made("eos")
    point = model.hook_dict["hook_embed"]
    point.ctx = {"a": 1}
    model.hook_embed.ctx["b"] = 2
    assert model.hook_dict["hook_embed"].ctx == {"a": 1, "b": 2}


def test_a_run_that_stops_keeps_nothing_of_the_layer_it_stops_at() -> None:
    model = made("eos")
    for stop in (1, -1):
        _, cache = model.run_with_cache(TEXTS, stop_at_layer=stop)
        assert not [name for name in cache if name.startswith("blocks.1") or "final" in name]
        assert len(cache) == 19
    named = model.run_with_cache(TEXTS, stop_at_layer=1, names_filter=["blocks.1.hook_resid_pre"])
    assert torch.equal(named[0], named[1]["resid_pre", 1])


# Names.


def test_parts_are_found_by_path_too() -> None:
    model = made("eos")
    zero = "0"
    assert getattr(model.blocks, zero) == model.blocks[0]
    assert utils.get_nested_attr(model, "blocks.0.attn.hook_z").name == "blocks.0.attn.hook_z"
    assert model.ln_final.name == "ln_final"
    with pytest.raises(AttributeError, match="a list of blocks and has no 'attn'"):
        model.blocks.attn  # noqa: B018 - asked for
    bridge = TransformerBridge(model.module, model.tokenizer)
    assert bridge.original_model is model.module
    _, cache = bridge.run_with_cache(TEXTS, names_filter="blocks.0.attn.hook_z")
    point = bridge.blocks[0].attn.o.hook_in
    seen: list[Tensor] = []
    bridge.run_with_hooks(TEXTS, fwd_hooks=[(point.name, lambda v, hook: seen.append(v))])
    torch.testing.assert_close(seen[0], cache["z", 0])


@both
def test_positions_are_embedded_by_calling(which: str) -> None:
    model = made(which, default_padding_side="left")
    tokens = model.to_tokens(TEXTS)
    assert_near(model.pos_embed(tokens, 2)[1, 0, :3], [0.3967, -0.6533, 0.8072])
    mask = utils.get_attention_mask(model.tokenizer, tokens, True)
    embedded = model.pos_embed(tokens, attention_mask=mask)
    assert_near(embedded[0, :, 0], [0.0, 0.0, 0.0, 0.0, 0.7155, -0.3683, 0.3967])
    stream = model.embed(tokens) + embedded
    torch.testing.assert_close(stream[1], model.run_with_cache(TEXTS)[1]["resid_pre", 0][1])
    assert torch.equal(model.pos_embed.W_pos, model.W_pos)


def test_a_layer_without_a_part_is_a_name() -> None:
    _, cache = made("eos").run_with_cache(TEXTS)
    assert torch.equal(cache["k", -1, None], cache["k", 1])


def test_words_of_signatures() -> None:
    model = made("eos")
    assert model.to_str_tokens(TEXTS[0], padding_side="left") == ["<|endoftext|>", "the", " cat"]
    assert model.get_token_position(" cat", TEXTS[0], padding_side="left") == 2
    assert model.to_single_str_token(int_token=5) == "h"
    assert model.cfg.n_params == 24576
    stream = model.input_to_embed(TEXTS)[0]
    assert model(stream, start_at_layer=0, shortformer_pos_embed=None).shape == (2, 7, 99)


# Generation.


def test_streams_are_tokens_with_the_prompt_first() -> None:
    model = made("eos")
    options = {"do_sample": False, "verbose": False, "stop_at_eos": False}
    for given in (TEXTS[0], model.to_tokens(TEXTS[0])):
        parts = model.generate_stream(given, 5, max_tokens_per_yield=2, **options)
        assert [part.tolist() for part in parts] == [[[48, 19, 24, 24]], [[5, 16]], [[16, 16]]]


def test_embeddings_are_gone_on_from() -> None:
    model = made("eos")
    given = model.embed(model.to_tokens(TEXTS[0]))
    options = {"max_new_tokens": 3, "do_sample": False, "stop_at_eos": False}
    tokens = model.generate(given, return_type="tokens", **options)
    longer = model.generate(given, **options)
    assert longer.shape == (1, 6, 32)
    assert torch.equal(longer[:, :3], given)
    assert torch.equal(longer[:, 3:], model.embed(tokens))
    assert tokens.tolist() == model.generate(model.to_tokens(TEXTS[0]), **options)[:, 3:].tolist()


# Numbers.


@both
def test_parts_are_projected_behind_a_norm(which: str) -> None:
    model = made(which)
    _, cache = model.run_with_cache(TEXTS)
    for onto in (model.W_U[:, 5], model.W_U[:, 5:8]):
        for layer, neuron_options in ((2, {"pos_slice": -1}), (1, {"incl_remainder": True})):
            plain = cache.stack_neuron_results(layer, apply_ln=True, **neuron_options)
            found = cache.stack_neuron_results(
                layer, apply_ln=True, project_output_onto=onto, **neuron_options
            )
            torch.testing.assert_close(found, plain @ onto, atol=1e-4, rtol=1e-4)
        whole = cache.get_full_resid_decomposition(apply_ln=True, expand_neurons=False)
        found = cache.get_full_resid_decomposition(
            apply_ln=True, expand_neurons=False, project_output_onto=onto
        )
        torch.testing.assert_close(found, whole @ onto, atol=1e-4, rtol=1e-4)


def test_products_of_factored_matrices_keep_the_smallest_middle() -> None:
    A, B = torch.arange(12.0).reshape(3, 4), torch.ones(4, 3)
    product = FactoredMatrix(A, B) @ FactoredMatrix(torch.ones(3, 5), torch.ones(5, 2))
    assert product.mdim == 3
    assert product.AB.tolist() == [[90.0, 90.0], [330.0, 330.0], [570.0, 570.0]]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("kaiming_uniform", [-0.0075, 0.5364, -0.823, -0.7359]),
        ("kaiming_normal", [-0.65, -0.6653, -0.1447, -0.2505]),
        ("xavier_uniform", [-0.0058, 0.4155, -0.6375, -0.5701]),
        ("xavier_normal", [-0.5035, -0.5154, -0.1121, -0.194]),
    ],
)
def test_initial_weights_are_drawn_as_there(name: str, row: list[float]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        weight = getattr(utils, f"init_{name}_")(torch.empty(6, 4))
        flat = getattr(utils, f"init_{name}_")(torch.empty(4096))
    assert_near(weight[0], row)
    wide = {"kaiming": 2.0, "xavier": 2 / 4097}[name.split("_")[0]]  # one feature goes in
    assert abs(flat.var() / wide - 1) < 0.1
    with pytest.raises(ValueError, match="mode is 'fan_in' or 'fan_out'"):
        utils.init_kaiming_uniform_(torch.empty(6, 4), mode="in")


def test_configs_have_the_newer_fields_and_late_sizes() -> None:
    sizes: dict[str, Any] = {"n_layers": 1, "d_model": 8, "n_ctx": 5, "d_head": 4, "act_fn": "gelu"}
    cfg = HookedTransformerConfig(**sizes, attention_dir="bidirectional", norm_topk_prob=False)
    cfg.d_vocab = 7
    assert HookedEncoder(cfg).W_E.shape == (7, 8)
    assert HookedEncoder(cfg).W_U.shape == (8, 7)
    with pytest.raises(Unsupported, match="use_yarn_rope: models from scratch have no positions"):
        HookedTransformerConfig(**sizes, d_vocab=7, use_yarn_rope=True)
    tokenizer = texts.like_gpt2()
    late = HookedTransformer(HookedTransformerConfig(**sizes), tokenizer)
    assert late.cfg.d_vocab == len(tokenizer) == late.W_U.shape[1]


@both
def test_generation_gives_logits_and_the_tokens_it_went_on_from(which: str) -> None:
    model = made(which)
    options = {"max_new_tokens": 3, "do_sample": False, "verbose": False, "stop_at_eos": False}
    plain = model.generate(TEXTS[0], return_type="tokens", **options)
    found = model.generate(TEXTS[0], output_logits=True, **options)
    assert torch.equal(found.sequences, plain)
    assert len(found.logits) == 3
    behind = model(plain)[:, -4:-1]
    torch.testing.assert_close(torch.stack(found.logits, 1), behind, atol=1e-4, rtol=1e-4)
    embeds = model.generate(TEXTS[0], return_type="embeds", **options)
    assert torch.equal(embeds, model.embed(plain))
    written, given = model.generate(TEXTS[0], return_input_tokens=True, **options)
    assert isinstance(written, str)
    assert torch.equal(given, model.to_tokens(TEXTS[0]))
    _, given = model.generate(TEXTS[0], return_input_tokens=True, prepend_bos=False, **options)
    assert torch.equal(given, model.to_tokens(TEXTS[0], prepend_bos=False))

    def after_one(tokens: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(tokens),), tokens.shape[1] > given.shape[1] + 1, dtype=torch.bool)

    for criteria in (after_one, [after_one]):
        stopped = model.generate(given, stopping_criteria=criteria, return_type="tokens", **options)
        assert stopped.shape[1] == given.shape[1] + 2


def test_heads_are_labelled_as_each_class_labels_them() -> None:
    module = made("eos").module
    labels = ["L0H0", "L0H1", "L0H2", "L0H3", "L1H0", "L1H1", "L1H2", "L1H3"]
    assert HookedTransformer(module).all_head_labels() == labels
    assert TransformerBridge(module).all_head_labels == labels


def test_inputs_of_heads_have_the_names_of_the_bridge_too() -> None:
    model = made("eos")
    names = [f"blocks.1.attn.hook_{role}_input" for role in "qkv"]
    _, cache = model.run_with_cache(TEXTS[0], names_filter=names)
    for name in names:
        plain = name.replace("attn.", "")
        _, under = model.run_with_cache(TEXTS[0], names_filter=plain)
        assert cache[name].shape[2:] == (4, 32)
        assert torch.equal(cache[name], under[plain])
