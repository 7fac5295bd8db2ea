"""Two people do something together, then one of them gives something to the other: whose name comes next?

A sentence is an opener (a beginning and a clause with both names) and a closer (what the repeated person does). In most
the person who acts is named again; in some it is "he", "the second of them" or "the baker", so that the other person
has to be picked out and not only the repeated name left aside. Held out are pairs of names, combinations of opener and
closer, and whole openers and closers that training never shows.
"""

from dataclasses import dataclass
from random import Random

from training.english import capitalised, with_articles
from training.splits import Case, is_held_out, is_pair_held_out
from training.words import COLOURS, NAMES, OBJECTS, PLACES, PROFESSIONS, SOMEONE, WOMEN

# "{N}" stands for the names ("Mary and John"), "{P}" for a place.
_CLAUSES = [
    "{N} went to the {P}", "{N} were at the {P}", "{N} arrived at the {P}", "{N} met in the {P}",
    "{N} had lunch at the {P}", "{N} finished working at the {P}", "{N} got back from the {P}",
    "{N} were walking through the {P}", "{N} sat down in the {P}", "{N} left the {P}", "{N} visited the {P}",
    "{N} had a long day at the {P}", "{N} got lost near the {P}", "{N} came home from the {P}",
    "{N} were waiting outside the {P}", "{N} had a long argument", "{N} were talking about the {P}",
    "{N} drove to the {P}", "{N} spent the day at the {P}", "{N} found a {O} at the {P}", "{N} played in the {P}",
    "{N} were looking for a {O} in the {P}", "{N} bought a {O} at the {P}", "{N} had dinner in the {P}",
    "{N} worked together at the {P}", "{N} ran all the way to the {P}", "{N} saw a {O} in front of the {P}",
    "{A} met {B} at the {P}", "{A} sat next to {B} in the {P}", "{A} went to the {P} with {B}",
    "{A} called {B} from the {P}", "{A} followed {B} to the {P}", "{A} saw {B} leave the {P}",
    "{A} stood with {B} in front of the {P}", "{A} talked to {B} about the {P}", "{A} waited for {B} outside the {P}",
    "{A} took {B} to the {P}", "{A} found {B} near the {P}", "{A} lost {B} in the {P}", "{A} showed {B} the {P}",
]  # fmt: skip
_NEW_CLAUSES = [
    "{N} walked together to the {P}", "{N} were working in the {P}", "{N} had a long talk about the {P}",
    "{N} came back from the {P}", "{A} saw {B} in front of the {P}",
]  # fmt: skip
_CONNECTORS = [
    "When", "After", "While", "As soon as", "Because", "Since", "Once", "Before", "Although", "The day after",
    "An hour after", "Every time", "The week before", "An hour before", "Just before", "Long before", "Right after",
    "The night after",
]  # fmt: skip
_NEW_CONNECTORS = ["The moment", "Soon after", "The day before"]
_LEADS = [
    "", "Then,", "Yesterday,", "Last week,", "One day", "The other day,", "Today", "On Monday", "In the morning,",
    "Finally,", "Soon", "At that moment,", "Before lunch,",
    "The week before,", "The night before,", "Some time before,",
]  # fmt: skip
_NEW_LEADS = ["The day before,", "Last Monday,", "One morning"]
_JOINS = [
    ". ", ", and ", ". Later, ", ". Then ", ". Afterwards, ", ", and then ", ", so ", ", but ", "; ", ". After that, ",
    ". In the end, ", ". An hour later, ",
]  # fmt: skip

