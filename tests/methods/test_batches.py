"""Texts in batches of one length, and metrics that know whose answer is whose."""

from __future__ import annotations

import pytest
import torch

import interpose as ip

CLEAN = ["The Eiffel Tower is in", "The capital of Japan is", "Hello"]
CORRUPT = ["The Trevi Fountain is in", "The capital of Italy is", "Hello"]


@pytest.fixture(scope="module")
def model() -> ip.TransformerModel:
    found = ip.load("pocket")
    assert isinstance(found, ip.TransformerModel)
    return found


def test_texts_of_one_length_run_together_and_none_is_padded(model: ip.TransformerModel) -> None:
    found = ip.batches(model, CLEAN, CORRUPT)
    numbers = sorted(number for batch in found for number in batch.numbers)
    assert numbers == [0, 1, 2]
    for batch in found:
        for row, number in zip(batch.clean, batch.numbers):
            assert row.tolist() == model.to_tokens(CLEAN[number])[0].tolist()
        assert batch.corrupt is not None
        for row, number in zip(batch.corrupt, batch.numbers):
            assert row.tolist() == model.to_tokens(CORRUPT[number])[0].tolist()
        assert batch.total == 3


def test_each_example_has_its_own_answer_whatever_batch_it_is_in(
    model: ip.TransformerModel,
) -> None:
    answers = [" Paris", " Tokyo", " and"]
    metric = ip.metrics.logit(answers)
    seen = {}
    for batch in ip.batches(model, CLEAN, batch_size=1):
        (number,) = batch.numbers
        logits = model(batch.clean)
        wanted = logits[0, -1, model.to_single_token(answers[number])]
        seen[number] = batch.measure(metric)(logits).item()
        assert seen[number] == wanted.item()
    assert len(set(seen.values())) == 3


def test_metrics_and_functions_have_gradients(model: ip.TransformerModel) -> None:
    (batch,) = ip.batches(model, CLEAN[:1])
    plain = model(batch.clean).detach()
    logits = plain.clone().requires_grad_()
    token = model.to_single_token(" Paris")
    for metric in (ip.metrics.logit(" Paris"), lambda logits: logits[:, -1, token]):
        (grad,) = torch.autograd.grad(batch.measure(metric)(logits).sum(), logits)
        assert grad.nonzero().tolist() == [[0, batch.clean.shape[1] - 1, token]]
    divergence = batch.measure(ip.metrics.kl(), clean_logits=plain)
    assert abs(float(divergence(plain))) < 1e-6
    assert float(divergence(plain * 2)) > 0.01


def test_tokens_are_named_only_where_there_is_one_text(model: ip.TransformerModel) -> None:
    (alone,) = ip.batches(model, CLEAN[0])
    assert alone.str_tokens == ["The", " Eiffel", " Tower", " is", " in"]
    assert all(batch.str_tokens is None for batch in ip.batches(model, CLEAN))


def test_pairs_of_different_lengths_and_models_in_training_are_refused(
    model: ip.TransformerModel,
) -> None:
    with pytest.raises(ValueError, match="positions do not correspond"):
        ip.batches(model, "The Eiffel Tower", "The Eiffel Tower is")
    with pytest.raises(ValueError, match="3 clean texts and 1 corrupted ones"):
        ip.batches(model, CLEAN, CORRUPT[:1])
    model.train()
    try:
        with pytest.raises(ip.Unsupported, match=r"Call model.eval\(\) first"):
            ip.batches(model, CLEAN)
    finally:
        model.eval()


def test_the_first_difference_is_known(model: ip.TransformerModel) -> None:
    (pair,) = ip.batches(model, CLEAN[1], CORRUPT[1])
    assert pair.corrupt is not None
    differ = (pair.clean != pair.corrupt).nonzero()[0, 1].item()
    assert pair.first == differ == 3


def test_what_a_tokenizer_returns_is_taken_without_its_padding(model: ip.TransformerModel) -> None:
    tokens = model.to_tokens(CLEAN[0])
    (batch,) = ip.batches(model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
    assert torch.equal(batch.clean, tokens)
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0
    (batch,) = ip.batches(model, {"input_ids": tokens, "attention_mask": mask})
    assert torch.equal(batch.clean, tokens[:, 1:])
    mask[0] = torch.tensor([1, 1, 0, 1, 1])
    with pytest.raises(TypeError, match="a mapping whose attention_mask has holes inside a text"):
        ip.batches(model, {"input_ids": tokens, "attention_mask": mask})
    with pytest.raises(TypeError, match="a mapping whose position_ids would be lost"):
        ip.batches(model, {"input_ids": tokens, "position_ids": mask})
