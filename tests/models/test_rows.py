"""What is known of padding, what is asked for, and what users may give as texts."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import interpose as ip
from interpose.models.running import masks
from interpose.models.running.rows import as_arguments, read
from interpose.models.transformer import TransformerModel
from tests.models import tiny
from tests.models.texts import EOS, speaking

TEXTS = ["the cat sat on the mat", "the dog sat"]


@pytest.fixture(scope="module")
def model() -> Any:
    """As GPT-2's tokenizer is: one token begins, ends and pads."""
    found = speaking("gpt2", pad=False, bos_token="</s>")
    found.config.pad_token_id = None
    return found


def lists(rows: Any) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in rows]


def alone(model: Any) -> list[list[int]]:
    return [model.to_tokens(text)[0].tolist() for text in TEXTS]


# What is remembered.


def test_views_are_remembered_and_copies_are_not(model: Any) -> None:
    tokens = model.to_tokens(TEXTS, padding_side="left")
    mask = tokens != EOS
    assert not mask.all()
    with torch.inference_mode():
        made_there = model.to_tokens(TEXTS, padding_side="left")
        assert torch.equal(masks.remembered(made_there[1:]), mask[1:])
    for view in (
        lambda x: x,
        lambda x: x[1],
        lambda x: x[:, 1:],
        lambda x: x[::2, 2:5],
        lambda x: x[:1].expand(4, -1),
        lambda x: x.mT[None],
        lambda x: x.detach(),
    ):
        assert torch.equal(masks.remembered(view(tokens)), view(mask))
    for copy in (tokens.clone(), tokens.int(), tokens[[0, 1]], torch.cat([tokens]), tokens + 0):
        assert masks.remembered(copy) is None
    assert masks.remembered(tokens.view(torch.int32)) is None


def test_what_is_written_to_is_forgotten_and_what_is_gone_takes_no_room(model: Any) -> None:
    gc.collect()
    before = len(masks._REMEMBERED)
    tokens = model.to_tokens(TEXTS)
    assert len(masks._REMEMBERED) == before + 1
    assert masks.remembered(tokens) is not None
    tokens[0, 0] = 5
    assert masks.remembered(tokens) is None
    del tokens
    gc.collect()
    assert len(masks._REMEMBERED) == before


def test_a_text_that_ends_with_eos_is_known_to_be_one(model: Any) -> None:
    texts = ["the cat</s></s>", "the dog sat on"]
    assert model.to_tokens(texts).shape == (2, 4)
    for given in (texts, model.to_tokens(texts), list(model.to_tokens(texts))):
        assert lists(read(model, given))[0][-2:] == [EOS, EOS]
    assert "attention_mask" not in model.prepare(model.to_tokens(texts))
    padded = model.to_tokens(["the cat</s>", "the dog sat on"])
    assert lists(read(model, padded))[0] == model.to_tokens("the cat</s>")[0].tolist()


def test_tokens_move_with_what_is_remembered(model: Any) -> None:
    tokens = model.to_tokens(TEXTS)
    there = masks.moved(tokens, "meta")
    assert masks.remembered(there) is not None
    assert masks.moved(tokens.clone(), "meta").device.type == "meta"
    assert masks.moved(tokens, "cpu") is tokens


# What is asked for.


def copy(model: Any, side: str = "right") -> Any:
    return model.to_tokens(TEXTS, padding_side=side).clone()


@pytest.mark.parametrize("side", ["left", "right"])
def test_copies_that_look_padded_are_asked_about(model: Any, side: str) -> None:
    tokens = copy(model, side)
    ways = [
        lambda given: ip.batches(model, given),
        lambda given: ip.measure(model, given, ip.metrics.logit(5)),
        lambda given: ip.max_activating(model, given, layer=0, progress=False),
        lambda given: ip.activation_statistics(model, given, "resid_post", progress=False),
        lambda given: ip.activation_statistics(model, [given], "resid_post", progress=False),
        lambda given: model.run_with_hooks(given, hooks=[ip.mean("z", layer=0)]),
        lambda given: model.run_with_hooks(given, hooks=[ip.resample("z", layer=0)]),
    ]
    for way in ways:
        with pytest.raises(ValueError, match="which may be text and may be padding"):
            way(tokens)
    for given in (tokens.tolist(), {"input_ids": tokens}):
        with pytest.raises(ValueError, match="which may be text and may be padding"):
            ip.measure(model, given, ip.metrics.logit(5))
    with torch.no_grad():
        model(tokens)  # a run alone measures nothing, and is transformers' own


