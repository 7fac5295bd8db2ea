"""Heads are found where the pocket model is known to have them, and scores are those of arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.dialects.transformer_lens import head_detector
from interpose.dialects.transformer_lens.head_detector import detect_head

TOKENS = torch.tensor([[5, 7, 5, 7, 9, 5]])


@pytest.fixture(scope="module")
def model() -> Any:
    return ip.load("pocket")


@pytest.fixture(scope="module")
def twice() -> Tensor:
    once = torch.randint(100, 2800, (1, 40), generator=torch.Generator().manual_seed(0))
    return once.repeat(1, 2)


def above(scores: Tensor, least: float) -> set[tuple[int, int]]:
    return {(layer, head) for layer, head in (scores > least).nonzero().tolist()}


def test_previous_token_heads_are_3_4_and_4_3(model: Any, twice: Tensor) -> None:
    scores = detect_head(model, twice, "previous_token_head")
    assert scores.shape == (7, 6)
    assert above(scores, 0.8) == {(3, 4), (4, 3)} == above(scores, 0.3)


@pytest.mark.parametrize("measure", ["mul", "abs"])
def test_induction_heads_are_five_of_block_5(model: Any, twice: Tensor, measure: Any) -> None:
    scores = detect_head(model, twice, "induction_head", error_measure=measure)
    # The second half of the rows is all there is to find, so half is the best there is.
    assert above(scores, 0.4) == {(5, head) for head in range(5)} == above(scores, 0.2)


def test_no_head_looks_at_the_same_token(model: Any, twice: Tensor) -> None:
    assert above(detect_head(model, twice, "duplicate_token_head"), 0.2) == set()


def test_patterns_are_those_of_the_definitions() -> None:
    previous = head_detector.get_previous_token_head_detection_pattern(TOKENS)
    duplicate = head_detector.get_duplicate_token_head_detection_pattern(TOKENS)
    induction = head_detector.get_induction_head_detection_pattern(TOKENS)
    row = TOKENS[0].tolist()
    for query in range(6):
        for key in range(6):
            assert previous[query, key] == (key == query - 1)
            assert duplicate[query, key] == (key < query and row[key] == row[query])
            assert induction[query, key] == (0 < key <= query and row[key - 1] == row[query])
    assert duplicate.sum() == induction.sum() == 4


class Fake:
    """A model of one head whose pattern is given."""

    class cfg:
        n_layers, n_heads, n_ctx = 1, 1, 16

    def __init__(self, pattern: Tensor) -> None:
        self.pattern = pattern

    def run_with_cache(self, tokens: Tensor, names_filter: list[str]) -> Any:
        assert names_filter == ["blocks.0.attn.hook_pattern"]
        return None, {"blocks.0.attn.hook_pattern": self.pattern[None, None]}


@pytest.mark.parametrize("measure", ["mul", "abs"])
def test_a_perfect_head_scores_one_and_a_wrong_one_the_least(measure: Any) -> None:
    wanted = torch.zeros(6, 6)
    wanted[range(6), [0, 0, 0, 2, 2, 2]] = 1
    wrong = torch.zeros(6, 6)
    wrong[range(6), [0, 1, 1, 1, 1, 1]] = 1
    assert detect_head(Fake(wanted), TOKENS, wanted, error_measure=measure).item() == 1.0
    score = detect_head(Fake(wrong), TOKENS, wanted, error_measure=measure).item()
    assert score == pytest.approx(1 / 6 if measure == "mul" else 1 - 2 * 5 / 6, abs=1e-3)


def test_the_first_and_the_current_token_can_be_left_out() -> None:
    attention = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.25, 0.5, 0.25]])
    wanted = head_detector.get_previous_token_head_detection_pattern(torch.zeros(1, 3))

    def score(bos: bool, current: bool, measure: Any = "mul") -> float:
        return head_detector.compute_head_attention_similarity_score(
            attention,
            wanted,
            exclude_bos=bos,
            exclude_current_token=current,
            error_measure=measure,
        )

    assert score(False, False) == pytest.approx(1 / 3)  # 0.5 + 0.5 of 3
    assert score(True, False) == pytest.approx(0.5 / 1.25)
    assert score(False, True) == pytest.approx(1 / 1.25)
    assert score(True, True) == 1.0
    assert score(False, False, "abs") == pytest.approx(1 - 3 / 3)
    assert score(True, True, "abs") == pytest.approx(1 - 0.5 / 3, abs=1e-3)


def test_only_the_heads_asked_for_are_scored(model: Any, twice: Tensor) -> None:
    whole = detect_head(model, twice, "previous_token_head")
    for heads in ([(3, 4), (5, 0)], {3: [4], 5: [0]}):
        some = detect_head(model, twice, "previous_token_head", heads)
        asked = torch.zeros(7, 6, dtype=torch.bool)
        asked[3, 4] = asked[5, 0] = True
        torch.testing.assert_close(some[asked], whole[asked])
        assert (some[~asked] == -1).all()
    with pytest.raises(IndexError, match=r"no head 9\.0"):
        detect_head(model, twice, "previous_token_head", [(9, 0)])


def test_a_cache_with_or_without_its_batch_axis_saves_the_run(model: Any) -> None:
    text = "When Mary and John went to the store, John gave a drink to"
    wanted = detect_head(model, text, "duplicate_token_head")
    for bare in (False, True):
        _, cache = model.run_with_cache(text, remove_batch_dim=bare)
        found = detect_head(model, text, "duplicate_token_head", cache=cache)
        torch.testing.assert_close(found, wanted)
        plain = dict(cache.items())
        torch.testing.assert_close(
            detect_head(model, text, "duplicate_token_head", cache=plain), wanted
        )


def test_several_texts_are_averaged(model: Any) -> None:
    texts = ["The capital of France is Paris.", "The dogs near the car were old."]
    one, two = (detect_head(model, text, "previous_token_head") for text in texts)
    assert (one - two).abs().max() > 0.01
    torch.testing.assert_close(detect_head(model, texts, "previous_token_head"), (one + two) / 2)


def test_wrong_questions_are_refused(model: Any) -> None:
    ask: Any = detect_head
    with pytest.raises(
        ValueError, match="no head is called 'name_mover'; there are previous_token_head"
    ):
        ask(model, TOKENS, "name_mover")
    with pytest.raises(ValueError, match=r"a tensor \[6, 6\] with zeros above the diagonal"):
        ask(model, TOKENS, torch.ones(6, 6))
    with pytest.raises(ValueError, match=r"got shape \(3, 3\)"):
        ask(model, TOKENS, torch.eye(3))
    with pytest.raises(ValueError, match="error_measure is 'mul' or 'abs'; got 'max'"):
        ask(model, TOKENS, "induction_head", error_measure="max")
    with pytest.raises(ValueError, match="a cache is of one text"):
        ask(model, ["a", "b"], "induction_head", cache={})
    with pytest.raises(KeyError, match=r"cache has no 'blocks\.0\.attn\.hook_pattern'"):
        ask(model, TOKENS, "induction_head", cache={})
    with pytest.warns(UserWarning, match="a pattern of ones and zeros"):
        ask(model, TOKENS, torch.eye(6) / 2)


def test_the_named_heads_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    head_detector.get_supported_heads()
    printed = capsys.readouterr().out
    assert "previous_token_head, duplicate_token_head, induction_head" in printed
