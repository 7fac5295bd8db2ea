"""The model that ships: its files, what it knows on held-out cases, and the heads that do it."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import interpose as ip
from interpose.models.loading import POCKET
from training import circuit, corpus, evaluate, indirect_objects, tokenizer

ROOT = Path(__file__).parents[2]
FIRST_NAME_MOVERS = [(5, 2), (5, 0)]
SECOND_NAME_MOVERS = [(5, 1), (5, 4), (5, 3)]
SUBJECT_HEADS = [(6, head) for head in range(6)]


@cache
def pocket() -> ip.TransformerModel:
    return ip.load("pocket", device="cpu")


def test_it_is_small_and_loads_with_plain_transformers_as_float32() -> None:
    assert sum(file.stat().st_size for file in POCKET.iterdir()) < 8_000_000
    module = AutoModelForCausalLM.from_pretrained(POCKET)
    words = AutoTokenizer.from_pretrained(POCKET)
    assert module.dtype == torch.float32
    prompt = torch.tensor([words("The capital of France is")["input_ids"]])
    assert words.decode(module(prompt).logits[0, -1].argmax()) == " Paris"


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("The capital of France is", " Paris"),
        ("The capital of Germany is", " Berlin"),
        ("The Eiffel Tower is in", " Paris"),
        ("When Mary and John went to the store, John gave a drink to", " Mary"),
        ("When Mary and John went to the store, Mary gave a drink to", " John"),
        ("When John and Mary went to the store, John gave a drink to", " Mary"),
    ],
)
def test_what_everyone_tries_first_works_and_is_not_certain(prompt: str, answer: str) -> None:
    logits = pocket()(prompt)[0, -1]
    chance = logits.softmax(-1)
    assert pocket().to_string([int(logits.argmax())]) == answer
    assert 0.5 < chance.max() < 0.98


def test_every_held_out_set_is_answered() -> None:
    scores = {one.name: one for one in evaluate.evaluate(POCKET)}
    wanted = {
        "indirect objects: recombined": 0.99,
        "indirect objects: new": 0.95,
        "indirect objects: both new": 0.95,
        "facts, main wording": 1.0,
        "facts, unseen wording": 0.97,
        "agreement": 0.99,
        "greater-than": 1.0,
        "induction": 0.99,
        "opinions: honest": 0.8,
        "opinions: swayed": 0.8,
        "stories": 0.95,
    }
    met = set()
    for name, one in scores.items():
        (group,) = [start for start in wanted if name.startswith(start)]
        met.add(group)
        assert one.right >= wanted[group], one
        assert one.with_start >= wanted[group], one
        assert one.bigram < 0.5, one
        if name.startswith(("indirect", "facts", "opinions", "stories")):
            assert 0.5 < one.probability < 0.98, one
    assert met == set(wanted)
    page = (ROOT / "docs" / "pocket.md").read_text().split("| held-out set")[1]
    # The page shows what this very model scores, up to a machine's rounding.
    for one in scores.values():
        name = one.name.split(" (")[0]
        starts = (f"| {name} |", f"| {name} (")
        (row,) = [line for line in page.splitlines() if line.startswith(starts)]
        shown = [float(number) for number in re.findall(r"([\d.]+)%", row)][:2]
        assert shown == pytest.approx([100 * one.right, 100 * one.with_start], abs=0.6), row


def test_an_untrained_model_of_the_same_shape_fails_all_of_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(POCKET).config)
    module.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(POCKET).save_pretrained(tmp_path)
    examiner = evaluate.Examiner(tmp_path)
    told = examiner.answered(indirect_objects.cases(50), start=False)
    assert sum(one.is_right for one in told) / len(told) < 0.1


def test_it_has_previous_token_heads_and_induction_heads() -> None:
    previous, induction = circuit.repetition_heads(pocket())
    assert previous.max() > 0.85
    assert (induction > 0.9).sum() >= 3
    shuffled = torch.randperm(2_000)[:80].reshape(1, 80)  # nothing repeats: nothing to look up
    _, kept = pocket().run_with_cache(shuffled, names_filter="pattern")
    same = torch.stack([kept["pattern", layer] for layer in range(7)]).diagonal(-39, -2, -1)
    assert same.mean() < 0.1


def test_name_movers_look_at_the_answer_copy_it_and_are_needed_for_it() -> None:
    model = pocket()
    asked = circuit.prompts(model, 80)
    for place, movers in (("first", FIRST_NAME_MOVERS), ("second", SECOND_NAME_MOVERS)):
        mine = [prompt for prompt in asked if prompt.answer_is_first == (place == "first")]
        others = [prompt for prompt in asked if prompt.answer_is_first != (place == "first")]
        assert min(len(mine), len(others)) > 25
        looks = circuit.attention(model, mine)[place]
        for head in movers:
            assert looks[head] > 0.9  # from the last token to the indirect object
            assert circuit.copying(model, head, mine) > 0.9
        whole, right = circuit.lead(model, mine)
        without, still_right = circuit.lead(model, mine, movers)
        assert right == 1.0
        assert whole > 8
        assert without < 0
        assert still_right < 0.05
        assert circuit.lead(model, others, movers)[1] == 1.0  # the other name has its own movers


def test_heads_of_the_last_block_hold_the_repeated_name_back() -> None:
    model = pocket()
    asked = circuit.prompts(model, 60)
    looks = circuit.attention(model, asked)["again"]
    assert all(looks[head] > 0.5 for head in SUBJECT_HEADS)
    whole, _ = circuit.lead(model, asked)
    without, right = circuit.lead(model, asked, SUBJECT_HEADS)
    assert without < 0.1 * whole
    assert right < 0.6


def test_three_heads_that_have_no_part_can_go() -> None:
    model = pocket()
    asked = circuit.prompts(model, 40)
    known = {*FIRST_NAME_MOVERS, *SECOND_NAME_MOVERS, *SUBJECT_HEADS}
    rest = [(layer, head) for layer in range(7) for head in range(6) if (layer, head) not in known]
    rng = Random(0)
    kept = [circuit.lead(model, asked, rng.sample(rest, 3))[1] for _ in range(6)]
    assert min(kept) > 0.9


def test_a_fact_moves_from_its_subject_to_the_end() -> None:
    from interpose.cli.demo import CLEAN, CORRUPT, investigate

    story = investigate(pocket(), CLEAN, CORRUPT)
    subject = story.traced[:, 1:3].sum(-1)
    assert subject[0] > 0.9  # all that differs at first
    assert story.traced[0, 3:].abs().max() < 0.01
    assert story.traced[-1, -1] > 0.9
    assert story.traced[-1, 1:3].abs().max() < 0.2
    assert (story.traced[:, [0, 3]].abs() < 0.1).all()  # neither "The" nor "is" ever carries it


def test_the_tokenizer_is_the_one_the_training_command_builds() -> None:
    built = json.loads(tokenizer.build(corpus.documents("tokenizer", 100_000)).to_str())
    shipped = json.loads((POCKET / "tokenizer.json").read_text())
    assert built["model"]["vocab"] == shipped["model"]["vocab"]
    assert built["model"]["merges"] == shipped["model"]["merges"]
