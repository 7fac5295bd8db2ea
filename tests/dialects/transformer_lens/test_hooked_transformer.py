"""`HookedTransformer` and `TransformerBridge`: hooks, levels, runs and weights, as their users know them."""

from __future__ import annotations

import functools
import pickle
import threading
from functools import cache as once
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.dialects.transformer_lens import (
    HookedEncoder,
    HookedEncoderDecoder,
    HookedTransformer,
    TransformerBridge,
)
from interpose.dialects.transformer_lens.generation import FrequencyPenalty, options_for
from tests.leftovers import hooks_on
from tests.models import tiny

pytestmark = pytest.mark.bits

PROMPT = "When Mary and John went to the store, John gave a drink to"


@once
def pocket() -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing("pocket", device="cpu")


@pytest.fixture
def model() -> Any:
    """A model of its own, so that no test sees another's hooks."""
    before = hooks_on(pocket().module)
    made = HookedTransformer(pocket().module, tokenizer=pocket().tokenizer)
    yield made
    made.reset_hooks(including_permanent=True)
    assert hooks_on(made.module) == before


def double(value: Tensor, hook: Any) -> Tensor:
    return value * 2


# Text.


def test_texts_begin_with_a_bos_token_unless_said_otherwise(model: HookedTransformer) -> None:
    assert model.to_str_tokens("The cat")[0] == "<|endoftext|>"
    assert model.to_tokens("The cat").shape == (
        1,
        model.to_tokens("The cat", prepend_bos=False).shape[1] + 1,
    )
    assert torch.equal(model("The cat"), model(model.to_tokens("The cat")))
    assert not torch.equal(model("The cat")[:, -1], model("The cat", prepend_bos=False)[:, -1])
    model.default_prepend_bos = False
    assert model.to_str_tokens("The cat")[0] == "The"
    model.cfg.default_prepend_bos = True
    assert model.to_str_tokens("The cat")[0] == "<|endoftext|>"
    model.default_prepend_bos = False
    assert model.cfg.default_prepend_bos is False
    bridge = TransformerBridge.boot_transformers("pocket", device="cpu")
    assert bridge.cfg.default_prepend_bos is True
    bridge.cfg.default_prepend_bos = False
    assert bridge.to_str_tokens("The cat")[0] == "The"
    bridge.enable_compatibility_mode()
    assert bridge.to_str_tokens("The cat")[0] == "<|endoftext|>"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_logits(model: HookedTransformer, side: str) -> None:
    texts = ["The capital of France is", "The Eiffel Tower is in the city of"]
    batch = model(texts, padding_side=side)
    for row, text in zip(batch, texts):
        alone = model(text)[0]
        shown = row[-len(alone) :] if side == "left" else row[: len(alone)]
        torch.testing.assert_close(shown, alone, atol=1e-4, rtol=1e-4)