def test_a_pad_token_that_is_eos_tells_nothing() -> None:
    model = speaking("gpt2", pad=False, pad_token="</s>")
    given = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with pytest.raises(ValueError, match="ends with '</s>' 3 times"):
        read(model, given["input_ids"])
    assert lists(read(model, given)) == alone(model)
    for side in ("left", "right"):
        assert lists(read(model, model.to_tokens(TEXTS, padding_side=side))) == alone(model)


def test_the_question_says_what_to_give(model: Any) -> None:
    with pytest.raises(ValueError) as error:
        read(model, copy(model))
    assert str(error.value) == (
        "row 1 of the tokens [2, 6] ends with '</s>' 3 times, which may be text and may be padding.\n  Give the texts "
        "themselves, what model.to_tokens returns (not a copy of it), or the mask: {'input_ids': tokens, "
        "'attention_mask': mask}, 0 where there is padding; torch.ones_like(tokens) if there is none."
    )
    tokens = copy(model)
    mask = torch.ones_like(tokens)
    assert lists(read(model, {"input_ids": tokens, "attention_mask": mask})) == tokens.tolist()
    mask[1, 3:] = 0
    assert lists(read(model, {"input_ids": tokens, "attention_mask": mask})) == alone(model)


@pytest.mark.parametrize(
    ("tokens", "asks"),
    [
        ([[EOS, 5, 6], [EOS, 7, 8]], False),  # a BOS each
        ([[5, 6, EOS], [7, 8, EOS]], False),  # an EOS each
        ([[5, EOS, EOS, 6], [7, 8, 9, 3]], False),  # inside
        ([[5, 6, EOS]], False),
        ([[EOS], [5]], False),
        ([[5, 6, EOS], [7, 8]], False),  # nobody pads to different lengths
        ([[5, 6, EOS], [7, 8, 9]], True),
        ([[EOS, 6, 9], [7, 8, 9]], True),
        ([[EOS, EOS, 9], [EOS, 8, 9]], True),
        ([[5, EOS, EOS]], True),
        ([[5, EOS, EOS], [7, 8]], True),
    ],
)
def test_what_looks_padded(model: Any, tokens: list[list[int]], asks: bool) -> None:
    if asks:
        with pytest.raises(ValueError, match="may be padding"):
            read(model, tokens)
    else:
        assert lists(read(model, tokens)) == tokens


def test_without_a_tokenizer_the_configs_pad_token_is_asked_about() -> None:
    model = TransformerModel(tiny.build("gpt2"))
    before = model.config.pad_token_id
    try:
        model.config.pad_token_id = None
        assert lists(read(model, [[5, 0, 0], [5, 6, 7]])) == [[5, 0, 0], [5, 6, 7]]
        model.config.pad_token_id = 0
        with pytest.raises(ValueError, match=r"row 0 of the tokens \[2, 3\] ends with token 0 2 t"):
            read(model, [[5, 0, 0], [5, 6, 7]])
    finally:
        model.config.pad_token_id = before


# What may be given.


def test_forms_of_one_text(model: Any) -> None:
    row = alone(model)[0]
    tensor = torch.tensor(row)
    forms = [
        TEXTS[0],
        row,
        tuple(row),
        tensor,
        tensor[None],
        tensor.int(),
        tensor.numpy(),
        [tensor],
    ]
    forms += [dict(model.tokenizer(TEXTS[0])), model.tokenizer(TEXTS[0], return_tensors="pt")]
    forms += [{"input_ids": tensor, "attention_mask": torch.ones(len(row))}]
    for form in forms:
        assert lists(read(model, form)) == [row]
    assert lists(read(model, (text for text in TEXTS))) == alone(model)
    assert read(model, []) == []


