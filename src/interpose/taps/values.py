"""Tensors inside what modules take and return: find them, read them, put others in their place.

Containers are tuples, named tuples, lists, dictionaries and dataclasses (so also transformers'
ModelOutput), nested as they come. A container is never changed: putting a tensor in returns a new
one of the same type. Everything else (caches, strings, None) is left alone. This is the only file
that knows about containers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from interpose.errors import EditShapeError, SiteNotFound, Unsupported
from interpose.sites.grammar import Key, spell

Leaf = tuple[Key, ...]


def leaves(value: Any) -> Iterator[tuple[Leaf, Tensor]]:
    """Every tensor in a value, with the path that leads to it."""
    if isinstance(value, Tensor):
        yield (), value
        return
    for key, part in parts(value):
        for path, tensor in leaves(part):
            yield (key, *path), tensor


def parts(value: Any) -> Iterator[tuple[Key, Any]]:
    """The direct elements of a container; nothing for any other value."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if isinstance(key, (str, int)):
                yield key, part
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value)
    elif isinstance(value, (tuple, list)):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                yield field.name, getattr(value, field.name)


def element(value: Any, leaf: Leaf) -> Any:
    """What a path leads to. Integer steps also count the elements of mappings and dataclasses."""
    for depth, key in enumerate(leaf):
        found = _step(value, key)
        if found is _MISSING:
            there = [spell((name,)) for name, _ in parts(value)]
            what = f"has {', '.join(there)}" if there else f"is a {type(value).__name__}"
            raise SiteNotFound(
                f"no element {spell(leaf[: depth + 1])!r}: {spell(leaf[:depth]) or 'the value'} "
                f"{what}"
            )
        value = found
    return value


def swap(value: Any, leaf: Leaf, new: Any) -> Any:
    """A copy of a container with one element replaced."""
    if not leaf:
        return new
    key, *rest = leaf
    inner = swap(_step(value, key), tuple(rest), new)
    if isinstance(value, Mapping):
        name = key if key in value else list(value)[int(key)]
        changed = copy.copy(value)
        changed[name] = inner  # type: ignore[index]
        return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        name = key if isinstance(key, str) else value._fields[key]
        if hasattr(value, "_replace"):
            return value._replace(**{name: inner})
    if isinstance(value, (tuple, list)):
        items = list(value)
        items[int(key)] = inner
        return items if type(value) is list else type(value)(items)
    name = key if isinstance(key, str) else dataclasses.fields(value)[key].name
    changed = copy.copy(value)
    object.__setattr__(changed, name, inner)
    return changed


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a container with every tensor put through a function, once if it stands in several places."""
    made: dict[int, Tensor] = {}
    for leaf, tensor in list(leaves(value)):
        if id(tensor) not in made:
            made[id(tensor)] = change(tensor)
        value = swap(value, leaf, made[id(tensor)])
    return value


_MISSING = object()


def _step(value: Any, key: Key) -> Any:
    if isinstance(value, Mapping) and key in value:
        return value[key]
    found = list(parts(value))
    if isinstance(key, int):
        return found[key][1] if -len(found) <= key < len(found) else _MISSING
    return dict(found).get(key, _MISSING)


def is_plain(value: Tensor) -> bool:
    """Whether a tensor is one dense array, not sparse or nested."""
    return value.layout is torch.strided and not value.is_nested


def twin(value: Tensor) -> Tensor:
    """A copy with the same strides that can be written to; an expanded value is written out."""
    if is_plain(value) and value.is_contiguous() and not torch.is_inference_mode_enabled():
        return value.clone()
    return _copy(value, value)


def are_one(one: Tensor, other: Tensor) -> bool:
    """Whether two replacements of one tensor may be one tensor: equal, and so are their gradients.

    Of gradients only what is plain to see counts: the same steps, none of which kept a tensor, from
    the same tensors. Otherwise they stay two, as they are right in any case.
    """
    if type(one) is not Tensor or type(other) is not Tensor or one.is_meta or one is other:
        return one is other
    todo: list[tuple[Any, Any]] = [(one.grad_fn, other.grad_fn)]
    done = set()
    while todo:
        pair = todo.pop()
        if pair[0] is pair[1] or pair in done:
            continue
        done.add(pair)
        a, b = (_constants(node) for node in pair)
        if a is None or a != b:
            return False
        todo += zip(*([step for step, _ in node.next_functions] for node in pair))
    return one.requires_grad == other.requires_grad and torch.equal(_bits(one), _bits(other))


def _bits(value: Tensor) -> Tensor:
    """All that a tensor holds, for comparing: of any dtype, with the bits of NaN and -0."""
    return value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def _constants(node: Any) -> Any:
    """What a step of a graph does, if that does not depend on tensors it kept; None if it may, and for leaves."""
    names = [name for name in dir(node) if "_saved_" in name]
    if not getattr(node, "next_functions", ()) or any("_raw_saved_" in name for name in names):
        return None
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return None
    at = [number for _, number in node.next_functions]
    return type(node), at, [getattr(node, name) for name in names]


def stand_in(value: Tensor) -> Tensor:
    """A copy with just the same strides, so that the kernels after it take the same path."""
    return _copy(value, value, expanded=True)


def settled(new: Tensor, value: Tensor) -> Tensor:
    """A copy of a replacement with the dtype and strides of the value it replaces.

    A copy, because the model may change it in place and what a user returned stays the user's.
    """
    return _copy(new if new.dtype == value.dtype else new.to(value.dtype), value, expanded=True)


def _copy(source: Tensor, like: Tensor, *, expanded: bool = False) -> Tensor:
    if torch.is_inference_mode_enabled():
        # Inference tensors count no versions; an ordinary tensor does, also in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return _copy(source, like, expanded=expanded)
    if not is_plain(like) or (like.is_contiguous() and source.is_contiguous()):
        return source.clone()
    if expanded and 0 in like.stride():
        return _copy_expanded(source, like)
    if (source.stride() == like.stride() and _dense(source)) or not _dense(like, holes=True):
        return source.clone()
    blank = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return blank.copy_(source)


def _copy_expanded(source: Tensor, like: Tensor) -> Tensor:
    """A copy that is expanded the same way, if the source is the same along the expanded axes."""
    small = source
    for axis, (stride, size) in enumerate(zip(like.stride(), like.shape)):
        if stride == 0 and size > 1:
            small = small.narrow(axis, 0, 1)
    if source is not like and not torch.equal(small.expand_as(source), source):
        return source.clone()
    if source is not like and source.requires_grad:
        made: Tensor = _SharedMemory.apply(source, small.detach().clone().expand_as(like))  # type: ignore[no-untyped-call]
        return made
    return small.clone().expand_as(like)


class _SharedMemory(torch.autograd.Function):
    """A value whose equal entries share memory, while each has a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, shared: Tensor) -> Tensor:  # noqa: ARG004
        return shared

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None


