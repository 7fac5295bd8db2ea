"""What is kept out of the training text: decided by a hash of what a case is made of, so every run agrees."""

import hashlib
from dataclasses import dataclass


def is_held_out(*parts: str, one_in: int = 10) -> bool:
    """Whether the combination of these words is one of those that training never shows."""
    digest = hashlib.sha256("|".join(parts).encode()).digest()
    return int.from_bytes(digest[:4], "big") % one_in == 0


def is_pair_held_out(a: str, b: str) -> bool:
    """Whether two names never occur together in training, in either order."""
    return is_held_out("pair", *sorted((a, b)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One held-out prompt and the continuations that count as right.

    Attributes:
        prompt: The text before the answer, without a space at its end.
        answers: Continuations that are right, each with its leading space.
        wrong: Continuations to compare with, where the task has them.
        part: Which part of the set this is, for a table that shows the parts.
    """

    prompt: str
    answers: tuple[str, ...]
    wrong: tuple[str, ...] = ()
    part: str = ""
