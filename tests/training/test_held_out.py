"""What the evaluation calls held out never stands in the training text."""

from __future__ import annotations

import re
from random import Random

import pytest

from training import agreement, corpus, facts, indirect_objects, opinions, stories, words, years
from training.splits import Case, is_held_out, is_pair_held_out
from training.words import NAMES, NOUNS

COUNT = 20_000
_NAMES = set(NAMES)


def texts(kind: object) -> list[str]:
    rng = Random("held-out test")
    return [kind.document(rng) for _ in range(COUNT)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [indirect_objects, stories], ids=lambda kind: kind.__name__)
def test_no_two_names_of_a_text_are_a_held_out_pair(kind: object) -> None:
    pairs = set()
    for text in texts(kind):
        found = sorted(set(re.findall(r"[A-Z]\w+", text)) & _NAMES)
        pairs |= {(a, b) for i, a in enumerate(found) for b in found[i + 1 :]}
    assert len(pairs) > 4_000  # most pairs there are
    assert not [pair for pair in pairs if is_pair_held_out(*pair)]


def test_no_text_has_a_held_out_combination_of_opener_and_closer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: dict[str, object] = {}
    for name in ("opener", "closer"):
        draw = getattr(indirect_objects, name)

        def noted(
            rng: Random, *, draw: object = draw, name: str = name, new: bool = False
        ) -> object:
            drawn[name] = draw(rng, new=new)  # type: ignore[operator]
            return drawn[name]

        monkeypatch.setattr(indirect_objects, name, noted)
    rng, used = Random(0), set()
    for _ in range(COUNT):
        indirect_objects.document(rng)  # the last opener and closer drawn are the ones it used
        used.add((drawn["opener"], drawn["closer"]))
    assert not [pair for pair in used if indirect_objects.is_combination_held_out(*pair)]  # type: ignore[arg-type]


def _as_regex(wording: str) -> re.Pattern[str]:
    for slot in ("{O}", "{P}", "{A}", "{B}"):
        wording = wording.replace(slot, r"[\w]+")
    return re.compile(wording.replace("{N}", r"\w+ and \w+"))


def test_whole_wordings_that_are_held_out_never_occur() -> None:
    joined = "\n".join(texts(indirect_objects))
    forms = [
        f"{form}{phrase.removeprefix(verb)}"
        for phrase in indirect_objects._NEW_PHRASES
        for verb in [phrase.split(" ")[0]]
        for form in verb.split("/")
    ]
    starts = [*indirect_objects._NEW_CONNECTORS, *indirect_objects._NEW_LEADS]
    assert len(forms) >= 30
    for wording in [*forms, *indirect_objects._NEW_CLAUSES, *starts]:
        assert not _as_regex(rf"\b{wording}\b").search(joined), wording
    for wording in ("gave", "went to the", "As soon as"):  # the search itself finds what is there
        assert _as_regex(rf"\b{wording}\b").search(joined), wording


def test_facts_are_never_said_in_a_held_out_wording() -> None:
    joined = "\n".join(texts(facts))

    def is_said(case: Case) -> bool:  # its first letter is large or small by where it stands
        begun = case.prompt[0].lower() + case.prompt[1:]
        return any(
            f"{before}{text}{case.answers[0]}" in joined
            for before in "\n "
            for text in (case.prompt, begun)
        )

    assert not [case for case in facts.cases() if is_said(case)]
    mains = facts.main_cases()
    assert sum(map(is_said, mains)) > 0.9 * len(mains)


def test_held_out_questions_are_never_asked() -> None:
    joined = "\n".join(texts(opinions))
    asked = held = 0
    for relation in opinions._RELATIONS:
        for subject in relation.pairs:
            for wording in opinions._QUESTIONS[relation.name]:
                found = wording.replace("{X}", subject) in joined
                if opinions.is_question_held_out(relation, subject):
                    assert not found, (relation.name, subject)
                    held += 1
                else:
                    asked += found
    assert held > 80
    assert asked > 500


def test_subjects_and_nouns_of_held_out_pairs_are_never_in_one_text() -> None:
    single = {plural: noun for noun, plural in NOUNS.items()} | {noun: noun for noun in NOUNS}
    seen = 0
    for text in texts(agreement):
        nouns = [single[word] for word in re.findall(r"\w+", text) if word in single]
        if len(nouns) == 2:
            seen += 1
            assert not agreement.is_subject_held_out(*nouns), text
    assert seen > COUNT / 2


def test_no_text_has_a_held_out_start_year() -> None:
    for text in texts(years):
        found = re.match(r"(?:The|After the) (\w+) .*?(\d\d)(\d\d)", text)
        if found and not text.startswith("The mall"):
            event, century, year = found.groups()
            if event in words.EVENTS:
                assert not years._is_held_out(event, century, int(year)), text


def test_the_same_seed_gives_the_same_text_and_another_gives_another() -> None:
    first, again, other = (list(corpus.documents(seed, 500)) for seed in ("a", "a", "b"))
    assert first == again
    assert len(set(first) & set(other)) < 100


def test_every_held_out_case_is_whole() -> None:
    kinds = (indirect_objects, facts, opinions, agreement, years, stories)
    for kind in kinds:
        cases = kind.cases()
        assert len(cases) >= 90
        for case in cases:
            assert "{" not in case.prompt
            assert not case.prompt.endswith(" ")
            assert case.answers
            assert not set(case.answers) & set(case.wrong), case


def test_about_one_in_ten_is_held_out() -> None:
    share = sum(is_held_out("share", str(i)) for i in range(10_000)) / 10_000
    assert 0.08 < share < 0.12
