"""Weight processing of models from scratch: functions from one state dict to another that computes the same.

Each refuses a config on which it would not. They work in double precision, and leave what they are given as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.config import HookedTransformerConfig
from interpose.dialects.transformer_lens.factored_matrix import FactoredMatrix
from interpose.errors import Unsupported

State = dict[str, Tensor]


def fold_layer_norm(state: State, cfg: HookedTransformerConfig) -> State:
    """What norms multiply with and add goes into the weights that read them; the norms' own weights are gone.

    Of weights that read a norm which takes off the mean, their mean over the stream's features goes too: it reads
    nothing.
    """
    if cfg.normalization_type is None:
        raise Unsupported("there are no norms to fold (normalization_type=None).")
    if cfg.positional_embedding_type == "shortformer":
        raise Unsupported("queries and keys read positions besides the norm (shortformer).")
    found = dict(state)
    for at in _layers(cfg):
        bias = found.get(f"{at}.ln2.b")
        if cfg.gated_mlp and bias is not None and bool((bias != 0).any()):
            raise Unsupported(f"{at}.ln2.b would be inside the gate, where this MLP has no bias.")
        shared = "_" if f"{at}.attn._W_K" in found else ""
        readers = [
            ("W_Q", "b_Q"),
            (f"{shared}W_K", f"{shared}b_K"),
            (f"{shared}W_V", f"{shared}b_V"),
        ]
        _fold(found, f"{at}.ln1", [(f"{at}.attn.{w}", f"{at}.attn.{b}") for w, b in readers])
        if not cfg.attn_only:
            names = [("W_in", None), ("W_gate", None)] if cfg.gated_mlp else [("W_in", "b_in")]
            _fold(found, f"{at}.ln2", [(f"{at}.mlp.{w}", b and f"{at}.mlp.{b}") for w, b in names])
            _fold(found, f"{at}.mlp.ln", [(f"{at}.mlp.W_out", f"{at}.mlp.b_out")])
    _fold(found, "ln_final", [("unembed.W_U", "unembed.b_U")])
    return found


def _fold(state: State, norm: str, readers: list[tuple[str, str | None]]) -> None:
    """Fold one norm into the weights [..., in, out] that read it."""
    if f"{norm}.w" not in state:
        return
    factor, summand = state.pop(f"{norm}.w"), state.pop(f"{norm}.b", None)
    for weight, bias in readers:
        if bias is not None and summand is not None:
            state[bias] = state[bias] + torch.einsum("i,...io->...o", summand, state[weight])
        made = state[weight] * factor[:, None]
        centred = summand is not None
        state[weight] = made - made.mean(-2, keepdim=True) if centred else made


def center_writing_weights(state: State, cfg: HookedTransformerConfig) -> State:
    """Whatever writes to the stream writes with mean zero, which norms that take off the mean do not see."""
    _must_not_see_means(cfg)
    names = ["embed.W_E"]
    if cfg.positional_embedding_type == "standard":
        names.append("pos_embed.W_pos")
    for at in _layers(cfg):
        names += [f"{at}.attn.W_O", f"{at}.attn.b_O"]
        names += [] if cfg.attn_only else [f"{at}.mlp.W_out", f"{at}.mlp.b_out"]
    return {**state, **{name: state[name] - state[name].mean(-1, keepdim=True) for name in names}}


def _must_not_see_means(cfg: HookedTransformerConfig) -> None:
    if cfg.normalization_type not in ("LN", "LNPre") or cfg.final_rms:
        raise Unsupported(
            "the mean of the stream is read: not every norm takes it off (LayerNorm)."
        )
    if cfg.use_normalization_before_and_after or cfg.post_embedding_ln:
        raise Unsupported("a norm stands between what is written and the stream.")


def center_unembed(state: State, cfg: HookedTransformerConfig) -> State:
    """Logits have mean zero over the vocabulary; probabilities stay."""
    if cfg.output_logits_soft_cap > 0:
        raise Unsupported("logits go through a softcap, which does not pass on a shift as a shift.")
    names = ("unembed.W_U", "unembed.b_U")
    return {**state, **{name: state[name] - state[name].mean(-1, keepdim=True) for name in names}}


def fold_value_biases(state: State, cfg: HookedTransformerConfig) -> State:
    """The biases of values go through ``W_O`` into ``b_O``: patterns sum to one."""
    found = dict(state)
    for at in _layers(cfg):
        name = f"{at}.attn._b_V" if f"{at}.attn._b_V" in found else f"{at}.attn.b_V"
        each = found[name].repeat_interleave(cfg.n_heads // len(found[name]), dim=0)
        written = torch.einsum("hd,hdm->m", each, found[f"{at}.attn.W_O"])
        found[f"{at}.attn.b_O"] = found[f"{at}.attn.b_O"] + written
        found[name] = torch.zeros_like(found[name])
    return found


def refactor_factored_attn_matrices(state: State, cfg: HookedTransformerConfig) -> State:
    """The factors of each head's products become those of a singular value decomposition."""
    if cfg.positional_embedding_type in ("rotary", "shortformer") or cfg.use_qk_norm:
        raise Unsupported("queries and keys are more than their projections of the normed stream.")
    if cfg.n_key_value_heads is not None:
        raise Unsupported("heads share keys and values, so that none has factors of its own.")
    found = fold_value_biases(state, cfg)
    for at in (f"{layer}.attn" for layer in _layers(cfg)):
        pair = [torch.cat([found[f"{at}.W_{r}"], found[f"{at}.b_{r}"][:, None]], 1) for r in "QK"]
        even = FactoredMatrix(pair[0], pair[1].transpose(-2, -1)).make_even()
        for role, made in (("Q", even.A), ("K", even.B.transpose(-2, -1))):
            found[f"{at}.W_{role}"], found[f"{at}.b_{role}"] = made[:, :-1], made[:, -1]
        u, s, v = FactoredMatrix(found[f"{at}.W_V"], found[f"{at}.W_O"]).svd()
        found[f"{at}.W_V"], found[f"{at}.W_O"] = u * s[:, None], v.transpose(-2, -1)
    return found


STEPS: dict[str, Callable[[State, HookedTransformerConfig], State]] = {
    "fold_ln": fold_layer_norm,
    "center_writing_weights": center_writing_weights,
    "center_unembed": center_unembed,
    "fold_value_biases": fold_value_biases,
    "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
}
"""The flags in the order in which they are done."""


def process(
    state: State, cfg: HookedTransformerConfig, flags: dict[str, bool | None]
) -> tuple[State, HookedTransformerConfig, tuple[str, ...]]:
    """A state dict that computes the same with simpler weights, the config that goes with it, and the flags done.

    Args:
        state: not changed.
        cfg: not changed.
        flags: True for what must be done, None for what is to be done where it is exact.
    """
    made = {name: value.detach().double() for name, value in state.items()}
    done = []
    for flag, step in STEPS.items():
        if flags.get(flag) is False:
            continue
        try:
            made = step(made, cfg)
        except Unsupported as error:
            if flags.get(flag) is None:
                continue
            raise Unsupported(f"{flag} is not exact on this model: {error}") from error
        done.append(flag)
        if flag == "fold_ln":
            kind = str(cfg.normalization_type).removesuffix("Pre")
            cfg = replace(cfg, normalization_type=f"{kind}Pre")
    return {name: value.to(cfg.dtype) for name, value in made.items()}, cfg, tuple(done)


def _layers(cfg: HookedTransformerConfig) -> Iterator[str]:
    return (f"blocks.{layer}" for layer in range(cfg.n_layers))
