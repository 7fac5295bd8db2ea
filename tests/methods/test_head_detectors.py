"""Scores are those of brute force, 1 for a hand-built induction head, and find the known heads of the pocket model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.dialects.transformer_lens import HookedTransformer, HookedTransformerConfig
from interpose.dialects.transformer_lens.head_detector import detect_head
from tests.leftovers import same_state, state_of
from tests.models import tiny
from tests.pages import loads_nothing

KINDS = ["previous", "current", "first", "duplicate", "induction"]
TYPES = ["gpt2", "llama", "gemma2", "gpt_neox"]


@pytest.fixture(scope="module")
def pocket() -> Any:
    return ip.load("pocket").requires_grad_(False)


def wants(kind: str, row: list[int], query: int, key: int) -> bool:
    """The definitions, one pair at a time."""
    return {
        "previous": key == query - 1,
        "current": key == query,
        "first": key == 0 < query,
        "duplicate": key < query and row[key] == row[query],
        "induction": 0 < key <= query and row[key - 1] == row[query],
    }[kind]


def brute_force(patterns: Tensor, rows: Tensor, kind: str) -> Tensor:
    """From whole patterns [layer, example, head, query, key] to scores [layer, head], in loops."""
    found = []
    for example, row in enumerate(rows.tolist()):
        for query in range(len(row)):
            keys = [key for key in range(len(row)) if wants(kind, row, query, key)]
            if keys:
                found.append(patterns[:, example, :, query][..., keys].sum(-1))
    return torch.stack(found).mean(0)


def induction_model(vocab: int = 20, length: int = 24) -> Any:
    """Two layers of two heads without norms, made by hand.

    The stream has a place for the token, one for the position and one for the token before. Head 0.0 looks at the
    position before and copies its token; head 1.0 looks for what was copied; 0.1 and 1.1 look at themselves.
    """
    wide = max(vocab, length)
    model = HookedTransformer(
        HookedTransformerConfig(
            n_layers=2,
            n_heads=2,
            d_model=2 * vocab + length,
            d_head=wide,
            n_ctx=length,
            d_vocab=vocab,
            attn_only=True,
            normalization_type=None,
            seed=0,
        )
    ).eval()
    token, pos, before = slice(0, vocab), slice(vocab, vocab + length), slice(vocab + length, None)
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()
             if "mask" not in name and "IGNORE" not in name}  # fmt: skip
    state["embed.W_E"][:, token] = torch.eye(vocab)
    state["pos_embed.W_pos"][:, pos] = torch.eye(length)
    state["unembed.W_U"][token] = torch.eye(vocab)
    sure = 40 * wide**0.5  # scores are divided by the root of d_head
    places, words = torch.eye(length, wide), torch.eye(vocab, wide)
    for layer, head, reads, seen, query, key in (
        (
            0,
            0,
            pos,
            pos,
            torch.cat([torch.zeros(1, wide), places[:-1]]),
            places,
        ),  # p asks for p - 1
        (0, 1, pos, pos, places, places),
        (1, 0, token, before, words, words),
        (1, 1, pos, pos, places, places),
    ):
        state[f"blocks.{layer}.attn.W_Q"][head, reads] = sure * query
        state[f"blocks.{layer}.attn.W_K"][head, seen] = key
    state["blocks.1.attn.W_K"][0, pos.start] = -1  # the first position has copied itself
    for layer, to in ((0, before), (1, token)):
        state[f"blocks.{layer}.attn.W_V"][0, token] = words
        state[f"blocks.{layer}.attn.W_O"][0, :, to] = (1 + layer) * words.T
    model.load_state_dict(state, strict=False)
    return model


def test_a_hand_built_induction_head_scores_one() -> None:
    model = induction_model()
    scores = ip.head_scores(model, "induction", length=10, repeats=2)
    torch.testing.assert_close(scores.values, torch.tensor([[0.0, 0], [1, 0]]), rtol=0, atol=1e-4)
    previous = ip.head_scores(model, "previous", length=10, repeats=2)
    assert previous.at(layer=0, head=0) == pytest.approx(1, abs=1e-4)
    assert previous.values[:, 1].abs().max() < 1e-4
    assert previous.at(layer=1, head=0) < 0.2  # nothing to find in the first saying: all keys alike
    current = ip.head_scores(model, "current", length=10, repeats=2)
    torch.testing.assert_close(current.values[:, 1], torch.ones(2), rtol=0, atol=1e-4)


def test_the_hand_built_model_does_say_what_came_next() -> None:
    rows = torch.randperm(20)[None, :10].repeat(1, 2)
    said = induction_model()(rows)[0, 10:19].argmax(-1)
    assert torch.equal(said, rows[0, 11:])


def test_the_pocket_model_has_the_heads_that_its_page_names(pocket: Any) -> None:
    previous = ip.head_scores(pocket, "previous", length=40, batch=16)
    first, second, third = previous.top(3)
    assert (first["layer"], first["head"], second["layer"], second["head"]) == (3, 4, 4, 3)
    assert first["value"] == pytest.approx(0.90, abs=0.02)
    assert second["value"] == pytest.approx(0.83, abs=0.02)
    assert third["value"] < 0.3
    induction = ip.head_scores(pocket, "induction", length=40, batch=16)
    strong = {
        (place["layer"], place["head"]) for place in induction.top(42) if place["value"] > 0.2
    }
    assert strong == {(5, head) for head in range(5)}
    assert induction.values[5, :5].min() > 0.965
    assert induction.values[5, :5].max() < 0.995
    assert ip.head_scores(pocket, "duplicate", length=40).values.max() < 0.2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TYPES)
def test_scores_are_those_of_loops_over_whole_patterns(name: str, kind: str) -> None:
    model = ip.wrap(tiny.build(name))
    rows = torch.randint(
        10, 14, (3, 9), generator=torch.Generator().manual_seed(1)
    )  # repeats, also at once
    _, cache = model.run_with_cache(rows, names_filter="pattern")
    wanted = brute_force(torch.stack([cache["pattern", 0], cache["pattern", 1]]), rows, kind)
    found = ip.head_scores(model, kind, texts=rows)
    torch.testing.assert_close(found.values, wanted, rtol=0, atol=1e-6)
    assert wanted.std() > 1e-3


def test_texts_of_different_lengths_count_by_their_queries(pocket: Any) -> None:
    texts = [
        "The dog saw the dog near the car",
        "When Mary saw John, John saw Mary",
        "In Rome and in Rome",
    ]
    found = ip.head_scores(pocket, "duplicate", texts=texts)
    rows = []
    for text in texts:
        tokens = pocket.to_tokens(text)
        _, cache = pocket.run_with_cache(tokens, names_filter="pattern")
        patterns = torch.stack([cache["pattern", layer] for layer in range(7)])
        count = sum(token in tokens[0, :at] for at, token in enumerate(tokens[0]))
        rows.append((count, brute_force(patterns, tokens, "duplicate")))
    wanted = sum(count * scores for count, scores in rows) / sum(count for count, _ in rows)
    torch.testing.assert_close(found.values, wanted, rtol=0, atol=1e-6)
    assert found.protocol["queries"] == sum(count for count, _ in rows)


def test_they_agree_with_the_dialects_detector(pocket: Any) -> None:
    tokens = torch.randint(100, 2800, (1, 20)).repeat(1, 2)
    for kind, name, having in (
        ("previous", "previous_token_head", 39),
        ("duplicate", "duplicate_token_head", 20),
        ("induction", "induction_head", 20),
    ):
        # Its measure divides by all queries, ours by those that have a wanted key.
        theirs = detect_head(pocket, tokens, name, error_measure="mul") * 40 / having
        torch.testing.assert_close(
            ip.head_scores(pocket, kind, texts=tokens).values, theirs, atol=1e-5, rtol=1e-5
        )
    every = torch.eye(40).roll(-1, 1).tril()  # the token before; the first token looks at itself
    every[0, 0] = 1
    mine = ip.head_scores(pocket, every, texts=tokens).values
    torch.testing.assert_close(mine, detect_head(pocket, tokens, every), atol=1e-5, rtol=1e-5)
    apart = detect_head(
        pocket, tokens, every, error_measure="abs"
    )  # each row has one key: 2 * share - 1
    torch.testing.assert_close(2 * mine - 1, apart, atol=1e-3, rtol=0)


def test_patterns_of_ones_own(pocket: Any) -> None:
    tokens = torch.randint(100, 2800, (2, 12))

    def two_before(row: Tensor) -> Tensor:
        return torch.eye(len(row)).roll(2, 0).tril(-2)

    found = ip.head_scores(pocket, two_before, texts=tokens)
    _, cache = pocket.run_with_cache(tokens, names_filter=("pattern", 3))
    wanted = cache["pattern", 3].diagonal(-2, -2, -1).mean((0, 2))
    torch.testing.assert_close(found.values[3], wanted)
    assert found.protocol["kind"] == "two_before"
    half = ip.head_scores(pocket, 0.5 * two_before(tokens[0]), texts=tokens)
    torch.testing.assert_close(half.values, found.values / 2)


def test_no_whole_pattern_is_kept(pocket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    run = type(pocket).run_with_cache

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, cache = run(self, *args, **kwargs)
        kept.append(max(value.numel() for value in cache.values()))
        return output, cache

    monkeypatch.setattr(type(pocket), "run_with_cache", watched)
    ip.head_scores(pocket, "induction", length=20, batch=20)
    assert kept == [6, 6]  # a number for each head


def test_random_tokens_are_seeded_different_and_never_special(pocket: Any, monkeypatch: Any) -> None:  # fmt: skip
    seen: list[Tensor] = []
    run = type(pocket).run_with_cache
    monkeypatch.setattr(
        type(pocket), "run_with_cache", lambda self, *a, **k: (seen.append(a[0]), run(self, *a, **k))[1]
    )  # fmt: skip
    one, same, other = (ip.head_scores(pocket, length=60, batch=4, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.values, same.values)
    assert not torch.equal(one.values, other.values)
    rows = seen[0]
    assert rows.shape == (4, 120)
    assert torch.equal(rows[:, :60], rows[:, 60:])
    assert all(len(set(row.tolist())) == 60 for row in rows)
    assert not set(rows.flatten().tolist()) & set(pocket.tokenizer.all_special_ids)
    ip.head_scores(pocket, length=5, repeats=3, batch=2, prepend_bos=True)
    assert seen[-1].shape == (2, 16)
    assert seen[-1][:, 0].tolist() == [pocket.tokenizer.bos_token_id] * 2


def test_a_small_vocabulary_says_tokens_twice() -> None:
    model = induction_model(vocab=6)
    scores = ip.head_scores(model, "induction", length=10, repeats=2)
    assert scores.at(layer=1, head=0) == pytest.approx(1, abs=1e-4)


def test_nothing_is_left_behind_and_results_are_saved() -> None:
    module = tiny.build("llama")
    before = state_of(module)
    scores = ip.head_scores(ip.wrap(module), "induction", length=8)
    assert same_state(before, state_of(module))
    again = ip.Scores.from_dict(scores.to_dict())
    assert torch.equal(again.values, scores.values)
    loads_nothing(scores.html())
    assert scores.protocol == {
        "kind": "induction", "texts": "8 x 8 random tokens said 2 times, seed 0", "queries": 64, "forwards": 1,
    }  # fmt: skip


def test_wrong_questions_are_refused(pocket: Any) -> None:
    with pytest.raises(
        ValueError, match="no head is called 'inductive'; there are previous, current"
    ):
        ip.head_scores(pocket, "inductive")
    with pytest.raises(ValueError, match="no query has a key to look at"):
        ip.head_scores(pocket, "induction", texts="The cat sat")
    with pytest.raises(ValueError, match=r"a tensor \[3, 3\]; got \[2, 2\]"):
        ip.head_scores(pocket, torch.eye(2), texts="The cat sat")
    with pytest.raises(ValueError, match="and the model has 256 positions"):
        ip.head_scores(pocket, length=200)
    with pytest.raises(ValueError, match="at least 1"):
        ip.head_scores(pocket, repeats=0)
    with pytest.raises(IndexError, match=r"layer 7 is not there: attention has"):
        ip.head_scores(pocket, layer=7)
    some = ip.head_scores(pocket, layer=[5, -1], length=20)
    assert some.axes["layer"] == [5, 6]


def test_random_texts_are_drawn_for_a_model_with_several_tokens_that_end_a_text() -> None:
    module = tiny.build("llama")
    module.config.eos_token_id = [20, 21]  # as in Llama 3 and Gemma 3
    seen: list[Tensor] = []

    def previous(tokens: Tensor) -> Tensor:
        seen.append(tokens)
        return torch.eye(len(tokens)).roll(-1, 1).tril()

    ip.head_scores(ip.wrap(module), previous, length=30, batch=8)
    assert len(seen) == 8
    assert not {20, 21} & set(torch.stack(seen).flatten().tolist())