def test_a_row_keeps_what_the_model_is_given_for_each_token(model: Any) -> None:
    tokens, mask = copy(model, "left"), torch.ones(2, 6, dtype=torch.long)
    mask[1, :3] = 0
    mask[0, 2] = 0
    types = torch.arange(12).reshape(2, 6)
    given = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": types}
    first, second = read(model, given)
    assert second["token_type_ids"].tolist() == types[1, 3:].tolist()
    assert first["attention_mask"].tolist() == mask[0].tolist()
    assert set(second) == {"input_ids", "token_type_ids"}
    assert set(read(model, {**given, "token_type_ids": types * 0})[1]) == {"input_ids"}


@torch.no_grad()
def test_a_mask_with_holes_is_used_and_its_holes_have_positions(model: Any) -> None:
    """By hand: each text alone, with its own mask."""
    rows, holes = alone(model), [[1, 1, 0, 1, 1, 1], [1, 0, 1]]
    wanted = []
    for row, mask in zip(rows, holes):
        given = {"input_ids": torch.tensor([row]), "attention_mask": torch.tensor([mask])}
        wanted.append(model.module(**given).logits[0, -1, 20])
        assert abs(model.module(given["input_ids"]).logits[0, -1, 20] - wanted[-1]) > 1e-3
    given = {"input_ids": rows, "attention_mask": holes}
    found = ip.measure(model, given, ip.metrics.logit(20)).without[0]
    ended = ip.sweep(
        model, given, edit=ip.zero, metric=ip.metrics.logit(20), pos=-1, over="layer",
        align="end", progress=False,
    ).clean[0]  # fmt: skip
    for each in (found, ended):
        assert torch.allclose(each, torch.stack(wanted), atol=1e-5)


def test_plain_runs_take_what_a_tokenizer_returns(model: Any) -> None:
    given = model.tokenizer(TEXTS, return_special_tokens_mask=True)
    with torch.no_grad():
        found = model(given).logits
        wanted = model(TEXTS)
        assert torch.allclose(found, wanted, atol=1e-5)
        one = model.run_with_cache(dict(model.tokenizer(TEXTS[0])), names_filter="resid_post")[1]
        assert one["resid_post", 0].shape[:2] == (1, 6)
    pixels = {"pixel_values": [1.0], "input_ids": torch.ones(1, 2)}
    assert as_arguments(model, pixels) == pixels


def test_measured_tokens_are_shown_without_padding(model: Any) -> None:
    found = ip.measure(model, model.to_tokens(TEXTS), ip.metrics.logit(20))
    assert list(found.inputs) == alone(model)
    given = {"input_ids": copy(model), "attention_mask": (copy(model) != EOS).long()}
    experiment = ip.Experiment(model=model, inputs=given, metrics=ip.metrics.logit(20))
    assert list(experiment.inputs or ()) == alone(model)


@torch.no_grad()
def test_the_last_token_of_each_text_is_measured_on_the_pocket_model() -> None:
    model = ip.load("pocket")
    texts = ["The Eiffel Tower is in", "When Mary and John went to the store, John gave a drink to"]
    paris = model.to_single_token(" Paris")
    wanted = torch.stack([model(text)[0, -1, paris] for text in texts])
    tokens = model.to_tokens(texts, padding_side="right")
    padding = model.module(tokens).logits[0, -1, paris]
    assert abs(padding - wanted[0]) > 1  # where it was measured once
    for given in (tokens, list(tokens), {"input_ids": tokens}, model.prepare(texts)):
        found = ip.measure(model, given, ip.metrics.logit(" Paris")).without[0]
        assert torch.allclose(found, wanted, atol=1e-4)
    with pytest.raises(
        ValueError, match=r"ends with '<\|endoftext\|>' 9 times"
    ):  # it pads as GPT-2
        ip.measure(model, tokens.clone(), ip.metrics.logit(" Paris"))
