"""The training itself, on a model of a few thousand parameters: seeded, resumable, with the loss where it belongs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training import corpus, tokenizer, train
from training.tokenizer import END_OF_TEXT
from training.words import NAMES
from training.world import COUNTRIES

SMALL = train.Settings(
    documents=2_000, steps=6, batch_tokens=256, layers=2, heads=2, width=16, context=64, warm_up=2
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(tokenizer.build(corpus.documents("tokenizer", 20_000)), made, context=64)
    return made


@pytest.fixture
def training(folder: Path, tmp_path: Path) -> train.Training:
    return _training(folder, tmp_path)


def _training(folder: Path, tmp_path: Path, settings: train.Settings = SMALL) -> train.Training:
    words = AutoTokenizer.from_pretrained(folder)
    rows = words(list(corpus.documents("small", 300)))["input_ids"]
    tokens = torch.tensor([0, *(token for row in rows for token in (*row, 0))])
    model = train.build(settings, len(words))
    tmp_path.mkdir(exist_ok=True)
    return train.Training(settings, tmp_path, model, train.Batches(tokens, len(words), settings))


def test_a_training_that_was_stopped_goes_on_to_the_same_weights(
    folder: Path, tmp_path: Path
) -> None:
    whole = _training(folder, tmp_path / "whole")
    whole.run()
    first = _training(folder, tmp_path / "parts")
    first.run(until=3)
    second = _training(folder, tmp_path / "parts")
    second.run()
    assert second.step == 6
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name]), name
    assert not torch.equal(  # three steps do change something
        first.model.lm_head.weight, second.model.lm_head.weight
    )


def test_a_checkpoint_of_another_training_is_refused(folder: Path, tmp_path: Path) -> None:
    _training(folder, tmp_path).run(until=2)
    other = _training(folder, tmp_path, train.Settings(**{**_fields(SMALL), "seed": 1}))
    with pytest.raises(SystemExit, match="of another training"):
        other.run()


def _fields(settings: train.Settings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def test_batches_depend_on_seed_and_step_alone(training: train.Training) -> None:
    for step in (0, 1, 5):
        row, label = training.batches(step)
        again, _ = training.batches(step)
        assert torch.equal(row, again)
        assert row.shape == label.shape == SMALL.rows(step)
    assert not torch.equal(training.batches(1)[0], training.batches(3)[0])


def test_labels_are_the_next_tokens_and_random_rows_count_from_their_second_saying(
    folder: Path, tmp_path: Path
) -> None:
    settings = train.Settings(**{**_fields(SMALL), "random_rows": 1.0, "batch_tokens": 4096})
    batches = _training(folder, tmp_path, settings).batches
    for step in (0, 1):
        rows, labels = batches(step)
        for row, label in zip(rows.tolist(), labels.tolist()):
            known = [at for at, wanted in enumerate(label) if wanted != -100]
            assert known
            for at in known:
                assert at + 1 == len(row) or label[at] == row[at + 1]
                before = row[:at]
                assert row[at] in before  # its token was said before, and what came next is known
            period = known[0] - row.index(row[known[0]])
            start = int(row[0] == 0)
            for at in known:
                assert row[at] == row[at - period]
            assert known[0] == period + start
    settings = train.Settings(**{**_fields(settings), "random_rows": 0.0})
    text = _training(folder, tmp_path / "b", settings)
    row, label = text.batches(1)
    assert torch.equal(row[:, 1:], label[:, :-1])
    assert 0 < (row[:, 0] == 0).float().mean() < 1  # some rows begin with the end of text


def test_the_exported_folder_loads_as_float32_from_float16_files(
    folder: Path, training: train.Training, tmp_path: Path
) -> None:
    training.run(until=1)
    train.export(training.model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    for name, weight in training.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.half().float()), name


def test_names_cities_and_numbers_are_one_token_with_and_without_a_space(folder: Path) -> None:
    words = AutoTokenizer.from_pretrained(folder)
    singles = [*NAMES, "Paris", "Berlin", "Rome", "00", "7", "43", *(f"{n:02}" for n in range(100))]
    singles += [land.name for land in COUNTRIES if " " not in land.name]
    for word in singles:
        assert len(words(word)["input_ids"]) == 1, word
        assert len(words(f" {word}")["input_ids"]) == 1, word
    assert words.convert_ids_to_tokens(words(" 1743")["input_ids"]) == ["Ġ17", "43"]


def test_any_text_comes_back_as_it_was(folder: Path) -> None:
    words = AutoTokenizer.from_pretrained(folder)
    for text in ("Grüße, 你好!\n\tx  y", "supercalifragilistic 12345", " leading", "Mary's", ""):
        assert words.decode(words(text)["input_ids"]) == text
    assert words(END_OF_TEXT)["input_ids"] == [0]


def test_the_learning_rate_rises_and_falls() -> None:
    settings = train.Settings()
    rates = [settings.rate(step) for step in range(settings.steps)]
    assert rates[0] < rates[200] < rates[399]
    assert max(rates) == pytest.approx(settings.learning_rate, rel=1e-3)
    assert rates[-1] < 1e-6