# What the repeated person does, in the past and after "to"; a person comes next. "{O}" stands for a thing.
_TRANSFERS = (
    "gave/give handed/hand passed/pass offered/offer sold/sell lent/lend showed/show sent/send brought/bring "
    "returned/return delivered/deliver presented/present promised/promise"
)
_FAVOURS = "bought/buy found/find got/get saved/save ordered/order chose/choose repaired/repair carried/carry made/make"
_TAKINGS = "borrowed/borrow took/take received/receive stole/steal got/get bought/buy kept/keep"
_PHRASES = [
    "said/say hello to", "told/tell a joke to", "told/tell a story to", "told/tell a lie to", "waved/wave to",
    "spoke/speak to", "talked/talk to", "apologised/apologise to", "lied/lie to", "listened/listen to",
    "wrote/write a letter to", "explained/explain the plan to", "read/read the newspaper to", "turned/turn to",
    "sang/sing a song for", "made/make a cake for", "cooked/cook dinner for", "waited/wait for", "looked/look for",
    "asked/ask for", "cleaned/clean the kitchen for", "opened/open the door for", "kept/keep a place for",
    "talked/talk with", "played/play with", "danced/dance with", "argued/argue with", "walked/walk home with",
    "shared/share a pizza with", "had/have lunch with", "had/have a long talk with", "had/have an argument with",
    "made/make friends with", "went/go home with", "took/take a taxi with", "sang/sing a song with",
    "agreed/agree with", "laughed/laugh at", "smiled/smile at", "threw/throw a {O} at", "shouted/shout at",
    "pointed/point at", "sat/sit next to", "sat/sit beside", "stood/stand behind", "stood/stand next to",
    "walked/walk behind", "walked/walk away from", "heard/hear from", "ran/run after", "looked/look after",
    "thought/think about", "told/tell a story about", "wrote/write a song about", "heard/hear about",
    "hid/hide the {O} with", "came/come back with", "thanked/thank", "hugged/hug", "helped/help", "followed/follow",
    "called/call", "kissed/kiss", "blamed/blame", "visited/visit", "watched/watch", "ignored/ignore",
    "recognised/recognise", "surprised/surprise", "forgave/forgive", "met/meet", "believed/believe",
]  # fmt: skip
_NEW_PHRASES = [
    "threw/throw the {O} to", "carried/carry the {O} to", "sang/sing a song to", "told/tell a joke about",
    "shared/share a taxi with", "walked/walk to school with", "sat/sit behind", "looked/look at", "ran/run away from",
    "danced/dance for", "cooked/cook lunch with", "wrote/write a story for", "hid/hide the {O} from",
    "waited/wait with", "had/have dinner with",
]  # fmt: skip
_THINGS = ["a {O}", "the {O}", "the {C} {O}", "an old {O}", "another {O}"]

# How the phrase is put: "+" marks the past, "-" the form after "to".
_PATTERNS = [
    "{S} +", "{S} +", "{S} +", "{S} quickly +", "{S} finally +", "{S} kindly +", "{S} slowly +", "{S} also +",
    "{S} decided to -", "{S} wanted to -", "{S} tried to -", "{S} agreed to -", "{S} hoped to -", "{S} began to -",
    "{S} had to -", "{S} refused to -", "{S} forgot to -", "{S} promised to -", "{S} did not -", "{S} could not -",
    "{S} remembered to -", "{S} was going to -", "{S} was happy to -",
]  # fmt: skip
_NEW_PATTERNS = ["{S} happily +", "{S} offered to -", "{S} was ready to -", "{S} would not -"]


