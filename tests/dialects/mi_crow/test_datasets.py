"""Data sets over lists, files and iterators; those of the `datasets` library by what they can do."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from interpose.dialects.mi_crow.datasets import (
    BaseDataset,
    ClassificationDataset,
    LoadingStrategy,
    TextDataset,
)

RECORDS = [
    {"text": f"text {number}", "category": "ab"[number % 3 == 0], "n": number}
    for number in range(10)
]
TEXTS = [record["text"] for record in RECORDS]


def test_texts_are_items_whatever_they_are_made_of() -> None:
    for data in (
        TextDataset(texts=TEXTS),
        TextDataset(RECORDS),
        TextDataset(iter(RECORDS), loading_strategy="memory"),
    ):
        assert len(data) == 10
        assert data[0] == "text 0"
        assert data[-1] == "text 9"
        assert data[2:4] == data[[2, 3]] == ["text 2", "text 3"]
        assert data.get_batch(8, 5) == TEXTS[8:]
        assert data.head(2) == TEXTS[:2]
        assert list(data.iter_items()) == list(data) == data.get_all_texts() == TEXTS
        assert [len(batch) for batch in data.iter_batches(4)] == [4, 4, 2]
        assert len(set(data.sample(3))) == 3
        with pytest.raises(IndexError, match="item 10 is not there: there are 10"):
            data[10]
    with pytest.raises(TypeError, match=r"give records .ds. or texts, and not both"):
        TextDataset()
    with pytest.raises(
        ValueError, match="there is no field 'body'; the record has 'text', 'category', 'n'"
    ):
        TextDataset(RECORDS, text_field="body")[0]
    with pytest.raises(ValueError, match="batch_size is at least 1"):
        next(TextDataset(RECORDS).iter_batches(0))


def test_a_random_sample_is_a_data_set_and_the_same_with_the_same_seed() -> None:
    data = TextDataset(RECORDS)
    one, other = data.random_sample(6, seed=3), data.random_sample(6, seed=3)
    assert isinstance(one, TextDataset)
    assert list(one) == list(other)
    assert set(one) < set(TEXTS)
    assert len(one) == 6
    assert list(data.random_sample(6, seed=4)) != list(one)
    assert len(data) == 10


def test_what_is_streamed_is_gone_through_and_not_counted() -> None:
    data = TextDataset(iter(RECORDS))
    assert data.loading_strategy is LoadingStrategy.STREAMING
    for call in (
        lambda: len(data),
        lambda: data[0],
        lambda: data.random_sample(2),
        lambda: data.get_batch(0, 1),
    ):
        with pytest.raises(NotImplementedError, match="STREAMING"):
            call()
    assert next(data.iter_batches(3)) == TEXTS[:3]


@pytest.mark.parametrize("streaming", [False, True])
def test_files_are_read_as_what_they_are(tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "a.csv").write_text('text;n\n"one; two";1\nthree;2\n', "utf-8-sig")
    (tmp_path / "a.json").write_text(json.dumps(RECORDS))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, RECORDS)))
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, RECORDS)))
    strategy = LoadingStrategy.STREAMING if streaming else LoadingStrategy.MEMORY
    options: dict[str, Any] = {"loading_strategy": strategy}
    rows = TextDataset.from_csv(tmp_path / "a.csv", delimiter=";", **options)
    for _ in range(2):  # files can be gone through again
        assert list(rows) == ["one; two", "three"]
    for name in ("a.json", "lines.json", "a.jsonl"):
        assert list(TextDataset.from_json(tmp_path / name, **options)) == TEXTS
    (tmp_path / "a.jsonl").write_text("{}\n{")
    with pytest.raises(ValueError, match=r"a.jsonl', line 2, is not JSON"):
        list(BaseDataset.from_json(tmp_path / "a.jsonl", **options))
    with pytest.raises(FileNotFoundError, match="there is no file"):
        list(BaseDataset.from_csv(tmp_path / "none.csv", **options))


def test_folders_of_texts_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    for name, text in (
        ("b.txt", "two\nlines"),
        ("a.txt", "one"),
        ("inside/c.txt", "three"),
        ("d.md", "no"),
    ):
        (tmp_path / name).write_text(text)
    assert list(TextDataset.from_local(tmp_path)) == ["one", "two\nlines", "three"]
    assert list(TextDataset.from_local(tmp_path, recursive=False)) == ["one", "two\nlines"]
    assert list(TextDataset.from_local(tmp_path / "b.txt")) == ["two\nlines"]
    (tmp_path / "x.jsonl").write_text('{"body": "line"}')
    assert list(TextDataset.from_local(tmp_path / "x.jsonl", text_field="body")) == ["line"]
    (tmp_path / "x.csv").write_text("text\nrow\n")
    assert list(TextDataset.from_local(tmp_path / "x.csv")) == ["row"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"there is no \.txt file in"):
        TextDataset.from_local(tmp_path / "empty")


def test_texts_have_categories() -> None:
    data = ClassificationDataset(RECORDS)
    assert data[0] == {"text": "text 0", "category": "b"}
    assert data.get_categories() == ["b", "a"]
    assert data.get_all_texts() == TEXTS
    several = ClassificationDataset(RECORDS, category_field=["category", "n"])
    assert several[3] == {"text": "text 3", "category": "b", "n": 3}
    assert several.get_categories() == ["b", "a"]


class Hub:
    """What the `datasets` library would return."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def load_dataset(self, *args: Any, **options: Any) -> Any:
        self.asked.append((args, options))
        return iter(RECORDS) if options["streaming"] else RECORDS

    def load_from_disk(self, path: str) -> Any:
        return RECORDS


def test_data_sets_of_a_hub_are_filtered_limited_and_stratified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    hub = Hub()
    monkeypatch.setitem(sys.modules, "datasets", hub)  # type: ignore[arg-type]
    whole = TextDataset.from_huggingface("some/data", split="test", revision="x")
    assert list(whole) == TEXTS
    assert hub.asked[0] == (
        ("some/data", None),
        {"split": "test", "revision": "x", "streaming": False},
    )
    some = TextDataset.from_huggingface("some/data", filters={"category": "a"}, limit=2)
    assert list(some) == ["text 1", "text 2"]
    options: dict[str, Any] = {"limit": 5, "stratify_by": "category"}
    parts = [
        ClassificationDataset.from_huggingface("d", stratify_seed=seed, **options)
        for seed in (1, 1, 2)
    ]
    for part in parts:
        assert sorted(one["category"] for one in part) == ["a", "a", "a", "b", "b"]  # of 6 and 4
    assert list(parts[0]) == list(parts[1])
    assert list(parts[0]) != list(parts[2])
    streamed = TextDataset.from_huggingface("d", loading_strategy="streaming")
    assert list(streamed) == TEXTS
    with pytest.raises(NotImplementedError, match="filters, limit and stratify_by need all items"):
        TextDataset.from_huggingface("d", loading_strategy="streaming", **options)
    assert TextDataset.from_disk("folder").loading_strategy is LoadingStrategy.DISK
    with pytest.raises(ValueError, match="limit is at least 1"):
        TextDataset.from_huggingface("d", limit=0)


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    for call in (lambda: TextDataset.from_huggingface("a/b"), lambda: TextDataset.from_disk("x")):
        with pytest.raises(
            ModuleNotFoundError, match=r"pip install datasets. Without it: TextDataset"
        ):
            call()
    assert importlib.util.find_spec("interpose") is not None
