"""Every ready sweep of activation patching, and a general one."""

from typing import Any

import torch

import interpose.dialects.transformer_lens.patching as patching
from interpose.dialects.transformer_lens import HookedTransformer

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"


def demo() -> dict[str, Any]:
    torch.set_grad_enabled(False)
    try:
        model = HookedTransformer.from_pretrained("gpt2")
        clean, corrupt = model.to_tokens(CLEAN), model.to_tokens(CORRUPT)
        answers = [model.to_single_token(name) for name in (" Mary", " John")]

        def difference(logits: Any) -> Any:
            return logits[0, -1, answers[0]] - logits[0, -1, answers[1]]

        logits, cache = model.run_with_cache(clean)
        best, worst = difference(logits).item(), difference(model(corrupt)).item()

        def metric(logits: Any) -> Any:
            return (difference(logits) - worst) / (best - worst)

        found: dict[str, Any] = {"baselines": [best, worst]}
        for kind in ("resid_pre", "resid_mid", "attn_out", "mlp_out"):
            function = getattr(patching, f"get_act_patch_{kind}")
            found[kind] = function(model, corrupt, cache, metric)[:, 9:]
        for kind in ("out", "q", "k", "v", "pattern"):
            function = getattr(patching, f"get_act_patch_attn_head_{kind}_all_pos")
            found[kind] = function(model, corrupt, cache, metric)
        by_pos = patching.get_act_patch_attn_head_out_by_pos(model, corrupt, cache, metric)
        every = patching.get_act_patch_attn_head_all_pos_every(model, corrupt, cache, metric)
        found["by position"] = [list(by_pos.shape), by_pos[4:6, 10:]]
        found["every"] = [list(every.shape), every.sum((1, 2))]
        blocks = patching.get_act_patch_block_every(model, corrupt, cache, metric)
        found["blocks"] = [list(blocks.shape), blocks[:, 3, 8:]]
        one = patching.generic_activation_patch(
            model,
            corrupt,
            cache,
            metric,
            patching.layer_pos_patch_setter,
            "attn_out",
            index_axis_names=("layer", "pos"),
        )
        found["general"] = one[5]
        return found
    finally:
        torch.set_grad_enabled(True)
