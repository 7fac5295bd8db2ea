"""A model like LLaMA, with fewer heads of keys and values than of queries."""

from functools import partial
from typing import Any

import torch

import interpose.dialects.transformer_lens.utils as utils
from interpose.dialects.transformer_lens import HookedTransformer

TEXT = "When Mary and John went to the store"


def demo() -> dict[str, Any]:
    torch.set_grad_enabled(False)
    try:
        plain = HookedTransformer.from_pretrained_no_processing("01-ai/Yi-6B")
        model = HookedTransformer.from_pretrained(
            "01-ai/Yi-6B", fold_ln=True, center_writing_weights=False, center_unembed=True
        )
        tokens = model.to_tokens(TEXT)
        logits, cache = model.run_with_cache(tokens)

        def no_head(value: Any, hook: Any, head: int) -> Any:
            value[:, :, head] = 0
            return value

        edited = {
            kind: model.run_with_hooks(
                tokens, fwd_hooks=[(utils.get_act_name(kind, 1), partial(no_head, head=1))]
            )[0, -1, :4]
            for kind in ("z", "k", "v", "q")
        }
        kinds = ("q", "k", "v", "z", "pattern", "pre", "pre_linear", "post")
        parts, labels = cache.decompose_resid(pos_slice=-1, return_labels=True)
        return {
            "both": [logits.log_softmax(-1)[0, -1, :3], plain(tokens).log_softmax(-1)[0, -1, :3]],
            "tokens": tokens,
            "shapes": [list(cache[kind, 0].shape) for kind in kinds],
            "rotated": [
                cache["blocks.0.attn.hook_rot_q"][0, 3, 1, :3],
                cache["blocks.0.attn.hook_rot_k"][0, 3, 1, :3],
            ],
            "keys": cache["k", 1][0, -1, :, :3],
            "pattern": cache["pattern", 2][0, 3, -1],
            "gate": cache["pre", 0][0, 2, :3],
            "linear": cache["pre_linear", 0][0, 2, :3],
            **edited,
            "labels": labels,
            "parts": parts[:, 0, :3],
            "generated": model.generate(TEXT, max_new_tokens=4, temperature=0, verbose=False),
            "config": [model.cfg.n_key_value_heads, model.cfg.normalization_type, model.cfg.act_fn],
            "queries": list(model.W_Q.shape),
            "circuit": model.OV[1, 3].S[:3],
        }
    finally:
        torch.set_grad_enabled(True)
