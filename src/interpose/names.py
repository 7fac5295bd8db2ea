"""Other systems' names for the same sites, as data: each rewrites a name into a canonical one.

TransformerLens's bridge says ``blocks.5.attn.q.hook_out``, vlm_spectra ``lm.layer.post`` and a layer,
short forms are pairs such as ``("resid_post", 5)``. Canonical names are those of TransformerLens's
``HookedTransformer``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_BLOCK = {
    "hook_in": "hook_resid_pre",
    "hook_out": "hook_resid_post",
    "hook_normalized_resid_post": "hook_resid_post",
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
    "attn.hook_q_input": "hook_q_input",
    "attn.hook_k_input": "hook_k_input",
    "attn.hook_v_input": "hook_v_input",
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
    "hook_full_embed": "blocks.0.hook_resid_pre",
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
_IN_OLD_BLOCK = re.compile(r"(?P<tower>encoder|decoder)\.(?P<layer>-?\d+)\.(?P<rest>.*hook_.+)")
"""As TransformerLens's encoder-decoders have it: ``encoder.0.attn.hook_q``."""
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


_OF_TRANSFORMERS = """
    W_E W_K W_gate b_gate embed pos_embed ln_final stream to_answer
    W_O W_Q W_U W_V W_in W_out W_pos anatomy b_K b_O b_Q b_U b_V b_in b_out blocks cfg check generate must_have_image
    generate_batch get_token_position mask_of prepare probe processor to_single_str_token to_single_token to_str_tokens
    partial to_string to_tokens tokenizer unembed
""".split()


def of_transformers(name: str) -> str:
    """What to say where something is asked of any module that only models of transformers have; empty for the rest."""
    kind = name.removeprefix("hook_")
    if not (name in _OF_TRANSFORMERS or kind in kinds() or kind != name or ".hook_" in name):
        return ""
    return (
        f"Only models of transformers have {name!r}: ip.load(name), or ip.wrap(module, tokenizer). Other modules have "
        "the names of their own parts."
    )


def canonical(name: str) -> str:
    """A name in its canonical spelling; one that nothing is known about comes back as it is."""
    name = name.removeprefix("lm.")
    if name in _WHOLE:
        return _WHOLE[name]
    match = _IN_BLOCK.fullmatch(name)
    tower = "" if match is None else match["tower"]
    if match is None:
        match = _IN_OLD_BLOCK.fullmatch(name)
        if match is None:
            return name
        tower = match["tower"] + "."
    rest = _BLOCK.get(match["rest"], match["rest"])
    return f"{tower}blocks.{match['layer']}.{rest}"


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


@dataclass(frozen=True, slots=True)
class Speller:
    """The names of one model's sites as plain data: it goes with values that are kept, also without the model.

    Attributes:
        sites: canonical names, each with whether its value is kept when nothing is named.
        absent: names that models of this kind may have and this one has not, each with the reason.
        offered: canonical names of sites that others have made; how they end is a kind.
    """

    sites: Mapping[str, bool] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    offered: tuple[str, ...] = ()

    def __call__(self, asked: Any) -> str:
        """The canonical spelling of a name or short form."""
        if is_short_form(asked):
            mine = self.ending(*asked[:2])
            asked = mine[0] if len(mine) == 1 else of_kind(*asked)
        if not isinstance(asked, str):
            raise TypeError(
                "a site is named by a string such as 'blocks.5.hook_resid_post', or by kind and "
                f"layer: ('resid_post', 5); got {asked!r}"
            )
        return self.key(asked)

    def key(self, name: str) -> str:
        """The canonical spelling of a name, layers counted from the end included."""
        mine = self.ending(name)
        key = mine[0] if len(mine) == 1 else canonical(name)
        negative = re.match(r"(.*?)blocks\.(-\d+)\.(.*)", key)
        if negative is not None:
            prefix, layer, rest = negative.groups()
            count = self.blocks(prefix) or self.blocks("decoder.")
            number = int(layer) + count
            key = f"{prefix}blocks.{number if number >= 0 else layer}.{rest}"
        if key not in self.sites:
            # An encoder-decoder has no sites without a prefix: its decoder's are meant.
            if f"decoder.{key}" in self.sites or f"decoder.{key}" in self.absent:
                return f"decoder.{key}"
        if key.endswith("mlp.hook_pre_linear") and key not in self.sites and key != name:
            key = key.removesuffix("_linear")  # the bridge's `mlp.in` of an MLP without a gate
        return key

    def ending(self, kind: str, layer: int | None = None) -> list[str]:
        """The offered names that end so, in one layer or in all."""
        if layer is not None and layer < 0:
            layer += self.blocks() or self.blocks("decoder.")
        ends = [name for name in self.offered if name.endswith(f".{kind}")]
        return [n for n in ends if layer is None or (layer_of(n) or ("", None))[1] == layer]

    def blocks(self, prefix: str = "") -> int:
        """How many blocks a tower has."""
        start = f"{prefix}blocks."
        return len({n[len(start) :].split(".")[0] for n in self.sites if n.startswith(start)})


def layer_of(name: str) -> tuple[str, int] | None:
    """The prefix of a canonical name's tower, and its layer; None for one that is in no block."""
    where = _IN_BLOCK.fullmatch(name)
    return None if where is None or where["layer"] == "*" else (where["tower"], int(where["layer"]))


def short_form(name: str) -> str:
    """A canonical name as one would type it: ``('resid_post', 3)``, if it has a short form."""
    where = _IN_BLOCK.fullmatch(name)
    if where is None or where["tower"] or not where["layer"].isdigit():
        return repr(name)
    kind = where["rest"].rpartition("hook_")[2]
    pair = (kind, int(where["layer"]))
    return repr(pair) if kind in kinds() and of_kind(*pair) == name else repr(name)
