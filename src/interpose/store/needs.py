"""What a harvest will take, told by the first of its texts: tokens, and room on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from interpose.errors import FileError
from interpose.models.transformer import TransformerModel
from interpose.render.text import human_bytes
from interpose.store.records import StoredSite
from interpose.store.rows import first_rows
from interpose.store.sources import Source
from interpose.store.vectors import Positions

_BESIDE = 8
"""At most so many bytes a token are not payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What there is of a text, on average.

    Attributes:
        tokens: how many.
        nbytes: how many bytes a store has for each token.
    """

    tokens: float
    nbytes: float

    @classmethod
    def of(
        cls,
        model: TransformerModel,
        source: Source,
        sites: Mapping[str, StoredSite],
        positions: Positions,
        *,
        prepend_bos: bool | None,
        length: int | None,
    ) -> Expected:
        """By the first texts; of an iterator they are kept for the harvest."""
        rows, texts = first_rows(model, source, prepend_bos, length)
        tokens = sum(len(row.tokens) for row in rows)
        share = 1.0
        if positions.wanted is not None:
            share = sum(len(positions.of(model, row.tokens)) for row in rows) / tokens
        payload = sum(site.nbytes for site in sites.values())
        return cls(tokens=tokens / texts, nbytes=share * payload + _BESIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What is left to do of a harvest.

    Attributes:
        texts: how many.
        tokens: how many they have, about.
        nbytes: how much room they take, about.
        free: how much the disk has.
    """

    texts: int
    tokens: int
    nbytes: float
    free: int

    @classmethod
    def of(
        cls,
        expected: Expected,
        folder: Path,
        count: int,
        size: int,
        done: Collection[int],
        part: tuple[int, int],
    ) -> Left:
        """Of so many texts, in shards of a size, of which some are done, and of these a part."""
        mine, of = part
        shards = [n for n in range(-(-count // size)) if n % of == mine and n not in done]
        texts = sum(min(size, count - number * size) for number in shards)
        tokens = texts * expected.tokens
        return cls(
            texts=texts,
            tokens=round(tokens),
            nbytes=tokens * expected.nbytes,
            free=shutil.disk_usage(folder).free,
        )

    def __str__(self) -> str:
        return (
            f"about {self.tokens:,} tokens of {self.texts:,} texts, {human_bytes(self.nbytes)}; the disk has "
            f"{human_bytes(self.free)} left"
        )

    def must_fit(self, folder: Path) -> None:
        """Refuse what the disk does not hold, before it begins."""
        if self.nbytes > self.free:
            raise FileError(
                f"about {human_bytes(self.nbytes)} are needed for {self.tokens:,} tokens, and {str(folder)!r} has "
                f"{human_bytes(self.free)} left. Fewer sites, positions (pos=) or bits (dtype='bfloat16', 'int8') take "
                "less."
            )