def _dense(value: Tensor, holes: bool = False) -> bool:
    """Whether no two elements share memory (and, without ``holes``, none lies between them)."""
    if value.is_contiguous():
        return True
    if value.layout is not torch.strided or type(value) not in (Tensor, torch.nn.Parameter):
        return False
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape)):
        if size == 1:
            continue
        if stride < expected or (stride > expected and not holes):
            return False
        expected = stride * size
    return True


def is_shard(value: Tensor) -> bool:
    """Whether it is spread over processes (a DTensor), of which each has a part."""
    return type(value) is not Tensor and hasattr(value, "full_tensor")


def check_supported(value: Tensor, name: str) -> None:
    """Refuse tensors that are not one plain array: inside ``vmap``, or a shard of a larger one."""
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise Unsupported(
            f"{name!r} was reached inside torch.func (vmap, grad, jvp): its value has no meaning "
            "outside. Call the model directly on a batch instead."
        )
    if is_shard(value):
        raise Unsupported(
            f"{name!r} is a DTensor, one shard of a larger value. Hook a module whose value is whole."
        )


def check_replacement(new: Any, value: Tensor, hook: Any, name: str) -> Tensor:
    """Refuse a replacement that the model could not take, and say what it needs."""
    if (
        isinstance(new, Tensor)
        and new.shape == value.shape
        and new.device == value.device
        and (new.dtype == value.dtype or _kind(new) == _kind(value))
    ):
        return new
    there = f"{hook.label} at {name!r}"
    if not isinstance(new, Tensor):
        raise EditShapeError(
            f"{there} returned a {type(new).__name__}; the value is a tensor of shape "
            f"{tuple(value.shape)}. Return a tensor, or None to leave the value as it is."
        )
    if new.shape != value.shape:
        raise EditShapeError(
            f"{there} returned shape {tuple(new.shape)}; the model needs {tuple(value.shape)}. "
            "Return a tensor of the same shape, or None to leave the value as it is."
        )
    if _kind(new) != _kind(value):
        raise EditShapeError(
            f"{there} returned {new.dtype}; the model needs {value.dtype}, and {_kind(new)} does "
            f"not stand for {_kind(value)}. Convert it with .to({value.dtype})."
        )
    raise EditShapeError(
        f"{there} returned a tensor on {new.device}; the value is on {value.device}. Move it with "
        ".to(value.device)."
    )


def _kind(value: Tensor) -> str:
    if value.dtype == torch.bool:
        return "bool"
    if value.is_complex():
        return "complex"
    return "floating point" if value.is_floating_point() else "integer"
