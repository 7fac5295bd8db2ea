"""Records of files: CSV, JSON, JSON lines, texts."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from interpose.errors import FileError
from interpose.explain.words import some


def of_csv(path: str | Path, delimiter: str = ",") -> Iterator[dict[str, str]]:
    """The rows of a CSV file, by the names in its first line."""
    with _there(path).open(newline="", encoding="utf-8-sig") as file:
        yield from csv.DictReader(file, delimiter=delimiter)


def of_json(path: str | Path) -> Iterator[Any]:
    """The records of a JSON file, which is a list of them, or of one that has one a line."""
    file = _there(path)
    if file.suffix != ".jsonl":
        text = file.read_text("utf-8")
        try:
            data = json.loads(text)
        except ValueError:
            data = None  # perhaps one a line all the same
        if isinstance(data, list):
            yield from data
            return
        if data is not None:
            yield data
            return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise FileError(f"{str(path)!r}, line {number}, is not JSON: {error}") from None


def of_texts(path: str | Path, *, recursive: bool) -> list[dict[str, str]]:
    """The texts of a folder, one of each ``.txt`` file, in the order of their names; or of one such file."""
    source = Path(path)
    if source.is_dir():
        found = sorted(source.rglob("*.txt") if recursive else source.glob("*.txt"))
        if not found:
            raise FileNotFoundError(f"there is no .txt file in {str(path)!r}.")
    else:
        found = [_there(path)]
    return [{"text": file.read_text("utf-8")} for file in found]


def _there(path: str | Path) -> Path:
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}.")
    return file


def chosen(
    records: Sequence[Any],
    filters: Mapping[str, Any] | None,
    limit: int | None,
    stratify_by: str | None,
    stratify_seed: int | None,
) -> Sequence[Any]:
    """Some of the records.

    Args:
        records: all of them.
        filters: what fields must be.
        limit: how many at most.
        stratify_by: a field, of whose values as large a share is kept as they have of all.
        stratify_seed: of which records of a value these are.
    """
    if filters:
        records = [one for one in records if all(field(one, n) == v for n, v in filters.items())]
    if limit is None or limit >= len(records):
        return records
    if limit < 1:
        raise ValueError(f"limit is at least 1; got {limit}.")
    if stratify_by is None:
        return [records[number] for number in range(limit)]
    by_value: dict[Any, list[int]] = {}
    for number in range(len(records)):
        by_value.setdefault(field(records[number], stratify_by), []).append(number)
    shares = {value: limit * len(mine) / len(records) for value, mine in by_value.items()}
    counts = {value: int(share) for value, share in shares.items()}
    rest = sorted(shares, key=lambda value: counts[value] - shares[value])
    for value in rest[: limit - sum(counts.values())]:
        counts[value] += 1
    draw = torch.Generator().manual_seed(0 if stratify_seed is None else stratify_seed)
    kept: list[int] = []
    for value, mine in by_value.items():
        order = torch.randperm(len(mine), generator=draw).tolist()
        kept += [mine[at] for at in order[: counts[value]]]
    return [records[number] for number in sorted(kept)]


def field(record: Any, name: str) -> Any:
    """A field of a record; an error that says which there are."""
    if not isinstance(record, Mapping):
        raise ValueError(f"there is no field {name!r}: the record is {record!r:.60}.")
    if name not in record:
        raise ValueError(f"there is no field {name!r}; the record has {some(map(repr, record))}.")
    return record[name]
