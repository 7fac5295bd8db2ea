"""`ClassificationDataset`: texts that each belong to a category."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from interpose.dialects.mi_crow.datasets import records
from interpose.dialects.mi_crow.datasets.base_dataset import BaseDataset
from interpose.dialects.mi_crow.datasets.loading_strategy import LoadingStrategy


class ClassificationDataset(BaseDataset):
    """Texts with their categories: its items are ``{"text": ..., "category": ...}``.

    Args:
        ds: records.
        store: where runs are kept; nothing is written to it.
        loading_strategy: as in `BaseDataset`.
        text_field: which field is the text.
        category_field: which is the category, or several of them.
    """

    def __init__(
        self,
        ds: Iterable[Any],
        store: Any = None,
        loading_strategy: LoadingStrategy | str | None = None,
        text_field: str = "text",
        category_field: str | Sequence[str] = "category",
    ) -> None:
        super().__init__(ds, store, loading_strategy)
        self.text_field = text_field
        self.category_field = category_field

    def item_of(self, record: Any) -> dict[str, Any]:
        """A record as text and category; of several categories each has its own name."""
        text = str(records.field(record, self.text_field))
        if isinstance(self.category_field, str):
            return {"text": text, "category": records.field(record, self.category_field)}
        return {"text": text, **{name: records.field(record, name) for name in self.category_field}}

    def extract_texts_from_batch(self, batch: Sequence[Any]) -> list[str]:
        """The texts of some items."""
        return [str(one["text"]) for one in batch]

    def get_categories(self) -> list[Any]:
        """Every category there is, each once, in the order they come."""
        name = "category" if isinstance(self.category_field, str) else self.category_field[0]
        return list(dict.fromkeys(one[name] for one in self))
