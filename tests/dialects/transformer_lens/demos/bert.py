"""Masked words and next sentences."""

from functools import partial
from typing import Any

import torch

from interpose.dialects.transformer_lens import BertNextSentencePrediction, HookedEncoder

TEXT = "The capital of France is [MASK]."
PAIRS = [("A man walked to school.", "It was cold."), ("It was cold.", "My name is John.")]


def demo() -> dict[str, Any]:
    torch.set_grad_enabled(False)
    try:
        model = HookedEncoder.from_pretrained("bert-base-cased")
        tokens = model.tokenizer(TEXT, return_tensors="pt")["input_ids"]
        logits, cache = model.run_with_cache(tokens)

        def no_head(z: Any, hook: Any, head: int) -> Any:
            z[:, :, head] = 0
            return z

        hooks = [("blocks.1.attn.hook_z", partial(no_head, head=1))]
        pairs = BertNextSentencePrediction(model)
        return {
            "words": model.tokenizer.convert_ids_to_tokens(tokens[0]),
            "logits": logits[0, 6, :5],
            "predicted": model(TEXT, return_type="predictions"),
            "two": model([TEXT, "Hello [MASK] name is john"], return_type="predictions"),
            "of text": model(TEXT)[0, 6, :5],
            "pattern": cache["pattern", 1][0, 0, 6],
            "stream": cache["blocks.2.hook_normalized_resid_post"][0, 3, :4],
            "embedded": cache["hook_full_embed"][0, 1, :3],
            "edited": model.run_with_hooks(tokens, fwd_hooks=hooks)[0, 6, :5],
            "next": [pairs(list(pair))[0] for pair in PAIRS],
            "said": [pairs(list(pair), return_type="predictions") for pair in PAIRS],
            "shapes": [list(model.W_Q.shape), list(model.W_U.shape), list(model.W_E.shape)],
        }
    finally:
        torch.set_grad_enabled(True)
