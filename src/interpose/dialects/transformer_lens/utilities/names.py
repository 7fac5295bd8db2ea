"""`get_act_name`: from short forms to the names of sites."""

from __future__ import annotations

import re

from interpose import names

_ALIASES = {"key": "k", "query": "q", "value": "v", "mlp_mid": "mid"}
_LAYER_TYPES = {"attention": "attn", "block": None, "blocks": None, "b": None, "": None}
_WITH_LAYER = re.compile(r"([a-z_]+)(\d+)(.*)")


def get_act_name(name: str, layer: int | str | None = None, layer_type: str | None = None) -> str:
    """The full name of an activation.

    ```python
    get_act_name("q", 3)             # blocks.3.attn.hook_q
    get_act_name("resid_pre", 3)     # blocks.3.hook_resid_pre
    get_act_name("scale", 2, "ln1")  # blocks.2.ln1.hook_scale
    get_act_name("scale")            # ln_final.hook_scale
    get_act_name("k6")               # blocks.6.attn.hook_k
    get_act_name("pattern")          # attn.hook_pattern, with which a full name ends
    ```

    Args:
        name: what is wanted, such as ``q``, ``pattern``, ``resid_post``, ``mlp_out``; or all in one
            (``scale4ln1``); or a full name, which comes back as it is.
        layer: which block, for what every block has.
        layer_type: which part of the block, for what several have: ``ln1``, ``ln2``, ``attn``, ``mlp``
            (or ``a``, ``m``). Not needed where only one part has it.
    """
    if layer is None and layer_type is None:
        if "." in name or name.startswith("hook_"):
            return name
        match = _WITH_LAYER.fullmatch(name)
        if match is not None:
            name, layer, layer_type = match.groups()
    name = _ALIASES.get(name, name)
    part = _LAYER_TYPES.get(layer_type, layer_type) if layer_type is not None else None
    if name == "mid":
        part = "mlp"
    elif name in names.kinds():
        part = None
        if layer is None:  # what the name ends with in every block
            return names.of_kind(name, "*").removeprefix("blocks.*.")
    return names.of_kind(name, layer, part)
