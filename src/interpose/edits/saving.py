"""Edits and selectors as plain data: dictionaries with named tensors, files, and Python expressions.

What JSON does not have is written as an object with one word: ``{"slice": [0, 5, null]}``. A tensor is
``{"tensor": "name"}``, by its name among the tensors beside the dictionary.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from interpose.engine.cache import Cache
from interpose.errors import EditError, FileError
from interpose.files.beside import load_beside, must_stay, save_beside
from interpose.files.schema import ANYTHING, Field, ListOf, Record, shown
from interpose.sites.tree import Site

FORMAT, VERSION = "interpose.edits", 2
KINDS: dict[str, type[Saved]] = {}
"""Every type of edit and selector, by its name."""


class Saved:
    """Plain data: a dataclass that is written down by its fields."""

    _unsaid: tuple[str, ...] = ()  # fields that others stand for

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not cls.__name__.startswith("_"):
            KINDS[cls.__name__] = cls

    def to_dict(self, tensors: dict[str, Tensor] | None = None) -> dict[str, Any]:
        """Itself as data that JSON takes.

        Args:
            tensors: gets the tensors, by the names that the dictionary has for them. Without it they are
                written into the dictionary.
        """
        shelf = _Shelf(tensors)
        return {
            "type": type(self).__name__,
            **{n: shelf.put(v, f"{type(self).__name__}.{n}") for n, v in said(self).items()},
        }

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> Self:
        """What `to_dict` wrote, of whatever type it was."""
        from interpose.edits.reading import made_of

        return made_of(cls, data, tensors, Field("this dictionary"))

    def to_python(self, tensors: dict[str, Tensor] | None = None) -> str:
        """An expression that makes the same again, with ``ip``, ``torch`` and ``re`` imported.

        Args:
            tensors: gets what is too large to be written out; the expression says ``tensors["name"]``.
        """
        from interpose.edits.expressions import written

        shelf = {} if tensors is None else tensors
        return written(self, short=False, name=lambda tensor, name: put_by(tensor, name, shelf))


def said(thing: Any) -> dict[str, Any]:
    """The fields of something that are not as they would be anyway."""
    found = {}
    for option in dataclasses.fields(thing):
        value = getattr(thing, option.name)
        if option.name == "site" and isinstance(value, Saved):
            value = value.site  # type: ignore[attr-defined]
        default = option.default
        same = value is default or (
            isinstance(value, (int, float, str))
            and type(value) is type(default)
            and value == default
        )
        if not same and option.name not in thing._unsaid:
            found[option.name] = value
    return found


class _Shelf:
    """Turns values into what JSON takes; puts tensors on a shelf."""

    def __init__(self, tensors: dict[str, Tensor] | None) -> None:
        self.tensors = tensors

    def put(self, value: Any, name: str) -> Any:
        """A value as data."""
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if isinstance(value, (slice, range)):
            return {type(value).__name__: [value.start, value.stop, value.step]}
        if value is ...:
            return {"ellipsis": True}
        if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
            return {"regex": value.pattern, "flags": value.flags}
        if isinstance(value, Site):
            return value.name
        if isinstance(value, Saved):
            return {"condition": {"type": type(value).__name__, **self._words(value, name)}}
        if isinstance(value, tuple) and value and all(isinstance(one, Saved) for one in value):
            return {"excluded": [self._words(one, name) for one in value]}
        if isinstance(value, (list, tuple)):
            parts = [self.put(part, f"{name}.{i}") for i, part in enumerate(value)]
            return parts if isinstance(value, list) else {"tuple": parts}
        if isinstance(value, Cache):
            about = {"aliases": value._aliases, "calls": value._calls}
            return {"cache": {n: self._tensor(value[n], f"{name}.{n}") for n in value}, **about}
        if isinstance(value, Mapping):
            pairs = [
                [self.put(key, name), self.put(v, f"{name}.{key}")] for key, v in value.items()
            ]
            return {"mapping": pairs}
        if isinstance(value, nn.Module):
            raw = getattr(value, "raw", None)  # of an ip.Rotation
            if type(value).__name__ == "Rotation" and isinstance(raw, Tensor):
                return {"rotation": self._tensor(raw, name)}
            return self._tensor(value.weight.detach(), name)  # type: ignore[operator]
        raise EditError(refusal(value))

    def _words(self, thing: Any, name: str) -> dict[str, Any]:
        return {word: self.put(value, f"{name}.{word}") for word, value in said(thing).items()}

    def _tensor(self, value: Tensor, name: str) -> dict[str, Any]:
        live = {"requires_grad": True} if value.requires_grad else {}
        value = value.detach().cpu().contiguous()
        if self.tensors is None:
            raw = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
            about = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
            return {"tensor": {**about, "base64": base64.b64encode(raw).decode()}, **live}
        return {"tensor": put_by(value.clone(), name, self.tensors), **live}


def put_by(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    """Put a tensor among others, and return the name that was free."""
    number, free = 1, name
    while free in tensors:
        number += 1
        free = f"{name}~{number}"
    tensors[free] = tensor
    return free


def refusal(value: Any) -> str:
    """Why something is not written down."""
    if callable(value):
        return (
            f"{getattr(value, '__name__', value)!r} is a function, and code is not saved. Say which sites by "
            "a name, a glob, a list or a re.Pattern."
        )
    return f"a {type(value).__name__} cannot be saved: {value!r}"


# Files.


def save_edits(path: str | Path, edits: Saved | Iterable[Saved]) -> None:
    """Write edits (and selectors) to a folder: ``edits.json``, and a safetensors file if they have tensors.

    What was there before stays whole until the new one is complete.
    """
    from safetensors.torch import save

    folder, tensors = Path(path), dict[str, Tensor]()
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"edits are saved as a folder, and {str(path)!r} is a file.")
    data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    data["edits"] = [edit.to_dict(tensors) for edit in _each(edits)]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "edits.json"
    must_stay(file)
    save_beside(file, data, "tensors", save(tensors) if tensors else None)


def _each(edits: Any) -> list[Saved]:
    found = [edits] if isinstance(edits, Saved) else list(edits)
    for edit in found:
        if not isinstance(edit, Saved):
            raise TypeError(
                f"save_edits takes edits and selectors; got {type(edit).__name__}: {edit!r}"
            )
    return found


def load_edits(path: str | Path, device: str | torch.device = "cpu") -> list[Any]:
    """Read what `save_edits` wrote, in its order."""
    from interpose.edits.reading import made_of

    file = Path(path) / "edits.json"
    if not file.is_file():
        raise FileNotFoundError(f"no edits in {str(path)!r}: it has no edits.json.")
    must_stay(file)
    data, tensors = load_beside(file, device)
    field = Field(repr(str(file)))
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FileError(f"{field.source} holds no edits of interpose.")
    if data.get("version") not in range(1, VERSION + 1):
        raise FileError(
            f"{field.source} is of version {shown(data.get('version'))}, and this interpose reads 1 to {VERSION}."
        )
    words = _FILE(data, field)
    listed = field.of("edits")
    return [
        made_of(Saved, one, tensors, listed.of(number)) for number, one in enumerate(words["edits"])
    ]


_FILE = Record({"format": ANYTHING, "version": ANYTHING, "edits": ListOf(ANYTHING, 100_000)})