def test_a_key_value_cache_gives_what_the_whole_run_gives(model: HookedTransformer) -> None:
    tokens = model.to_tokens(PROMPT)
    whole = model(tokens)
    first = model.module(tokens[:, :-1], use_cache=True)
    last = model(tokens[:, -1:], past_key_values=first.past_key_values)
    torch.testing.assert_close(last[:, -1], whole[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prepend_bos", [True, False])
def test_tokens_padded_at_the_left_are_masked(model: HookedTransformer, prepend_bos: bool) -> None:
    model.default_padding_side, model.default_prepend_bos = "left", prepend_bos
    texts = ["The capital of France is", "The Eiffel Tower is in the city of"]
    tokens = model.to_tokens(texts)
    for row, text in zip(model(tokens), texts):
        torch.testing.assert_close(row[-1], model(text)[0, -1], atol=1e-4, rtol=1e-4)


def test_a_second_argument_is_what_to_return(model: HookedTransformer) -> None:
    tokens = model.to_tokens(PROMPT)
    loss = model(tokens, "loss")
    assert torch.equal(loss, model(tokens, return_type="loss"))
    assert torch.equal(model.loss_fn(model(tokens), tokens), loss)
    assert model.loss_fn(model(tokens), tokens, per_token=True).shape == (1, tokens.shape[1] - 1)
    assert model.run_with_cache(tokens, "loss")[0].ndim == 0


# Hooks.


def test_hooks_are_attached_reset_permanent_and_prepended(model: HookedTransformer) -> None:
    tokens = model.to_tokens(PROMPT)
    plain = model(tokens)
    order: list[str] = []
    model.add_hook("blocks.0.hook_resid_post", lambda value, hook: order.append("second"))
    model.add_hook(
        "blocks.0.hook_resid_post", lambda value, hook: order.append("first"), prepend=True
    )
    model.add_perma_hook("blocks.1.hook_resid_post", double)
    assert not torch.equal(model(tokens), plain)
    assert order == ["first", "second"]
    listed = model.list_hooks()
    assert set(listed) == {"blocks.0.hook_resid_post", "blocks.1.hook_resid_post"}
    assert [handle.is_permanent for handle in listed["blocks.1.hook_resid_post"]] == [True]
    assert set(model.list_hooks(including_permanent=False)) == {"blocks.0.hook_resid_post"}
    assert set(model.list_hooks("blocks.1.hook_out")) == {"blocks.1.hook_resid_post"}
    model.reset_hooks()
    assert set(model.list_hooks()) == {"blocks.1.hook_resid_post"}
    model.remove_all_hook_fns(including_permanent=True)
    assert torch.equal(model(tokens), plain)


def test_hooks_added_inside_a_context_go_with_it_and_those_outside_stay(
    model: HookedTransformer,
) -> None:
    tokens = model.to_tokens(PROMPT)
    seen: list[str] = []

    def note(where: str) -> Any:
        return lambda value, hook: seen.append(where)

    model.add_hook("blocks.0.hook_resid_pre", note("outside"))
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", note("with"))]) as same:
        assert same is model
        assert model.context_level == 1
        model.add_hook("blocks.0.hook_resid_pre", note("inside"))
        with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", note("nested"))]):
            model(tokens)
            assert sorted(seen) == ["inside", "nested", "outside", "with"]
        seen.clear()
        model(tokens)
        assert sorted(seen) == ["inside", "outside", "with"]
    seen.clear()
    model(tokens)
    assert seen == ["outside"]
    assert model.context_level == 0


def test_hooks_come_off_when_a_hook_raises(model: HookedTransformer) -> None:
    def fail(value: Tensor, hook: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        model.run_with_hooks(PROMPT, fwd_hooks=[("blocks.2.attn.hook_z", fail)])
    with pytest.raises(KeyError, match="mine"), model.hooks(fwd_hooks=[("z", fail)]):
        model(PROMPT)
    assert model.context_level == 0
    assert not model.list_hooks()


def test_hooks_can_be_left_on_the_model(model: HookedTransformer) -> None:
    tokens = model.to_tokens(PROMPT)
    plain = model(tokens)
    hooked = model.run_with_hooks(tokens, fwd_hooks=[("resid_post", double)], reset_hooks_end=False)
    assert torch.equal(model(tokens), hooked)
    model.reset_hooks()
    assert torch.equal(model(tokens), plain)
    with model.hooks(fwd_hooks=[("resid_post", double)], reset_hooks_end=False):
        pass
    assert torch.equal(model(tokens), hooked)


def test_blocks_of_other_threads_take_nothing_away(model: HookedTransformer) -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", lambda value, hook: None)]):
            model(PROMPT)
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    assert model.context_level == 0
    model.add_hook("blocks.1.hook_mlp_out", double)
    leave.set()
    thread.join()
    assert set(model.list_hooks()) == {"blocks.1.hook_mlp_out"}


def test_a_wrong_name_leaves_nothing_behind(model: HookedTransformer) -> None:
    pairs = [("blocks.0.hook_mlp_out", double), ("blocks.0.hook_nothing", double)]
    with pytest.raises(LookupError), model.hooks(fwd_hooks=pairs, reset_hooks_end=False):
        raise AssertionError("the block must not be entered")
    assert not model.list_hooks()


def test_levels_remove_what_was_added_with_them(model: HookedTransformer) -> None:
    model.add_hook("blocks.0.hook_mlp_out", double, level=3)
    model.add_hook("blocks.1.hook_mlp_out", double, level=4)
    model.reset_hooks(level=3)
    assert set(model.list_hooks()) == {"blocks.1.hook_mlp_out"}


def test_contexts_are_kept_until_they_are_cleared(model: HookedTransformer) -> None:
    def remember(value: Tensor, hook: Any) -> None:
        hook.ctx["mean"] = value.mean().item()

    model.run_with_hooks(PROMPT, fwd_hooks=[("blocks.3.hook_out", remember)])
    assert model.hook_dict["blocks.3.hook_resid_post"].ctx["mean"] != 0
    model.run_with_hooks(PROMPT, fwd_hooks=[("blocks.3.hook_out", remember)], clear_contexts=True)
    assert model.hook_dict["blocks.3.hook_resid_post"].ctx == {}


def test_a_veto_stops_a_hook_before_it_is_added(model: HookedTransformer) -> None:
    class Careful(HookedTransformer):
        def check_hooks_to_add(self, hook_point: Any, hook_point_name: str, *args: Any) -> None:
            if hook_point_name.endswith("hook_pattern"):
                raise AssertionError("patterns are off limits")

    careful = Careful(model.module, tokenizer=model.tokenizer)
    careful.add_hook("blocks.0.hook_mlp_out", double)
    with pytest.raises(AssertionError, match="off limits"):
        careful.add_hook(lambda name: "pattern" in name, double)
    with pytest.raises(AssertionError, match="off limits"):
        careful.run_with_hooks(PROMPT, fwd_hooks=[("pattern", double)])
    assert set(careful.list_hooks()) == {"blocks.0.hook_mlp_out"}
    careful.reset_hooks()


def test_the_name_in_a_hook_is_the_one_that_was_asked_for(model: HookedTransformer) -> None:
    names: list[str] = []
    for asked in ("blocks.0.attn.hook_z", "blocks.0.attn.o.hook_in"):
        names.clear()
        model.run_with_hooks(
            PROMPT, fwd_hooks=[(asked, lambda value, hook: names.append(hook.name))]
        )
        assert names == [asked]
        _, cache = model.run_with_cache(PROMPT, names_filter=asked)
        assert set(cache.keys()) == {asked}


def test_partials_may_have_their_parameters_in_any_order(model: HookedTransformer) -> None:
    def ablate(value: Tensor, head: int, hook: Any) -> Tensor:
        assert hook.layer() == 5
        value[:, :, head] = 0
        return value

    cut = model.run_with_hooks(
        PROMPT, fwd_hooks=[("blocks.5.attn.hook_z", functools.partial(ablate, head=2))]
    )
    same = ip.load("pocket", device="cpu").run_with_hooks(
        model.to_tokens(PROMPT), hooks=[ip.zero("z", layer=5, head=2)]
    )
    assert torch.equal(cut, same)


def test_backward_hooks_scale_gradients_also_when_they_return_a_tuple(
    model: HookedTransformer,
) -> None:
    def gradient(*hooks: Any) -> Tensor:
        model.module.zero_grad()
        with model.hooks(bwd_hooks=list(hooks)):
            model(PROMPT, return_type="loss").backward()
        found = model.module.transformer.wte.weight.grad.clone()
        model.module.zero_grad()
        return found

    plain = gradient()
    halved = gradient(("blocks.0.hook_resid_pre", lambda grad, hook: grad * 0.5))
    tupled = gradient(("blocks.0.hook_resid_pre", lambda grad, hook: (grad * 0.5,)))
    assert torch.equal(halved, tupled)
    assert not torch.allclose(halved, plain)
    # What reaches the embedding through the stream is halved; what the unembedding (tied to it) gets is not.
    with_none = gradient(("blocks.0.hook_resid_pre", lambda grad, hook: torch.zeros_like(grad)))
    torch.testing.assert_close(halved - with_none, (plain - with_none) / 2, atol=1e-6, rtol=1e-3)


def test_batch_axes_can_be_taken_off_around_functions(model: HookedTransformer) -> None:
    def cut(value: Tensor, hook: Any) -> Tensor:
        assert value.ndim == 2
        return value * 0.5

    by_hand = model.run_with_hooks(
        PROMPT, fwd_hooks=[("blocks.1.hook_mlp_out", lambda value, hook: value * 0.5)]
    )
    taken = model.run_with_hooks(
        PROMPT, fwd_hooks=[("blocks.1.hook_mlp_out", cut)], remove_batch_dim=True
    )
    assert torch.equal(by_hand, taken)


# Caches.


def test_caching_hooks_fill_a_dict(model: HookedTransformer) -> None:
    cache, forward, backward = model.get_caching_hooks(
        lambda name: name.endswith("hook_z"), incl_bwd=True
    )
    with model.hooks(fwd_hooks=forward, bwd_hooks=backward):
        model(PROMPT, return_type="loss").backward()
    model.module.zero_grad()
    expected = {f"blocks.{layer}.attn.hook_z" for layer in range(7)}
    assert set(cache) == expected | {f"{name}_grad" for name in expected}
    _, kept = model.run_with_cache(PROMPT, names_filter=["z", "resid_pre"])
    assert torch.equal(cache["blocks.2.attn.hook_z"], kept["z", 2])
    standing = model.add_caching_hooks("blocks.2.attn.hook_z", remove_batch_dim=True)
    model(PROMPT)
    assert torch.equal(standing["blocks.2.attn.hook_z"], kept["z", 2][0])
    model.reset_hooks()
    sliced, forward, _ = model.get_caching_hooks(["z", "resid_pre"], pos_slice=-1)
    model.run_with_hooks(PROMPT, fwd_hooks=forward)
    assert torch.equal(sliced["blocks.2.attn.hook_z"], kept["z", 2][:, -1:])
    assert torch.equal(sliced["blocks.2.hook_resid_pre"], kept["resid_pre", 2][:, -1:])


@pytest.mark.parametrize("pos", [-1, (1, 4), (0, 9, 2), [2, 3]])
def test_positions_are_sliced_as_they_are_kept(model: HookedTransformer, pos: Any) -> None:
    _, whole = model.run_with_cache(PROMPT)
    _, some = model.run_with_cache(
        PROMPT, pos_slice=pos, names_filter=["z", "resid_pre", "pattern"]
    )
    index: Any = slice(*pos) if isinstance(pos, tuple) else [pos] if isinstance(pos, int) else pos
    assert torch.equal(some["resid_pre", 3], whole["resid_pre", 3][:, index])
    assert torch.equal(some["z", 3], whole["z", 3][:, index])


def test_gradients_are_kept_beside_values(model: HookedTransformer) -> None:
    loss, cache = model.run_with_cache(
        PROMPT, return_type="loss", incl_bwd=True, names_filter="resid_mid"
    )
    assert loss.ndim == 0
    stream = cache["resid_mid", 3].clone().requires_grad_()
    by_leaf = model.run_with_hooks(
        PROMPT, return_type="loss", fwd_hooks=[("blocks.3.hook_resid_mid", lambda v, hook: stream)]
    )
    (expected,) = torch.autograd.grad(by_leaf, stream)
    assert torch.equal(cache["blocks.3.hook_resid_mid_grad"], expected)
    assert model.module.transformer.wte.weight.grad is None


def test_a_filter_that_matches_nothing_is_an_error(model: HookedTransformer) -> None:
    for nothing in (lambda name: False, "blocks.0.hook_nothing", ["blocks.9.hook_z"]):
        with pytest.raises(LookupError):
            model.run_with_cache(PROMPT, names_filter=nothing)


def test_flags_make_sites_part_of_everything(model: HookedTransformer) -> None:
    _, before = model.run_with_cache(PROMPT)
    model.set_use_attn_result(True)
    model.set_use_split_qkv_input(True)
    model.set_use_attn_in(True)
    model.set_use_hook_mlp_in(True)
    _, after = model.run_with_cache(PROMPT)
    new = {name.split(".", 2)[2] for name in set(after) - set(before)}
    expected = {
        "attn.hook_result",
        "hook_q_input",
        "hook_k_input",
        "hook_v_input",
        "hook_attn_in",
        "hook_mlp_in",
    }
    assert new == expected

    # Each head's own copy of the stream: an edit of one reaches that head's queries and no other's.
    def nudge(value: Tensor, hook: Any) -> None:
        value[:, :, 2] += 1

    _, before = model.run_with_cache(PROMPT, names_filter=["q", "k"])
    _, nudged = model.run_with_cache(
        PROMPT, fwd_hooks=[("blocks.1.hook_q_input", nudge)], names_filter=["q", "k"]
    )
    moved = (nudged["q", 1] != before["q", 1]).any(-1).any(1)[0]
    assert moved.tolist() == [head == 2 for head in range(6)]
    assert torch.equal(nudged["k", 1], before["k", 1])


# Parts of the model.


def test_runs_stop_and_start_at_layers_and_save_the_work(model: HookedTransformer) -> None:
    ran: list[int] = []
    handles = [
        block.mlp.register_forward_hook(lambda *_, n=number: ran.append(n))
        for number, block in enumerate(model.module.transformer.h)
    ]
    model.cfg  # noqa: B018 - found before anything is counted
    tokens = model.to_tokens(PROMPT)
    _, cache = model.run_with_cache(tokens)
    ran.clear()
    stream = model(tokens, stop_at_layer=4)
    assert ran == [0, 1, 2, 3]
    torch.testing.assert_close(stream, cache["resid_pre", 4])
    model(stream, start_at_layer=4)  # the first time it is proven that this model can
    ran.clear()
    logits = model(stream, start_at_layer=4)
    assert ran == [4, 5, 6]
    _, late = model.run_with_cache(stream, start_at_layer=4)
    assert "blocks.4.hook_resid_pre" in late
    assert "blocks.3.hook_resid_post" not in late
    torch.testing.assert_close(logits, model(tokens))
    for handle in handles:
        handle.remove()


def test_weights_circuits_and_scores() -> None:
    model = pocket()
    W_V, W_O, W_Q, W_K = (torch.as_tensor(w) for w in (model.W_V, model.W_O, model.W_Q, model.W_K))
    torch.testing.assert_close(model.OV[3, 2].AB, W_V[3, 2] @ W_O[3, 2])
    torch.testing.assert_close(model.QK[3, 2].AB, W_Q[3, 2] @ W_K[3, 2].T)
    scores = model.all_composition_scores("K")
    assert scores.shape == (7, 6, 7, 6)
    assert (scores[3, :, :4] == 0).all()
    left, right = W_V[1, 0] @ W_O[1, 0], (W_Q[5, 3] @ W_K[5, 3].T).T
    expected = (left @ right).norm() / left.norm() / right.norm()
    torch.testing.assert_close(scores[1, 0, 5, 3], expected, atol=1e-5, rtol=1e-4)
    assert model.all_head_labels()[:2] == ["L0H0", "L0H1"]
    assert model.W_E_pos.shape == (2808 + 256, 192)
    both = torch.as_tensor(model.b_O).sum(0) + torch.as_tensor(model.b_out).sum(0)
    torch.testing.assert_close(model.accumulated_bias(7), both)
    one = torch.as_tensor(model.b_O)[:2].sum(0)
    torch.testing.assert_close(
        model.accumulated_bias(1, mlp_input=True, include_mlp_biases=False), one
    )
    paris = model.to_single_token(" Paris")
    assert torch.equal(
        model.tokens_to_residual_directions(" Paris"), torch.as_tensor(model.W_U)[:, paris]
    )
    assert model.tokens_to_residual_directions(torch.tensor([[1, 2], [3, 4]])).shape == (2, 2, 192)


def test_grouped_queries_have_whole_circuits() -> None:
    model = HookedTransformer(tiny.build("llama", "causal"))
    heads, shared = model.cfg.n_heads, model.cfg.n_key_value_heads
    assert shared < heads
    assert model.OV.shape[:2] == (model.cfg.n_layers, heads)
    of = 1 * shared // heads
    W_V, W_O = torch.as_tensor(model.W_V), torch.as_tensor(model.W_O)
    torch.testing.assert_close(model.OV[0, 1].AB, W_V[0, of] @ W_O[0, 1])
    _, cache = model.run_with_cache(torch.tensor([[1, 2, 3]]))
    assert cache["k", 0].shape[2] == shared


def test_the_config_and_the_parts_have_the_known_names() -> None:
    model = pocket()
    cfg = model.cfg
    assert (cfg.n_layers, cfg.n_heads, cfg.d_model, cfg.d_head, cfg.d_mlp) == (7, 6, 192, 32, 768)
    assert (cfg.d_vocab, cfg.n_ctx, cfg.normalization_type) == (2808, 256, "LN")
    assert cfg.attention_dir == "causal"
    assert cfg.to_dict()["d_vocab"] == 2808
    assert (cfg.dtype, str(cfg.device)) == (torch.float32, "cpu")
    with pytest.raises(AttributeError, match="the config has no 'd_modell'"):
        cfg.d_modell  # noqa: B018
    assert model.blocks[3].attn.W_Q.shape == (6, 192, 32)
    assert torch.equal(
        torch.as_tensor(model.W_O[3, 2]), torch.as_tensor(model.blocks[3].attn.W_O[2])
    )
    assert len(model.hook_points()) == len(model.hook_dict)
    assert "blocks.0.attn.hook_z" in model.mod_dict
    assert "transformer.h.0.attn" in model.mod_dict


def test_a_loaded_model_is_looked_into_and_stays_as_it_is() -> None:
    module = tiny.build("gpt2", "causal")
    keys, kinds = list(module.state_dict()), [type(part) for part in module.modules()]
    model = HookedTransformer.from_pretrained_no_processing("pocket", hf_model=module)
    model.run_with_cache(torch.tensor([[1, 2, 3]]))
    assert model.module is module
    assert list(module.state_dict()) == keys
    assert [type(part) for part in module.modules()] == kinds
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(torch.tensor([[1, 2]])), model(torch.tensor([[1, 2]])))


# The bridge, encoders, generation.


def test_the_bridges_names_resolve_and_its_filters_see_them() -> None:
    bridge = TransformerBridge.boot_transformers("pocket", device="cpu")
    logits, cache = bridge.run_with_cache("The capital of France is")
    assert torch.equal(cache["blocks.0.attn.q.hook_out"], cache["blocks.0.attn.hook_q"])
    assert torch.equal(cache["ln_final.hook_out"], cache["ln_final.hook_normalized"])
    _, some = bridge.run_with_cache(
        "The cat", names_filter=lambda name: name.endswith("attn.o.hook_in")
    )
    assert set(some.keys()) == {f"blocks.{layer}.attn.o.hook_in" for layer in range(7)}
    for end in ("mlp.hook_out", "mlp.in.hook_out"):
        _, some = bridge.run_with_cache(
            "The cat", names_filter=lambda name, end=end: name.endswith(end)
        )
        assert set(some.keys()) == {f"blocks.{layer}.{end}" for layer in range(7)}
    shown: list[str] = []
    bridge.run_with_cache(
        "The cat", names_filter=lambda name: shown.append(name) or name == "hook_embed"
    )
    assert not [
        name for name in shown if "_post.hook" in name or ".gate." in name
    ]  # it has no such parts
    bridge.add_hook("blocks.0.hook_out", hook_fn=double)
    assert not torch.equal(bridge("The capital of France is"), logits)
    bridge.reset_hooks()
    assert bridge.get_hook_point("blocks.0.hook_out").name == "blocks.0.hook_out"
    assert bridge.block_submodules(0) == ["attn", "ln1", "ln2", "mlp"]
    assert bridge.layer_types() == ["attn+mlp"] * 7
    layers, stacked = bridge.stack_params_for("attn", "W_Q")
    assert layers == list(range(7))
    assert torch.equal(stacked, torch.as_tensor(bridge.W_Q))
    assert "attn.hook_z" in bridge.block_hooks(0)


def test_encoders_and_encoder_decoders() -> None:
    bert = HookedEncoder(tiny.build("bert", "masked"))
    tokens = torch.tensor([[3, 4, 5]])
    logits, cache = bert.run_with_cache(tokens)
    torch.testing.assert_close(logits, bert.module(tokens).logits)
    assert "blocks.0.attn.hook_pattern" in cache
    t5 = HookedEncoderDecoder(tiny.build("t5", "encoder_decoder"))
    decoder = torch.tensor([[0, 7]])
    logits = t5(tokens, decoder_input=decoder)
    assert torch.equal(logits, t5.module(input_ids=tokens, decoder_input_ids=decoder).logits)


def test_generation_takes_the_known_words(model: HookedTransformer) -> None:
    greedy = model.generate(
        "The capital of France is", max_new_tokens=3, do_sample=False, verbose=False
    )
    assert greedy.startswith("The capital of France is Paris.")
    assert (
        model.generate("The capital of France is", 3, temperature=0, use_past_kv_cache=False)
        == greedy
    )
    with model.hooks(fwd_hooks=[("blocks.6.hook_resid_post", lambda value, hook: value * 0)]):
        assert model.generate("The capital of France is", 3, do_sample=False) != greedy
    assert isinstance(model.generate("The", 3, return_type="tokens", stop_at_eos=False), Tensor)
    with pytest.raises(NotImplementedError, match=r"model\.record"):
        model.generate("The", return_cache=True)
    assert model.generate(
        "The capital of France is", 5, do_sample=False, stop_strings=["Paris"]
    ).endswith("Paris")
    assert options_for({"temperature": 0.5})["temperature"] == 0.5
    scores = FrequencyPenalty(2.0)(torch.tensor([[1, 1, 3]]), torch.zeros(1, 4))
    assert scores.tolist() == [[0.0, -4.0, 0.0, -2.0]]


def test_text_streams_in_parts_and_enters_the_first_block(model: HookedTransformer) -> None:
    whole = model.generate("The capital of France is", 6, do_sample=False)
    parts = list(model.generate_stream("The capital of France is", 6, 2, do_sample=False))
    streamed = model.to_string(torch.cat(parts, 1)[0])
    assert streamed.replace("<|endoftext|>", "") == whole.replace("<|endoftext|>", "")
    assert model.hf_generate(
        "The capital of France is", max_new_tokens=1, do_sample=False
    ).endswith(" Paris")
    stream, tokens, _, mask = model.input_to_embed("The cat")
    assert mask is None
    torch.testing.assert_close(stream, model.run_with_cache("The cat")[1]["resid_pre", 0])
    assert torch.equal(tokens, model.to_tokens("The cat"))


def test_every_weight_has_its_old_name() -> None:
    weights = pocket().tl_parameters()
    assert {
        "embed.W_E",
        "pos_embed.W_pos",
        "blocks.6.mlp.W_out",
        "ln_final.w",
        "unembed.W_U",
    } <= set(weights)
    assert torch.equal(
        torch.as_tensor(weights["blocks.2.attn.W_Q"]), torch.as_tensor(pocket().W_Q[2])
    )
    assert dict(pocket().tl_named_parameters()).keys() == pocket().get_params().keys()
    assert pocket().n_params_total == 3_702_720
    layers, circuits = pocket().OV_for_attn_layers
    assert layers == list(range(7))
    assert circuits.shape == pocket().QK_for_attn_layers[1].shape
    assert pocket().attn_head_labels == pocket().all_head_labels()
