"""`past_kv_cache`: runs that go on from what was read. Numbers are those of TransformerLens 3.5.1."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from interpose.dialects.transformer_lens import (
    HookedTransformer,
    HookedTransformerConfig,
    HookedTransformerKeyValueCache,
    TransformerLensKeyValueCache,
)
from interpose.dialects.transformer_lens.cache.key_value_cache import (
    TransformerLensKeyValueCache as ByItsModule,
)
from interpose.dialects.transformer_lens.cache.key_value_cache_entry import (
    TransformerLensKeyValueCacheEntry,
)
from interpose.dialects.transformer_lens.past_key_value_caching import (
    HookedTransformerKeyValueCache as ByItsOldModule,
)
from interpose.errors import Unsupported
from tests.dialects.transformer_lens.test_padding import TEXTS, assert_near, both, made
from tests.models import tiny

MORE = [" sat on", " saw the mat and"]
LAST = {  # logits of the first token over the texts of MORE, after TEXTS
    ("gpt2", "eos"): ([4.2985, -1.0907], [-1.9422, -0.5642, 3.4976, 4.2805]),
    ("gpt2", "pad"): ([5.3941, 5.4637], [0.2779, 4.5961, 4.1912, 5.3069]),
    ("qwen2", "eos"): ([-0.0693, -0.9439], [0.7058, 0.0757, 0.6345, -0.4976]),
    ("qwen2", "pad"): ([-0.9873, 0.2512], [-0.4514, -0.963, 0.2542, -0.9421]),
}


def new_cache(model: Any, batch_size: int = 1) -> TransformerLensKeyValueCache:
    return TransformerLensKeyValueCache.init_cache(model.cfg, model.cfg.device, batch_size)


def test_the_class_is_found_where_code_imports_it() -> None:
    assert TransformerLensKeyValueCache is ByItsModule is ByItsOldModule
    assert TransformerLensKeyValueCache is HookedTransformerKeyValueCache


@pytest.mark.parametrize(("kind", "which"), list(LAST))
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_run_goes_on_from_a_cache_that_grows_or_is_frozen(
    kind: str, which: str, side: str
) -> None:
    model = made(which, kind, default_padding_side=side)
    cache = new_cache(model, 2)
    heads = model.cfg.n_key_value_heads or model.cfg.n_heads
    assert cache.entries[0].past_keys.shape == (2, 0, heads, model.cfg.d_head)
    first = model(TEXTS, past_kv_cache=cache)
    length = first.shape[1]
    assert cache[1].past_values.shape == (2, length, heads, model.cfg.d_head)
    mask = copy.copy(cache.previous_attention_mask)
    short, long = LAST[kind, which]
    text = slice(2, 4) if side == "left" else slice(2)
    cache.freeze()
    for _ in range(2):  # nothing is added
        logits = model(MORE, past_kv_cache=cache, prepend_bos=False)
        assert_near(logits[0, text, 0], short)
        assert_near(logits[1, :, 0], long)
        assert torch.equal(cache.previous_attention_mask, mask)
        assert cache[0].past_keys.shape[1] == length
    cache.unfreeze()
    _, kept = model.run_with_cache(MORE, past_kv_cache=cache, prepend_bos=False, return_type=None)
    assert kept["pattern", 0].shape == (2, 4, 4, length + 4)
    assert kept["k", 1].shape == (2, 4, heads, model.cfg.d_head)
    new = [0, 0, 1, 1] if side == "left" else [1, 1, 0, 0]
    assert cache.previous_attention_mask.tolist() == [[*mask[0].tolist(), *new], [1] * (length + 4)]
    assert cache[1].past_keys.shape[1] == length + 4  # of every layer, though nothing was returned


@both
def test_texts_in_parts_give_what_the_whole_text_gives(which: str) -> None:
    model = made(which)
    whole = model(TEXTS[1] + MORE[1])
    cache = new_cache(model)
    parts = [
        model(TEXTS[1], past_kv_cache=cache),
        model(MORE[1], past_kv_cache=cache, prepend_bos=False),
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)
    loss = model(MORE[1], past_kv_cache=(again := new_cache(model)), return_type="loss")
    assert_near(model(MORE[1], return_type="loss"), [loss.item()])
    assert again.previous_attention_mask.shape == (1, 5)


def test_hooks_hear_and_edit_runs_that_go_on() -> None:
    model = made("eos")
    tokens = model.to_tokens(TEXTS[1])
    cache = new_cache(model)
    model(tokens[:, :4], past_kv_cache=cache)
    cache.freeze()
    seen: list[tuple[int, ...]] = []

    def silence(value: torch.Tensor, hook: Any) -> None:
        seen.append(tuple(value.shape))
        value[:] = 0

    plain = model(tokens[:, 4:], past_kv_cache=cache)
    name = "blocks.1.attn.hook_z"
    edited = model.run_with_hooks(tokens[:, 4:], past_kv_cache=cache, fwd_hooks=[(name, silence)])
    assert seen == [(1, 3, 4, 8)]
    whole = model.run_with_hooks(tokens, fwd_hooks=[(name, silence)])[:, 4:]
    torch.testing.assert_close(edited, whole, atol=1e-4, rtol=1e-4)
    assert (edited - plain).abs().max() > 0.1


POSITIONS: list[dict[str, Any]] = [
    {},
    {"positional_embedding_type": "rotary", "rotary_dim": 4},
    {"positional_embedding_type": "shortformer"},
    {"positional_embedding_type": "alibi"},
    {
        "positional_embedding_type": "relative_positional_bias",
        "relative_attention_num_buckets": 4,
        "relative_attention_max_distance": 6,
    },
    {"n_key_value_heads": 2, "use_qk_norm": True, "normalization_type": "RMS"},
    {"use_local_attn": True, "window_size": 3, "attn_types": ["local", "global"]},
]


@pytest.mark.parametrize("options", POSITIONS, ids=lambda options: "-".join(options) or "plain")
def test_models_from_scratch_go_on_too(options: dict[str, Any]) -> None:
    cfg = HookedTransformerConfig(
        n_layers=2, d_model=16, d_head=4, n_ctx=12, d_vocab=20, act_fn="relu", seed=0, **options
    )
    model = HookedTransformer(cfg)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(20, (2, 9), generator=torch.Generator().manual_seed(0))
    whole, cache = model(tokens), new_cache(model, 2)
    parts = [model(tokens[:, each], past_kv_cache=cache) for each in (slice(4), slice(4, 9))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)
    assert cache[0].past_keys.shape == (2, 9, options.get("n_key_value_heads", 4), 4)
    mask = torch.ones(2, 4, dtype=torch.long)
    mask[0, :2] = 0
    padded = new_cache(model, 2)
    model(tokens[:, :4], past_kv_cache=padded, attention_mask=mask)
    after = model(tokens[:, 4:], past_kv_cache=padded)
    torch.testing.assert_close(after[0], model(tokens[:1, 2:])[0, 2:], atol=1e-4, rtol=1e-4)


def test_an_entry_appends_and_a_frozen_one_does_not() -> None:
    cfg = HookedTransformerConfig(
        n_layers=1, d_model=8, d_head=4, n_ctx=6, d_vocab=5, attn_only=True
    )
    entry = TransformerLensKeyValueCacheEntry.init_cache_entry(cfg, "cpu", 3)
    assert entry.past_keys.shape == (3, 0, 2, 4)
    keys, values = torch.randn(2, 3, 2, 2, 4)
    assert torch.equal(entry.append(keys, values)[0], keys)
    entry.frozen = True
    longer = entry.append(keys, values)[1]
    assert torch.equal(longer, torch.cat([values, values], 1))
    assert torch.equal(entry.past_values, values)


def test_a_model_without_such_a_cache_says_so() -> None:
    model = HookedTransformer(tiny.build("bert", "masked"))
    cache = TransformerLensKeyValueCache([], torch.ones(1, 0))
    with pytest.raises(Unsupported, match="takes no past_key_values to go on from"):
        model(torch.tensor([[1, 2]]), past_kv_cache=cache)


@both
def test_what_enters_the_first_block_counts_on_from_a_cache(which: str) -> None:
    model = made(which, default_padding_side="left")
    cache = new_cache(model, 2)
    model(TEXTS, past_kv_cache=cache)
    before = copy.deepcopy(cache.previous_attention_mask)
    stream, tokens, _, mask = model.input_to_embed(MORE, prepend_bos=False, past_kv_cache=cache)
    assert torch.equal(cache.previous_attention_mask, before)
    assert cache[0].past_keys.shape[1] == before.shape[1]
    assert mask.tolist()[0] == [*before[0].tolist(), 0, 0, 1, 1]
    _, kept = model.run_with_cache(MORE, prepend_bos=False, past_kv_cache=cache)
    torch.testing.assert_close(stream, kept["resid_pre", 0])
    assert tokens.shape == (2, 4)
