"""What a field of a file may hold: a few kinds that check a value for type, size and range, and say what is wrong.

A kind is called with a value and its `Field`, and returns the value, or raises `FileError`. Any function of these
two is one, so that a class may have kinds of its own; `kind_of` makes kinds out of annotations.

```python
RESULT = Record({"title": Text(), "axes": MapOf(ListOf(Text())), "layer": Either(Whole(0), NULL)}, optional=("layer",))
words = RESULT(data, Field("'result.json'"))
```
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from interpose.errors import FileError

FAR = 2**53
"""Whole numbers beyond it are not exact in JSON."""
MANY = 50_000_000
"""How long a list may be; a text, in letters."""


class Field(typing.NamedTuple):
    """A field of a file (or of what else the data is from), as errors call it; without a key, the whole."""

    source: str = "this data"
    above: Field | None = None
    key: Any = None

    def of(self, key: object) -> Field:
        """One field, or one entry of a list."""
        return Field(self.source, self, key)

    @property
    def name(self) -> str:
        """Its name as one would write it: ``edits[0].layer``; empty for the whole."""
        steps = []
        here = self
        while here.above is not None:
            steps.append(here.key)
            here = here.above
        text = ""
        for key in reversed(steps):
            if isinstance(key, str) and key.isidentifier() and key.isascii() and len(key) < 60:
                text += f".{key}" if text else key
            else:
                text += f"[{shown(key, 30)}]"
        return text

    def wrong(self, found: Any, expected: str) -> FileError:
        """The error for a value that is not as it should be."""
        return self.says(f"is {shown(found)}, and should be {expected}.")

    def says(self, what: str) -> FileError:
        """An error about what stands here: a sentence without its beginning."""
        where = f"{self.source}: {self.name}" if self.name else self.source
        error = FileError(f"{where} {what}")
        error.field = self.name
        return error


def shown(value: Any, most: int = 60) -> str:
    """A value in a few words, however large it is, and without letters that a terminal would obey."""
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, Mapping):
        keys = ", ".join(shown(key, 20) for key in list(value)[:3])
        return f"an object with {keys}{', ...' if len(value) > 3 else ''}" if value else "empty"
    if isinstance(value, str) and len(value) > most:
        return f"{value[:most]!r}... ({len(value)} letters)"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a whole number of {value.bit_length()} bits"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (str, int, float)):
        return repr(value)
    return f"a {type(value).__name__}"


class Kind(typing.Protocol):
    """What checks a value."""

    @property
    def what(self) -> str:
        """What it takes, in words."""

    def __call__(self, value: Any, field: Field) -> Any:
        """The value, checked."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text that can be written down again: no halves of letters."""

    most: int = MANY
    least: int = 0

    @property
    def what(self) -> str:
        """In words."""
        least = f"{self.least} to " if self.least else "at most "
        return "a text" if self.most == MANY else f"a text of {least}{self.most} letters"

    def __call__(self, value: Any, field: Field) -> str:
        """The text."""
        if not isinstance(value, str) or not self.least <= len(value) <= self.most:
            raise field.wrong(value, self.what)
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise field.says(f"is {shown(value)}, which has half of a letter (a lone surrogate).")
        return value


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number in a range, both ends included."""

    low: int = -FAR
    high: int = FAR

    @property
    def what(self) -> str:
        """In words."""
        usual = (self.low, self.high) == (-FAR, FAR)
        return "a whole number" + ("" if usual else f" from {self.low} to {self.high}")

    def __call__(self, value: Any, field: Field) -> int:
        """The number."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise field.wrong(value, self.what)
        if not self.low <= value <= self.high:
            raise field.wrong(value, f"a whole number from {self.low} to {self.high}")
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a range; NaN and infinities only where they are said to be fine."""

    low: float = -math.inf
    high: float = math.inf
    finite: bool = True

    @property
    def what(self) -> str:
        """In words."""
        usual = (self.low, self.high) == (-math.inf, math.inf)
        return ("a finite number" if self.finite else "a number") + (
            "" if usual else f" from {self.low:g} to {self.high:g}"
        )

    def __call__(self, value: Any, field: Field) -> float:
        """The number."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise field.wrong(value, self.what)
        if isinstance(value, int) and value.bit_length() > 1000:
            raise field.wrong(value, self.what)
        if self.finite and not math.isfinite(value):
            raise field.wrong(value, self.what)
        if value < self.low or value > self.high:
            raise field.wrong(value, self.what)
        return value


