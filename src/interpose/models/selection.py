"""Which of a row of things is meant: layers, heads, neurons, rows; positions by number or by text.

Reading, editing, sweeping and every method choose in the same way: one or several, a slice, negative from the end,
each once; and what is not there is said in the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Some = int | slice | Sequence[int] | None
"""One (negative from the end), several, a slice; None for all."""
PLURAL = {
    "layer": "layers",
    "head": "heads",
    "neuron": "neurons",
    "rows": "rows",
    "pos": "positions",
}


def entries(
    given: Any, there: int | Sequence[int], word: str, of: str, *, count: int | None = None
) -> list[int]:
    """What was asked for, in that order, each once, counted from the front.

    Args:
        given: a number, several, a slice; None for all.
        there: how many there are, or which, where some are missing.
        word: what they are: ``layer``, ``head``, ``neuron``, ``pos`` or ``rows``.
        of: what has them, for errors.
        count: where negative numbers count from, if some are missing.
    """
    known = range(there) if isinstance(there, int) else there
    count = len(known) if count is None else count
    if given is None:
        return list(known)
    if isinstance(given, slice):
        given = [number for number in range(count)[given] if number in known]
    elif hasattr(given, "tolist"):
        given = given.tolist()
    asked: list[Any] = [given] if isinstance(given, (int, str, float)) else list(given)
    for one in asked:
        if not hasattr(one, "__index__") or isinstance(one, bool):
            raise TypeError(f"{PLURAL[word]} are whole numbers; got {one!r}.")
    asked = [int(one) for one in asked]
    if not asked:
        raise IndexError(f"{word} is empty: {of} has {listed(word, known)}; None means all.")
    for one in asked:
        if (one + count if one < 0 else one) not in known:
            raise IndexError(absent(word, one, known, of))
    return list(dict.fromkeys(one + count if one < 0 else one for one in asked))


def absent(word: str, asked: int, there: int | Sequence[int], of: str) -> str:
    """What an error says about something that is not there."""
    known = range(there) if isinstance(there, int) else there
    return f"{word} {asked} is not there: {of} has {listed(word, known)}."


def listed(word: str, there: Sequence[int]) -> str:
    """What there is: ``layers 0 to 5``, or their numbers, where some are missing."""
    if not there:
        return f"no {PLURAL[word]}"
    if list(there) == list(range(len(there))):
        return f"{PLURAL[word]} 0 to {len(there) - 1}"
    return f"{PLURAL[word]} {', '.join(map(str, there))}"


def spans_of(
    text: str, pieces: Sequence[str], ids: Sequence[int] = (), alone: Sequence[int] = ()
) -> list[range]:
    """Where a text is among the tokens of another: whole tokens, with or without the space in front.

    Args:
        text: what to look for.
        pieces: the tokens as strings.
        ids: the same tokens as numbers.
        alone: the tokens of the text by itself, which find characters that are cut into several tokens.
    """
    found = []
    for start, first in enumerate(pieces):
        # A space that is a token by itself is not part of the word behind it.
        wanted = (text,) if first == " " else (text, f" {text}")
        said, length = "", 0
        for count, piece in enumerate(pieces[start:], 1):
            said += piece
            if said in wanted:
                length = count
                break
            if not any(one.startswith(said) for one in wanted):
                break
        if alone and ids[start : start + len(alone)] == alone:
            length = len(alone)
        if length:
            found.append(range(start, start + length))
    return found


def missing_text(text: str, where: str, pieces: Sequence[str]) -> str:
    """What an error says about a text that is not among some tokens."""
    shown = list(pieces) if len(pieces) <= 40 else [*pieces[:20], "...", *pieces[-20:]]
    return (
        f"{text!r} is not in {where}, whose tokens are {shown}.\n  A text is one or more whole tokens, with or "
        "without the space in front; positions may also be numbers."
    )
