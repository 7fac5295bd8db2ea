"""Edits out of data that anyone may have written: every field is checked before anything is made of it."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import importlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from interpose.edits.positions import MOST
from interpose.edits.saving import KINDS, Saved
from interpose.engine.cache import Cache
from interpose.files.schema import (
    ANYTHING,
    FLAG,
    NULL,
    Either,
    Field,
    Instance,
    Kind,
    ListOf,
    MapOf,
    Number,
    OneOf,
    Record,
    Text,
    Whole,
    annotations_of,
    kind_of,
    shown,
)

Made = TypeVar("Made", bound=Saved)
_OLD_WORDS = {"sites": "site"}  # of version 1
_HOMES = ("attention", "basic", "conditions", "other_values", "selector", "subspace")
_DTYPES = {
    str(one).removeprefix("torch."): one
    for one in vars(torch).values()
    if isinstance(one, torch.dtype)
}


def made_of(
    wanted: type[Made], data: Any, tensors: Mapping[str, Tensor] | None, field: Field
) -> Made:
    """What `Saved.to_dict` wrote, if it is of a type or of one below it.

    Args:
        wanted: the type.
        data: what was written.
        tensors: those that it names.
        field: what errors call it.
    """
    words = _words(data, field)
    for module in _HOMES:
        importlib.import_module(f"interpose.edits.{module}")
    name = words.pop("type", None)
    made = KINDS.get(name) if isinstance(name, str) else None
    if made is None or not issubclass(made, wanted):
        known = ", ".join(sorted(n for n, k in KINDS.items() if issubclass(k, wanted)))
        raise field.of("type").says(
            f"is {shown(name)}, and no edit is called so. There are: {known}.\n  If it is one of your own, import the "
            "module that defines it first."
        )
    options = dataclasses.fields(made)  # type: ignore[arg-type]
    read = _Reader(tensors).fields(made, words, field)
    positional = [read.pop(o.name) for o in options if o.name in read and not o.kw_only]
    named = [o.name for o in options if not o.kw_only and o.name in words]
    try:
        return made(**dict(zip(named, positional)), **read)
    except (TypeError, ValueError, LookupError) as error:
        raise field.says(f"makes no {name}: {error}") from error


def _words(data: Any, field: Field) -> dict[str, Any]:
    words = MapOf(ANYTHING, Text(60))(data, field)
    made = {_OLD_WORDS.get(word, word): value for word, value in words.items()}
    if len(made) != len(words):
        raise field.says("has a field under its old and its new name.")
    return made


# What a field may hold, once it was read.


@dataclasses.dataclass(frozen=True)
class _Read:
    """Anything that was read: its own parts were checked then."""

    what: str = "anything"

    def __call__(self, value: Any, field: Field) -> Any:  # noqa: ARG002
        return value


_FINE = _Read()
_REGEX = Instance(re.Pattern, "a regex")
_NAME = Either(Text(10_000), _REGEX, NULL)
_SITE = Either(
    _NAME, ListOf(Either(_NAME, Whole(), ListOf(Either(Text(10_000), Whole()), 10)), 10_000)
)
_GIVEN: Mapping[Any, Kind] = {
    Any: _FINE,
    object: _FINE,
    float: Number(finite=False),
    slice: Instance(slice, "a slice"),
    Tensor: Instance(Tensor, "a tensor"),
}


@dataclasses.dataclass(frozen=True)
class _Listed:
    """Of a kind, or a range whose numbers would be."""

    of: Kind

    @property
    def what(self) -> str:
        return self.of.what

    def __call__(self, value: Any, field: Field) -> Any:
        self.of(list(value[:1]) if isinstance(value, range) else value, field)
        return value


# The words that values are written with.


class _Reader:
    """Turns what JSON has into values: the inverse of `interpose.edits.saving`'s shelf."""

    def __init__(self, tensors: Mapping[str, Tensor] | None) -> None:
        self.tensors = tensors
        self.words: dict[str, Callable[[Any, Field], Any]] = {
            "slice": self._slice,
            "range": self._range,
            "tensor": self._tensor,
            "tuple": lambda data, field: tuple(
                self.take(list(_one(data, "tuple", _LIST, field)), field.of("tuple"))
            ),
            "excluded": self._excluded,
            "condition": self._condition,
            "mapping": self._mapping,
            "cache": self._cache,
            "rotation": self._rotation,
            "regex": _regex,
            "ellipsis": lambda data, field: [..., _one(data, "ellipsis", OneOf(True), field)][0],
            "float": lambda data, field: float(_one(data, "float", _ENDLESS, field)),
        }

    def fields(self, made: type[Saved], words: Mapping[str, Any], field: Field) -> dict[str, Any]:
        """The words of an edit, each as its annotation says."""
        hints, read = annotations_of(made), {}
        there = {option.name for option in dataclasses.fields(made)}  # type: ignore[arg-type]
        for word, value in words.items():
            here = field.of(word)
            if word not in there:
                raise here.says(f"is not a field of {made.__name__}: written by another version?")
            read[word] = self.take(value, here)
            kind = _SITE if word == "site" else _Listed(kind_of(hints.get(word, Any), _GIVEN))
            kind(read[word], here)
        return read

    def take(self, value: Any, field: Field) -> Any:
        """A value."""
        if isinstance(value, (list, tuple)):
            return [self.take(part, field.of(number)) for number, part in enumerate(value)]
        if not isinstance(value, Mapping):
            return ANYTHING(value, field)
        word = next(iter(value), None)
        if word not in self.words:
            raise field.says(
                f"is {shown(value)}: that is nothing that edits are written with. Written by another version?"
            )
        return self.words[word](value, field)

    def _slice(self, data: Any, field: Field) -> slice:
        return slice(*_one(data, "slice", ListOf(Either(Whole(), NULL), 3, 3), field))

    def _range(self, data: Any, field: Field) -> range:
        start, stop, step = _one(data, "range", ListOf(Whole(), 3, 3), field)
        if step == 0:
            raise field.says("is a range whose step is 0.")
        return range(start, stop, step)

    def _tensor(self, data: Any, field: Field) -> Tensor:
        words = _TENSOR(data, field)
        held = words["tensor"]
        if isinstance(held, str):
            if self.tensors is None or held not in self.tensors:
                raise field.says(
                    f"is the tensor {shown(held)}, which is not among those beside it."
                )
            found = self.tensors[held]
        else:
            found = _written_inside(held, field)
        if not words.get("requires_grad"):
            return found.detach()
        if not (found.is_floating_point() or found.is_complex()):
            raise field.says("can be trained, and a tensor of whole numbers cannot.")
        return found.detach().requires_grad_()

    def _excluded(self, data: Any, field: Field) -> tuple[Any, ...]:
        inner = field.of("excluded")
        found = _one(data, "excluded", ListOf(MapOf(ANYTHING), 1000), field)
        fields = [inner.of(number) for number in range(len(found))]
        return tuple(
            self.fields(KINDS["at"], _words(one, there), there) for one, there in zip(found, fields)
        )

    def _condition(self, data: Any, field: Field) -> Any:
        held = _one(data, "condition", MapOf(ANYTHING), field)
        return made_of(KINDS["when"], held, self.tensors, field.of("condition"))

    def _mapping(self, data: Any, field: Field) -> dict[Any, Any]:
        pairs = _one(data, "mapping", ListOf(ListOf(ANYTHING, 2, 2), 1_000_000), field)
        inner, made = field.of("mapping"), {}
        for number, (key, value) in enumerate(pairs):
            there = inner.of(number)
            named = _KEY(self.take(key, there), there)
            if isinstance(named, list):
                raise there.wrong(named, "a name and a value, and the name no list")
            made[named] = self.take(value, there)
        return made

    def _cache(self, data: Any, field: Field) -> Cache:
        words = _CACHE(data, field)
        there = field.of("cache")
        values = {name: self._tensor(one, there.of(name)) for name, one in words["cache"].items()}
        return Cache(values, aliases=words["aliases"], calls=words["calls"])

    def _rotation(self, data: Any, field: Field) -> nn.Module:
        from interpose.edits.subspace import Rotation

        held = _one(data, "rotation", MapOf(ANYTHING), field)
        raw = self._tensor(held, field.of("rotation")).detach()
        if raw.ndim != 2 or not raw.is_floating_point() or raw.shape[0] > raw.shape[1]:
            raise field.says(
                f"is a rotation of shape {tuple(raw.shape)}, and its directions are [k, units]."
            )
        made = Rotation(raw.shape[1], 0)
        made.raw = nn.Parameter(raw, requires_grad=held.get("requires_grad", False))
        return made


