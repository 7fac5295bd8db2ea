"""Other systems' names for the same sites, as data: each rewrites a name into a canonical one.

TransformerLens's bridge says ``blocks.5.attn.q.hook_out``, vlm_spectra ``lm.layer.post`` and a layer,
short forms are pairs such as ``("resid_post", 5)``. Canonical names are those of TransformerLens's
``HookedTransformer``.
"""

from __future__ import annotations

import re

_BLOCK = {
    "hook_in": "hook_resid_pre",
    "hook_out": "hook_resid_post",
    "ln1.hook_in": "hook_attn_in",
    "ln1.hook_out": "ln1.hook_normalized",
    "ln2.hook_in": "hook_resid_mid",
    "ln2.hook_out": "ln2.hook_normalized",
    "ln1_post.hook_out": "hook_attn_out",
    "ln2_post.hook_out": "hook_mlp_out",
    "attn.q.hook_out": "attn.hook_q",
    "attn.k.hook_out": "attn.hook_k",
    "attn.v.hook_out": "attn.hook_v",
    "attn.o.hook_in": "attn.hook_z",
    "attn.o.hook_out": "attn.hook_out",
    "attn.hook_attention_weights": "attn.hook_pattern",
    "attn.hook_scores": "attn.hook_attn_scores",
    "attn.hook_head_out": "attn.hook_result",
    "mlp.hook_out": "hook_mlp_out",
    "mlp.gate.hook_out": "mlp.hook_pre",
    "mlp.in.hook_out": "mlp.hook_pre_linear",
    "mlp.out.hook_in": "mlp.hook_post",
    "mlp.out.hook_out": "hook_mlp_out",
    "mixer.hook_in": "hook_mixer_in",
    "mixer.hook_out": "hook_mixer_out",
}
"""Within a block. ``attn.hook_out`` is a site of its own: the output projection, before post-norms."""

_WHOLE = {
    "embed.hook_out": "hook_embed",
    "pos_embed.hook_out": "hook_pos_embed",
    "ln_final.hook_out": "ln_final.hook_normalized",
    "logits": "unembed.hook_out",
    "embed": "hook_embed",
    "pos_embed": "hook_pos_embed",
    "scale": "ln_final.hook_scale",
    "normalized": "ln_final.hook_normalized",
}

_SPECTRA = {
    "layer.pre": "hook_resid_pre",
    "layer.post": "hook_resid_post",
    "attn.pre": "attn.hook_in",
    "attn.out": "hook_attn_out",
    "attn.pattern": "attn.hook_pattern",
    "mlp.out": "hook_mlp_out",
    "mlp.pre": "mlp.hook_pre",
}
"""vlm_spectra's kinds, with a layer beside them."""

_KINDS = {
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "z": "attn.hook_z",
    "rot_q": "attn.hook_rot_q",
    "rot_k": "attn.hook_rot_k",
    "pattern": "attn.hook_pattern",
    "attn": "attn.hook_pattern",
    "attn_scores": "attn.hook_attn_scores",
    "scores": "attn.hook_attn_scores",
    "result": "attn.hook_result",
    "attn_logits": "attn.hook_attn_scores",
    "pre": "mlp.hook_pre",
    "mlp_pre": "mlp.hook_pre",
    "pre_linear": "mlp.hook_pre_linear",
    "post": "mlp.hook_post",
    "mlp_post": "mlp.hook_post",
    "router_logits": "mlp.hook_router_logits",
    "expert_weights": "mlp.hook_expert_weights",
    "expert_indices": "mlp.hook_expert_indices",
    "experts_out": "mlp.hook_experts_out",
    "expert_out": "mlp.hook_expert_out",
}
_NORMS = ("scale", "normalized")
_LAYER_TYPES = {"a": "attn", "m": "mlp", "b": ""}
TOWER = r"(?:(?:encoder|decoder|vision|audio|stack)(?:_\d+)?\.)?"
"""What the names of a tower's sites begin with; nothing for the main one."""

_IN_BLOCK = re.compile(rf"(?P<tower>{TOWER})blocks\.(?P<layer>-?\d+|\*)\.(?P<rest>.+)")
_SEMANTIC = re.compile(
    rf"(lm\.)?{TOWER}(blocks\.(-?\d+|\*|\*\*)\.|hook_|(ln_final|embed|pos_embed|unembed)\.hook)"
)


def looks_semantic(name: str) -> bool:
    """Whether a name can only mean a site found by discovery."""
    return bool(_SEMANTIC.match(name))


def kinds() -> set[str]:
    """Words that name one site in each block."""
    found = {"resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "attn_in", "mlp_in"}
    return found | {"q_input", "k_input", "v_input", "mixer_in", "mixer_out"} | set(_KINDS)


def canonical(name: str) -> str:
    """A name in its canonical spelling; one that nothing is known about comes back as it is."""
    name = name.removeprefix("lm.")
    if name in _WHOLE:
        return _WHOLE[name]
    match = _IN_BLOCK.fullmatch(name)
    if match is None:
        return name
    rest = _BLOCK.get(match["rest"], match["rest"])
    return f"{match['tower']}blocks.{match['layer']}.{rest}"


def bridge_names(name: str) -> list[str]:
    """What TransformerLens's bridge calls a canonical name, on one kind of block or another."""
    match = _IN_BLOCK.fullmatch(name)
    if match is None:
        return [other for other, known in _WHOLE.items() if known == name and "." in other]
    found = [other for other, known in _BLOCK.items() if known == match["rest"]]
    if match["rest"] == "mlp.hook_pre":
        found.append("mlp.in.hook_out")  # of an MLP without a gate
    return [f"{match['tower']}blocks.{match['layer']}.{other}" for other in found]


def of_kind(kind: str, layer: int | str | None = None, part: str | None = None) -> str:
    """The canonical name of a short form: a kind, a layer (``*`` for all), and the part of the block if needed."""
    kind = kind.removeprefix("lm.").removeprefix("hook_")
    if kind in ("embed", "pos_embed") or layer is None:
        if kind in _NORMS:
            return f"{part or 'ln_final'}.hook_{kind}"
        return _WHOLE.get(kind, kind if "." in kind else f"hook_{kind}")
    if kind in _SPECTRA:
        return f"blocks.{layer}.{_SPECTRA[kind]}"
    if part is not None and part not in ("b",):
        return f"blocks.{layer}.{_LAYER_TYPES.get(part, part)}.hook_{kind}"
    if kind in _NORMS:
        return f"blocks.{layer}.ln1.hook_{kind}"
    return f"blocks.{layer}.{_KINDS.get(kind, f'hook_{kind}')}"


def is_short_form(asked: object) -> bool:
    """Whether something is a pair such as ``("resid_post", 5)``, or has the part of the block as a third."""
    return (
        isinstance(asked, tuple)
        and len(asked) in (2, 3)
        and isinstance(asked[0], str)
        and (isinstance(asked[1], int) or asked[1] is None)
        and all(isinstance(part, str) for part in asked[2:])
    )
