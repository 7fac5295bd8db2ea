"""Names for units by somebody who reads their examples, such as a language model; and how good such names are.

Nobody is called unless a function is given for it: it takes a prompt and returns an answer, both texts. A name is
scored by a judge who has it and examples alone: by detection (in which of these texts is the unit active?) and by
fuzzing (in which of these texts are the marked tokens those at which it is active?).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

import interpose as ip
from interpose.concepts.naming import Concepts
from interpose.concepts.report import Features
from interpose.progress import ShowProgress, tracked
from interpose.results.scores import Scores

Ask = Callable[[str], str]
"""A prompt, and the answer to it."""

OPEN, CLOSE = "<<", ">>"
_LABEL = """\
Below are pieces of text. In each, the tokens between {open} and {close} are those at which one unit of a language
model is active; the number says how strongly, from 1 to 10. The unit adds to the chance of these tokens next: {raises}.

{examples}

What do the marked tokens have in common, together with what stands before them? Answer with one line:
Label: <at most ten words>"""
_DETECT = """\
A unit of a language model is said to be active at: {label}

In which of these pieces of text is it active at some token?

{examples}

Answer with one line, such as "Active: 1, 4" or "Active: none"."""
_FUZZ = """\
A unit of a language model is said to be active at: {label}

In each of these pieces of text some tokens are marked with {open} and {close}. In which are these the tokens at which
it is active?

{examples}