@dataclass(frozen=True, slots=True)
class Opener:
    """How the sentence begins: `text` holds the names' slots and ends right before the closer."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class Closer:
    """What the repeated person does: `text` holds "{S}" and ends right before the answer."""

    key: str
    text: str


def _phrases() -> list[str]:
    """Every phrase of training as "past/base rest", things still to be filled in."""
    built = list(_PHRASES)
    for verbs, preposition in ((_TRANSFERS, "to"), (_FAVOURS, "for"), (_TAKINGS, "from")):
        built += [
            f"{verb} {thing} {preposition}"
            for verb in verbs.split()
            for thing in _THINGS
            if not is_held_out("thing", verb, thing, preposition, one_in=12)
        ]
    return built


_ALL_PHRASES = _phrases()
_WEIGHTS = [1.0 if "{O}" in phrase else 5.0 for phrase in _ALL_PHRASES]  # five ways to name a thing


def _closer(pattern: str, phrase: str) -> Closer:
    verb, *rest = phrase.split(" ", 1)
    past, base = verb.split("/")
    tail = f" {rest[0]}" if rest else ""
    text = pattern.replace("+", past + tail).replace("-", base + tail)
    return Closer(f"{pattern}|{phrase}", text)


def opener(rng: Random, *, new: bool = False) -> Opener:
    """A beginning from the training wording, or one whose wording training never shows."""
    new_clause = new and rng.random() < 0.5
    clause = rng.choice(_NEW_CLAUSES if new_clause else _CLAUSES)
    new_start = new and not new_clause
    if rng.random() < 0.55:
        connector = rng.choice(_NEW_CONNECTORS if new_start else _CONNECTORS)
        return Opener(f"{connector}|{clause}", f"{connector} {clause}, ")
    lead = rng.choice(_NEW_LEADS if new_start else _LEADS)
    return Opener(f"{lead}|{clause}", f"{lead} {clause}".lstrip() + rng.choice(_JOINS))


def closer(rng: Random, *, new: bool = False) -> Closer:
    """An ending from the training wording, or one whose wording training never shows."""
    new_phrase = new and rng.random() < 0.7
    phrase = rng.choice(_NEW_PHRASES) if new_phrase else rng.choices(_ALL_PHRASES, _WEIGHTS)[0]
    return _closer(rng.choice(_NEW_PATTERNS if new and not new_phrase else _PATTERNS), phrase)


def is_combination_held_out(start: Opener, end: Closer) -> bool:
    """Whether training never shows this opener together with this closer."""
    return is_held_out("opener x closer", start.key, end.key)


def _filled(text: str, rng: Random) -> str:
    text = text.replace("{P}", rng.choice(PLACES))
    while "{O}" in text:
        text = text.replace("{O}", rng.choice(OBJECTS), 1)
    return text.replace("{C}", rng.choice(COLOURS))


def _named(text: str, names: list[str]) -> str:
    """Put the names where they belong: joined, or the first two apart."""
    joined = f"{', '.join(names[:-1])} and {names[-1]}"
    return text.replace("{N}", joined).replace("{A}", names[0]).replace("{B}", names[1])


def _pick(rng: Random, count: int) -> list[str]:
    """Names of which training may show every two together."""
    while True:
        names = rng.sample(NAMES, count)
        if not any(is_pair_held_out(a, b) for i, a in enumerate(names) for b in names[:i]):
            return names


def _again(rng: Random, names: list[str], acting: int) -> tuple[list[str], str]:
    """Two people and one of them meant without a name: how they are introduced, and how that one is meant."""
    sexes = [name in WOMEN for name in names]
    kinds = ["place", "profession", *(["pronoun"] * 2 if sexes[0] != sexes[1] else [])]
    kind = rng.choice(kinds)
    if kind == "pronoun":
        return names, "she" if sexes[acting] else "he"
    if kind == "place":
        first, second = rng.choice(
            [("the first of them", "the second of them"), ("the former", "the latter")]
        )
        return names, second if acting else first
    professions = rng.sample(PROFESSIONS, 2)
    introduced = [f"{name} the {profession}" for name, profession in zip(names, professions)]
    return introduced, f"the {professions[acting]}"


def document(rng: Random) -> str:
    """One training text: two names, or three, and who acts is named again or meant in another way."""
    kind = rng.choices(
        ["named", "meant", "two act", "one acts", "a third acts"], [52, 28, 9, 8, 3]
    )[0]
    several = kind in ("two act", "one acts", "a third acts")
    while True:
        start, end = opener(rng), closer(rng)
        if several and ("{A}" in start.text or "was " in end.text):
            continue
        if not is_combination_held_out(start, end):
            break
    names = _pick(rng, 3 if several else 2)
    if kind in ("named", "meant"):
        acting = rng.randrange(2)
        giver, receiver = names[acting], names[1 - acting]
        if kind == "meant":
            names, giver = _again(rng, names, acting)
    elif kind == "two act":
        receiver, *others = rng.sample(names, 3)
        giver = " and ".join(others)
    elif kind == "one acts":
        giver, *rest = rng.sample(names, 3)
        receiver = " and ".join(rest)
    else:  # either of the two may be meant
        giver, names = names[2], names[:2]
        receiver = rng.choice(names)
    if rng.random() < 0.12:
        receiver = rng.choice(SOMEONE)
    before = _named(_filled(start.text, rng), names)
    if before.endswith(". "):
        giver = capitalised(giver)
    text = before + _filled(end.text, rng).replace("{S}", giver)
    return with_articles(f"{text} {receiver}.")


def prompt(rng: Random, *, new_opener: bool = False, new_closer: bool = False) -> Case:
    """A held-out prompt: an unseen pair of names, in an unseen combination or unseen wording."""
    while True:
        start, end = opener(rng, new=new_opener), closer(rng, new=new_closer)
        if new_opener or new_closer or is_combination_held_out(start, end):
            break
    while True:
        names = rng.sample(NAMES, 2)
        if is_pair_held_out(*names):
            break
    giver, receiver = rng.sample(names, 2)
    text = _named(_filled(start.text, rng), names) + _filled(end.text, rng).replace("{S}", giver)
    part = {(0, 0): "recombined", (1, 0): "new opener", (0, 1): "new closer", (1, 1): "both new"}
    return Case(
        prompt=with_articles(text),
        answers=(f" {receiver}",),
        wrong=(f" {giver}",),
        part=part[int(new_opener), int(new_closer)],
    )


def cases(count: int = 500) -> list[Case]:
    """Held-out prompts of all four parts."""
    rng = Random("indirect objects")
    kinds = [(False, False), (True, False), (False, True), (True, True)]
    return [
        prompt(rng, new_opener=start, new_closer=end) for start, end in kinds for _ in range(count)
    ]
