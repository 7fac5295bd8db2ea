"""Values as data that JSON takes, and back to the last bit: tensors, numbers that JSON lacks, tuples, results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import (
    Any,
    Protocol,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

import torch
from torch import Tensor

_MARKS = ({"tensor"}, {"tensor", "dtype", "shape"}, {"number"}, {"tuple"}, {"pairs"})


@runtime_checkable
class Written(Protocol):
    """What writes itself: a result, inside of another."""

    def to_dict(self, tensors: dict[str, Tensor] | None = None) -> dict[str, Any]:
        """Itself as data, with its ``format``."""


def plain(value: Any, hint: Any = Any, tensors: dict[str, Tensor] | None = None) -> Any:
    """A value as JSON has it: what JSON has no word for is marked by a mapping, and anything else is its text.

    Args:
        value: what to write.
        hint: its annotation; a tuple that it speaks of is a plain list.
        tensors: where tensors go, to be written beside it; None to write their numbers out.
    """
    if isinstance(value, Tensor):
        if tensors is not None:
            tensors[name := str(len(tensors))] = value.detach().cpu().contiguous()
            return {"tensor": name}
        kind = str(value.dtype).removeprefix("torch.")
        return {"tensor": numbers(value), "dtype": kind, "shape": list(value.shape)}
    if isinstance(value, Written):
        return value.to_dict(tensors)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = get_type_hints(type(value))
        names = [one.name for one in dataclasses.fields(value)]
        return {name: plain(getattr(value, name), hints[name], tensors) for name in names}
    if isinstance(value, Mapping):
        of = _inner(hint, dict, 2)[1]
        if all(isinstance(name, str) for name in value) and set(value) not in _MARKS:
            return {name: plain(part, of, tensors) for name, part in value.items()}
        pairs = ([plain(name), plain(part, of, tensors)] for name, part in value.items())
        return {"pairs": list(pairs)}
    if isinstance(value, (list, tuple)):
        inner = _inner(hint, type(value), len(value))
        found = [plain(*pair, tensors) for pair in zip(value, inner)]
        said = isinstance(value, list) or get_origin(_known(hint)) is tuple
        return found if said else {"tuple": found}
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": _odd(value)}
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


def shaped(value: Any, hint: Any) -> Any:
    """What is made of data that was read, by its annotation: tuples of lists, dataclasses of mappings.

    Args:
        value: the data.
        hint: its annotation.
    """
    hint = _known(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        made, hints = cast("Callable[..., Any]", hint), get_type_hints(hint)
        return made(**{name: shaped(part, hints[name]) for name, part in value.items()})
    if get_origin(hint) is dict and isinstance(value, Mapping):
        inner = _inner(hint, dict, 2)[1]
        return {name: shaped(part, inner) for name, part in value.items()}
    if get_origin(hint) in (list, tuple) and isinstance(value, (list, tuple)):
        made = get_origin(hint)
        return made(map(shaped, value, _inner(hint, made, len(value))))
    return value


def _known(hint: Any) -> Any:
    """An annotation without its None."""
    if get_origin(hint) not in (Union, UnionType):
        return hint
    return next(one for one in get_args(hint) if one is not type(None))


def _inner(hint: Any, kind: type, count: int) -> Sequence[Any]:
    """The annotations of what is inside of a container of some kind."""
    hint = _known(hint)
    inner = get_args(hint) if get_origin(hint) is kind else ()
    if kind is dict or (kind is tuple and ... not in inner and inner):
        return inner or (Any,) * count
    return (inner[0] if inner else Any,) * count


def numbers(value: Tensor) -> Any:
    """The numbers of a tensor as nested lists; those that JSON lacks are texts."""
    found = value.detach().cpu().tolist()
    odd = value.is_floating_point() and not bool(torch.isfinite(value).all())
    return _each(found, lambda x: x if math.isfinite(x) else _odd(x)) if odd else found


def read(value: Any, tensors: Mapping[str, Tensor], inner: Callable[[Any], Any]) -> Any:
    """What `plain` wrote.

    Args:
        value: the data.
        tensors: those that were written beside it.
        inner: from the data of a result inside of another to that result.
    """

    def again(part: Any) -> Any:
        return read(part, tensors, inner)

    if isinstance(value, list):
        return [again(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    marks = set(value)
    if marks == {"tensor"}:
        return tensors[value["tensor"]]
    if marks == {"tensor", "dtype", "shape"}:
        kind = getattr(torch, value["dtype"])
        flat = _each(value["tensor"], _number)
        return torch.tensor(flat, dtype=kind).reshape(value["shape"])
    if marks == {"number"}:
        return float(value["number"])
    if marks == {"tuple"}:
        return tuple(map(again, value["tuple"]))
    if marks == {"pairs"}:
        return {again(name): again(part) for name, part in value["pairs"]}
    if {"format", "version"} <= marks:
        return inner(value)
    return {name: again(part) for name, part in value.items()}


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    return [_each(part, change) for part in value] if isinstance(value, list) else change(value)


def _odd(value: float) -> str:
    """A number that JSON lacks, with its sign: processors make NaNs of both."""
    sign = "-" if math.copysign(1, value) < 0 else ""
    return f"{sign}nan" if math.isnan(value) else f"{sign}inf"


def _number(value: Any) -> Any:
    """A number of a tensor; version 1 marked each that JSON lacks."""
    odd = value["number"] if isinstance(value, Mapping) else value
    return float(odd) if isinstance(odd, str) else odd