@dataclass(frozen=True, slots=True)
class Instance:
    """Something of a type: true or false, null, and what was read already."""

    type: Any
    what: str

    def __call__(self, value: Any, field: Field) -> Any:
        """The thing itself."""
        if not isinstance(value, self.type):
            raise field.wrong(value, self.what)
        return value


FLAG = Instance(bool, "true or false")
NULL = Instance(type(None), "null")


@dataclass(frozen=True, slots=True, init=False)
class OneOf:
    """One of some texts or numbers."""

    choices: tuple[Any, ...]

    def __init__(self, *choices: Any) -> None:
        object.__setattr__(self, "choices", choices)

    @property
    def what(self) -> str:
        """In words."""
        return " or ".join(map(shown, self.choices))

    def __call__(self, value: Any, field: Field) -> Any:
        """The one."""
        same = [one for one in self.choices if type(one) is type(value) and one == value]
        if not same:
            raise field.wrong(value, self.what)
        return value


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list whose entries are all of a kind."""

    of: Kind
    most: int = MANY
    least: int = 0

    @property
    def what(self) -> str:
        """In words."""
        if self.least == self.most:
            return f"a list of {self.most}, each {self.of.what}"
        least = f" at least {self.least}," if self.least else ""
        return f"a list,{least} each {self.of.what}"

    def __call__(self, value: Any, field: Field) -> Any:
        """The list (or the tuple), with what its kind made of the entries."""
        if not isinstance(value, (list, tuple)):
            raise field.wrong(value, self.what)
        if not self.least <= len(value) <= self.most:
            many = str(self.least) if self.least == self.most else f"{self.least} to {self.most}"
            raise field.wrong(value, f"a list of {many}")
        read = [self.of(one, field.of(number)) for number, one in enumerate(value)]
        return read if isinstance(value, list) else tuple(read)


@dataclass(frozen=True, slots=True)
class MapOf:
    """An object with any keys, whose values are all of a kind."""

    of: Kind
    key: Kind = dataclasses.field(default_factory=lambda: Text(10_000))
    most: int = 1_000_000

    @property
    def what(self) -> str:
        """In words."""
        return f"an object, each value {self.of.what}"

    def __call__(self, value: Any, field: Field) -> Any:
        """A dictionary with what its kind made of the values."""
        if not isinstance(value, Mapping):
            raise field.wrong(value, self.what)
        if len(value) > self.most:
            raise field.says(f"has {len(value)} fields, and may have {self.most}.")
        return {
            self.key(key, field.of(key)): self.of(one, field.of(key)) for key, one in value.items()
        }


@dataclass(frozen=True, slots=True)
class Record:
    """An object with these fields and no others; ``optional`` ones may be missing."""

    fields: Mapping[str, Kind]
    optional: Iterable[str] = ()

    @property
    def what(self) -> str:
        """In words."""
        return f"an object with {', '.join(self.fields)}"

    def __call__(self, value: Any, field: Field) -> dict[str, Any]:
        """A dictionary of the fields that are there."""
        if not isinstance(value, Mapping):
            raise field.wrong(value, self.what)
        unknown = [name for name in value if name not in self.fields]
        if unknown:
            known = ", ".join(self.fields)
            raise field.says(
                f"has a field {shown(unknown[0], 30)}, which is none of: {known}. Written by another version?"
            )
        missing = [n for n in self.fields if n not in value and n not in tuple(self.optional)]
        if missing:
            raise field.says(
                f"has no field {missing[0]!r}, and should have one: {self.fields[missing[0]].what}."
            )
        return {name: self.fields[name](one, field.of(name)) for name, one in value.items()}


@dataclass(frozen=True, slots=True, init=False)
class Either:
    """Any of several kinds; of those that differ in type, the error is that of the one that is meant."""

    kinds: tuple[Kind, ...]

    def __init__(self, *kinds: Kind) -> None:
        object.__setattr__(self, "kinds", kinds)

    @property
    def what(self) -> str:
        """In words."""
        return ", or ".join(kind.what for kind in self.kinds)

    def __call__(self, value: Any, field: Field) -> Any:
        """What the first kind that takes it makes of it."""
        deepest: FileError | None = None
        for kind in self.kinds:
            try:
                return kind(value, field)
            except FileError as error:
                if deepest is None and error.field != field.name:
                    deepest = error
        raise deepest or field.wrong(value, self.what)


@dataclass(frozen=True, slots=True)
class Data:
    """Anything that JSON has: texts, numbers, lists and objects of them."""

    what: str = "texts, numbers, lists and objects"

    def __call__(self, value: Any, field: Field) -> Any:
        """The same."""
        if isinstance(value, (list, tuple)):
            return ListOf(self)(value, field)
        if isinstance(value, Mapping):
            return MapOf(self)(value, field)
        if isinstance(value, str):
            return Text()(value, field)
        if isinstance(value, int):
            return value if isinstance(value, bool) else Number()(value, field)
        if value is None or isinstance(value, float):
            return value
        raise field.wrong(value, self.what)


ANYTHING = Data()


def record_of(made: type, /, **kinds: Kind) -> Record:
    """The fields of a dataclass, each of the kind that its annotation says, or of a given one."""
    hints = annotations_of(made)
    options = dataclasses.fields(made)
    missing = dataclasses.MISSING
    return Record(
        {one.name: kinds.get(one.name) or kind_of(hints.get(one.name, Any)) for one in options},
        optional=tuple(
            one.name
            for one in options
            if one.default is not missing or one.default_factory is not missing
        ),
    )


def annotations_of(made: type) -> dict[str, Any]:
    """The annotations of a class; none where they name what cannot be found, as those of a class in a function may."""
    try:
        return typing.get_type_hints(made)
    except NameError:
        return {}


def kind_of(hint: Any, plain: Mapping[Any, Kind] | None = None) -> Kind:
    """The kind that an annotation means: of JSON's types, of unions and containers of them, else a type itself.

    Args:
        hint: the annotation.
        plain: what some annotations mean instead.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if plain and hint in plain:
        return plain[hint]
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin in (typing.Union, types.UnionType):
        return Either(*(kind_of(one, plain) for one in inner))
    if origin is typing.Literal:
        return OneOf(*inner)
    if origin is tuple and inner[-1] is not ...:
        return _Tuple(tuple(kind_of(one, plain) for one in inner))
    if origin in (list, tuple, set, frozenset) or _is(origin or hint, Sequence):
        return ListOf(kind_of(inner[0], plain) if inner else ANYTHING)
    if _is(origin or hint, Mapping):
        return (
            MapOf(kind_of(inner[1], plain), kind_of(inner[0], plain)) if inner else MapOf(ANYTHING)
        )
    if dataclasses.is_dataclass(hint):
        return record_of(typing.cast("type", hint))
    made = origin or hint
    if made is Callable or not isinstance(made, type):
        made = ()
    return Instance(made, f"a {getattr(made, '__name__', 'value')}")


def _is(hint: Any, what: type) -> bool:
    return isinstance(hint, type) and issubclass(hint, what)


@dataclass(frozen=True, slots=True)
class _Tuple:
    kinds: tuple[Kind, ...]

    @property
    def what(self) -> str:
        """In words."""
        return f"a list of {', '.join(kind.what for kind in self.kinds)}"

    def __call__(self, value: Any, field: Field) -> Any:
        """The list, with what each kind made of its entry."""
        if not isinstance(value, (list, tuple)) or len(value) != len(self.kinds):
            raise field.wrong(value, self.what)
        return type(value)(
            kind(one, field.of(number)) for number, (kind, one) in enumerate(zip(self.kinds, value))
        )


_PLAIN: dict[Any, Kind] = {
    Any: ANYTHING,
    object: ANYTHING,
    str: Text(),
    int: Whole(),
    float: Number(finite=False),
    bool: FLAG,
    None: NULL,
    type(None): NULL,
}
