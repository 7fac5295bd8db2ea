"""A model that reads both ways and says whether brackets are balanced: permanent hooks hide padding."""

from typing import Any

import torch

import interpose.dialects.transformer_lens.utils as utils
from interpose.dialects.transformer_lens import HookedTransformer, HookedTransformerConfig
from interpose.dialects.transformer_lens.hook_points import HookPoint

START, PAD, END, LEFT, RIGHT = range(5)
TEXTS = ["(())", "()()()", ")(", "((", "(()())"]


def demo() -> dict[str, Any]:
    torch.set_grad_enabled(False)
    try:
        cfg = HookedTransformerConfig(
            n_ctx=10,
            d_model=24,
            d_head=12,
            n_heads=2,
            d_mlp=24,
            n_layers=3,
            attention_dir="bidirectional",
            act_fn="relu",
            d_vocab=5,
            d_vocab_out=2,
            use_attn_result=True,
            use_hook_tokens=True,
        )
        model = HookedTransformer(cfg).eval()
        model.load_state_dict(weights(model))
        tokens = torch.full((len(TEXTS), 8), PAD)
        for row, text in zip(tokens, TEXTS):
            said = [START, *(LEFT if each == "(" else RIGHT for each in text), END]
            row[: len(said)] = torch.tensor(said)
        seen = model(tokens)[:, 0]
        hide_padding(model)
        logits, cache = model.run_with_cache(tokens)
        found = {
            "padding is seen": seen,
            "logits": logits[:, 0],
            "names": sorted(name for name in cache if not name.startswith("unembed")),
        }
        found |= taken_apart(model, tokens, cache)
        model.reset_hooks(including_permanent=True)
        return found | {"seen again": model(tokens)[:, 0]}
    finally:
        torch.set_grad_enabled(True)


def weights(model: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    state = model.state_dict()
    for name in sorted(state):
        if not name.endswith(("mask", "IGNORE")):
            shape = state[name].shape
            size = shape[-2] ** -0.5 if len(shape) > 1 else 0.3
            mean = 1.0 if name.endswith(".w") else 0.0
            state[name] = mean + 1.2 * size * torch.randn(shape, generator=generator)
    return state


def hide_padding(model: Any) -> None:
    """Hooks that `reset_hooks` leaves: they see the tokens, and hide padding from every head."""

    def note(tokens: Any, hook: HookPoint) -> None:
        hook.ctx["padding"] = (tokens == PAD)[:, None, None]

    def hide(scores: Any, hook: HookPoint) -> None:
        scores.masked_fill_(model.hook_dict["hook_tokens"].ctx["padding"], -1e5)
        if hook.layer() == model.cfg.n_layers - 1:
            model.hook_dict["hook_tokens"].ctx.clear()

    for name, point in model.hook_dict.items():
        if name == "hook_tokens":
            point.add_perma_hook(note)
        elif name.endswith("attn_scores"):
            point.add_perma_hook(hide)
    model.reset_hooks()


def taken_apart(model: Any, tokens: Any, cache: Any) -> dict[str, Any]:
    """What each part says of each text, and what single heads and neurons do."""
    way = model.W_U[:, 0] - model.W_U[:, 1]
    norm = model.ln_final
    parts = [cache["embed"] + cache["pos_embed"]]
    for layer in range(model.cfg.n_layers):
        parts += [cache["result", layer][:, :, head] for head in range(2)]
        parts += [cache["mlp_out", layer]]
    biases = model.b_O.sum(0)
    whole = sum(parts) + biases
    stack = torch.stack([part[:, 0] for part in parts])
    scale = cache["scale"][:, 0]
    logits = (stack * norm.w / scale) @ way
    alone = model.run_with_hooks(tokens[:1], fwd_hooks=[("blocks.0.attn.hook_pattern", even)])
    name = utils.get_act_name("pattern", 2)
    pattern = cache[name]
    neurons = cache["post", 1][:, 1, :4]
    result = [
        {"whole": bool(torch.allclose(whole, cache["resid_post", 2], atol=1e-4))},
        {"parts": logits, "even": alone[:, 0], "pattern": pattern[0, 1, 0]},
        {"neurons": neurons, "written": (model.W_out[1, :4] @ way), "scale": scale[:, 0]},
    ]
    return {key: value for each in result for key, value in each.items()}


def even(pattern: Any, hook: HookPoint) -> Any:
    return torch.ones_like(pattern) / pattern.shape[-1]
