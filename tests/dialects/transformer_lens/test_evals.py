"""A trained model and a random one, told apart; datasets that are what they say."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import interpose as ip
from interpose.dialects.transformer_lens import evals
from tests.models import tiny


@pytest.fixture(scope="module")
def model() -> Any:
    return ip.load("pocket")


@pytest.fixture(scope="module")
def untrained() -> Any:
    return ip.wrap(tiny.build("gpt2", "causal"))


def test_induction_is_learned(model: Any, untrained: Any) -> None:
    torch.manual_seed(0)
    for options in ({}, {"subseq_len": 40}, {"subseq_len": 40, "prepend_bos": False}):
        assert evals.induction_loss(model, **options) < 0.05
    chance = math.log(untrained.cfg.d_vocab)
    assert evals.induction_loss(untrained, subseq_len=8, batch_size=16) > 0.8 * chance


class Listening:
    """Stands between `induction_loss` and a model, and writes down what is asked."""

    def __init__(self, cfg: Any) -> None:
        self.cfg, self.tokenizer = cfg, SimpleNamespace(bos_token_id=1)

    def __call__(self, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        self.tokens = tokens
        return 2.0 ** torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)


def test_tokens_are_said_twice_and_the_second_saying_counts(model: Any) -> None:
    listening = Listening(model.cfg)
    loss = evals.induction_loss(listening, subseq_len=6, batch_size=5)
    assert listening.tokens.shape == (5, 12)
    assert (listening.tokens[:, 0] == 1).all()
    assert torch.equal(listening.tokens[:, 1:6], listening.tokens[:, 7:])
    assert loss == (2**7 + 2**8 + 2**9 + 2**10) / 4
    evals.induction_loss(listening, subseq_len=6, prepend_bos=False)
    assert torch.equal(listening.tokens[:, :6], listening.tokens[:, 6:])


def test_induction_says_what_is_too_long_or_missing(model: Any, untrained: Any) -> None:
    with pytest.raises(ValueError, match="at most 128, half the model's context"):
        evals.induction_loss(model, subseq_len=384)
    with pytest.raises(ValueError, match="no BOS token is known: give a tokenizer"):
        evals.induction_loss(untrained, subseq_len=8, prepend_bos=True)


def test_losses_are_those_of_the_model(model: Any) -> None:
    text = "When Mary and John went to the store, John gave a drink to Mary."
    tokens = model.to_tokens(text)
    with torch.no_grad():
        logits = model.module(tokens).logits[0, :-1]
    wanted = torch.nn.functional.cross_entropy(logits, tokens[0, 1:])
    torch.testing.assert_close(evals.sanity_check(model, text), wanted)
    assert evals.sanity_check(model) > wanted + 5  # plain English is not its world
    other = model.to_tokens("The capital of France is Paris.")
    found = evals.evaluate_on_dataset(model, [{"tokens": tokens}, other, None], truncate=2)
    assert found == pytest.approx(float(wanted + evals.sanity_check(model, other)) / 2)
    with pytest.raises(ValueError, match="the loader gave no batch"):
        evals.evaluate_on_dataset(model, [])


def test_the_pocket_model_knows_indirect_objects_and_a_random_one_does_not(model: Any) -> None:
    for options in ({}, {"symmetric": True}, {"prepend_bos": False}):
        dataset = evals.IOIDataset(model.tokenizer, num_samples=60, seed=1, **options)
        found = evals.ioi_eval(model, dataset)
        assert found["Accuracy"] >= 0.98
        assert found["Logit Difference"] > 8
    scrambled = [
        dict(item, IO=item["S"], S=item["IO"]) for item in map(dataset.__getitem__, range(60))
    ]
    assert evals.ioi_eval(model, scrambled)["Accuracy"] <= 0.02
    random = ip.load("pocket")
    tiny.randomise(random.module)
    found = evals.ioi_eval(
        random, evals.IOIDataset(model.tokenizer, num_samples=60, seed=1, symmetric=True)
    )
    assert 0.2 < found["Accuracy"] < 0.8


def test_the_lead_is_read_where_the_name_is_predicted(model: Any) -> None:
    dataset = evals.IOIDataset(model.tokenizer, num_samples=5, seed=2)
    leads = []
    for item, sample in zip(map(dataset.__getitem__, range(5)), dataset.samples):
        before = item["prompt"][: -len(item["IO"])]
        assert model.to_string(before) == "<|endoftext|>" + sample["text"].removesuffix(
            sample["IO"]
        )
        last = model(before[None])[0, -1].detach()
        right, wrong = (model.to_single_token(sample[key]) for key in ("IO", "S"))
        leads.append(float(last[right] - last[wrong]))
    found = evals.ioi_eval(model, dataset, batch_size=2)
    assert found["Logit Difference"] == pytest.approx(sum(leads) / 5, rel=1e-4)


def test_the_same_seed_gives_the_same_sentences(model: Any) -> None:
    def samples(**options: Any) -> list[dict[str, str]]:
        return evals.IOIDataset(model.tokenizer, num_samples=20, **options).samples

    assert samples(seed=4) == samples(seed=4) != samples(seed=5)
    assert samples() != samples()
    pairs = samples(seed=4, symmetric=True)
    for one, two in zip(pairs[::2], pairs[1::2]):
        assert (one["IO"], one["S"]) == (two["S"], two["IO"])
        assert one["text"] != two["text"]
    for sample in samples(seed=4):
        assert sample["text"].endswith(sample["IO"])
        assert sample["text"].count(sample["S"].strip()) == 2
        assert sample["text"].count(sample["IO"].strip()) == 2
        assert "[" not in sample["text"]
    assert len(evals.IOIDataset(model.tokenizer, num_samples=5, symmetric=True)) == 5


def test_sentences_names_and_nouns_can_be_ones_own(model: Any) -> None:
    dataset = evals.IOIDataset(
        model.tokenizer,
        templates=["[A] met [B]. [B] gave the [OBJECT] to [A]"],
        names=["Alice", "Paul"],
        nouns={"OBJECT": ["ball"]},
        num_samples=1,
        seed=0,
    )
    giver = dataset.samples[0]["S"]
    assert f"{giver} gave the ball to{dataset.samples[0]['IO']}" in dataset.samples[0]["text"]
    item = dataset[0]
    assert item["prompt"][0] == model.tokenizer.bos_token_id
    assert item["prompt"][-1] == item["IO"][0]
    with pytest.raises(ValueError, match=r"templates end with \[A\]"):
        evals.IOIDataset(model.tokenizer, templates=["[A] met [B]"])


def no_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *rest: Any) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)


def test_what_downloads_says_so(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    no_datasets(monkeypatch)
    calls = [
        *(lambda make=make: make(model.tokenizer) for make in evals.DATASET_LOADERS),
        lambda: evals.evaluate(model),
        lambda: evals.mmlu_eval(model),
        evals.make_mmlu_data_loader,
    ]
    for call in calls:
        with pytest.raises(ModuleNotFoundError, match="pip install datasets, and be online"):
            call()


def test_loaders_and_questions_with_a_stand_in_for_datasets(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = {
        "question": "Which is first?",
        "choices": ["a", "b", "c", "d"],
        "subject": "virology",
    }
    rows = [question | {"answer": answer} for answer in range(4)]

    def load_dataset(*where: str, split: str, streaming: bool = False) -> Any:
        return rows if where[0] == "cais/mmlu" else [{"text": "The ball is red. " * 400}] * 3

    fake = SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    batches = list(evals.make_wiki_data_loader(model.tokenizer, batch_size=2))
    assert batches[0]["tokens"].shape == (2, 1024)
    found = evals.mmlu_eval(model, subjects="virology")
    assert (found["num_correct"], found["num_total"]) == (1, 4)  # it says the same each time
    assert found["subject_scores"] == {"virology": 0.25}
    assert len(evals.make_mmlu_data_loader(num_samples=2)) == 2
    assert len(set(evals.MMLU_SUBJECTS)) == 57
    with pytest.raises(ValueError, match="MMLU has no alchemy"):
        evals.mmlu_eval(model, subjects="alchemy")
