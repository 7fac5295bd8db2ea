"""Models of TransformerLens 2 by hand: state dicts as it wrote them, and what it computed from them.

Nothing here comes from the package. A config is a plain dict, positions and heads are loops, and the dtype is the
state dict's, so that float64 gives the truth and autograd the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Config = dict[str, Any]
State = dict[str, Tensor]
Edits = dict[str, Callable[[Tensor], Tensor]]

SMALL: Config = {
    "n_layers": 2,
    "d_model": 12,
    "n_ctx": 10,
    "d_head": 4,
    "n_heads": 3,
    "d_mlp": 20,
    "act_fn": "relu",
    "d_vocab": 17,
}
_USUAL: Config = {
    "d_vocab_out": None,
    "eps": 1e-5,
    "normalization_type": "LN",
    "positional_embedding_type": "standard",
    "attention_dir": "causal",
    "attn_only": False,
    "gated_mlp": False,
    "parallel_attn_mlp": False,
    "post_embedding_ln": False,
    "final_rms": False,
    "use_normalization_before_and_after": False,
    "use_attn_scale": True,
    "attn_scale": None,
    "scale_attn_by_inverse_layer_idx": False,
    "use_qk_norm": False,
    "n_key_value_heads": None,
    "use_local_attn": False,
    "attn_types": None,
    "window_size": None,
    "rotary_dim": None,
    "rotary_base": 10000,
    "rotary_adjacent_pairs": False,
    "use_NTK_by_parts_rope": False,
    "attn_scores_soft_cap": -1.0,
    "output_logits_soft_cap": -1.0,
    "relative_attention_num_buckets": None,
    "relative_attention_max_distance": None,
}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_new": lambda x: _gelu_by_tanh(x),
    "gelu_fast": lambda x: _gelu_by_tanh(x),
    "gelu_pytorch_tanh": lambda x: _gelu_by_tanh(x),
    "silu": lambda x: x * torch.sigmoid(x),
    "solu": lambda x: x * x.softmax(-1),
    "solu_ln": lambda x: x * x.softmax(-1),
}


def _gelu_by_tanh(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def whole(options: Config) -> Config:
    """Options with what goes without saying."""
    cfg = {**_USUAL, **SMALL, **options}
    cfg["d_vocab_out"] = cfg["d_vocab_out"] or cfg["d_vocab"]
    cfg["rotary_dim"] = cfg["rotary_dim"] or cfg["d_head"]
    return cfg


# State dicts.


def state_dict(options: Config, seed: int = 0) -> State:
    """What ``torch.save(model.state_dict(), ...)`` held: parameters and buffers, with random numbers everywhere."""
    cfg, made = whole(options), {}
    generator = torch.Generator().manual_seed(seed)

    def weight(name: str, *shape: int, size: float | None = None) -> None:
        size = shape[-2] ** -0.5 if size is None else size
        drawn = torch.randn(*shape, generator=generator, device="cpu")
        made[name] = size * drawn.to(torch.get_default_device())

    def norm(path: str, kind: str | None, width: int = cfg["d_model"]) -> None:
        if kind in ("LN", "RMS"):
            weight(f"{path}.w", width, size=0.3)
            made[f"{path}.w"] += 1
        if kind == "LN":
            weight(f"{path}.b", width, size=0.3)

    kind, d_model, d_mlp = cfg["normalization_type"], cfg["d_model"], cfg["d_mlp"]
    weight("embed.W_E", cfg["d_vocab"], d_model, size=1.0)
    if cfg["post_embedding_ln"]:
        norm("embed.ln", "LN")
    if cfg["positional_embedding_type"] != "rotary":
        weight("pos_embed.W_pos", cfg["n_ctx"], d_model, size=0.7)
    for layer in range(cfg["n_layers"]):
        at = f"blocks.{layer}"
        for name in ("ln1",) if cfg["attn_only"] else ("ln1", "ln2"):
            norm(f"{at}.{name}", kind)
            if cfg["use_normalization_before_and_after"]:
                norm(f"{at}.{name}_post", kind)
        _attention_weights(cfg, layer, weight, norm, made)
        if cfg["attn_only"]:
            continue
        weight(f"{at}.mlp.W_in", d_model, d_mlp, size=1.5 * d_model**-0.5)
        weight(f"{at}.mlp.b_in", d_mlp, size=0.3)
        weight(f"{at}.mlp.W_out", d_mlp, d_model)
        weight(f"{at}.mlp.b_out", d_model, size=0.3)
        if cfg["gated_mlp"]:
            weight(f"{at}.mlp.W_gate", d_model, d_mlp)
        if cfg["act_fn"] == "solu_ln":
            norm(f"{at}.mlp.ln", kind, d_mlp)
    norm("ln_final", "RMS" if cfg["final_rms"] and kind == "LN" else kind)
    weight("unembed.W_U", d_model, cfg["d_vocab_out"])
    weight("unembed.b_U", cfg["d_vocab_out"], size=0.3)
    return made


def _attention_weights(cfg: Config, layer: int, weight: Any, norm: Any, made: State) -> None:
    at, d_model, d_head = f"blocks.{layer}.attn", cfg["d_model"], cfg["d_head"]
    of_keys = cfg["n_key_value_heads"] or cfg["n_heads"]
    for role in "QKV":
        shared = "_" if role != "Q" and cfg["n_key_value_heads"] else ""
        heads = cfg["n_heads"] if role == "Q" else of_keys
        weight(f"{at}.{shared}W_{role}", heads, d_model, d_head, size=1.5 * d_model**-0.5)
        weight(f"{at}.{shared}b_{role}", heads, d_head, size=0.3)
    weight(f"{at}.W_O", cfg["n_heads"], d_head, d_model)
    weight(f"{at}.b_O", d_model, size=0.3)
    if cfg["use_qk_norm"]:
        norm(f"{at}.q_norm", "RMS", d_head)
        norm(f"{at}.k_norm", "RMS", d_head)
    if cfg["positional_embedding_type"] == "relative_positional_bias" and layer == 0:
        weight(
            f"{at}.rel_pos_bias.weight",
            cfg["relative_attention_num_buckets"],
            cfg["n_heads"],
            size=1.0,
        )
    made[f"{at}.mask"] = torch.tril(torch.ones(cfg["n_ctx"], cfg["n_ctx"], dtype=torch.bool))
    if cfg["use_local_attn"] and cfg["attn_types"][layer] == "local":
        made[f"{at}.mask"] = torch.triu(made[f"{at}.mask"], 1 - cfg["window_size"])
    made[f"{at}.IGNORE"] = torch.tensor(-torch.inf)
    if cfg["positional_embedding_type"] == "rotary":
        weight(f"{at}.rotary_sin", cfg["n_ctx"], cfg["rotary_dim"])  # nothing may read them
        weight(f"{at}.rotary_cos", cfg["n_ctx"], cfg["rotary_dim"])


# The forward pass.


class Run:
    """One forward pass: ``logits``, and the values of all names in ``seen``.

    Args:
        state: weights by name.
        options: the config.
        tokens: [batch, pos].
        edits: for some names, what makes another value of the value there.
    """

    def __init__(
        self, state: State, options: Config, tokens: Tensor, edits: Edits | None = None
    ) -> None:
        self.state, self.cfg = state, whole(options)
        self.edits, self.seen = edits or {}, {}
        cfg, kind = self.cfg, self.cfg["normalization_type"]
        stream = state["embed.W_E"][tokens]
        if cfg["post_embedding_ln"]:
            stream = self.norm("embed.ln", "LN", stream)
        stream = self.see("hook_embed", stream)
        self.positions: Tensor | None = None
        if cfg["positional_embedding_type"] in ("standard", "shortformer"):
            placed = state["pos_embed.W_pos"][: tokens.shape[1]].expand_as(stream)
            self.positions = self.see("hook_pos_embed", placed)
        if cfg["positional_embedding_type"] == "standard":
            stream = stream + self.positions
        for layer in range(cfg["n_layers"]):
            stream = self.block(layer, stream)
        if kind is not None and cfg["final_rms"]:
            kind = kind.replace("LN", "RMS")
        logits = self.norm("ln_final", kind, stream) @ state["unembed.W_U"] + state["unembed.b_U"]
        self.logits = _capped(logits, cfg["output_logits_soft_cap"])

    def see(self, name: str, value: Tensor) -> Tensor:
        """Keep a value, edited if it is to be."""
        self.seen[name] = self.edits[name](value) if name in self.edits else value
        return self.seen[name]

    def norm(self, path: str, kind: str | None, x: Tensor) -> Tensor:
        """A norm of a kind, with its points."""
        if kind is None:
            return x
        if kind.startswith("LN"):
            x = x - x.mean(-1, keepdim=True)
        scale = (x**2).mean(-1, keepdim=True) + self.cfg["eps"]
        x = x / self.see(f"{path}.hook_scale", scale.sqrt())
        if kind in ("LN", "RMS"):
            x = x * self.state[f"{path}.w"]
        if kind == "LN":
            x = x + self.state[f"{path}.b"]
        return self.see(f"{path}.hook_normalized", x)

    def block(self, layer: int, stream: Tensor) -> Tensor:
        """The stream after a block."""
        cfg, at = self.cfg, f"blocks.{layer}"
        kind, twice = cfg["normalization_type"], cfg["use_normalization_before_and_after"]
        stream = self.see(f"{at}.hook_resid_pre", stream)
        attended = self.attention(layer, self.see(f"{at}.hook_attn_in", stream))
        if twice:
            attended = self.norm(f"{at}.ln1_post", kind, attended)
        middle = stream + self.see(f"{at}.hook_attn_out", attended)
        if cfg["attn_only"]:
            return self.see(f"{at}.hook_resid_post", middle)
        if not cfg["parallel_attn_mlp"]:
            middle = self.see(f"{at}.hook_resid_mid", middle)
        read = self.see(f"{at}.hook_mlp_in", stream if cfg["parallel_attn_mlp"] else middle)
        thought = self.mlp(f"{at}.mlp", self.norm(f"{at}.ln2", kind, read))
        if twice:
            thought = self.norm(f"{at}.ln2_post", kind, thought)
        return self.see(f"{at}.hook_resid_post", middle + self.see(f"{at}.hook_mlp_out", thought))

    def mlp(self, at: str, x: Tensor) -> Tensor:
        """What the MLP gives."""
        state, act = self.state, _ACTIVATIONS[self.cfg["act_fn"]]
        if self.cfg["gated_mlp"]:
            gate = act(self.see(f"{at}.hook_pre", x @ state[f"{at}.W_gate"]))
            linear = self.see(f"{at}.hook_pre_linear", x @ state[f"{at}.W_in"])
            post = gate * linear + state[f"{at}.b_in"]
        else:
            post = act(self.see(f"{at}.hook_pre", x @ state[f"{at}.W_in"] + state[f"{at}.b_in"]))
        if self.cfg["act_fn"] == "solu_ln":
            kind = "LN" if self.cfg["normalization_type"] == "LN" else "LNPre"
            post = self.norm(f"{at}.ln", kind, self.see(f"{at}.hook_mid", post))
        return self.see(f"{at}.hook_post", post) @ state[f"{at}.W_out"] + state[f"{at}.b_out"]

    def attention(self, layer: int, stream: Tensor) -> Tensor:
        """What attention gives: the sum of what its heads write, and a bias."""
        cfg, at, state = self.cfg, f"blocks.{layer}.attn", self.state
        self.norm(f"blocks.{layer}.ln1", cfg["normalization_type"], stream)  # for its points
        q, k, v = (self.project(layer, role, stream) for role in "QKV")
        if cfg["use_qk_norm"]:
            q, k = self.norm(f"{at}.q_norm", "RMS", q), self.norm(f"{at}.k_norm", "RMS", k)
        if cfg["positional_embedding_type"] == "rotary":
            q = self.see(f"{at}.hook_rot_q", turn(q, cfg))
            k = self.see(f"{at}.hook_rot_k", turn(k, cfg))
        scale = (cfg["attn_scale"] or cfg["d_head"] ** 0.5) if cfg["use_attn_scale"] else 1.0
        if cfg["scale_attn_by_inverse_layer_idx"]:
            scale *= layer + 1
        group = cfg["n_heads"] // k.shape[2]
        scores, allowed = [], self.allowed(layer, q.shape[1])
        for head in range(cfg["n_heads"]):
            raw = q[:, :, head] @ k[:, :, head // group].mT / scale
            found = _capped(raw, cfg["attn_scores_soft_cap"])
            if cfg["positional_embedding_type"] in ("alibi", "relative_positional_bias"):
                found = found + self.bias(head, raw)
            scores.append(found.masked_fill(~allowed, -torch.inf))
        pattern = self.see(f"{at}.hook_attn_scores", torch.stack(scores, 1)).softmax(-1)
        pattern = self.see(f"{at}.hook_pattern", pattern)
        mixed = [pattern[:, h] @ v[:, :, h // group] for h in range(cfg["n_heads"])]
        z = self.see(f"{at}.hook_z", torch.stack(mixed, 2))
        written = [z[:, :, h] @ state[f"{at}.W_O"][h] for h in range(cfg["n_heads"])]
        return self.see(f"{at}.hook_result", torch.stack(written, 2)).sum(2) + state[f"{at}.b_O"]

    def project(self, layer: int, role: str, stream: Tensor) -> Tensor:
        """Queries, keys or values, each head from its own copy of the stream."""
        cfg, at = self.cfg, f"blocks.{layer}.attn"
        shared = "_" if role != "Q" and cfg["n_key_value_heads"] else ""
        W, b = (self.state[f"{at}.{shared}{kind}_{role}"] for kind in "Wb")
        copies = torch.stack([stream] * len(W), dim=2)
        copies = self.see(f"blocks.{layer}.hook_{role.lower()}_input", copies)
        made = []
        for head in range(len(W)):
            known = dict(self.seen)
            x = self.norm(f"blocks.{layer}.ln1", cfg["normalization_type"], copies[:, :, head])
            self.seen = known  # a norm's points show the stream, not one head's copy
            if cfg["positional_embedding_type"] == "shortformer" and role != "V":
                x = x + self.positions
            made.append(x @ W[head] + b[head])
        return self.see(f"{at}.hook_{role.lower()}", torch.stack(made, 2))

    def allowed(self, layer: int, length: int) -> Tensor:
        """Which keys each query may look at."""
        cfg = self.cfg
        local = cfg["use_local_attn"] and cfg["attn_types"][layer] == "local"
        found = torch.ones(length, length, dtype=torch.bool)
        for query in range(length):
            for key in range(length):
                ahead = key > query and cfg["attention_dir"] == "causal"
                far = local and query - key >= cfg["window_size"]
                found[query, key] = not (ahead or far)
        return found

    def bias(self, head: int, scores: Tensor) -> Tensor:
        """What a head's scores get for the distance of query and key."""
        cfg, made = self.cfg, torch.zeros_like(scores[0])
        for query in range(len(made)):
            for key in range(len(made)):
                if cfg["positional_embedding_type"] == "alibi":
                    made[query, key] = _slope(head, cfg["n_heads"]) * min(key - query, 0)
                else:
                    row = bucket(
                        key - query,
                        cfg["relative_attention_num_buckets"],
                        cfg["relative_attention_max_distance"],
                        cfg["attention_dir"] == "bidirectional",
                    )
                    made[query, key] = self.state["blocks.0.attn.rel_pos_bias.weight"][row, head]
        return made


