"""Text that repeats itself: codes, lists and full names in English."""

from random import Random

from training.words import FRUITS, NAMES, OBJECTS, PLACES, SURNAMES


def document(rng: Random) -> str:
    """A short English text whose end repeats its beginning."""
    kind = rng.randrange(4)
    if kind == 0:
        code = " ".join(f"{rng.randrange(100):02}" for _ in range(rng.randint(2, 5)))
        thing = rng.choice(["code", "number", "answer", "password"])
        return f"The {thing} is {code}. Please remember: the {thing} is {code}."
    if kind == 1:
        listed = ", ".join(rng.sample(FRUITS, rng.randint(3, 6)))
        place = rng.choice(PLACES)
        return f"{rng.choice(NAMES)} went to the {place} to buy {listed}. The {place} had {listed}."
    if kind == 2:
        name = f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}"
        other = f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}"
        return f"{name} met {other} near the {rng.choice(PLACES)}. {other} talked to {name}."
    said = " ".join(rng.sample(OBJECTS + FRUITS, rng.randint(3, 7)))
    return f"Say after me: {said}. Again: {said}."
