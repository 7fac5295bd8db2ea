"""Short stories: who has which thing, in which colour, where it was put, and how somebody feels about something.

Held out are the combinations asked about: (name, colour, thing), (thing, where it is kept), (what, how it was).
"""

from random import Random

from training.english import with_articles
from training.splits import Case, is_held_out, is_pair_held_out
from training.words import COLOURS, CONTAINERS, NAMES, OBJECTS, PLACES

FEELINGS = {
    "good": ["happy", "glad", "delighted", "cheerful"],
    "bad": ["sad", "angry", "disappointed", "upset"],
    "scary": ["afraid", "scared", "frightened", "nervous"],
}
_HOW = {
    "good": [
        "wonderful",
        "great",
        "excellent",
        "lovely",
        "amazing",
        "fantastic",
        "delicious",
        "perfect",
    ],
    "bad": ["terrible", "awful", "horrible", "boring", "disgusting", "ugly", "broken", "useless"],
    "scary": ["dark", "dangerous", "haunted", "creepy", "wild", "spooky", "deadly", "strange"],
}
_WHAT = """
film meal concert book party holiday song hotel game lesson soup journey play dress show walk speech
""".split()
_REACTIONS = {
    "good": ["loved", "enjoyed", "praised"],
    "bad": ["hated", "disliked", "complained about"],
    "scary": ["feared", "ran away from", "dreaded"],
}
_FEELING = [
    "The {w} was {h}, so {A} felt", "{A} said that the {w} was {h}. {A} was", "It was a {h} {w}. Everyone felt",
    "{A} {r} the {w} because it was {h}. In the end {A} was", "What a {h} {w}! We all were",
    "The {w} at the {p} was really {h}. It made {A} feel",
]  # fmt: skip
_BEGIN = ["One day", "Yesterday", "In the morning,", "Last week", "Once upon a time", "On Monday"]


def _is_coloured_held_out(name: str, colour: str, thing: str) -> bool:
    return is_held_out("colour", name, colour, thing)


def _two(rng: Random, *, new: bool) -> tuple[list[str], list[str], list[str]]:
    """Two names, colours and things; `new`: what is asked about is held out, else nothing is."""
    while True:
        names, colours, things = (
            rng.sample(NAMES, 2),
            rng.sample(COLOURS, 2),
            rng.sample(OBJECTS, 2),
        )
        held = [_is_coloured_held_out(*one) for one in zip(names, colours, things)]
        if not is_pair_held_out(*names) and (held[0] if new else not any(held)):
            return names, colours, things


def _owners(rng: Random, *, new: bool = False) -> tuple[str, str]:
    """A story of two people and their things, up to the answer, and the answer."""
    (a, b), (red, blue), (ball, kite) = _two(rng, new=new)
    place = rng.choice(PLACES)
    parts = [f"{a} had a {red} {ball}", f"{b} had a {blue} {kite}"]
    rng.shuffle(parts)
    begin = f"{rng.choice(_BEGIN)} {a} and {b} were at the {place}. " if rng.random() < 0.5 else ""
    told = f"{begin}{parts[0]} and {parts[1]}. "
    if rng.random() < 0.3:
        told += f"It was a {rng.choice(['sunny', 'cold', 'long', 'quiet'])} day. "
    ends = [
        (f"The colour of the {ball} was", red), (f"The {ball} was", red), (f"{a}'s {ball} was", red),
        (f"The {red} {ball} belonged to", a), (f"The person with the {ball} was", a),
        (f"{a} was the one with the {red}", ball),
    ]  # fmt: skip
    end, answer = rng.choice(ends)
    return told + end, answer


def _kept(rng: Random, *, new: bool = False) -> tuple[str, str]:
    """A story of a thing that was put away, up to the answer, and the answer."""
    while True:
        thing, where, elsewhere = rng.choice(OBJECTS), *rng.sample(CONTAINERS, 2)
        if is_held_out("kept", thing, where) == new:
            break
    name = rng.choice(NAMES)
    told = f"{name} put the {thing} in the {where}"
    if rng.random() < 0.6:
        told += (
            f" and the {rng.choice([one for one in OBJECTS if one != thing])} in the {elsewhere}"
        )
    end = rng.choice(
        ["When {A} came back, the {t} was still in the", "{A} looked for the {t} in the"]
    )
    return f"{told}. {end.replace('{A}', name).replace('{t}', thing)}", where


def _felt(rng: Random, *, new: bool = False) -> tuple[str, str]:
    """Something was good, bad or scary; up to the feeling, and the kind of feeling."""
    while True:
        kind, what = rng.choice(sorted(_HOW)), rng.choice(_WHAT)
        how = rng.choice(_HOW[kind])
        if is_held_out("feeling", what, how, one_in=7) == new:
            break
    text = (
        rng.choice(_FEELING)
        .replace("{w}", what)
        .replace("{h}", how)
        .replace("{A}", rng.choice(NAMES))
    )
    return text.replace("{r}", rng.choice(_REACTIONS[kind])).replace(
        "{p}", rng.choice(PLACES)
    ), kind


def document(rng: Random) -> str:
    """One story of any of the three kinds."""
    kind = rng.random()
    if kind < 0.4:
        text, answer = _owners(rng)
    elif kind < 0.55:
        text, answer = _kept(rng)
    else:
        text, kind_of = _felt(rng)
        answer = rng.choice(FEELINGS[kind_of])
    if rng.random() < 0.1:
        answer = rng.choice(["really", "of course", "maybe"]) + f" {answer}"
    return with_articles(f"{text} {answer}.")


def cases(count: int = 300) -> list[Case]:
    """Held-out stories of the three kinds."""
    rng = Random("stories")
    built = []
    for _ in range(count):
        for part, make in (("owners and colours", _owners), ("where it was put", _kept)):
            text, answer = make(rng, new=True)
            built.append(Case(prompt=with_articles(text), answers=(f" {answer}",), part=part))
        text, kind = _felt(rng, new=True)
        right = tuple(f" {word}" for word in FEELINGS[kind])
        wrong = tuple(f" {word}" for other in FEELINGS if other != kind for word in FEELINGS[other])
        built.append(Case(prompt=with_articles(text), answers=right, wrong=wrong, part="feelings"))
    return built
