"""Values from elsewhere: another run's cache, a mapping by site name, statistics, or a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from interpose.engine.points import HookPoint
from interpose.errors import AmbiguousSite, EditError


def looked_up(source: Any, hook: HookPoint, edit: object) -> Tensor:
    """What a source has for a site: under the name it was asked by, or any other that is known."""
    if isinstance(source, Tensor):
        return source
    spelt = vars(edit).setdefault("_spelt", {}) if hasattr(edit, "__dict__") else {}
    if (key := spelt.get(hook.canonical)) is not None and key in source:
        return _tensor(source[key], edit)  # found before: an edit is asked at every token
    for name in (hook.name, hook.canonical):
        try:
            found = source[name]
        except AmbiguousSite:
            calls = source.calls(name)  # one value for each call of the module
            if hook.call is None or hook.call >= len(calls):
                raise
            found = calls[hook.call]
        except KeyError:
            continue
        return _tensor(found, edit)
    spelling = hook.model.tree.spelling
    if isinstance(source, Mapping) and spelling is not None:
        for key in source:
            if isinstance(key, (str, tuple)) and spelling(key) == hook.canonical:
                spelt[hook.canonical] = key
                return _tensor(source[key], edit)
    there = list(source) if isinstance(source, Mapping) else []
    shown = ", ".join(map(repr, there[:6])) + (", ..." if len(there) > 6 else "")
    raise EditError(
        f"{edit!r}: its source has no value for {hook.name!r}. It has: {shown or 'nothing by name'}.\n  "
        "Keep it in the run that the values come from: names_filter=the same selector."
    )


def _tensor(found: Any, edit: object) -> Tensor:
    mean = getattr(found, "mean", None)
    found = mean if isinstance(mean, Tensor) else found
    if not isinstance(found, Tensor):
        raise TypeError(
            f"{edit!r}: a source holds tensors by site name; got {type(found).__name__}."
        )
    return found


def as_source(source: Any, owner: str) -> Any:
    """A source as edits keep it: a tensor, or a mapping from site names to tensors."""
    if source is None or isinstance(source, (Tensor, Mapping)):
        return source
    rows = getattr(source, "rows", None)
    if rows is not None and all(isinstance(getattr(r, "mean", None), Tensor) for r in rows):
        return {row.site: row.mean for row in rows}  # statistics of several sites
    if isinstance(getattr(source, "mean", None), Tensor):
        return source.mean  # of one
    result = getattr(source, "result", None)
    if callable(result):
        return as_source(result(), owner)  # of a detector that is still counting
    raise TypeError(
        f"{owner} takes a cache, a mapping from site names to tensors, statistics or a tensor; got "
        f"{type(source).__name__}."
    )
