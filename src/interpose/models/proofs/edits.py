"""The edits that `check` makes at a site, and what it compares to see that a model is as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from interpose.sites.tree import Site


def same(value: Tensor, hook: Any) -> Tensor:  # noqa: ARG001
    """The identity, as a new tensor."""
    return value.clone()


def moved(value: Tensor, hook: Any) -> Tensor:  # noqa: ARG001
    """The value with noise of its own size, the same each time."""
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(7))
    # Of a copy in one order: another order of adding up would give another last bit.
    size = value.detach().float().contiguous()
    scale = size.std().clamp_min(1e-3) if value.numel() > 1 else 1.0
    return value + (noise.to(value.device) * scale).to(value.dtype)


def stretched(value: Tensor, hook: Any) -> Tensor:  # noqa: ARG001
    """Each entry by a factor of its own: a common one may cancel in a later norm."""
    factors = torch.rand(value.shape, generator=torch.Generator().manual_seed(7)) + 0.6
    return value * factors.to(value)


def edit_of(site: Site) -> Callable[[Tensor, Any], Tensor]:
    """An edit that a site of this kind cannot but show an effect of."""
    if site.kind == "pattern":

        def look_at_the_first(value: Tensor, hook: Any) -> Tensor:  # noqa: ARG001
            new = torch.zeros_like(value)
            new[..., 0] = 1
            return new

        return look_at_the_first
    if site.kind == "expert_indices":
        return lambda value, hook: torch.where(value == 0, 1, 0) + 0 * value  # noqa: ARG005
    if site.kind == "attn_scores":
        return lambda value, hook: torch.where(
            value > -1e4, moved(value.clamp_min(-9), hook), value
        )
    if site.kind == "scale":
        return stretched
    return moved


def in_place(edit: Callable[[Tensor, Any], Tensor], give: bool) -> Callable[[Tensor, Any], Any]:
    """The same edit, written into what the hook got, and returned or not."""

    def change(value: Tensor, hook: Any) -> Tensor | None:
        value.copy_(edit(value.clone(), hook))
        return value if give else None

    return change


def state(module: torch.nn.Module) -> list[Any]:
    """Everything a check must leave alone, in a form that can be compared."""
    found: list[Any] = [list(module.state_dict())]
    for part in module.modules():
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks)
        found.append((part.training, [list(h.values()) for h in hooks], "forward" in vars(part)))
    found += [p._version for p in module.parameters()]
    return found