def _one(data: Any, word: str, kind: Kind, field: Field) -> Any:
    """What a word says that stands alone."""
    return Record({word: kind})(data, field)[word]


def _written_inside(held: Mapping[str, Any], field: Field) -> Tensor:
    """A tensor whose bytes are in the data."""
    dtype, shape = _DTYPES[held["dtype"]], held["shape"]
    try:
        raw = bytearray(base64.b64decode(held["base64"], validate=True))
    except binascii.Error as error:
        raise field.of("base64").says(f"is not base64: {error}.") from None
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise field.says(
            f"has {len(raw)} bytes, and a tensor of {held['dtype']} and shape {shown(shape)} has others."
        )
    found = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return found.reshape(shape).clone()


def _regex(data: Any, field: Field) -> re.Pattern[str]:
    words = _WRITTEN_REGEX(data, field)
    text = words["regex"]
    if costly := _costly(text, words["flags"]):
        raise field.says(f"is the regex {shown(text)}, which {costly}: it might never end.")
    try:
        return re.compile(text, words["flags"])
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise field.says(f"is not a regex: {error}.") from None


def _costly(text: str, flags: int) -> str:
    """Why a regex may take longer than a name is long to the fourth power; nothing where it may not."""
    if flags & re.VERBOSE or re.search(r"\(\?[a-zA-Z]*x", text):
        return "is verbose"
    bare = re.sub(r"\\.", "a", text, flags=re.DOTALL)
    bare = re.sub(r"\[\^?\]?[^\]]*\]", "a", bare)  # classes
    if re.search(r"\\[1-9]|\(\?P=|\(\?\(", text):
        return "refers back to a part of itself"
    bare = bare.replace("(?", "(")
    if re.search(r"\)[*+{]", bare):
        return "repeats a group"
    if len(re.findall(r"[*+]|\{", bare)) > 3 or bare.count("?") > 8:
        return "repeats too often"
    return ""


_KEY = Either(Text(10_000), Whole(), ListOf(Either(Text(10_000), Whole()), 10))
_LIST = ListOf(ANYTHING, MOST)
_ENDLESS = OneOf("nan", "inf", "-inf")
_WRITTEN_REGEX = Record({"regex": Text(10_000), "flags": Whole(0, 511)})
_INSIDE = Record(
    {
        "dtype": OneOf(*_DTYPES),
        "shape": ListOf(Whole(0, 2**40), 16),
        "base64": Text(),
    }
)
_TENSOR = Record(
    {"tensor": Either(Text(10_000), _INSIDE), "requires_grad": FLAG}, ["requires_grad"]
)
_CACHE = Record(
    {
        "cache": MapOf(MapOf(ANYTHING)),
        "aliases": MapOf(Text(10_000)),
        "calls": MapOf(ListOf(Text(10_000))),
    }
)
