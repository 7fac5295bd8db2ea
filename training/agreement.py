"""Subject and verb agree, whatever stands between them. Held out: (subject, noun in between) pairs.

Every held-out prompt has a noun of the other number right before the verb, so the last word misleads.
"""

from random import Random

from training.splits import Case, is_held_out
from training.words import NOUNS

_BETWEEN = [
    "near the {n}", "behind the {n}", "next to the {n}", "with the {n}", "in front of the {n}", "beside the {n}",
    "from the {n}", "that the {n} {like}", "that belonged to the {n}", "who met the {n}", "close to the {n}",
]  # fmt: skip
_VERBS = [
    ("is", "are"),
    ("was", "were"),
    ("has", "have"),
    ("looks", "look"),
    ("seems", "seem"),
    ("needs", "need"),
]
_REST = {
    "is": ["old", "new", "ready", "very tall", "on the way", "not here", "well known"],
    "has": ["a problem", "no time", "a good name", "two sides", "nothing to do"],
    "needs": ["help", "a new home", "more time", "some paint"],
}
_REST["was"] = _REST["looks"] = _REST["seems"] = [
    "old",
    "new",
    "ready",
    "very tall",
    "well known",
    "tired",
    "sure",
]
_ADJECTIVES = ["", "", "", "old ", "small ", "tall ", "young ", "famous ", "lost "]
SINGULAR = tuple(f" {one}" for one, _ in _VERBS)
PLURAL = tuple(f" {many}" for _, many in _VERBS)


def is_subject_held_out(subject: str, between: str) -> bool:
    """Whether training never shows the one noun before the other."""
    return is_held_out("agreement", subject, between)


def _subject(rng: Random, subject: str, between: str, *, plural: bool, between_plural: bool) -> str:
    head = NOUNS[subject] if plural else subject
    noun = NOUNS[between] if between_plural else between
    middle = (
        rng.choice(_BETWEEN).replace("{n}", noun).replace("{like}", rng.choice(["like", "liked"]))
    )
    if not between_plural:
        middle = middle.replace(" like", " likes").replace(" likesd", " liked")
    return f"The {rng.choice(_ADJECTIVES)}{head} {middle}"


def document(rng: Random) -> str:
    """One sentence; in three of four another noun stands between subject and verb."""
    subject, between = rng.sample(sorted(NOUNS), 2)
    while is_subject_held_out(subject, between):
        subject, between = rng.sample(sorted(NOUNS), 2)
    plural, between_plural = rng.random() < 0.5, rng.random() < 0.5
    start = f"The {rng.choice(_ADJECTIVES)}{NOUNS[subject] if plural else subject}"
    if rng.random() < 0.75:
        start = _subject(rng, subject, between, plural=plural, between_plural=between_plural)
    verb = rng.choice(_VERBS)
    return f"{start} {verb[plural]} {rng.choice(_REST[verb[0]])}."


def cases(count: int = 600) -> list[Case]:
    """Held-out pairs, the noun in between always of the other number."""
    rng = Random("agreement")
    built: list[Case] = []
    while len(built) < count:
        subject, between = rng.sample(sorted(NOUNS), 2)
        if not is_subject_held_out(subject, between):
            continue
        plural = rng.random() < 0.5
        prompt = _subject(rng, subject, between, plural=plural, between_plural=not plural)
        right, wrong = (PLURAL, SINGULAR) if plural else (SINGULAR, PLURAL)
        built.append(Case(prompt=prompt, answers=right, wrong=wrong))
    return built