Answer with one line, such as "Active: 1, 4" or "Active: none"."""
MEASURES = ["balanced accuracy", "precision", "recall", "F1"]


def label_features(
    found: Features,
    ask: Ask,
    *,
    neuron: int | Sequence[int] | None = None,
    k: int = 8,
    groups: int = 4,
    progress: ShowProgress = True,
) -> Concepts:
    """Names for units by a function that reads a prompt with their examples and answers with a line ``Label: ...``.

    ```python
    concepts = ip.label_features(found, ask=lambda prompt: my_model(prompt), neuron=[17, 40])
    ```

    Args:
        found: what `ip.features` returned.
        ask: takes a prompt and returns an answer.
        neuron: which units; by default all that are active.
        k: how many of the strongest examples it is shown.
        groups: and one of each of so many groups by value.
        progress: as in `ip.sweep`.
    """
    names: dict[int, str] = {}
    for unit in tracked(_units(found, neuron), progress, "unit", _one):
        answer = ask(label_prompt(found, unit, k=k, groups=groups))
        if (name := parsed_label(answer)) is not None:
            names[unit] = name
    return Concepts.of(names)


def label_prompt(found: Features, unit: int, *, k: int = 8, groups: int = 4) -> str:
    """What the labelling function is asked about a unit."""
    shown = found.examples(unit)[:k]
    shown += [one for group in found.groups(unit, groups, 1) for one in group["examples"]]
    most = max((one["value"] for one in shown), default=1.0)
    lines = [
        f"{number}. {marked(one, _active(one))} ({max(1, round(10 * one['value'] / most))})"
        for number, one in enumerate(shown, 1)
    ]
    raises = ", ".join(repr(word) for word, _ in found.logits(unit)["up"][:5]) or "not known"
    return _LABEL.format(open=OPEN, close=CLOSE, raises=raises, examples="\n".join(lines))


def parsed_label(answer: str) -> str | None:
    """The name in an answer: behind the last ``Label:``; None if there is none."""
    found = re.findall(r"(?im)^[\s*#>-]*label\s*[:*]+\s*(.+?)\s*$", answer)
    name = found[-1].strip(" *\"'`") if found else ""
    return name or None


def score_labels(
    found: Features,
    concepts: Concepts,
    judge: Ask,
    *,
    by: str = "detection",
    neuron: int | Sequence[int] | None = None,
    count: int = 10,
    batch_size: int = 5,
    seed: int = 0,
    progress: ShowProgress = True,
) -> Scores:
    """How well names tell where units are active, as a judge uses them, who sees the name and examples alone.

    Half of the examples are of the unit, from its random sample. By detection the others are of random tokens around
    which it is not active; by fuzzing they are its own, with other tokens marked. A name that says nothing has a
    balanced accuracy of a half.

    Args:
        found: what `ip.features` returned; best of texts that the names were not made of.
        concepts: the names.
        judge: takes a prompt and returns an answer with a line ``Active: 1, 4``.
        by: ``detection`` or ``fuzzing``.
        neuron: which units; by default all that have a name.
        count: how many examples of each kind.
        batch_size: how many the judge sees at a time.
        seed: of which and in which order.
        progress: as in `ip.sweep`.
    """
    if by not in ("detection", "fuzzing"):
        raise ValueError(f"by is 'detection' or 'fuzzing'; got {by!r}.")
    units = [u for u in _units(found, neuron) if u in concepts]
    if not units:
        raise ValueError("none of these units has a name.")
    rows, scored, unreadable = [], [], 0
    for unit in tracked(units, progress, "unit", _one):
        rng = random.Random(f"{seed} {unit}")
        examples = _tests(found, unit, by, count, rng)
        if len({truth for _, truth in examples}) < 2:
            continue
        said: list[bool | None] = []
        for first in range(0, len(examples), batch_size):
            some = [text for text, _ in examples[first : first + batch_size]]
            prompt = judge_prompt(concepts[unit], some, by)
            said += parsed_active(judge(prompt), len(some))
        unreadable += sum(one is None for one in said)
        rows.append(_measures([truth for _, truth in examples], [bool(one) for one in said]))
        scored.append(unit)
    if not rows:
        raise ip.NothingMatched(
            "none of these units has examples both of where it is active and of where it is not."
        )
    return Scores(
        title=f"Names of {len(scored)} units, scored by {by}",
        values=torch.tensor(rows),
        axes={"unit": scored, "measure": list(MEASURES)},
        unit="share",
        protocol={"by": by, "count": count, "seed": seed, "unreadable_answers": unreadable},
        evidence=(
            "Evidence for whether a judge who has a name alone can tell where the unit is active; it depends on the "
            "judge, and says nothing of what the unit does."
        ),
    )


def judge_prompt(label: str, examples: Sequence[str], by: str) -> str:
    """What the judge is asked."""
    lines = "\n".join(f"{number}. {text}" for number, text in enumerate(examples, 1))
    form = _DETECT if by == "detection" else _FUZZ
    return form.format(label=label, examples=lines, open=OPEN, close=CLOSE)


def parsed_active(answer: str, count: int) -> list[bool | None]:
    """Which of so many examples an answer calls active; None of all of them if it has no such line."""
    found = re.findall(r"(?im)^[\s*#>-]*active\s*[:*]+(.*)$", answer)
    if not found:
        return [None] * count
    numbers = {int(one) for one in re.findall(r"\d+", found[-1])}
    return [number in numbers for number in range(1, count + 1)]


def marked(one: dict[str, Any], where: Sequence[bool]) -> str:
    """An example as text, with tokens marked."""
    made = "".join(
        f"{OPEN}{word}{CLOSE}" if here else word for word, here in zip(one["words"], where)
    )
    return made.replace(CLOSE + OPEN, "").replace("\n", " ")


def _one(_: int) -> int:
    return 1


def _active(one: dict[str, Any]) -> list[bool]:
    return [value > 0 for value in one["activations"]]


def _units(found: Features, neuron: int | Sequence[int] | None) -> list[int]:
    if neuron is not None:
        asked = [neuron] if isinstance(neuron, int) else list(neuron)
        return [found.units[found.row(unit)] for unit in asked]
    return [u for u, fired in zip(found.units, found.counts.fired.tolist()) if fired]


def _tests(
    found: Features, unit: int, by: str, count: int, rng: random.Random
) -> list[tuple[str, bool]]:
    """Examples as texts, with whether each is of the unit."""
    groups = found.groups(unit, 1)
    own = groups[0]["examples"] if groups else []
    rng.shuffle(own)
    made = []
    if by == "detection":
        made = [(marked(one, [False] * len(one["words"])), True) for one in own[:count]]
        others = found.sample.without(found.row(unit)).tolist()
        rng.shuffle(others)
        for at in others[: len(made)]:
            words = [found.word(token) for token in found.sample.windows[at].tolist()]
            made.append(("".join(words).replace("\n", " "), False))
    else:
        for number, one in enumerate(own[: 2 * count]):
            true = _active(one)
            other = _moved(one, true, rng) if number % 2 else None
            made.append((marked(one, true if other is None else other), other is None))
    rng.shuffle(made)
    return made


def _moved(one: dict[str, Any], true: list[bool], rng: random.Random) -> list[bool] | None:
    """As many tokens marked, but others; None if there are none."""
    free = [at for at, (word, here) in enumerate(zip(one["words"], true)) if word and not here]
    if not free:
        return None
    chosen = set(rng.sample(free, min(len(free), sum(true))))
    return [at in chosen for at in range(len(true))]


def _measures(truth: Sequence[bool], said: Sequence[bool]) -> list[float]:
    """As `MEASURES` names them."""
    right = sum(a and b for a, b in zip(truth, said))
    called, there = sum(said), sum(truth)
    refused = sum(not a and not b for a, b in zip(truth, said))
    recall, specificity = right / there, refused / (len(truth) - there)
    precision = right / called if called else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return [(recall + specificity) / 2, precision, recall, f1]
