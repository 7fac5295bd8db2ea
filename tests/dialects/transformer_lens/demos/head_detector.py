"""Heads that look at the previous token, at duplicates, and behind them."""

from typing import Any

import torch

from interpose.dialects.transformer_lens import HookedTransformer
from interpose.dialects.transformer_lens.head_detector import (
    detect_head,
    get_duplicate_token_head_detection_pattern,
    get_induction_head_detection_pattern,
    get_previous_token_head_detection_pattern,
)

TEXT = "Mary went to the store and Mary went to the store"


def demo() -> dict[str, Any]:
    model = HookedTransformer.from_pretrained("gpt2-small")
    tokens = model.to_tokens(TEXT)
    found: dict[str, Any] = {
        "previous": get_previous_token_head_detection_pattern(tokens)[:4, :4],
        "duplicate": get_duplicate_token_head_detection_pattern(tokens).nonzero(),
        "behind": get_induction_head_detection_pattern(tokens).nonzero(),
    }
    _, cache = model.run_with_cache(tokens, remove_batch_dim=True)
    for kind in ("previous_token_head", "duplicate_token_head", "induction_head"):
        for measure in ("mul", "abs"):
            found[f"{kind}, {measure}"] = detect_head(model, TEXT, kind, error_measure=measure)
        found[f"{kind}, strictly"] = detect_head(
            model, TEXT, kind, exclude_bos=True, exclude_current_token=True, cache=cache
        )
    found["two texts"] = detect_head(model, [TEXT, "A cat and a cat"], "previous_token_head")
    some = detect_head(model, TEXT, "induction_head", heads=[(3, 2), (5, 0)])
    found["some"] = [some[3, 2], some[5, 0], some[0, 0]]
    found["by layer"] = detect_head(model, TEXT, "induction_head", heads={4: [1], 2: [0, 3]})[
        [4, 2]
    ]
    first = torch.zeros(tokens.shape[1], tokens.shape[1])
    first[:, 0] = 1
    found["at the first token"] = detect_head(model, TEXT, first)
    return found
