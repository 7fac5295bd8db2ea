"""A model that plays Othello: a probe reads the board, and an edit along the probe changes what it plays."""

from typing import Any

import torch

import interpose.dialects.transformer_lens.utils as utils
from interpose.dialects.transformer_lens import HookedTransformer, HookedTransformerConfig

GAMES = [
    "D3 C5 F6 F5 E6 E3 D6 F7 G6 C3",
    "F5 D6 C5 F4 E3 C6 D3 F6 E6 D7",
    "C4 C3 D3 C5 D6 F4 B4 B3 B5 F3",
]
CENTRE = {"D4", "E4", "D5", "E5"}
SQUARES = [f"{column}{row}" for column in "ABCDEFGH" for row in range(1, 9)]
PLAYED = {square: place for place, square in enumerate(sorted(set(SQUARES) - CENTRE), 1)}


def demo() -> dict[str, Any]:
    torch.set_grad_enabled(False)
    try:
        cfg = HookedTransformerConfig(
            n_layers=4,
            d_model=32,
            d_head=8,
            n_heads=4,
            d_mlp=64,
            d_vocab=61,
            n_ctx=59,
            act_fn="gelu",
            normalization_type="LN",
        )
        model = HookedTransformer(cfg)
        model.load_and_process_state_dict(weights(model), fold_ln=True, center_unembed=True)
        moves = torch.tensor([[PLAYED[move] for move in game.split()] for game in GAMES])
        logits, cache = model.run_with_cache(moves)
        found = {
            "logits": logits[0, -1, :6],
            "likeliest": logits[:, -1].topk(3).indices,
            "kind": model.cfg.normalization_type,
            "patterns": cache["pattern", 2][1, :, -1],
        }
        return found | probed(model, moves, cache) | neurons(model, cache)
    finally:
        torch.set_grad_enabled(True)


def weights(model: Any) -> dict[str, Any]:
    """A state dict as published, with masks, of random numbers."""
    generator = torch.Generator().manual_seed(0)
    state = model.state_dict()
    for name in sorted(state):
        if not name.endswith(("mask", "IGNORE")):
            shape = state[name].shape
            size = shape[-2] ** -0.5 if len(shape) > 1 else 0.2
            state[name] = 1.2 * size * torch.randn(shape, generator=generator)
    return state


def probed(model: Any, moves: Any, cache: Any) -> dict[str, Any]:
    """A probe [mode, d_model, row, column, (empty, white, black)] reads the stream."""
    generator = torch.Generator().manual_seed(1)
    probe = torch.randn(2, model.cfg.d_model, 8, 8, 3, generator=generator)
    stream = cache["resid_post", 2]
    board = torch.einsum("bpd,mdxyo->mbpxyo", stream, probe).log_softmax(-1)
    mine = (probe[..., 1] - probe[..., 2]).mean(0)
    direction = mine[:, 4, 2] / mine[:, 4, 2].norm()

    def flip(resid: Any, hook: Any) -> None:
        along = resid[:, 5] @ direction
        resid[:, 5] -= 2 * along[:, None] * direction

    name = utils.get_act_name("resid_post", 2)
    flipped = model.run_with_hooks(moves, fwd_hooks=[(name, flip)])
    plain = model(moves)
    return {
        "board": board[0, 0, -1, 3:5, 3:5],
        "state": board[1, 2, 4].argmax(-1),
        "flipped": flipped[:, 5].log_softmax(-1)[:, :5],
        "changed": (flipped - plain).abs().amax((0, 2)),
    }


def neurons(model: Any, cache: Any) -> dict[str, Any]:
    """What neurons read and write, and what patching one layer's does."""
    reads, writes = model.W_in[2], model.W_out[2]
    normed = reads / reads.norm(dim=0, keepdim=True)
    post = cache["post", 2]
    resid, labels = cache.decompose_resid(layer=3, apply_ln=False, return_labels=True)
    active = post.std((0, 1)).argsort(descending=True)[:3]

    def silence(value: Any, hook: Any) -> Any:
        value[:, :, active] = 0.0
        return value

    edited = model.run_with_hooks(
        torch.ones(1, 6, dtype=torch.long), fwd_hooks=[("blocks.2.mlp.hook_post", silence)]
    )
    return {
        "direct": (writes @ model.W_U)[active, :4],
        "alike": (normed.T @ normed)[active][:, active],
        "busiest": active,
        "labels": labels,
        "parts": resid[:, 0, -1, 0],
        "silenced": edited[0, -1, :4],
        "by neuron": cache.stack_neuron_results(3, pos_slice=-1, neuron_slice=(0, 2))[:, 0, 0],
    }
