"""What is found out about a model by trying it, kept as long as it would come out the same.

How a module is built is the engine's `Stamp`. What a trial showed (rows are independent, later tokens move
nothing before them) rests on more: flags of modules and configs, hooks of others, and the numbers themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import call, is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from interpose.engine.model import Model
from interpose.taps import values
from interpose.taps.tap import Tap

T = TypeVar("T")

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
_NOT_FLAGS = (
    "training",  # trials run in eval mode, whatever the mode is
    "forward",  # the engine's stamp compares it
    "_compiled_call_impl",  # hooked runs are eager
)


def known(model: Model, key: Any, find_out: Callable[[], T], *, tried: bool = True) -> T:
    """What a function finds out about a model: found out once, and again when what it rests on has changed.

    Args:
        model: the model.
        key: what it is called.
        find_out: does so.
        tried: whether it shows in the model's numbers; else it follows from how the model is built.
    """
    model.refresh(thoroughly=True)
    shelf: dict[Any, tuple[int, Any, Conditions | None]] = vars(model).setdefault("_known", {})
    changes, found, conditions = shelf.get(key, (-1, None, None))
    if changes != model.changes or (conditions is not None and not conditions.hold()):
        found = find_out()
        shelf[key] = model.changes, found, Conditions(model.root) if tried else None
    return found  # type: ignore[no-any-return]


class Conditions:
    """What the numbers of a module come from, at one moment: flags, hooks of others, parameters and buffers."""

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        tensors = _tensors(modules)
        self._root = weak(root)
        self._flags = list(_flags(modules))
        self._functions = list(map(weak, _functions(modules)))
        self._versions = list(map(_version, tensors))
        self._tensors = list(map(weak, tensors))
        self._hooks = list(map(weak, _foreign_hooks(modules)))

    def hold(self) -> bool:
        """Whether they are the same now."""
        root = self._root()
        if root is None:
            return False
        modules = list(root.modules())
        tensors = _tensors(modules)
        return (
            _same(self._tensors, tensors)
            and list(map(_version, tensors)) == self._versions
            and _same(self._hooks, _foreign_hooks(modules))
            and list(_flags(modules)) == self._flags
            and _same(self._functions, _functions(modules))
        )


def weak(found: Any) -> Callable[[], Any]:
    """A weak reference; a strong one to what takes no weak ones."""
    try:
        return weakref.ref(found)
    except TypeError:
        return lambda: found


def _same(references: list[Callable[[], Any]], objects: list[Any]) -> bool:
    """Whether references are to just these objects, in this order."""
    return len(references) == len(objects) and all(map(is_, map(call, references), objects))


def _tensors(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Parameters and buffers; of several modules as often as they have them."""
    held = chain.from_iterable((m._parameters.values(), m._buffers.values()) for m in modules)
    return [one for one in chain.from_iterable(held) if one is not None]


def foreign_hooks(root: nn.Module) -> list[Callable[..., Any]]:
    """Forward hooks on a module, on any below it, or on all modules there are, that are none of ours."""
    return _foreign_hooks(root.modules())


def _foreign_hooks(modules: Iterable[nn.Module]) -> list[Callable[..., Any]]:
    registries = [
        nn.modules.module._global_forward_pre_hooks,
        nn.modules.module._global_forward_hooks,
    ]
    for module in modules:
        registries += [module._forward_pre_hooks, module._forward_hooks]
    found = [hook for registry in registries if registry for hook in list(registry.values())]
    return [hook for hook in found if not isinstance(hook, Tap) and home_of(hook) != "interpose"]


def home_of(hook: Any) -> str:
    """The package that a hook was written in."""
    while hasattr(hook, "func"):  # a partial
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0]


def _version(tensor: Tensor) -> tuple[int, torch.dtype, int]:
    """Changes when a tensor is written to, or given other numbers, or numbers of another kind."""
    ordinary = type(tensor) in (Tensor, nn.Parameter) and values.is_plain(tensor)
    place = tensor.data_ptr() if ordinary else 0
    return -1 if tensor.is_inference() else tensor._version, tensor.dtype, place


def _flags(modules: Iterable[nn.Module]) -> Iterator[dict[str, Any]]:
    """Plain attributes of modules and of their configs, by name."""
    configs: dict[int, Any] = {}
    for module in modules:
        own = vars(module)
        yield _plain(own)
        if "config" in own:
            configs.setdefault(id(own["config"]), own["config"])
    for config in configs.values():
        yield _plain(getattr(config, "__dict__", {}))


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, texts and lists of them, each by its name."""
    found: dict[str, Any] = {}
    for name, value in attributes.items():
        if name in _NOT_FLAGS:
            continue
        if isinstance(value, _PLAIN):
            found[name] = value
        elif isinstance(value, (list, tuple)) and all(isinstance(one, _PLAIN) for one in value):
            found[name] = tuple(value)  # as it is now
    return found


def _functions(modules: Iterable[nn.Module]) -> list[Callable[..., Any]]:
    """Functions that modules hold as attributes."""
    return [
        value
        for module in modules
        for name, value in vars(module).items()
        if callable(value) and name not in _NOT_FLAGS and not isinstance(value, type)
    ]
