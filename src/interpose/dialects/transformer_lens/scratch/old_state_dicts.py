"""State dicts as TransformerLens wrote them: with buffers that are computed here, keys and values in two layouts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from interpose.dialects.transformer_lens.scratch.transformer import Transformer

_COMPUTED = re.compile(
    r"blocks\.\d+\.attn\.(mask|IGNORE|rotary_sin|rotary_cos|alibi)|.*\.hook_\w+\..*"
)
_SHARED = re.compile(r"(blocks\.\d+\.attn\.)_?([Wb]_[KV])")


def translate(module: Transformer, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Make a state dict of TransformerLens's one of this module, in place. Its own pass through unchanged.

    Args:
        module: that is to be loaded.
        state_dict: parameters and buffers by name.
        prefix: what the names begin with.
    """
    own = module.state_dict()
    for key in list(state_dict):
        name = key.removeprefix(prefix)
        if _COMPUTED.fullmatch(name):
            del state_dict[key]
        elif name == "pos_embed.W_pos" and name not in own:
            del state_dict[key]  # there, models with ALiBi have a table that nothing reads
        elif (match := _SHARED.fullmatch(name)) is not None and name not in own:
            other = match[1] + (match[2] if name.startswith(f"{match[1]}_") else f"_{match[2]}")
            if other in own:
                state_dict[prefix + other] = _regrouped(name, state_dict.pop(key), len(own[other]))


def _regrouped(name: str, value: Tensor, heads: int) -> Tensor:
    """A weight of keys or values for another number of heads."""
    if len(value) <= heads:
        return value.repeat_interleave(heads // len(value), dim=0)
    groups: Tensor = value.unflatten(0, (heads, -1))
    if not bool((groups == groups[:, :1]).all()):
        raise ValueError(f"{name!r} differs within groups of heads that are to share it.")
    return groups[:, 0]
