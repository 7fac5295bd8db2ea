"""Points inside a function, where no module ends: attention scores, patterns, rotated queries.

An inner point is a module of ours that belongs to no model. Code that stands inside the function
(the attention interface, a function mode) calls it with the value and goes on with what it returns,
so that every kind of hook, read and gradient works there as it does at a module's output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from interpose.models.reach.lenses import Counted
from interpose.taps import bypass, tap

_SOFTMAX = {torch.softmax, torch.nn.functional.softmax, Tensor.softmax}


class InnerPoint(nn.Module):
    """A place inside another module's forward."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, value: Tensor) -> Tensor:
        """The value itself; hooks on this module see and change it."""
        return value

    def __call__(self, value: Tensor) -> Tensor:
        """What a module's call does with our hooks, without what it does for others."""
        for hook in tuple(self._forward_hooks.values()):
            made = hook(self, (value,), {}, value)
            value = value if made is None else made
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> InnerPoint:
        return InnerPoint(self.name)


class Core(Counted):
    """The inner points of one attention module: ``q``, ``k``, ``v``, ``scores``, ``pattern``, ``z``."""

    def __init__(self, module: nn.Module, *, reach: Reach) -> None:
        self.module = module
        self.reach = reach
        for name in POINTS:
            setattr(self, name, InnerPoint(name))

    q: InnerPoint
    k: InnerPoint
    v: InnerPoint
    scores: InnerPoint
    pattern: InnerPoint
    z: InnerPoint

    def _connect(self) -> None:
        self.reach.connect(self)

    def _disconnect(self) -> None:
        self.reach.disconnect(self)

    @property
    def explicit(self) -> bool:
        """Whether scores or pattern are listened to here and now, so that the kernel must give way."""
        return tap.is_listened_to(self.scores) or tap.is_listened_to(self.pattern)

    def is_wanted(self) -> bool:
        """Whether any point is listened to here and now."""
        return any(tap.is_listened_to(getattr(self, name)) for name in POINTS)

    def output(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the module's forward with its kernel calls in view."""
        with KernelTap(self):
            return forward(*args, **kwargs)


POINTS = ("q", "k", "v", "scores", "pattern", "z")


class Reach:
    """How the inside of attention modules is reached. This one: a function mode around the forward."""

    def connect(self, core: Core) -> None:
        """Make a core's points be called."""
        bypass.bypass(core.module, core)

    def disconnect(self, core: Core) -> None:
        """Undo `connect`."""
        bypass.unbypass(core.module, core)


class KernelTap(TorchFunctionMode):
    """Sees ``softmax`` and ``scaled_dot_product_attention`` while an attention module runs."""

    def __init__(self, core: Core, *, keys: int | None = None) -> None:
        super().__init__()
        self.core = core
        self.keys = keys

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the points look at what goes into and out of the kernel."""
        kwargs = kwargs or {}
        if func in _SOFTMAX:
            return self._softmax(func, args, kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _softmax(
        self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        name = "input" if "input" in kwargs else None
        scores = kwargs[name] if name else args[0]
        scores = self._seen(self.core.scores, scores)
        if name:
            kwargs = {**kwargs, name: scores}
        else:
            args = (scores, *args[1:])
        return self._seen(self.core.pattern, func(*args, **kwargs))

    def _seen(self, point: InnerPoint, value: Tensor) -> Tensor:
        """Show a value to a point, without the columns that stand for no key (attention sinks)."""
        keys = self.keys
        if keys is None or value.shape[-1] == keys:
            return point(value)
        part = value[..., :keys]
        new = point(part)
        return value if new is part else torch.cat([new, value[..., keys:]], dim=-1)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        core = self.core
        query, key, value = core.q(query), core.k(key), core.v(value)
        if not core.explicit:
            z = torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
            return core.z(z)
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = query @ key.transpose(-2, -1) * scale
        if is_causal:
            attn_mask = causal_mask(query, key)
        if attn_mask is not None:
            scores = scores + additive(attn_mask, scores.dtype)
        pattern = core.pattern(core.scores(scores).softmax(-1))
        pattern = torch.dropout(pattern, dropout_p, train=dropout_p > 0)
        return core.z(pattern @ value)


class FunctionPoint(Counted, InnerPoint):
    """The result of one function that a module calls inside its forward, such as a router's own ``linear``."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__(getattr(function, "__name__", "function"))
        self.inside = [module]  # in a list, so that it does not become a part of this one
        self.function = function

    def _connect(self) -> None:
        bypass.bypass(self.inside[0], self)

    def _disconnect(self) -> None:
        bypass.unbypass(self.inside[0], self)

    def is_wanted(self) -> bool:
        """Whether someone listens here and now."""
        return tap.is_listened_to(self)

    def output(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the module's forward with the function in view."""
        with _FunctionTap(self):
            return forward(*args, **kwargs)


class _FunctionTap(TorchFunctionMode):
    def __init__(self, point: FunctionPoint) -> None:
        super().__init__()
        self.point = point

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return self.point(made) if func is self.point.function else made


def causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """What to add to scores for the kernels' ``is_causal``: aligned at the upper left."""
    return _causal(query.shape[-2], key.shape[-2], query.dtype, query.device)


@lru_cache(maxsize=4)
def _causal(queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        may = torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
        return additive(may, dtype)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores, from one that says where to look."""
    if mask.dtype != torch.bool:
        return mask
    nothing = torch.zeros((), dtype=dtype, device=mask.device)
    return nothing.masked_fill(~mask, torch.finfo(dtype).min)
