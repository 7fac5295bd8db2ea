"""`TextDataset`: texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from interpose.dialects.mi_crow.datasets import records
from interpose.dialects.mi_crow.datasets.base_dataset import BaseDataset
from interpose.dialects.mi_crow.datasets.loading_strategy import LoadingStrategy


class TextDataset(BaseDataset):
    """Texts: its items are strings.

    Args:
        ds: texts, or records with a field of text.
        store: where runs are kept; nothing is written to it.
        loading_strategy: as in `BaseDataset`.
        text_field: which field of a record is the text.
        texts: texts, instead of ``ds``.
    """

    def __init__(
        self,
        ds: Iterable[Any] | None = None,
        store: Any = None,
        loading_strategy: LoadingStrategy | str | None = None,
        text_field: str = "text",
        *,
        texts: Iterable[str] | None = None,
    ) -> None:
        if (ds is None) == (texts is None):
            raise TypeError("give records (ds) or texts, and not both.")
        super().__init__(texts if ds is None else ds, store, loading_strategy)  # type: ignore[arg-type]
        self.text_field = text_field

    @classmethod
    def from_local(
        cls,
        source: str | Path,
        store: Any = None,
        *,
        recursive: bool = True,
        text_field: str = "text",
    ) -> Self:
        """The texts of a folder (one of each ``.txt`` file), of a ``.txt``, ``.csv``, ``.json`` or ``.jsonl`` file.

        Args:
            source: the folder or file.
            store: where runs are kept.
            recursive: also folders in it.
            text_field: which field of a record is the text.
        """
        kind = Path(source).suffix.lower()
        if kind in (".jsonl", ".json") and not Path(source).is_dir():
            return cls.from_json(source, store, text_field=text_field)
        if kind == ".csv":
            return cls.from_csv(source, store, text_field=text_field)
        return cls(records.of_texts(source, recursive=recursive), store, text_field=text_field)

    def item_of(self, record: Any) -> str:
        """The text of a record."""
        return str(record if isinstance(record, str) else records.field(record, self.text_field))

    def extract_texts_from_batch(self, batch: Sequence[Any]) -> list[str]:
        """The texts of some items, or records."""
        return [self.item_of(one) for one in batch]
