"""Padding, BOS and losses of padded texts. Numbers are those of TransformerLens 3.5.1 (of the bridge: 4.3).

They were written down from the same random models there, with a tokenizer like GPT-2's, which has no token for
padding and one for beginnings and ends, and with one that has a token for each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from interpose.dialects.transformer_lens import (
    HookedTransformer,
    HookedTransformerConfig,
    TransformerBridge,
    utils,
)
from tests.models import texts, tiny

TEXTS = ["the cat", "the dog ran in the park"]
TOKENIZERS: dict[str, Any] = {"eos": texts.like_gpt2, "pad": texts.tokenizer}
both = pytest.mark.parametrize("which", list(TOKENIZERS))


def made(which: str, kind: str = "gpt2", **options: Any) -> Any:
    module, tokenizer = tiny.build(kind), TOKENIZERS[which]()
    load = HookedTransformer.from_pretrained_no_processing
    return load(kind, hf_model=module, tokenizer=tokenizer, **options)


def assert_near(value: Tensor, written_down: list[float]) -> None:
    torch.testing.assert_close(value.flatten(), torch.tensor(written_down), atol=2e-3, rtol=0)


ALONE = {"eos": [1.0222, 3.9239, 0.0352], "pad": [2.4603, 6.0593, 6.3451]}
AT_RIGHT = {
    "eos": [*ALONE["eos"], 2.8837, -1.843, 1.623, 2.4283],
    "pad": [*ALONE["pad"], 10.936, 10.339, 11.6132, 12.48],
}
LOSS = {("eos", "left"): 9.9989, ("eos", "right"): 7.1704}
LOSS |= {("pad", "left"): 10.795, ("pad", "right"): 7.4051}
LOSSES = {
    ("eos", "left"): [0.0, 0.0, 0.0, 0.0, 9.601, 13.9206],
    ("eos", "right"): [9.601, 13.9206, 4.3541, 0.503, 0.6547, 0.5414],
    ("pad", "left"): [0.0, 0.0, 0.0, 0.0, 15.3025, 6.5765],
    ("pad", "right"): [15.3025, 6.5765, 2.183, 0.0417, 0.2612, 0.0152],
}


@both
def test_a_tokenizer_gets_a_token_for_padding_and_yours_stays_as_it_is(which: str) -> None:
    yours = TOKENIZERS[which]()
    before = yours.pad_token, yours.padding_side
    model = HookedTransformer(tiny.build("gpt2"), yours, default_padding_side="left")
    assert model.tokenizer.pad_token == {"eos": "<|endoftext|>", "pad": "<pad>"}[which]
    assert model.tokenizer.padding_side == model.default_padding_side == "left"
    assert (yours.pad_token, yours.padding_side) == before == (before[0], "right")
    model.set_tokenizer(yours)
    assert model.default_padding_side == "right"
    assert model.tokenizer.pad_token is not None
    model.tokenizer.padding_side = "left"  # as users of TransformerLens change it
    assert model.to_tokens(TEXTS)[0, 0] == model.tokenizer.pad_token_id


@both
@pytest.mark.parametrize("prepend_bos", [True, False])
def test_texts_of_left_padded_tokens_give_what_they_give_alone(
    which: str, prepend_bos: bool
) -> None:
    model = made(which, default_padding_side="left")
    tokens = model.to_tokens(TEXTS, prepend_bos=prepend_bos)
    alone = model(TEXTS[0], prepend_bos=prepend_bos)[0]
    if prepend_bos:
        assert_near(alone[:, 0], ALONE[which])
    for given in (tokens, tokens.clone(), TEXTS):
        found = model(given, prepend_bos=prepend_bos)[0, -len(alone) :]
        torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-4)


@both
def test_a_call_may_say_where_tokens_are_padded(which: str) -> None:
    model = made(which)
    tokens = model.to_tokens(TEXTS, padding_side="left").clone()
    assert_near(model(tokens, padding_side="left")[0, -3:, 0], ALONE[which])
    assert_near(model(TEXTS, padding_side="right")[0, :, 0], AT_RIGHT[which])
    assert_near(model(model.to_tokens(TEXTS))[0, :, 0], AT_RIGHT[which])


@both
def test_attention_masks_are_those_of_the_tokenizer(which: str) -> None:
    model = made(which)
    for side, rows in (
        ("left", [[0, 0, 0, 0, 1, 1, 1], [1] * 7, [0, 0, 0, 0, 0, 1, 1]]),
        ("right", [[1, 1, 1, 0, 0, 0, 0], [1] * 7, [1, 1, 0, 0, 0, 0, 0]]),
    ):
        model.tokenizer.padding_side = side
        tokens = model.to_tokens([*TEXTS, "the"])
        assert utils.get_attention_mask(model.tokenizer, tokens, True).tolist() == rows


@both
@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_and_their_tokens_have_one_loss(which: str, side: str) -> None:
    model = made(which, default_padding_side=side)
    tokens = model.to_tokens(TEXTS)
    for given in (TEXTS, tokens, tokens.clone(), tokens.tolist()):
        assert_near(model(given, return_type="loss"), [LOSS[which, side]])
        each = model(given, return_type="loss", loss_per_token=True)
        assert_near(each[0], LOSSES[which, side])


@both
def test_patterns_at_padding_on_the_right_are_those_of_any_token(which: str) -> None:
    _, cache = made(which).run_with_cache(TEXTS)
    row = {
        "eos": [0.08, 0.24, 0.17, 0.15, 0.09, 0.14, 0.12],
        "pad": [0.08, 0.12, 0.18, 0.2, 0.11, 0.13, 0.17],
    }
    torch.testing.assert_close(
        cache["pattern", 0][0, 0, -1], torch.tensor(row[which]), atol=6e-3, rtol=0
    )


@both
@pytest.mark.parametrize("side", ["left", "right"])
def test_masked_scores_are_minus_infinity_in_caches_and_hooks(which: str, side: str) -> None:
    model = made(which, default_padding_side=side)
    plain, cache = model.run_with_cache(TEXTS)
    scores = cache["attn_scores", 0][0, 0]
    first = 4 if side == "left" else 0
    text = torch.ones(7, 7).tril().bool()
    text[:, :first] = False
    assert torch.equal(scores.isneginf(), ~text)
    row = {"eos": [-1.36, -0.6, -0.47], "pad": [-0.41, -0.15, 0.13]}[which]
    torch.testing.assert_close(
        scores[first + 2, first : first + 3], torch.tensor(row), atol=6e-3, rtol=0
    )
    seen: list[Tensor] = []

    def look(value: Tensor, hook: Any) -> None:
        seen.append(value)

    def hide_the_first_word(value: Tensor, hook: Any) -> None:
        value[:, :, -1, first + 1] = -torch.inf

    name = "blocks.0.attn.hook_attn_scores"
    heard = model.run_with_hooks(TEXTS, fwd_hooks=[(name, look)])
    torch.testing.assert_close(heard[:, first:], plain[:, first:], atol=1e-4, rtol=1e-4)
    assert torch.equal(seen[0][0, 0], scores)
    edited = model.run_with_hooks(TEXTS, fwd_hooks=[(name, hide_the_first_word)])
    assert edited.isfinite().all()
    assert not torch.equal(edited[:, -1], plain[:, -1])
    torch.testing.assert_close(edited[:, first:-1], heard[:, first:-1])
    bridge = TransformerBridge(model.module, model.tokenizer)
    assert bridge.run_with_cache(TEXTS)[1]["attn_scores", 0].isfinite().all()


@both
def test_embedded_positions_are_there_for_every_text(which: str) -> None:
    model = made(which)
    plain = model(TEXTS)
    logits, cache = model.run_with_cache(TEXTS, names_filter="hook_pos_embed")
    assert torch.equal(logits, plain)
    assert cache["hook_pos_embed"].shape == (2, 7, 32)
    row = [0.7155, -0.3683, 0.3967, 0.0286, -0.3491, -0.2032, 0.1412]
    for text in cache["hook_pos_embed"][:, :, 0]:
        assert_near(text, row)

    def of_the_second_text(value: Tensor, hook: Any) -> None:
        value[1] = 0

    edited = model.run_with_hooks(TEXTS, fwd_hooks=[("hook_pos_embed", of_the_second_text)])
    torch.testing.assert_close(edited[0], plain[0], atol=1e-5, rtol=1e-5)
    assert (edited[1] - plain[1]).abs().max() > 0.1
    left = made(which, default_padding_side="left")
    shifted = left.run_with_cache(TEXTS)[1]["hook_pos_embed"][0, -3:, 0]
    assert_near(shifted, row[:3])


@both
@pytest.mark.parametrize(
    ("kind", "begins"),
    [("gpt2", True), ("llama", True), ("gpt_neox", False), ("qwen2", False), ("mpt", False)],
)
def test_the_bridge_puts_bos_where_its_types_of_models_have_it(
    which: str, kind: str, begins: bool
) -> None:
    tokenizer = TOKENIZERS[which]()
    bridge = TransformerBridge.boot_transformers(
        kind, hf_model=tiny.build(kind), tokenizer=tokenizer
    )
    words = tokenizer("the cat")["input_ids"]
    expected = [tokenizer.bos_token_id, *words] if begins else words
    assert bridge.cfg.default_prepend_bos is begins
    assert bridge.to_tokens("the cat").tolist() == [expected]
    assert bridge.to_tokens(tokenizer.bos_token + "the cat", prepend_bos=True).tolist() == [
        [tokenizer.bos_token_id, *words]
    ]


BRIDGE = {  # the loss, and what it generates from both texts, padded at the left
    ("gpt2", "eos"): (7.1704, [24, 5, 16], [51, 51, 51]),
    ("gpt2", "pad"): (7.4051, [83, 83, 43], [43, 43, 43]),
    ("llama", "eos"): (4.8814, [25, 88, 25], [88, 66, 91]),
    ("llama", "pad"): (4.6083, [37, 95, 95], [14, 76, 44]),
    ("gpt_neox", "eos"): (4.9317, [27, 8, 8], [1, 33, 33]),
    ("gpt_neox", "pad"): (6.233, [33, 33, 33], [14, 3, 67]),
}


@pytest.mark.parametrize(("kind", "which"), list(BRIDGE))
def test_the_bridge_pads_at_the_right_in_runs_and_at_the_left_in_generation(
    kind: str, which: str
) -> None:
    tokenizer = TOKENIZERS[which]()
    bridge = TransformerBridge.boot_transformers(
        kind, hf_model=tiny.build(kind), tokenizer=tokenizer
    )
    loss, *written = BRIDGE[kind, which]
    assert_near(bridge(TEXTS, return_type="loss"), [loss])
    options = {"max_new_tokens": 3, "do_sample": False, "return_type": "tokens"}
    tokens = bridge.generate(TEXTS, **options)
    assert tokens[:, -3:].tolist() == written
    assert tokens[0, 0] == bridge.tokenizer.pad_token_id
    assert bridge.tokenizer.padding_side == "right"


@both
def test_a_callable_filter_ranges_over_what_none_means(which: str) -> None:
    model = made(which)
    everything = set(model.run_with_cache(TEXTS[0])[1])
    assert set(model.run_with_cache(TEXTS[0], names_filter=lambda name: True)[1]) == everything
    assert "blocks.0.attn.hook_result" not in everything
    model.set_use_attn_result(True)
    more = set(model.run_with_cache(TEXTS[0], names_filter=lambda name: True)[1])
    assert more - everything == {f"blocks.{n}.attn.hook_result" for n in range(2)}
    model.set_use_attn_result(False)
    named = model.run_with_cache(TEXTS[0], names_filter=lambda name: name.endswith("hook_result"))
    assert set(named[1]) == more - everything  # it asks for nothing else
    heard: list[str] = []

    def note(value: Tensor, hook: Any) -> None:
        heard.append(hook.name)

    model.run_with_hooks(TEXTS[0], fwd_hooks=[(lambda name: True, note)])
    assert set(heard) == everything


@pytest.mark.parametrize("normalized", ["LN", "RMS"])
def test_a_token_that_is_masked_inside_a_text_is_none_of_it(normalized: str) -> None:
    cfg = HookedTransformerConfig(
        n_layers=2,
        d_model=12,
        d_head=4,
        n_ctx=9,
        d_vocab=11,
        act_fn="gelu",
        normalization_type=normalized,
        seed=0,
    )
    model = HookedTransformer(cfg)
    model.load_state_dict({k: 3 * v if "W_" in k else v for k, v in model.state_dict().items()})
    tokens, mask = torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[1, 1, 0, 1, 1, 1]])
    without = model(tokens[:, [0, 1, 3, 4, 5]])
    found = model(tokens, attention_mask=mask)[:, [0, 1, 3, 4, 5]]
    torch.testing.assert_close(found, without, atol=1e-5, rtol=1e-5)
    assert (model(tokens)[:, 3:] - without[:, 2:]).abs().max() > 0.1


HOLE = {  # logits of the last token where the mask leaves out the third one, there
    ("gpt2", "eos"): [3.9493, -0.2838, 0.2079],
    ("gpt2", "pad"): [7.1645, 0.8324, -2.9091],
    ("llama", "eos"): [0.7299, 0.8439, -0.5697],
    ("llama", "pad"): [0.7499, 0.7541, 1.1058],
}


@pytest.mark.parametrize(("kind", "which"), list(HOLE))
def test_positions_do_not_count_what_a_mask_leaves_out(kind: str, which: str) -> None:
    model = made(which, kind)
    tokens = model.to_tokens(TEXTS[1])
    mask = torch.ones_like(tokens)
    mask[0, 2] = 0
    found = model(tokens, attention_mask=mask)[0, -1, :3]
    assert_near(found, HOLE[kind, which])
    _, cache = model.run_with_cache(tokens, attention_mask=mask)
    last = model.unembed(cache["ln_final.hook_normalized"])[0, -1, :3]
    torch.testing.assert_close(last, found, atol=1e-4, rtol=1e-4)
    bridge = TransformerBridge(model.module, model.tokenizer)
    plain = model.module(input_ids=tokens, attention_mask=mask).logits[0, -1, :3]
    torch.testing.assert_close(bridge(tokens, attention_mask=mask)[0, -1, :3], plain)
    assert (plain - found).abs().max() > 0.01
