"""Parts whose weights are spread over processes: what lies inside is some heads or neurons only, and not offered."""

from __future__ import annotations

from typing import Any

from torch import nn

from interpose.taps.values import is_shard

_WHOLE = ("hook_in", "hook_out")
_SPREAD = "its weights are spread over processes (tensor parallel), each with some of its heads or neurons"


def withhold(sites: dict[str, Any], absent: dict[str, str], at: str, part: nn.Module) -> None:
    """Take away the sites inside a part of a block, if each process has some of its weights.

    Args:
        sites: those that were found, by name.
        absent: why others were not.
        at: what the names inside begin with.
        part: its module.
    """
    if any(map(is_shard, part.parameters())):
        inside = [n for n in (*sites, *absent) if n.startswith(at) and not n.endswith(_WHOLE)]
        for name in inside:
            sites.pop(name, None)
        absent |= dict.fromkeys(inside, _SPREAD)
