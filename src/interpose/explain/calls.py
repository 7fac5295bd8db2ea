"""Calls of what is exported that have wrong arguments: which are wrong, and which there are."""

from __future__ import annotations

import functools
import inspect
from types import FunctionType, ModuleType
from typing import Any

from interpose.explain.words import hint, nearest

_SAME = {
    "target": "answer",
    "targets": "answer",
    "right": "answer",
    "wrong": "instead",
    "prompt": "texts",
    "prompts": "texts",
    "source": "clean",
    "base": "corrupt",
    "k": "top",
    "topk": "top",
    "top_k": "top",
}
"""Words of other libraries for arguments of ours."""


def careful(found: Any, name: str) -> Any:
    """A public function, class or module whose calls with wrong arguments say which ones it takes.

    Nothing is looked at unless a call fails. A class stays itself, with another ``__init__``; so do those of a module.
    """
    if isinstance(found, FunctionType):
        return _explained(found, name, found)
    if isinstance(found, ModuleType):
        vars(found).setdefault("__getattr__", functools.partial(_no_such, found, name))
        for word, thing in list(vars(found).items()):
            if isinstance(thing, type) and thing.__module__ == found.__name__ and word[0] != "_":
                careful(thing, f"{name}.{word}")
    elif isinstance(found, type):
        own: Any = vars(found).get("__init__")
        if isinstance(own, FunctionType) and not hasattr(own, "__wrapped__"):
            found.__init__ = _explained(own, name, found)  # type: ignore[misc]
    return found


def _no_such(module: ModuleType, label: str, name: str) -> Any:
    """What a module says about a name that it has not."""
    public = [word for word in vars(module) if word[0] != "_"]
    own = [
        word for word in public if getattr(vars(module)[word], "__module__", "") == module.__name__
    ]
    raise AttributeError(
        f"{label} has no {name!r}{hint(name, own, lambda near: f'{label}.{near}')}"
    )


def _explained(call: Any, name: str, thing: Any) -> Any:
    """A function that raises a TypeError of ours where Python finds that arguments do not fit."""

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except TypeError as error:
            try:
                inspect.signature(call).bind(*args, **kwargs)
            except TypeError:
                why = _why_not(call, name, thing, args, kwargs)
                raise TypeError(why or str(error)) from None
            raise  # from inside

    if call is thing:
        checked.__module__, checked.__qualname__ = "interpose", name.rpartition(".")[2]
    return checked


def _why_not(call: Any, name: str, thing: Any, args: Any, kwargs: dict[str, Any]) -> str:
    """Which arguments do not fit, and what would."""
    parameters = list(inspect.signature(call).parameters.values())
    if call is not thing:  # an __init__
        parameters, args = parameters[1:], args[1:]
    words = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes = f"\n  It takes: {', '.join(words)}."
    for word in kwargs:
        if word not in words:
            return f"{name} has no argument {word!r}{_meant(word, words)}{takes}"
    places = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    given = {p.name for p, _ in zip(places, args)}
    if twice := given & set(kwargs):
        return f"{name} has {sorted(twice)[0]!r} twice: by its place and by its name.{takes}"
    missing = [p.name for p in parameters if p.default is p.empty and p.name in words]
    missing = [word for word in missing if word not in {*given, *kwargs}]
    if missing:
        return f"{name} also needs {' and '.join(map(repr, missing))}.{takes}"
    if len(args) > len(places):
        named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        count = len(places)
        by_name = f" The rest by name: {', '.join(named)}." if named else ""
        return (
            f"{name} takes {count} argument{'s' * (count != 1)} by place; got {len(args)}.{by_name}"
        )
    return ""


def _meant(word: str, words: list[str]) -> str:
    """Which argument a word was meant for."""
    same = _SAME.get(word.lower())
    near = same if same in words else nearest(word, words)
    if near is None:
        starts = (other for other in words if word.startswith(other) or other.startswith(word))
        near = next(starts, None)
    return "." if near is None else f"; did you mean {near!r}?"
