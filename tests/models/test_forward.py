"""What a call of a model means: inputs, outputs, losses, and parts of a run."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import interpose as ip
from interpose.models.running.forward import Output
from interpose.models.transformer import TransformerModel
from tests.bounds import assert_near
from tests.leftovers import hooks_on, same_state, state_of
from tests.models import tiny
from tests.models.texts import TEXTS, speaking, tokenizer

pytestmark = pytest.mark.bits


@pytest.fixture(scope="module")
def llama() -> Any:
    return speaking("llama", layers=3)


@pytest.fixture(scope="module")
def tokens(llama: Any) -> Tensor:
    return llama.to_tokens(TEXTS[1])


# What goes in.


@torch.no_grad()
def test_text_and_tokens_give_the_modules_own_logits(llama: Any, tokens: Tensor) -> None:
    expected = llama.module(input_ids=tokens).logits
    for given in (TEXTS[1], [TEXTS[1]], tokens, tokens[0], tokens[0].tolist(), tokens.int()):
        assert torch.equal(llama(given), expected)
    batch = torch.cat([tokens, tokens])
    assert torch.equal(llama(batch), llama.module(input_ids=batch).logits)
    with_bos = llama(TEXTS[1], prepend_bos=True)
    assert torch.equal(with_bos, llama(llama.to_tokens(TEXTS[1], prepend_bos=True)))


@torch.no_grad()
def test_floats_are_embeddings(llama: Any, tokens: Tensor) -> None:
    embedded = llama.module.get_input_embeddings()(tokens)
    assert torch.equal(llama(embedded), llama(tokens))


@torch.no_grad()
def test_keywords_and_mappings_go_to_transformers_and_its_output_comes_back(
    llama: Any, tokens: Tensor
) -> None:
    expected = llama.module(input_ids=tokens)
    encoded = llama.tokenizer(TEXTS[1], return_tensors="pt", return_token_type_ids=False)
    encoded = encoded.to(llama.device)
    calls = [
        llama(input_ids=tokens),
        llama({"input_ids": tokens}),
        llama(encoded),
        llama(**encoded),
    ]
    for output in calls:
        assert type(output) is type(expected)
        assert output.keys() == expected.keys()
        assert torch.equal(output.logits, expected.logits)
    assert torch.equal(llama(encoded, return_type="logits"), expected.logits)
    assert isinstance(llama(input_ids=tokens, return_dict=False), tuple)


@torch.no_grad()
def test_labels_are_transformers_business(llama: Any, tokens: Tensor) -> None:
    expected = llama.module(input_ids=tokens, labels=tokens)
    output = llama(tokens, labels=tokens)
    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(llama(tokens, labels=tokens, return_type="loss"), expected.loss)
    assert torch.equal(llama(tokens, labels=tokens, return_type="logits"), expected.logits)
    with pytest.raises(ValueError, match="with labels the loss is the module's own, one number"):
        llama(tokens, labels=tokens, return_type="loss", loss_per_token=True)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_tokens_give_what_the_texts_give(llama: Any, side: str) -> None:
    batch = llama.to_tokens(TEXTS, padding_side=side)
    expected = llama(TEXTS, padding_side=side)
    assert torch.equal(llama(batch), expected)  # the pad token says what is padding
    mask = llama.mask_of(batch)
    assert torch.equal(llama(batch, attention_mask=mask), expected)
    assert torch.equal(llama(batch, attention_mask=mask.tolist()), expected)
    embedded = llama.module.get_input_embeddings()(batch)
    assert torch.equal(llama(embedded, attention_mask=mask), expected)
    unknown = TransformerModel(llama.module, tokenizer(pad=False))
    assert torch.equal(unknown(batch, attention_mask=mask), expected)
    everything = torch.ones_like(batch)
    ignored = llama(batch, attention_mask=everything)
    assert torch.equal(ignored, llama.module(input_ids=batch).logits)
    assert torch.equal(unknown(batch), expected)  # it came from to_tokens, whoever asks
    assert torch.equal(unknown(batch.clone()), ignored)
    assert not torch.equal(ignored, expected)


def test_a_text_brings_its_own_mask(llama: Any) -> None:
    with pytest.raises(TypeError, match="a text brings its own mask; give tokens with attention"):
        llama("the cat", attention_mask=torch.ones(1, 2))


@torch.no_grad()
def test_a_kv_cache_of_the_users_goes_on(llama: Any, tokens: Tensor) -> None:
    expected = llama(tokens)
    cache = DynamicCache()
    first = llama(tokens[:, :4], past_key_values=cache)
    mask = torch.ones_like(tokens)
    rest = llama(tokens[:, 4:], past_key_values=cache, attention_mask=mask)
    torch.testing.assert_close(torch.cat([first, rest], 1), expected)


@torch.no_grad()
def test_models_without_logits_give_their_first_tensor() -> None:
    bert = speaking("bert", "masked")
    bare = TransformerModel(bert.module.bert, tokenizer())
    tokens = bare.to_tokens("the cat")
    assert torch.equal(bare("the cat"), bare.module(input_ids=tokens).last_hidden_state)
    assert torch.equal(bert("the cat"), bert.module(input_ids=tokens).logits)
    vision = TransformerModel(tiny.build("vit", "vision"))
    pixels = tiny.inputs(vision.module)["pixel_values"]
    assert torch.equal(vision(pixels), vision.module(pixel_values=pixels).last_hidden_state)


@torch.no_grad()
def test_an_encoder_decoder_takes_the_encoders_input() -> None:
    model = speaking("t5", "encoder_decoder")
    tokens = model.to_tokens("the cat sat")
    assert torch.equal(  # the config names no start: padding is T5's
        model(tokens), model.module(input_ids=tokens, decoder_input_ids=torch.tensor([[0]])).logits
    )
    start = model.config.decoder_start_token_id = 3
    one = torch.full((1, 1), start)
    expected = model.module(input_ids=tokens, decoder_input_ids=one).logits
    assert torch.equal(model("the cat sat"), expected)
    assert model(TEXTS).shape == (3, 1, 99)
    target = torch.tensor([[start, 5, 6]])
    expected = model.module(input_ids=tokens, decoder_input_ids=target).logits
    assert torch.equal(model(tokens, decoder_input_ids=target), expected)
    loss = model(tokens, decoder_input_ids=target, return_type="loss")
    by_hand = torch.nn.functional.cross_entropy(expected[0, :-1], target[0, 1:])
    torch.testing.assert_close(loss, by_hand)
    with pytest.raises(ValueError, match="a loss of next tokens needs at least two, and logits"):
        model(tokens, return_type="loss")
    output = model("the cat sat", labels=target)
    assert torch.equal(output.loss, model.module(input_ids=tokens, labels=target).loss)
    whisper = TransformerModel(tiny.build("whisper", "encoder_decoder"))
    sound = tiny.inputs(whisper.module)["input_features"]
    assert whisper(sound).shape[:2] == (2, 1)


def test_misspelt_arguments_are_not_swallowed(llama: Any, tokens: Tensor) -> None:
    with pytest.raises(TypeError, match="no argument 'return_typ'; did you mean 'return_type'"):
        llama(tokens, return_typ="loss")
    with pytest.raises(
        ValueError, match="return_type is 'logits', 'loss', 'both' or None; got 'l'"
    ):
        llama(tokens, return_type="l")


# Losses.


def losses_by_hand(logits: Tensor, tokens: Tensor) -> list[Tensor]:
    found = []
    for place in range(len(tokens) - 1):
        row = logits[place].double()
        found.append(row.exp().sum().log() - row[tokens[place + 1]])
    return found


@torch.no_grad()
def test_the_loss_is_that_of_next_tokens(llama: Any, tokens: Tensor) -> None:
    expected = torch.stack(losses_by_hand(llama(tokens)[0], tokens[0]))
    close = {"check_dtype": False, "rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(llama(tokens, return_type="loss"), expected.mean(), **close)
    each = llama(tokens, return_type="loss", loss_per_token=True)
    assert each.shape == (1, tokens.shape[1] - 1)
    torch.testing.assert_close(each[0], expected, **close)
    own = llama.module(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(llama(tokens, return_type="loss"), own)
    assert torch.equal(
        llama(input_ids=tokens, return_type="loss"), llama(tokens, return_type="loss")
    )


@pytest.mark.parametrize("options", [{}, {"return_type": "logits"}, {"return_type": None}])
def test_a_loss_per_token_without_a_loss_is_refused_before_anything_runs(
    llama: Any, tokens: Tensor, options: dict[str, Any]
) -> None:
    refused = "^loss_per_token goes with return_type='loss' or 'both'.$"
    for given in (tokens, {"input_ids": tokens}):
        with counted(llama) as ran, pytest.raises(ValueError, match=refused):
            llama(given, loss_per_token=True, **options)
        assert not ran


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_has_no_part_in_the_loss(llama: Any, side: str) -> None:
    alone = [llama(text, return_type="loss", loss_per_token=True)[0] for text in TEXTS]
    both = llama(TEXTS, return_type="both", padding_side=side)
    assert isinstance(both, Output)
    assert torch.equal(both.logits, llama(TEXTS, padding_side=side))
    torch.testing.assert_close(both.loss, torch.cat(alone).mean())
    each = llama(TEXTS, return_type="loss", loss_per_token=True, padding_side=side)
    for row, expected in zip(each, alone):
        filled = row.shape[0] - len(expected)
        text, rest = (
            (row[filled:], row[:filled]) if side == "left" else row.split([len(expected), filled])
        )
        torch.testing.assert_close(text, expected)
        assert not rest.any()
    naive = torch.nn.functional.cross_entropy(
        both.logits[:, :-1].transpose(1, 2), llama.to_tokens(TEXTS, padding_side=side)[:, 1:]
    )
    assert abs(naive - both.loss) > 0.05


def test_the_loss_has_gradients(llama: Any, tokens: Tensor) -> None:
    weight = llama.module.lm_head.weight
    (ours,) = torch.autograd.grad(llama(tokens, return_type="loss"), weight)
    (own,) = torch.autograd.grad(llama.module(input_ids=tokens, labels=tokens).loss, weight)
    torch.testing.assert_close(ours, own)
    _, cache = llama.run_with_cache(
        tokens, return_type="loss", incl_bwd=True, names_filter="blocks.1.hook_resid_pre"
    )
    assert cache["blocks.1.hook_resid_pre_grad"].abs().sum() > 0


def test_a_loss_that_means_nothing_is_refused(llama: Any, tokens: Tensor) -> None:
    bert = speaking("bert", "masked")
    with pytest.raises(ip.Unsupported) as error:
        bert("the cat", return_type="loss")
    assert str(error.value) == (
        "the loss is that of next tokens, and BertForMaskedLM predicts none. Give labels=... for "
        "the loss that transformers has for it."
    )
    embedded = llama.module.get_input_embeddings()(tokens)
    with pytest.raises(ValueError, match="a loss needs the tokens, and this run has none: give in"):
        llama(embedded, return_type="loss")
    with pytest.raises(ValueError, match="a loss of next tokens needs at least two"):
        llama(tokens[:, :1], return_type="loss")
    with pytest.raises(
        ValueError, match="a loss of next tokens needs at least two, and logits for"
    ):
        llama(tokens, logits_to_keep=1, return_type="loss")


def test_none_runs_for_the_hooks(llama: Any, tokens: Tensor) -> None:
    seen = []
    hooks = [("blocks.2.hook_resid_post", lambda value, hook: seen.append(value.shape))]
    assert llama.run_with_hooks(tokens, return_type=None, fwd_hooks=hooks) is None
    assert seen == [(1, tokens.shape[1], 32)]


# Parts of a run.

# Scores and pattern would make attention leave its kernel, and round otherwise.
STREAM = ["blocks.*.hook_resid_*", "blocks.*.attn.hook_z"]
PARTS = [
    "gpt2",
    "llama",
    "mistral",
    "opt",
    "bloom",  # blocks return tuples
    "falcon",  # tuples, attention beside the MLP
    "gptj",
    "gpt_neox",
    "phi",
    "gemma2",
    "qwen3_moe",
    "mamba",
    "rwkv",
    "xlnet",  # [pos, batch, d_model]
]


@contextmanager
def counted(model: Any) -> Iterator[Counter[int]]:
    """How often each block really ran, by the calls of what is in it."""
    found: Counter[int] = Counter()
    handles = []
    for block in model.anatomy.towers[-1].blocks:
        inside = next(part for part in block.module.children())

        def count(module: Any, args: Any, output: Any, index: int = block.index) -> None:
            found[index] += 1

        handles.append(inside.register_forward_hook(count))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def residual_at(cache: Any, layer: int, count: int) -> Tensor:
    last = layer == count
    name = f"blocks.{count - 1}.hook_resid_post" if last else f"blocks.{layer}.hook_resid_pre"
    found: Tensor = cache[name]
    return found


@pytest.mark.parametrize("name", PARTS)
@torch.no_grad()
def test_a_part_of_a_run_is_the_whole_run_without_the_rest(name: str) -> None:
    model = speaking(name, layers=3)
    side = "right" if name == "rwkv" else "left"
    expected, cache = model.run_with_cache(TEXTS, padding_side=side, names_filter=STREAM[:1])
    given = model.prepare(TEXTS, padding_side=side)
    mask = given["attention_mask"]
    count = len(model.anatomy.towers[0].blocks)
    before = hooks_on(model.module)
    for layer in range(count + 1):
        residual = residual_at(cache, layer, count)
        model(residual, start_at_layer=layer, attention_mask=mask)  # the proof is in the first
        with counted(model) as ran:
            stopped = model(TEXTS, padding_side=side, stop_at_layer=layer)
        assert torch.equal(stopped, residual)
        assert set(ran) == set(range(layer))
        with counted(model) as ran:
            model(
                residual, start_at_layer=layer, attention_mask=mask
            )  # proven again, for hooks are new
            ran.clear()
            output = model(residual, start_at_layer=layer, attention_mask=mask)
        assert_near(output, expected)  # a copy of the residual lies elsewhere: kernels look at that
        assert set(ran) == set(range(layer, count))
    assert hooks_on(model.module) == before


@torch.no_grad()
def test_layers_count_from_the_end_too(llama: Any, tokens: Tensor) -> None:
    expected, cache = llama.run_with_cache(tokens, names_filter=STREAM)
    assert torch.equal(llama(tokens, stop_at_layer=-1), cache["blocks.2.hook_resid_pre"])
    assert_near(llama(cache["blocks.2.hook_resid_pre"], start_at_layer=-1), expected)
    for argument in ("start_at_layer", "stop_at_layer"):
        for layer in (4, -4):
            with pytest.raises(IndexError) as error:
                llama(cache["blocks.2.hook_resid_pre"], **{"start_at_layer": 1} | {argument: layer})
            assert str(error.value) == f"{argument}={layer}: this model has blocks 0 to 2."


@torch.no_grad()
def test_from_one_block_to_another(llama: Any, tokens: Tensor) -> None:
    _, cache = llama.run_with_cache(tokens, names_filter=STREAM)
    llama(cache["blocks.1.hook_resid_pre"], start_at_layer=1)  # the proof is in the first
    with counted(llama) as ran:
        llama(cache["blocks.1.hook_resid_pre"], start_at_layer=1)  # proven again, for hooks are new
        ran.clear()
        residual = llama(cache["blocks.1.hook_resid_pre"], start_at_layer=1, stop_at_layer=2)
    assert set(ran) == {1}
    assert_near(residual, cache["blocks.2.hook_resid_pre"])
    same = llama(cache["blocks.1.hook_resid_pre"], start_at_layer=1, stop_at_layer=1)
    assert torch.equal(same, cache["blocks.1.hook_resid_pre"])
    with pytest.raises(ValueError, match="stop_at_layer=1 comes before start_at_layer=2"):
        llama(residual, start_at_layer=2, stop_at_layer=1)


@torch.no_grad()
def test_keywords_can_stop_too(llama: Any, tokens: Tensor) -> None:
    residual = llama(input_ids=tokens, stop_at_layer=1)
    assert torch.equal(residual, llama(tokens, stop_at_layer=1))


def test_hooks_fire_in_the_blocks_that_run_and_only_there(llama: Any, tokens: Tensor) -> None:
    def double(value: Tensor, hook: Any) -> Tensor:
        return value * 2

    edits = [("blocks.1.hook_resid_pre", double), ("blocks.2.attn.hook_z", double)]
    with torch.no_grad():
        _, clean = llama.run_with_cache(tokens, names_filter=STREAM)
        expected, cache = llama.run_with_cache(
            tokens, fwd_hooks=edits, names_filter=[*STREAM, "*embed"]
        )
        residual = clean["blocks.1.hook_resid_pre"]
        kept = residual.clone()
        output, part = llama.run_with_cache(
            residual, start_at_layer=1, fwd_hooks=edits, names_filter=[*STREAM, "*embed"]
        )
        assert_near(output, expected)
        assert torch.equal(residual, kept)
        names = {name for name in cache if "blocks.0." not in name and name != "hook_embed"}
        assert len(names) == len(cache) - 5
        assert set(part) == names
        for name in names:
            assert_near(part[name], cache[name])
        with llama.hooks(fwd_hooks=edits):
            assert_near(llama(residual, start_at_layer=1), expected)
        stopped, part = llama.run_with_cache(
            tokens, stop_at_layer=1, fwd_hooks=edits, names_filter=STREAM
        )
    assert torch.equal(stopped, 2 * residual)  # what block 1 would have got
    assert "blocks.0.hook_resid_post" in part
    assert "blocks.1.hook_resid_mid" not in part


def test_the_models_own_hooks_are_silent_before_the_start(llama: Any, tokens: Tensor) -> None:
    _, cache = llama.run_with_cache(tokens, names_filter=STREAM)
    heard: list[str] = []
    handle = llama.add_hook("blocks.*.hook_resid_pre", lambda value, hook: heard.append(hook.name))
    llama(cache["blocks.1.hook_resid_pre"], start_at_layer=1)
    handle.remove()
    assert heard == ["blocks.1.hook_resid_pre", "blocks.2.hook_resid_pre"]


def test_a_hook_before_the_start_is_an_error(llama: Any, tokens: Tensor) -> None:
    _, cache = llama.run_with_cache(tokens, names_filter=STREAM)
    residual = cache["blocks.1.hook_resid_pre"]
    for name in ("blocks.0.attn.hook_z", "blocks.0.attn.hook_pattern", "hook_embed"):
        with pytest.raises(ip.NeverFired) as error:
            llama.run_with_cache(residual, start_at_layer=1, names_filter=[name])
        assert str(error.value) == (
            f"the cache at {name!r} cannot fire: with start_at_layer=1 nothing before block 1 is "
            "computed."
        )
    scope = llama.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", lambda value, hook: None)])
    with pytest.raises(ip.NeverFired, match=r"at 'blocks\.0\.hook_mlp_out' never fired"), scope:
        llama(residual, start_at_layer=1)


def test_gradients_reach_the_residual_that_was_given(llama: Any, tokens: Tensor) -> None:
    _, cache = llama.run_with_cache(
        tokens, incl_bwd=lambda out: out.square().sum(), names_filter="blocks.1.hook_resid_pre"
    )
    residual = cache["blocks.1.hook_resid_pre"].clone().requires_grad_()
    llama(residual, start_at_layer=1).square().sum().backward()
    assert_near(residual.grad, cache["blocks.1.hook_resid_pre_grad"])
    assert llama(tokens, stop_at_layer=2).requires_grad
    llama.module.zero_grad()


@torch.no_grad()
def test_a_loss_after_a_start_needs_the_tokens(llama: Any, tokens: Tensor) -> None:
    expected, cache = llama.run_with_cache(tokens, return_type="loss", names_filter=STREAM)
    residual = cache["blocks.1.hook_resid_pre"]
    with pytest.raises(ValueError, match="a loss needs the tokens, and this run has none: give in"):
        llama(residual, start_at_layer=1, return_type="loss")
    loss = llama(residual, start_at_layer=1, return_type="loss", input_ids=tokens)
    assert_near(loss, expected, llama(tokens))
    assert llama(residual, start_at_layer=1, return_type=None) is None


def test_a_residual_of_the_wrong_kind_is_refused(llama: Any, tokens: Tensor) -> None:
    for wrong, kind in (
        (tokens, "torch.int64 of shape .1, 11."),
        ("the cat", "str"),
        (None, "NoneType"),
    ):
        with pytest.raises(TypeError, match=f"start_at_layer takes the residual .* got {kind}"):
            llama(wrong, start_at_layer=1)
    with pytest.raises(ip.EditShapeError) as error:
        llama(torch.zeros(1, 4, 16), start_at_layer=1)
    assert str(error.value) == (
        "start_at_layer=1 was given torch.float32 of shape (1, 4, 16); 'blocks.1.hook_resid_pre' is "
        "torch.float32 of shape (1, 4, 32)."
    )
    with pytest.raises(ip.EditShapeError, match=r"is \[batch, pos, d_model\]; got \(4, 32\)"):
        llama(torch.zeros(4, 32), start_at_layer=1)


@torch.no_grad()
def test_a_start_that_would_be_wrong_is_refused_with_the_reason() -> None:
    model = speaking("gemma3n_text")
    tokens = model.to_tokens("the cat sat")
    _, cache = model.run_with_cache(tokens, names_filter="blocks.*.hook_resid_pre")
    assert torch.equal(model(tokens, stop_at_layer=1), cache["blocks.1.hook_resid_pre"])
    before = state_of(model.module)
    with pytest.raises(ip.Unsupported) as error:
        model(cache["blocks.1.hook_resid_pre"], start_at_layer=1)
    assert str(error.value) == (
        "Gemma3nForCausalLM cannot start at block 1 with the residual alone: blocks also take "
        "'per_layer_input', 'shared_kv_states', which depend on the tokens or on earlier blocks "
        "(KeyError: 0).\n  It may work with the tokens of the run: give input_ids=... too."
    )
    assert same_state(before, state_of(model.module))


@pytest.mark.parametrize(("name", "layer"), [("deepseek_v4", 0), ("gemma3n_text", 0), ("zamba", 1)])
@torch.no_grad()
def test_some_starts_need_the_tokens_too(name: str, layer: int) -> None:
    model = speaking(name)
    tokens = model.to_tokens("the cat sat")
    expected, cache = model.run_with_cache(tokens, names_filter="blocks.*.hook_resid_pre")
    residual = cache[f"blocks.{layer}.hook_resid_pre"]
    with pytest.raises(ip.Unsupported, match="It may work with the tokens of the run"):
        model(residual, start_at_layer=layer)
    assert_near(model(residual, start_at_layer=layer, input_ids=tokens), expected)


@torch.no_grad()
def test_pixels_are_asked_for() -> None:
    model = TransformerModel(tiny.build("vit", "vision", layers=3))
    pixels = tiny.inputs(model.module)["pixel_values"]
    expected, cache = model.run_with_cache(pixels, names_filter="blocks.*.hook_resid_pre")
    residual = cache["blocks.1.hook_resid_pre"]
    assert torch.equal(model(pixels, stop_at_layer=1), residual)
    assert_near(model(residual, start_at_layer=1, pixel_values=pixels), expected)
    with pytest.raises(TypeError, match="also needs what this model begins with: pixel_values="):
        model(residual, start_at_layer=1)


def test_two_stacks_have_no_common_count() -> None:
    model = speaking("t5", "encoder_decoder")
    with pytest.raises(ip.Unsupported) as error:
        model("the cat", stop_at_layer=1)
    assert str(error.value) == (
        "stop_at_layer counts the blocks of one stack; T5ForConditionalGeneration has encoder.blocks, "
        "decoder.blocks.\n  To stop early, name what you want: "
        "model.run_with_cache(..., names_filter=[...], stop=True)"
    )


def test_a_kv_cache_is_not_left_half_filled(llama: Any, tokens: Tensor) -> None:
    with pytest.raises(ip.Unsupported, match="would leave your past_key_values half filled"):
        llama(tokens, stop_at_layer=1, past_key_values=DynamicCache())


def test_no_start_under_gradient_checkpointing() -> None:
    model = speaking("llama")
    residual = model("the cat", stop_at_layer=1).detach()
    model.module.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(ip.Unsupported, match="start_at_layer under gradient checkpointing: the"):
        model(residual, start_at_layer=1)
    with torch.no_grad():
        model(residual, start_at_layer=1)
    model("the cat", stop_at_layer=1).sum().backward()


@torch.no_grad()
def test_other_threads_and_runs_inside_hooks_are_whole(llama: Any, tokens: Tensor) -> None:
    expected, cache = llama.run_with_cache(tokens, names_filter=STREAM)
    residual = cache["blocks.1.hook_resid_pre"]
    found = []

    def meanwhile(value: Tensor, hook: Any) -> None:
        with torch.no_grad():
            found.append(llama.module(input_ids=tokens).logits)
            found.append(llama(tokens))

    def in_a_thread(value: Tensor, hook: Any) -> None:
        thread = threading.Thread(target=meanwhile, args=(value, hook))
        thread.start()
        thread.join()

    for function in (meanwhile, in_a_thread):
        hooks = [("blocks.1.attn.hook_z", function)]
        output = llama.run_with_hooks(residual, start_at_layer=1, stop_at_layer=2, fwd_hooks=hooks)
        assert_near(output, cache["blocks.2.hook_resid_pre"])
    assert len(found) == 4
    assert all(torch.equal(one, expected) for one in found)


def test_an_error_on_the_way_leaves_nothing_behind(llama: Any, tokens: Tensor) -> None:
    residual = llama(tokens, stop_at_layer=1)
    llama(residual, start_at_layer=1)
    before = hooks_on(llama.module)

    def fail(value: Tensor, hook: Any) -> None:
        raise ZeroDivisionError

    hooks = [("blocks.1.attn.hook_z", fail)]
    with pytest.raises(ZeroDivisionError):
        llama.run_with_hooks(residual, start_at_layer=1, stop_at_layer=2, fwd_hooks=hooks)
    assert hooks_on(llama.module) == before
    expected = llama.module(input_ids=tokens).logits
    assert_near(llama(residual, start_at_layer=1), expected)


# Ending early when nobody wants the output.


@torch.no_grad()
def test_no_return_type_ends_a_cached_run_early() -> None:
    model = speaking("llama", layers=3)
    tokens = model.to_tokens("the cat")
    wanted = {"names_filter": "blocks.0.hook_resid_post", "return_type": None}
    output, first = model.run_with_cache(tokens, **wanted)  # complete: it learns
    with counted(model) as ran:
        again, cache = model.run_with_cache(tokens, **wanted)
    assert output is None
    assert again is None
    assert set(ran) == {0}
    assert torch.equal(cache["blocks.0.hook_resid_post"], first["blocks.0.hook_resid_post"])
    filled = DynamicCache()
    with counted(model) as ran:
        model.run_with_cache(tokens, past_key_values=filled, **wanted)
        model.run_with_cache({"input_ids": tokens, "past_key_values": filled}, **wanted)
        model.run_with_cache(tokens, stop=False, **wanted)
    assert ran == {0: 3, 1: 3, 2: 3}
    assert filled.get_seq_length(2) == 2 * tokens.shape[1]
    residual, _ = model.run_with_cache(tokens, stop_at_layer=2, **wanted)
    assert torch.equal(residual, model(tokens, stop_at_layer=2))


def test_gradients_need_the_whole_run(llama: Any, tokens: Tensor) -> None:
    with pytest.raises(ip.GradientError, match="gradients need one number to start from"):
        llama.run_with_cache(tokens, return_type=None, incl_bwd=True)
