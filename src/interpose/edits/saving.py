"""Edits and selectors as plain data: dictionaries with named tensors, files, and Python expressions.

What JSON does not have is written as an object with one word: ``{"slice": [0, 5, null]}``. A tensor is
``{"tensor": "name"}``, by its name among the tensors beside the dictionary.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from interpose.engine.cache import Cache
from interpose.errors import EditError
from interpose.files.writing import write_whole
from interpose.sites.tree import Site

VERSION = 2
_OLD_WORDS = {"sites": "site"}  # of version 1
_HOMES = ("attention", "basic", "other_values", "selector", "subspace")
_KINDS: dict[str, type[Saved]] = {}
_SMALL = 16
"""Tensors of so many numbers are written out in Python expressions."""
_LONG = 150
"""Letters of a regex: what Python itself writes of longer ones is cut off."""


class Saved:
    """Plain data: a dataclass that is written down by its fields."""

    _unsaid: tuple[str, ...] = ()  # fields that others stand for

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not cls.__name__.startswith("_"):
            _KINDS[cls.__name__] = cls

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
        words = _new_words(data)
        name = words.pop("type", None)
        for module in _HOMES:
            importlib.import_module(f"interpose.edits.{module}")
        kind = _KINDS.get(name) if isinstance(name, str) else None
        if kind is None or not issubclass(kind, cls):
            known = ", ".join(sorted(n for n, k in _KINDS.items() if issubclass(k, cls)))
            raise EditError(
                f"no edit is called {name!r}. There are: {known}.\n  If it is one of your own, import the "
                "module that defines it first."
            )
        options: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
        unknown = set(words) - {option.name for option in options}
        if unknown:
            raise EditError(
                f"{name} has no field {sorted(unknown)[0]!r}: written by another version?"
            )
        read = {word: _taken(value, tensors) for word, value in words.items()}
        positional = [read.pop(o.name, None) for o in options if o.name in read and not o.kw_only]
        named = [o.name for o in options if not o.kw_only and o.name in words]
        return kind(**dict(zip(named, positional)), **read)

    def to_python(self, tensors: dict[str, Tensor] | None = None) -> str:
        """An expression that makes the same again, with ``ip``, ``torch`` and ``re`` imported.

        Args:
            tensors: gets what is too large to be written out; the expression says ``tensors["name"]``.
        """
        return written(self, short=False, tensors={} if tensors is None else tensors)


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
        if isinstance(value, re.Pattern):
            return {"regex": value.pattern, "flags": value.flags}
        if isinstance(value, Site):
            return value.name
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
        raise EditError(_refusal(value))

    def _words(self, thing: Any, name: str) -> dict[str, Any]:
        return {word: self.put(value, f"{name}.{word}") for word, value in said(thing).items()}

    def _tensor(self, value: Tensor, name: str) -> dict[str, Any]:
        live = {"requires_grad": True} if value.requires_grad else {}
        value = value.detach().cpu().contiguous()
        if self.tensors is None:
            raw = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
            about = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
            return {"tensor": {**about, "base64": base64.b64encode(raw).decode()}, **live}
        name = _free(name, self.tensors)
        self.tensors[name] = value.clone()
        return {"tensor": name, **live}


def _free(name: str, taken: Mapping[str, Tensor]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}~{number}"
    return free


def _refusal(value: Any) -> str:
    if callable(value):
        return (
            f"{getattr(value, '__name__', value)!r} is a function, and code is not saved. Say which sites by "
            "a name, a glob, a list or a re.Pattern."
        )
    return f"a {type(value).__name__} cannot be saved: {value!r}"


def _new_words(data: Mapping[str, Any]) -> dict[str, Any]:
    return {_OLD_WORDS.get(word, word): value for word, value in data.items()}


def _taken(value: Any, tensors: Mapping[str, Tensor] | None) -> Any:
    """The inverse of `_Shelf.put`."""
    if isinstance(value, list):
        return [_taken(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    word = next(iter(value))
    held = value[word]
    if word in ("slice", "range"):
        return slice(*held) if word == "slice" else range(*held)
    if word == "tensor":
        return _tensor_of(value, tensors)
    if word == "tuple":
        return tuple(_taken(part, tensors) for part in held)
    if word == "excluded":
        return tuple({w: _taken(v, tensors) for w, v in _new_words(one).items()} for one in held)
    if word == "mapping":
        return {_taken(key, tensors): _taken(part, tensors) for key, part in held}
    if word == "cache":
        values = {name: _taken(part, tensors) for name, part in held.items()}
        return Cache(values, aliases=value["aliases"], calls=value["calls"])
    if word == "rotation":
        from interpose.edits.subspace import Rotation

        raw = _taken(held, tensors).detach()
        made = Rotation(raw.shape[1], raw.shape[0])
        made.raw = nn.Parameter(raw, requires_grad=held.get("requires_grad", False))
        return made
    if word == "regex":
        return re.compile(held, value["flags"])
    if word in ("ellipsis", "float"):
        return ... if word == "ellipsis" else float(held)
    raise EditError(f"{word!r} is nothing that edits are written with: written by another version?")


def _tensor_of(value: Mapping[str, Any], tensors: Mapping[str, Tensor] | None) -> Tensor:
    held = value["tensor"]
    if isinstance(held, str):
        if tensors is None or held not in tensors:
            raise EditError(f"the tensor {held!r} is not among those beside the edit.")
        found = tensors[held]
    else:
        dtype = getattr(torch, held["dtype"])
        raw = bytearray(base64.b64decode(held["base64"]))
        found = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        found = found.reshape(held["shape"]).clone()
    return found.detach().requires_grad_() if value.get("requires_grad") else found


# Expressions.


def written(thing: Any, *, short: bool, tensors: dict[str, Tensor] | None = None) -> str:
    """Something as a call: for people (``short``), or so that Python makes it again."""
    name = type(thing).__name__
    name = "at" if name.startswith("_") else name
    required = [o.name for o in dataclasses.fields(thing) if o.default is dataclasses.MISSING]
    first = [option.name for option in dataclasses.fields(thing) if not option.kw_only][:1]
    parts = []
    words = said(thing)
    for option in sorted(dataclasses.fields(thing), key=lambda option: bool(option.kw_only)):
        if option.name in words or option.name in required:
            shown = _shown(words.get(option.name), f"{name}.{option.name}", short, tensors)
            bare = option.name in (*required, *first) and not option.kw_only
            parts.append(shown if bare else f"{option.name}={shown}")
    return f"{'' if short else 'ip.'}{name}({', '.join(parts)})"


def _shown(value: Any, name: str, short: bool, tensors: dict[str, Tensor] | None) -> str:
    def inner(part: Any) -> str:
        return _shown(part, name, short, tensors)

    if isinstance(value, tuple) and value and all(isinstance(one, Saved) for one in value):
        shown = [
            f"{{{', '.join(f'{w!r}: {inner(v)}' for w, v in said(x).items())}}}" for x in value
        ]
        return shown[0] if len(shown) == 1 else f"[{', '.join(shown)}]"
    if isinstance(value, (list, tuple)):
        parts = [inner(part) for part in value]
        if isinstance(value, list):
            return f"[{', '.join(parts)}]"
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if isinstance(value, float):  # NumPy's too
        return repr(float(value)) if math.isfinite(value) else f"float({str(float(value))!r})"
    if isinstance(value, Tensor):
        if short:
            return f"tensor{tuple(value.shape)}"
        plain = value.numel() <= _SMALL and not value.requires_grad and bool(value.isfinite().all())
        return _written_out(value) if plain else _named(value, name, tensors)
    if short:
        if isinstance(value, Mapping):
            what = type(value).__name__ if isinstance(value, Cache) else "mapping"
            return f"{what}({len(value)} values)"
        return repr(value)
    if isinstance(value, Site):
        return repr(value.name)
    if isinstance(value, Mapping):
        pairs = [
            f"{inner(k)}: {_shown(v, f'{name}.{k}', short, tensors)}" for k, v in value.items()
        ]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, nn.Module):
        return _named(value.weight.detach(), name, tensors)  # type: ignore[operator]
    if isinstance(value, re.Pattern) and len(value.pattern) > _LONG:
        return f"re.compile({value.pattern!r}, {value.flags})"
    if value is None or isinstance(value, (bool, int, str, slice, range, re.Pattern)):
        return repr(value)
    if value is ...:
        return "..."
    raise EditError(_refusal(value))


def _named(value: Tensor, name: str, tensors: dict[str, Tensor] | None) -> str:
    shelf = {} if tensors is None else tensors
    name = _free(name, shelf)
    shelf[name] = value
    return f"tensors[{name!r}]"


def _written_out(value: Tensor) -> str:
    numbers, dtype = value.tolist(), value.dtype
    usual = torch.as_tensor(numbers).dtype if value.numel() else None
    return (
        f"torch.tensor({numbers})" if dtype == usual else f"torch.tensor({numbers}, dtype={dtype})"
    )


# Files.


def save_edits(path: str | Path, edits: Saved | Iterable[Saved]) -> None:
    """Write edits (and selectors) to a folder: ``edits.json``, and a safetensors file if they have tensors.

    What was there before stays whole until the new one is complete.
    """
    from safetensors.torch import save

    folder, tensors = Path(path), dict[str, Tensor]()
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"edits are saved as a folder, and {str(path)!r} is a file.")
    data: dict[str, Any] = {"format": "interpose.edits", "version": VERSION}
    data["edits"] = [edit.to_dict(tensors) for edit in _each(edits)]
    folder.mkdir(parents=True, exist_ok=True)
    if tensors:
        raw = save(tensors)
        data["tensors"] = f"tensors-{hashlib.sha256(raw).hexdigest()[:16]}.safetensors"
        write_whole(folder / data["tensors"], raw)
    write_whole(folder / "edits.json", json.dumps(data, indent=1, allow_nan=False).encode())
    for old in folder.glob("tensors-*.safetensors"):
        if old.name != data.get("tensors"):
            old.unlink(missing_ok=True)


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
    from safetensors.torch import load_file

    folder = Path(path)
    file = folder / "edits.json"
    if not file.is_file():
        raise FileNotFoundError(f"no edits in {str(path)!r}: it has no edits.json.")
    try:
        data = json.loads(file.read_text())
    except ValueError as error:
        raise EditError(f"{str(file)!r} is no JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != "interpose.edits":
        raise EditError(f"{str(file)!r} holds no edits of interpose.")
    if data.get("version") not in range(1, VERSION + 1):
        raise EditError(
            f"{str(file)!r} is of version {data.get('version')!r}, and this interpose reads 1 to {VERSION}."
        )
    tensors = {}
    if "tensors" in data:
        tensors = load_file(folder / data["tensors"], device=str(device))
    return [Saved.from_dict(one, tensors) for one in data["edits"]]
