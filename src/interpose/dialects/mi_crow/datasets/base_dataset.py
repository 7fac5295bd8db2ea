"""`BaseDataset`: items that can be counted and taken by number, or that come one by one."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch

from interpose.dialects.mi_crow.datasets import records
from interpose.dialects.mi_crow.datasets.loading_strategy import LoadingStrategy


class BaseDataset:
    """Items of whatever source: a list, an iterable, a data set of the `datasets` library.

    Args:
        ds: records or texts.
        store: where runs are kept; nothing is written to it.
        loading_strategy: ``STREAMING`` goes through them without counting; by default as the source is.
    """

    def __init__(
        self,
        ds: Iterable[Any] = (),
        store: Any = None,
        loading_strategy: LoadingStrategy | str | None = None,
    ) -> None:
        counted = hasattr(ds, "__len__") and hasattr(ds, "__getitem__")
        if loading_strategy is None:
            kind = LoadingStrategy.MEMORY if counted else LoadingStrategy.STREAMING
        else:
            kind = LoadingStrategy(loading_strategy)
        if kind is not LoadingStrategy.STREAMING and not counted:
            ds = list(ds)
        self._records: Any = ds
        self.store = store
        self.loading_strategy = kind

    # Where they are from.

    @classmethod
    def from_huggingface(
        cls,
        repo_id: str,
        store: Any = None,
        split: str = "train",
        revision: str | None = None,
        filters: Mapping[str, Any] | None = None,
        limit: int | None = None,
        stratify_by: str | None = None,
        stratify_seed: int | None = None,
        loading_strategy: LoadingStrategy | str = LoadingStrategy.MEMORY,
        name: str | None = None,
        **options: Any,
    ) -> Self:
        """A data set from a hub; needs the `datasets` library.

        Args:
            repo_id: its name.
            store: where runs are kept.
            split: which part.
            revision: of the repository.
            filters: what fields must be.
            limit: how many items at most.
            stratify_by: a field, of whose values as large a share is kept as they have of all.
            stratify_seed: of which items of a value these are.
            loading_strategy: ``STREAMING`` downloads items as they are needed.
            name: of a configuration of it.
            **options: for the data set, such as ``text_field``.
        """
        kind = LoadingStrategy(loading_strategy)
        streaming = kind is LoadingStrategy.STREAMING
        if streaming and (filters or stratify_by or limit is not None):
            raise NotImplementedError(
                "filters, limit and stratify_by need all items, and STREAMING has them one by one. Leave them out, or "
                "choose MEMORY."
            )
        source = _library().load_dataset(
            repo_id, name, split=split, revision=revision, streaming=streaming
        )
        if not streaming:
            source = records.chosen(source, filters, limit, stratify_by, stratify_seed)
        return cls(source, store, kind, **options)

    @classmethod
    def from_disk(cls, path: str | Path, store: Any = None, **options: Any) -> Self:
        """What the `datasets` library saved to a folder; needs it.

        Args:
            path: of the folder.
            store: where runs are kept.
            **options: for the data set, such as ``text_field``.
        """
        return cls(_library().load_from_disk(str(path)), store, LoadingStrategy.DISK, **options)

    @classmethod
    def from_csv(
        cls,
        source: str | Path,
        store: Any = None,
        *,
        delimiter: str = ",",
        loading_strategy: LoadingStrategy | str = LoadingStrategy.MEMORY,
        **options: Any,
    ) -> Self:
        """The rows of a CSV file.

        Args:
            source: the file.
            store: where runs are kept.
            delimiter: what stands between fields.
            loading_strategy: ``STREAMING`` reads rows as they are needed.
            **options: for the data set, such as ``text_field``.
        """
        return cls(
            _Again(lambda: records.of_csv(source, delimiter)), store, loading_strategy, **options
        )

    @classmethod
    def from_json(
        cls,
        source: str | Path,
        store: Any = None,
        *,
        loading_strategy: LoadingStrategy | str = LoadingStrategy.MEMORY,
        **options: Any,
    ) -> Self:
        """The records of a JSON file: a list, or one a line.

        Args:
            source: the file.
            store: where runs are kept.
            loading_strategy: ``STREAMING`` reads lines as they are needed.
            **options: for the data set, such as ``text_field``.
        """
        return cls(_Again(lambda: records.of_json(source)), store, loading_strategy, **options)

    # Items.

    @property
    def is_streaming(self) -> bool:
        """Whether items come one by one."""
        return self.loading_strategy is LoadingStrategy.STREAMING

    def item_of(self, record: Any) -> Any:
        """A record as this kind of data set gives it."""
        return record

    def __len__(self) -> int:
        self._must_be_counted("len")
        return len(self._records)

    def __getitem__(self, index: int | slice | Sequence[int]) -> Any:
        self._must_be_counted("an item by its number")
        if isinstance(index, slice):
            index = range(len(self))[index]
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"item {index} is not there: there are {len(self)}.")
            return self.item_of(self._records[index % len(self)])
        return [self[number] for number in index]

    def __iter__(self) -> Iterator[Any]:
        return map(self.item_of, iter(self._records))

    def iter_items(self) -> Iterator[Any]:
        """Every item."""
        return iter(self)

    def iter_batches(self, batch_size: int) -> Iterator[list[Any]]:
        """Every item, so many at a time."""
        if batch_size < 1:
            raise ValueError(f"batch_size is at least 1; got {batch_size}.")
        items = iter(self)
        while batch := list(islice(items, batch_size)):
            yield batch

    def get_batch(self, start: int, batch_size: int) -> list[Any]:
        """So many items from a number on; fewer at the end."""
        found: list[Any] = self[max(0, start) : max(0, start) + batch_size]
        return found

    def head(self, n: int = 5) -> list[Any]:
        """The first items."""
        return list(islice(iter(self), n))

    def sample(self, n: int = 5) -> list[Any]:
        """Some items at random."""
        return list(self.random_sample(n))

    def random_sample(self, n: int, seed: int | None = None) -> Self:
        """A data set of some of the items, in a random order; with a seed the same each time."""
        self._must_be_counted("a random sample")
        draw = torch.Generator()
        draw.seed() if seed is None else draw.manual_seed(seed)
        order = torch.randperm(len(self), generator=draw).tolist()[:n]
        return self._of([self._records[number] for number in order])

    def _of(self, chosen: list[Any]) -> Self:
        """The same kind of data set over other records."""
        made = type(self).__new__(type(self))
        vars(made).update(vars(self))
        made._records = chosen
        made.loading_strategy = LoadingStrategy.MEMORY
        return made

    def extract_texts_from_batch(self, batch: Sequence[Any]) -> list[str]:
        """The texts of some items."""
        return [str(one) for one in batch]

    def get_all_texts(self) -> list[str]:
        """The texts of all items."""
        return self.extract_texts_from_batch(list(self))

    def _must_be_counted(self, what: str) -> None:
        if self.is_streaming:
            raise _Uncounted(
                f"{what} is not to be had of a STREAMING data set: go through it with iter_items or iter_batches."
            )

    def __repr__(self) -> str:
        count = "streaming" if self.is_streaming else f"{len(self)} items"
        return f"{type(self).__name__}({count})"


class _Uncounted(NotImplementedError, TypeError):
    """Both, so that ``list(data)``, which asks for a length, goes on without one."""


class _Again:
    """What can be gone through again and again."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def _library() -> Any:
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "this needs the datasets library: pip install datasets. Without it: TextDataset(texts=[...]), from_csv, "
            "from_json, from_local."
        ) from None
