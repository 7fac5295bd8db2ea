"""All methods that read texts take ``prepend_bos``, and run what ``to_tokens`` then gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import interpose as ip

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
LEAD = ip.metrics.logit_difference(" Mary", " John")
METHODS: dict[str, Callable[..., Any]] = {
    "logit_lens": lambda m, a, b, **w: ip.logit_lens(m, a, pos=-1, **w),
    "direct_logit_attribution": lambda m, a, b, **w: ip.direct_logit_attribution(
        m, a, answer=" Mary", by="head", **w
    ),
    "compare_prompts": lambda m, a, b, **w: ip.compare_prompts(m, a, b, **w),
    "ablation": lambda m, a, b, **w: ip.ablation(m, a, metric=LEAD, **w),
    "mean ablation": lambda m, a, b, **w: ip.ablation(
        m, a, metric=LEAD, replace_by="mean", reference=b, **w
    ),
    "activation_patching": lambda m, a, b, **w: ip.activation_patching(
        m, a, b, metric=LEAD, family="attn_head_out_all_pos", **w
    ),
    "path_patching": lambda m, a, b, **w: ip.path_patching(m, a, b, metric=LEAD, **w),
    "causal_tracing": lambda m, a, b, **w: ip.causal_tracing(
        m, a, subject=" store", answer=" Mary", samples=1, pos=-1, **w
    ),
    "attention_knockout": lambda m, a, b, **w: ip.attention_knockout(
        m, a, metric=LEAD, query=-1, key=" John", **w
    ),
    "attention_patterns": lambda m, a, b, **w: ip.attention_patterns(m, a, layer=5, **w),
    "attribution_patching": lambda m, a, b, **w: ip.attribution_patching(
        m, a, b, metric=LEAD, over=("layer", "head"), **w
    ),
    "edge_attribution": lambda m, a, b, **w: ip.edge_attribution(m, a, b, metric=LEAD, **w),
    "saliency": lambda m, a, b, **w: ip.saliency(m, a, metric=LEAD, site="resid_pre", **w),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_text_with_bos_is_what_its_tokens_are(name: str) -> None:
    model, run = ip.load("pocket"), METHODS[name]
    tokens = [model.to_tokens(text, prepend_bos=True) for text in (CLEAN, CORRUPT)]
    found = torch.as_tensor(run(model, CLEAN, CORRUPT, prepend_bos=True).values)
    assert torch.allclose(found, torch.as_tensor(run(model, *tokens).values), atol=1e-5)
    without = torch.as_tensor(run(model, CLEAN, CORRUPT).values)
    assert found.shape != without.shape or (found - without).abs().max() > 1e-4