def _slope(head: int, heads: int) -> float:
    return 2 ** (-8 * (head + 1) / heads)


def bucket(ahead: int, count: int, farthest: int, both_ways: bool) -> int:
    """T5's row for a key that is so far ahead of its query: near distances by themselves, far ones in ranges."""
    first = 0
    if both_ways:
        count //= 2
        first = count if ahead > 0 else 0
    distance = abs(ahead) if both_ways else max(-ahead, 0)
    single = count // 2
    if distance < single:
        return first + distance
    share = math.log(distance / single) / math.log(farthest / single)
    return first + min(single + int(share * (count - single) + 1e-6), count - 1)


def turn(x: Tensor, cfg: Config) -> Tensor:
    """Queries or keys [batch, pos, head, d_head] turned by their positions."""
    size, made = cfg["rotary_dim"], x.clone()
    for j in range(size // 2):
        one, other = (2 * j, 2 * j + 1) if cfg["rotary_adjacent_pairs"] else (j, j + size // 2)
        speed = cfg["rotary_base"] ** (-2 * j / size)
        if cfg["use_NTK_by_parts_rope"]:
            speed = _slowed(speed, cfg)
        for pos in range(x.shape[1]):
            sin, cos = math.sin(pos * speed), math.cos(pos * speed)
            a, b = x[:, pos, :, one], x[:, pos, :, other]
            made[:, pos, :, one] = a * cos - b * sin
            made[:, pos, :, other] = b * cos + a * sin
    return made


def _slowed(speed: float, cfg: Config) -> float:
    """Llama 3.1's: by the wavelength, as it is, slower by a factor, or between the two."""
    length = cfg["NTK_original_ctx_len"]
    low, high = cfg["NTK_by_parts_low_freq_factor"], cfg["NTK_by_parts_high_freq_factor"]
    wavelength = 2 * math.pi / speed
    if wavelength < length / high:
        return speed
    if wavelength > length / low:
        return speed / cfg["NTK_by_parts_factor"]
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * speed / cfg["NTK_by_parts_factor"] + smooth * speed


def _capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap > 0 else x


# Training.


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean cross-entropy of next tokens."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def trained(
    state: State, options: Config, tokens: Tensor, loss_of: Any, make_optimizer: Any, steps: int = 5
) -> State:
    """The state after some steps of an optimizer, in float64."""
    found = {name: value.double() if value.ndim else value for name, value in state.items()}
    leaves = {n: v.requires_grad_() for n, v in found.items() if n.rpartition(".")[2] not in _FIXED}
    optimizer = make_optimizer(list(leaves.values()))
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(Run(leaves, options, tokens).logits, tokens).backward()
        optimizer.step()
    return {name: value.detach() for name, value in leaves.items()}


_FIXED = ("mask", "IGNORE", "rotary_sin", "rotary_cos")
