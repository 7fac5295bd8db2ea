"""The attention interface of transformers, wrapped once for the process.

Every attention module that goes through it asks ``AttentionInterface.get_interface`` for its kernel.
The wrapper hands out that kernel untouched unless someone listens inside an attention module; then
the points of that module are called around it. The kernel stays what it is unless scores or pattern
are wanted: then the model's own eager function runs, with its softmax in view. No config changes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from interpose.errors import Unsupported
from interpose.models.reach.inner import Core, KernelTap, Reach, additive, causal_mask
from interpose.taps import tap

_watched = 0  # a plain number, read before anything else: unhooked models still compile whole
_CORES: weakref.WeakKeyDictionary[nn.Module, Core] = weakref.WeakKeyDictionary()
_observers: list[Callable[..., None]] = []


class Interface(Reach):
    """Reaches into attention modules by the function they ask transformers for."""

    def connect(self, core: Core) -> None:
        """Call a core's points from now on."""
        global _watched
        _CORES[core.module] = core
        _watched += 1

    def disconnect(self, core: Core) -> None:
        """Undo `connect`."""
        global _watched
        _CORES.pop(core.module, None)
        _watched -= 1


class observed:
    """A ``with`` block in which a function is told of every attention call: ``tell(module, q, k, v)``."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self.tell = tell

    def __enter__(self) -> None:
        global _watched
        with tap._LOCK:
            _observers.append(self.tell)
            _watched += 1

    def __exit__(self, *error: object) -> None:
        global _watched
        with tap._LOCK:
            _observers.remove(self.tell)
            _watched -= 1


@functools.cache
def install() -> None:
    """Wrap the interface; done when the first transformers model is wrapped."""
    from transformers import AttentionInterface

    original = AttentionInterface.get_interface

    @functools.wraps(original)
    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        kernel: Callable[..., Any] = original(self, name, default)
        if not _watched:
            return kernel
        return functools.partial(_run, kernel, name, default)

    AttentionInterface.get_interface = get_interface


def _run(
    kernel: Callable[..., Any],
    name: str,
    default: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Attention with a module's points around the kernel."""
    for tell in _observers:
        tell(module, query, key, value)
    core = _CORES.get(module)
    if core is None or not core.is_wanted():
        return kernel(module, query, key, value, attention_mask, *args, **kwargs)  # type: ignore[no-any-return]
    query, key, value = core.q(query), core.k(key), core.v(value)
    if not core.explicit:
        z, weights = kernel(module, query, key, value, attention_mask, *args, **kwargs)
        return core.z(z), weights
    if kernel is not default:
        attention_mask = _explicit_mask(module, name, query, key, attention_mask, kwargs)
    with KernelTap(core, keys=key.shape[-2]):
        z, weights = default(module, query, key, value, attention_mask, *args, **kwargs)
    # A kernel that gives no weights goes on giving none: what the module returns stays the same.
    return core.z(z), weights if kernel is default else None


def _explicit_mask(
    module: nn.Module,
    name: str,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """What a kernel takes as a mask, in the form that eager attention adds to its scores."""
    if name not in ("sdpa", "eager") or (mask is not None and mask.ndim != 4):
        raise Unsupported(
            f"attention runs as {name!r}, whose mask says nothing about scores. To look at scores "
            "or patterns: model.module.set_attn_implementation('sdpa') (or 'eager') first."
        )
    if mask is not None:
        return _as_added(mask, query.dtype)
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return causal_mask(query, key)[None, None] if causal and query.shape[-2] > 1 else None


def _as_added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as one to add; made once for all the layers that share it."""
    if mask.dtype != torch.bool:
        return mask
    made: Tensor | None = getattr(mask, "_added", None)
    if made is None or made.dtype != dtype:
        made = mask._added = additive(mask, dtype)  # type: ignore[attr-defined]
    return made
