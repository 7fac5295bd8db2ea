"""The word that was meant by a wrong one, and what there is in a row."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice that was meant by a word, whatever its letter case; None if none is near.

    Args:
        word: what was written.
        choices: what there is; the first of several that are as near.
        cutoff: how near it must be: 1 is the word itself.
    """
    known: dict[str, str] = {}
    for choice in choices:
        known.setdefault(choice.lower(), choice)
    near = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=cutoff)
    return known[near[0]] if near else None


def hint(word: str, choices: Iterable[str], shown: Callable[[str], str] = repr) -> str:
    """``; did you mean 'head'?``, or nothing.

    Args:
        word: what was written.
        choices: what there is.
        shown: how a choice is to be written.
    """
    near = nearest(word, choices)
    return "" if near is None else f"; did you mean {shown(near)}?"


def some(names: Iterable[str], most: int = 8) -> str:
    """Names in a row, of many the first ones."""
    listed = list(names)
    more = f", ... ({len(listed)} in all)" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
