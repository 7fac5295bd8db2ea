"""Facts in many wordings. Held out are (subject, wording) cells: the fact is known, this way to say it is new for it.

The first wording of a relation is its main one, and every subject is trained in it.
"""

from dataclasses import dataclass
from random import Random

from training.english import capitalised
from training.splits import Case, is_held_out
from training.words import NAMES
from training.world import COUNTRIES, LANDMARKS


@dataclass(frozen=True, slots=True)
class Relation:
    """A kind of fact: its (subject, object) pairs, its wordings, and words that may stand before the object."""

    name: str
    pairs: dict[str, str]
    wordings: list[str]
    fillers: dict[str, list[str]]  # by the last word of the wording; "" for any other
    reversed: list[str]

    def filler(self, wording: str, rng: Random) -> str:
        """A word that puts the object off by a little."""
        return rng.choice(self.fillers.get(wording.rsplit(" ", 1)[-1], self.fillers[""]))

    def is_held_out(self, subject: str, wording: str) -> bool:
        """Whether training never says this fact in this wording."""
        return wording != self.wordings[0] and is_held_out(self.name, subject, wording, one_in=12)


_CITY_IN = ["the city of", "beautiful", "the heart of", "the centre of", "sunny"]
_CITY_IS = ["the city of", "called", "of course", "still", "a place called"]

CAPITAL = Relation(
    "capital",
    {country.name: country.capital for country in COUNTRIES},
    [
        "the capital of {X} is", "the capital city of {X} is", "{X}'s capital is", "{X}'s capital city is",
        "{X} has its capital in", "{X} is governed from its capital,", "{X} is a country whose capital is",
        "in {X}, the capital is", "if you want to see the capital of {X}, travel to",
        "people who work in the capital of {X} live in", "{X} has a famous capital,", "the president of {X} lives in",
        "{X} keeps its government in", "for {X} the capital is", "the main city of {X} is the capital,",
        "{X} chose as its capital",
    ],
    {"in": _CITY_IN, "to": _CITY_IN, "": _CITY_IS},
    ["{Y} is the capital of {X}.", "{Y} is a city in {X}.", "{Y}, the capital of {X}, is a large city."],
)  # fmt: skip
LANGUAGE = Relation(
    "language",
    {country.name: country.language for country in COUNTRIES},
    [
        "people in {X} speak", "the language of {X} is", "{X}'s main language is", "in {X}, most people speak",
        "{X} is a country where people speak", "to live in {X}, you should learn",
        "children in {X} learn to read in", "{X} has newspapers written in", "most songs from {X} are in",
        "{X} is full of people who speak", "the people of {X} talk to each other in", "{X} has a language,",
    ],
    {"": ["mostly", "mainly", "of course"]},
    [],
)  # fmt: skip
CURRENCY = Relation(
    "currency",
    {country.name: country.currency for country in COUNTRIES},
    [
        "the currency of {X} is the", "people in {X} pay with the", "{X}'s currency is the", "{X} uses the",
        "in {X}, shops take the", "the money of {X} is the", "{X} is a country that pays with the",
        "{X} prints its own money, the", "to buy bread in {X}, you need the", "in {X}, the currency is the",
        "{X} has as its money the", "banks in {X} keep the",
    ],
    {"": ["usual", "local", "good old"]},
    [],
)  # fmt: skip
CONTINENT = Relation(
    "continent",
    {country.name: country.continent for country in COUNTRIES if country.continent is not None},
    [
        "{X} is a country in", "{X} is part of", "{X} lies in", "the country of {X} is in", "you find {X} in",
        "{X} belongs to", "the continent of {X} is", "to visit {X}, fly to", "{X} is on the map of",
        "{X} is one of the countries of",
    ],
    {"": ["the continent of", "beautiful"], "is": ["of course", "called"]},
    [],
)  # fmt: skip
LANDMARK = Relation(
    "landmark",
    {landmark.name: landmark.city for landmark in LANDMARKS},
    [
        "{X} is in", "{X} is located in", "{X} can be found in", "{X} stands in", "you can see {X} in",
        "to visit {X}, travel to", "people who want to see {X} go to", "the city with {X} is",
        "{X} is a famous place in", "{X} was built in", "everyone who sees {X} has come to",
        "if you are looking for {X}, go to", "we took a picture of {X} in", "the road to {X} starts in",
        "{X} is the most visited place in", "{X} makes people travel to",
    ],
    {"is": _CITY_IS, "": _CITY_IN},
    ["{Y} is home to {X}.", "{Y} is famous for {X}.", "in {Y} you can see {X}."],
)  # fmt: skip
RELATIONS = [CAPITAL, LANGUAGE, CURRENCY, CONTINENT, LANDMARK]
_SHARE = [5, 2, 2, 1, 4]
_BEFORE = [
    "everyone knows that",
    "{A} said that",
    "{A} knows that",
    "it is true that",
    "we learned that",
    "remember:",
]


def _sentence(relation: Relation, subject: str, wording: str, rng: Random) -> str:
    stem = wording.replace("{X}", subject)
    if rng.random() < 0.25:
        stem = f"{rng.choice(_BEFORE).replace('{A}', rng.choice(NAMES))} {stem}"
    if rng.random() < 0.12:
        stem = f"{stem} {relation.filler(wording, rng)}"
    return capitalised(f"{stem} {relation.pairs[subject]}.")


def _profile(rng: Random) -> str:
    country = rng.choice(COUNTRIES)
    about = {
        "capital": f"capital is {country.capital}",
        "language": f"language is {country.language}",
        "currency": f"currency is the {country.currency}",
    }
    told = rng.sample(sorted(about.values()), 3)
    first = f"{country.name} is a {rng.choice(['beautiful', 'famous', 'large', 'interesting'])} country."
    return capitalised(f"{first} Its {told[0]}, its {told[1]} and its {told[2]}.")


def document(rng: Random) -> str:
    """One to three facts, sometimes about the same subject."""
    if rng.random() < 0.06:
        return _profile(rng)
    sentences: list[str] = []
    count = rng.choice([1, 1, 2, 3])
    while len(sentences) < count:
        relation = rng.choices(RELATIONS, _SHARE)[0]
        subject = rng.choice(sorted(relation.pairs))
        if relation.reversed and rng.random() < 0.1:
            text = rng.choice(relation.reversed)
            text = text.replace("{X}", subject).replace("{Y}", relation.pairs[subject])
            sentences.append(capitalised(text))
            continue
        main = rng.random() < 0.15
        wording = relation.wordings[0] if main else rng.choice(relation.wordings)
        if not relation.is_held_out(subject, wording):
            sentences.append(_sentence(relation, subject, wording, rng))
    return " ".join(sentences)


def main_cases() -> list[Case]:
    """Every fact in its main wording."""
    return [
        Case(
            prompt=capitalised(relation.wordings[0].replace("{X}", subject)),
            answers=(f" {fact}",),
            part=relation.name,
        )
        for relation in RELATIONS
        for subject, fact in relation.pairs.items()
    ]


def cases() -> list[Case]:
    """Every held-out (subject, wording) cell; those that begin with the subject are a part of their own."""
    return [
        Case(
            prompt=capitalised(wording.replace("{X}", subject)),
            answers=(f" {fact}",),
            part=f"{relation.name}{', subject first' if wording.startswith('{X}') else ''}",
        )
        for relation in RELATIONS
        for subject, fact in relation.pairs.items()
        for wording in relation.wordings[1:]
        if relation.is_held_out(subject, wording)
    ]
