"""Edits and selectors as Python expressions, built out of their values: a text is a literal, whatever it says."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from interpose.edits.saving import Saved, refusal, said
from interpose.engine.cache import Cache
from interpose.errors import EditError
from interpose.sites.tree import Site

Name = Callable[[Tensor, str], str]
"""From a tensor that is too large to be written out, and its field, to the name by which it is found in ``tensors``."""
_SMALL = 16
"""Tensors of so many numbers are written out."""
_FLAGS = ("ASCII", "DOTALL", "IGNORECASE", "MULTILINE", "VERBOSE")


def written(thing: Any, *, short: bool, name: Name | None = None) -> str:
    """Something as a call: for people (``short``), or so that Python makes it again.

    Args:
        thing: an edit or a selector.
        short: for people.
        name: for tensors that are not written out.
    """
    called = type(thing).__name__
    called = "at" if called.startswith("_") else called
    required = [o.name for o in dataclasses.fields(thing) if o.default is dataclasses.MISSING]
    first = [option.name for option in dataclasses.fields(thing) if not option.kw_only][:1]
    parts = []
    words, writer = said(thing), _Writer(short, name)
    for option in sorted(dataclasses.fields(thing), key=lambda option: bool(option.kw_only)):
        if option.name in words or option.name in required:
            shown = writer.write(words.get(option.name), f"{called}.{option.name}")
            bare = option.name in (*required, *first) and not option.kw_only
            parts.append(shown if bare else f"{option.name}={shown}")
    return f"{'' if short else 'ip.'}{called}({', '.join(parts)})"


def literal(value: Any) -> str:
    """Plain data as Python has it: texts, numbers, lists, tuples, slices, ranges and dictionaries of them."""
    return _Writer(False, None).write(value, "")


@dataclasses.dataclass(frozen=True)
class _Writer:
    short: bool
    name: Name | None

    def write(self, value: Any, field: str) -> str:
        """A value as an expression."""
        if isinstance(value, Tensor):
            return self._tensor(value, field)
        if isinstance(value, (list, tuple)):
            return self._several(value, field)
        if isinstance(value, Mapping):
            return self._mapping(value, field)
        if isinstance(value, re.Pattern):
            return _regex(value)
        if isinstance(value, Saved):
            return written(value, short=self.short, name=self.name)
        if value is None or isinstance(value, bool):
            return repr(value)
        for plain in (int, str):  # without the types of NumPy, and others that write themselves
            if isinstance(value, plain):
                return plain.__repr__(value)
        if isinstance(value, float):
            whole = float(value)
            return repr(whole) if math.isfinite(whole) else f"float({str(whole)!r})"
        if isinstance(value, (slice, range)):
            ends = (value.start, value.stop, value.step)
            shown = ends[:2] if isinstance(value, range) and value.step == 1 else ends
            return f"{type(value).__name__}({', '.join(self.write(end, field) for end in shown)})"
        if value is ...:
            return "..."
        if self.short:
            return repr(value)
        if isinstance(value, Site):
            return repr(value.name)
        if isinstance(value, nn.Module):
            return self._named(value.weight.detach(), field)  # type: ignore[operator]
        raise EditError(refusal(value))

    def _several(self, value: Any, field: str) -> str:
        if isinstance(value, tuple) and value and all(isinstance(one, Saved) for one in value):
            parts = [self._words(one, field) for one in value]
            return parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"
        parts = [self.write(part, field) for part in value]
        if isinstance(value, list):
            return f"[{', '.join(parts)}]"
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"

    def _words(self, thing: Saved, field: str) -> str:
        pairs = [f"{word!r}: {self.write(value, field)}" for word, value in said(thing).items()]
        return f"{{{', '.join(pairs)}}}"

    def _mapping(self, value: Mapping[Any, Any], field: str) -> str:
        if self.short:
            what = type(value).__name__ if isinstance(value, Cache) else "mapping"
            return f"{what}({len(value)} values)"
        pairs = [
            f"{self.write(k, field)}: {self.write(v, f'{field}.{k}')}" for k, v in value.items()
        ]
        return f"{{{', '.join(pairs)}}}"

    def _tensor(self, value: Tensor, field: str) -> str:
        if self.short:
            return f"tensor{tuple(value.shape)}"
        plain = value.numel() <= _SMALL and not value.requires_grad and bool(value.isfinite().all())
        if not plain:
            return self._named(value, field)
        numbers, dtype = value.tolist(), value.dtype
        usual = torch.as_tensor(numbers).dtype if value.numel() else None
        if dtype == usual:
            return f"torch.tensor({numbers})"
        return f"torch.tensor({numbers}, dtype={dtype})"

    def _named(self, value: Tensor, field: str) -> str:
        if self.name is None:
            raise EditError("a tensor of so many numbers is not written out here.")
        return f"tensors[{self.name(value, field)!r}]"


def _regex(value: re.Pattern[Any]) -> str:
    """A regex with the names of its flags; what Python itself writes of long ones is cut off."""
    flags = [f"re.{name}" for name in _FLAGS if value.flags & getattr(re, name)]
    said = ", ".join([repr(value.pattern), *([" | ".join(flags)] if flags else [])])
    return f"re.compile({said})"
