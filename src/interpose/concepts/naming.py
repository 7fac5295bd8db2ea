"""`Concepts`: names for units, with how sure one is of each; CSV and JSON in and out."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import interpose as ip
from interpose.errors import FileError
from interpose.files.reading import read_bytes

COLUMNS = ("unit", "name", "value")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Concepts(ip.Result):
    """What units are called.

    ```python
    concepts = ip.Concepts.of({17: "places in France", 40: "question marks"})
    concepts[17]
    concepts.save("concepts.csv")        # or .json
    ip.Concepts.read("concepts.csv")
    ```

    Attributes:
        title: what they are names of.
        concepts: the name of each unit.
        scores: how sure one is of it; None where nobody has said.
    """

    title: str = "Concepts"
    concepts: dict[int, str] = field(default_factory=dict)
    scores: dict[int, float | None] = field(default_factory=dict)

    @classmethod
    def of(cls, concepts: Mapping[int, str], scores: Mapping[int, float] | None = None) -> Self:
        """Names by unit.

        Args:
            concepts: of each unit.
            scores: of some.
        """
        kept = {} if scores is None else {unit: float(score) for unit, score in scores.items()}
        return cls(concepts=dict(concepts), scores={unit: kept.get(unit) for unit in concepts})

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Names from a file: CSV with a number, a name and perhaps a score in each line, or what `save` wrote.

        Of several names for one unit the one of the highest score stays, of equal ones the first.

        Args:
            path: ``.csv`` or ``.json``.
        """
        if Path(path).suffix != ".csv":
            return cls.load(path)
        source = repr(str(path))
        text = read_bytes(path).decode("utf-8-sig", "replace")
        concepts: dict[int, str] = {}
        scores: dict[int, float | None] = {}
        for line, row in enumerate(csv.reader(io.StringIO(text)), 1):
            if not row or (line == 1 and not row[0].strip().lstrip("-").isdigit()):
                continue  # a heading
            unit, name, score = _line(row, f"{source}, line {line}")
            if unit not in concepts or (score or 0.0) > (scores[unit] or 0.0):
                concepts[unit], scores[unit] = name, score
        return cls(concepts=concepts, scores=scores)

    def __getitem__(self, unit: int) -> str:
        return self.concepts[unit]

    def get(self, unit: int, default: str = "") -> str:
        """The name of a unit, if it has one."""
        return self.concepts.get(unit, default)

    def __contains__(self, unit: object) -> bool:
        return unit in self.concepts

    def __len__(self) -> int:
        return len(self.concepts)

    def find(self, word: str) -> list[int]:
        """The units whose names have a word in them, in any case."""
        return [u for u, name in self.concepts.items() if word.casefold() in name.casefold()]

    def joined(self, other: Concepts) -> Concepts:
        """With the other's names; where both have one, the one of the higher score, of equal ones this."""
        concepts, scores = {**other.concepts, **self.concepts}, {**other.scores, **self.scores}
        for unit in self.concepts.keys() & other.concepts.keys():
            if (other.scores.get(unit) or 0.0) > (self.scores.get(unit) or 0.0):
                concepts[unit], scores[unit] = other.concepts[unit], other.scores.get(unit)
        return Concepts(title=self.title, concepts=concepts, scores=scores)

    def records(self) -> Iterator[dict[str, Any]]:
        """A record for each unit: its number, its name, and its score as the value."""
        for unit in sorted(self.concepts):
            row = (unit, self.concepts[unit], self.scores.get(unit))
            yield dict(zip(COLUMNS, row))


def _line(row: list[str], where: str) -> tuple[int, str, float | None]:
    """A unit, its name and its score."""
    cells = [cell.strip() for cell in row]
    try:
        unit, name, said = cells if len(cells) == 3 else [*cells, ""]
        score = float(said) if said and said != "-" else None
        return int(unit), name.removeprefix("'") if name[:2] in _ESCAPED else name, score
    except ValueError:
        raise FileError(
            f"{where} is not a number, a name and perhaps a score: {', '.join(row)[:80]!r}."
        ) from None


_ESCAPED = ("'=", "'+", "'-", "'@")
"""How `Result.to_csv` begins what a spreadsheet would take for a formula."""
