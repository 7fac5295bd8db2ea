"""Something lasts from one year to a later one of the same century. Held out: (event, century, year) triples."""

from random import Random

from training.splits import Case, is_held_out
from training.words import EVENTS, NAMES, PLACES

_WORDINGS = [
    "The {E} lasted from the year {c}{y} to the year {c}", "The {E} began in {c}{y} and ended in {c}",
    "The {E} started in the year {c}{y} and finished in the year {c}", "The {E} of {c}{y} went on until {c}",
    "From {c}{y} until the end of the {E} in {c}", "After the {E} of {c}{y} came another one, in {c}",
    "{A} lived near the {P} from {c}{y} to {c}", "The {P} was built in {c}{y} and rebuilt in {c}",
]  # fmt: skip
CENTURIES = [str(century) for century in range(11, 20)]
START_YEARS = range(2, 99)


def _is_held_out(event: str, century: str, year: int) -> bool:
    return is_held_out("years", event, century, str(year), one_in=8)


def document(rng: Random) -> str:
    """One sentence with two years; every later year is as likely as any other."""
    while True:
        event, century, year = rng.choice(EVENTS), rng.choice(CENTURIES), rng.choice(START_YEARS)
        if not _is_held_out(event, century, year):
            break
    text = rng.choice(_WORDINGS).replace("{E}", event).replace("{c}", century)
    text = text.replace("{y}", f"{year:02}").replace("{A}", rng.choice(NAMES))
    return f"{text.replace('{P}', rng.choice(PLACES))}{rng.randint(year + 1, 99):02}."


def cases() -> list[Case]:
    """For each start year every held-out event and century, in the wordings that name an event."""
    rng = Random("years")
    return [
        Case(
            prompt=rng.choice(_WORDINGS[:6])
            .replace("{E}", event)
            .replace("{c}", century)
            .replace("{y}", f"{year:02}"),
            answers=tuple(f"{later:02}" for later in range(year + 1, 100)),
            part=f"{year:02}",
        )
        for year in START_YEARS
        for event in EVENTS
        for century in CENTURIES
        if _is_held_out(event, century, year)
    ]
