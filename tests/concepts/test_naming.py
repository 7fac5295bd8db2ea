"""Names for units: files, prompts and scores."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import interpose as ip
from interpose.concepts.labelling import label_prompt, parsed_active, parsed_label

TEXTS = [
    f"The {noun} near the {place} was old."
    for noun in ("cat", "dog", "bird", "teacher")
    for place in ("house", "town", "sea", "door", "car")
]


@pytest.fixture(scope="module")
def found() -> ip.Features:
    return ip.features(ip.load("pocket"), TEXTS, site="post", layer=3, context=3, progress=False)


@pytest.fixture(scope="module")
def unit(found: ip.Features) -> int:
    """One that is active at some tokens, and around others at none."""
    for unit in found.units:
        if 0.1 < found.density(unit) < 0.2 and len(found.sample.without(found.row(unit))) > 20:
            return unit
    raise AssertionError


def test_names_are_written_and_read_as_csv_and_json(tmp_path: Path) -> None:
    names = ip.Concepts.of({3: 'says "hi", twice', 11: "=1+1", 4: "läuft"}, {3: 0.5})
    for file in ("c.csv", "c.json", "c.safetensors"):
        again = ip.Concepts.read(names.save(tmp_path / file))
        assert again.concepts == names.concepts
        assert again.scores == names.scores
    assert names.find("HI") == [3]
    assert (len(names), 3 in names, 5 in names, names.get(5, "?")) == (3, True, False, "?")


def test_of_several_names_the_surest_stays(tmp_path: Path) -> None:
    file = tmp_path / "c.csv"
    file.write_text("neuron_idx,concept_name,score\n3,low,0.2\n3,high,0.9\n3,middle,0.5\n7,only\n")
    found = ip.Concepts.read(file)
    assert found.concepts == {3: "high", 7: "only"}
    assert found.scores == {3: 0.9, 7: None}
    both = ip.Concepts.of({3: "other", 8: "new"}, {3: 0.95}).joined(found)
    assert both.concepts == {3: "other", 7: "only", 8: "new"}


@pytest.mark.parametrize("line", ["x,y,z", "3", "3,a,b", "3,a,0.5,more"])
def test_a_line_that_is_not_a_name_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "c.csv"
    file.write_text(f"unit,name,score\n{line}\n")
    with pytest.raises(ip.FileError, match="line 2 is not a number, a name"):
        ip.Concepts.read(file)


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ("Label: places in France", "places in France"),
        ("I think...\n**Label:** the word 'door'.\n", "the word 'door'."),
        ("label : x\nLabel: better", "better"),
        ("nothing", None),
        ("Label:", None),
    ],
)
def test_the_name_is_read_from_the_answer(answer: str, name: str | None) -> None:
    assert parsed_label(answer) == name


@pytest.mark.parametrize(
    ("answer", "which"),
    [
        ("Active: 1, 3", [True, False, True]),
        ("Let me see.\nActive: none", [False, False, False]),
        ("**Active:** 2 and 9", [False, True, False]),
        ("1, 3", [None, None, None]),
    ],
)
def test_which_are_active_is_read_from_the_answer(answer: str, which: list[Any]) -> None:
    assert parsed_active(answer, 3) == which


def test_the_prompt_marks_the_tokens_at_which_the_unit_is_active(
    found: ip.Features, unit: int
) -> None:
    prompts: list[str] = []

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        return "Label: something"

    names = ip.label_features(found, ask, neuron=unit, progress=False)
    assert names.concepts == {unit: "something"}
    assert prompts == [label_prompt(found, unit)]
    strongest = found.examples(unit)[0]
    assert f"<<{strongest['token']}>>" in prompts[0]
    assert "(10)" in prompts[0]


def judge_who_knows(found: ip.Features, unit: int, by: str) -> Any:
    """Says which examples are of the unit by looking them up."""
    own = [one for group in found.groups(unit, 1) for one in group["examples"]]
    texts = {"".join(one["words"]) for one in own}

    def marked(one: dict[str, Any]) -> str:
        pairs = zip(one["words"], one["activations"])
        return "".join(f"<<{w}>>" if a > 0 else w for w, a in pairs).replace(">><<", "")

    right = texts if by == "detection" else set(map(marked, own))

    def judge(prompt: str) -> str:
        lines = re.findall(r"(?m)^(\d+)\. (.*)$", prompt)
        return "Active: " + ", ".join(number for number, text in lines if text in right)

    return judge


@pytest.mark.parametrize("by", ["detection", "fuzzing"])
def test_a_judge_who_knows_scores_one_and_others_a_half(
    found: ip.Features, unit: int, by: str
) -> None:
    names = ip.Concepts.of({unit: "whatever"})
    given: dict[str, Any] = {"by": by, "progress": False}
    knows = ip.score_labels(found, names, judge_who_knows(found, unit, by), **given)
    assert knows.values[0].tolist() == [1, 1, 1, 1]
    for answer in ("Active: none", "Active: 1, 2, 3, 4, 5", "no idea"):
        blind = ip.score_labels(found, names, lambda prompt, said=answer: said, **given)
        assert blind.at(unit=unit, measure="balanced accuracy") == 0.5
    assert blind.protocol["unreadable_answers"] > 0


def test_examples_of_where_a_unit_is_not_active_are_true(found: ip.Features, unit: int) -> None:
    model = ip.load("pocket")
    row = found.row(unit)
    for at in found.sample.without(row)[:10].tolist():
        order = int(found.sample.order[at])
        text, pos = order >> 32, order & (2**32 - 1)
        _, cache = model.run_with_cache(TEXTS[text], names_filter=[("post", 3)])
        near = cache["post", 3][0, max(0, pos - 3) : pos + 4, unit]
        assert not bool((near > 0).any())
