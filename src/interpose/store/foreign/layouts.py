"""Activations that others cached, row by row: runs of mi-crow, and SAELens's data sets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from interpose.errors import FileError
from interpose.explain.words import some
from interpose.files.reading import read_json, read_tensors
from interpose.store.foreign.extras import needed


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRow:
    """A text as somebody cached it.

    Attributes:
        values: by the name that it has there, each [pos, ...]. With padding if ``real`` is None and some is there.
        tokens: [pos], None where they were not kept.
        real: [pos], which of it is no padding; None where that was not kept.
    """

    values: Mapping[str, Tensor]
    tokens: Tensor | None
    real: Tensor | None


class Layout(Protocol):
    """What somebody's tool writes.

    Attributes:
        model: what it says the model is.
        padded: whether rows may have padding.
    """

    model: str
    padded: bool

    def fingerprint(self) -> str:
        """A hash of the names and sizes of its files, and of what describes them."""

    def rows(self) -> Iterator[ForeignRow]:
        """In the order of the files."""


def layout_of(path: Path) -> Layout:
    """Who wrote what is in a folder.

    Args:
        path: the folder of a run of mi-crow, or of a data set.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {str(path)!r}.")
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return SaeLensDataset(path)
    if (path / "meta.json").is_file() or (path / "batch_0").is_dir():
        return MiCrowRun(path)
    if (path / "runs").is_dir():
        runs = sorted(one.name for one in (path / "runs").iterdir())
        raise FileError(
            f"{str(path)!r} is a store of mi-crow with runs {some(map(repr, runs))}: give the folder of one, such as "
            f"{str(path / 'runs' / runs[0]) if runs else 'runs/first'!r}."
        )
    raise FileError(
        f"{str(path)!r} is not a run of mi-crow (with meta.json) nor a data set that SAELens saved (with state.json)."
    )


def _hash(described: Any, files: Sequence[Path], folder: Path) -> str:
    sizes = [[str(file.relative_to(folder)), file.stat().st_size] for file in files]
    return hashlib.sha256(json.dumps([described, sizes], sort_keys=True).encode()).hexdigest()


class MiCrowRun:
    """A run of mi-crow: a folder for each batch, or one file of a detector with all batches."""

    padded = True

    def __init__(self, path: Path) -> None:
        self.path = path
        meta = read_json(path / "meta.json") if (path / "meta.json").is_file() else {}
        self.model = str(meta.get("model", "")) if isinstance(meta, dict) else ""
        unified = path / "detectors"
        self._files = sorted((unified if unified.is_dir() else path).rglob("*.safetensors"))
        self._unified = unified.is_dir()
        if not self._files:
            raise FileError(f"{str(path)!r} has no activations: no .safetensors file is in it.")

    def fingerprint(self) -> str:
        """A hash of the names and sizes of its files."""
        return _hash(self.model, self._files, self.path)

    def _batches(self) -> Iterator[dict[tuple[str, str], Tensor]]:
        """The tensors of each batch, by layer and key."""
        if self._unified:
            there = {(file.parent.name, file.stem): read_tensors(file)[0] for file in self._files}
            numbers = {int(name.rpartition("_")[2]) for one in there.values() for name in one}
            for number in sorted(numbers):
                yield {
                    key: one[f"batch_{number}"]
                    for key, one in there.items()
                    if f"batch_{number}" in one
                }
            return
        by_batch: dict[int, list[Path]] = {}
        for file in self._files:
            name = file.relative_to(self.path).parts[0]
            if name.startswith("batch_") and name[6:].isdecimal():
                by_batch.setdefault(int(name[6:]), []).append(file)
        for number in sorted(by_batch):
            yield {
                (file.parent.name, file.stem): next(iter(read_tensors(file)[0].values()))
                for file in by_batch[number]
            }

    def rows(self) -> Iterator[ForeignRow]:
        """Text by text."""
        for number, batch in enumerate(self._batches()):
            masks = [one for (_, key), one in batch.items() if key == "attention_mask"]
            tokens = [one for (_, key), one in batch.items() if key == "input_ids"]
            values = {
                layer: one
                for (layer, key), one in batch.items()
                if key == "activations" and one.ndim >= 3
            }
            if not values:
                raise FileError(f"batch {number} of {str(self.path)!r} has no activations.")
            shapes = {tuple(one.shape[:2]) for one in [*values.values(), *masks, *tokens]}
            if len(shapes) > 1:
                raise FileError(
                    f"batch {number} of {str(self.path)!r} has values for {sorted(shapes)} texts and positions."
                )
            for row in range(shapes.pop()[0]):
                yield ForeignRow(
                    values={name: one[row] for name, one in values.items()},
                    tokens=tokens[0][row] if tokens else None,
                    real=masks[0][row] != 0 if masks else None,
                )


class SaeLensDataset:
    """A data set that SAELens saved: contexts of one length, without padding."""

    padded = False
    model = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        state, info = read_json(path / "state.json"), read_json(path / "dataset_info.json")
        try:
            self._files = [path / Path(one["filename"]).name for one in state["_data_files"]]
            features: dict[str, Any] = info["features"]
            self._sites = {
                name: tuple(one["shape"])
                for name, one in features.items()
                if one.get("_type") == "Array2D"
            }
        except (KeyError, TypeError, AttributeError):
            raise FileError(f"{str(path)!r} is not a data set that SAELens saved.") from None
        self._tokens = "token_ids" in features
        if not self._sites:
            raise FileError(
                f"{str(path)!r} is a data set without activations: it has {some(map(repr, features))}, and none is "
                "an Array2D, as SAELens saves them."
            )

    def fingerprint(self) -> str:
        """A hash of the names and sizes of its files."""
        said = {name: list(shape) for name, shape in self._sites.items()}
        return _hash(said, self._files, self.path)

    def rows(self) -> Iterator[ForeignRow]:
        """Context by context."""
        pyarrow = needed("pyarrow", "reading a data set")
        needed("pyarrow.ipc", "reading a data set")
        for file in self._files:
            if not file.is_file():
                raise FileError(f"{str(file)!r} is gone, and the data set says that it has it.")
            try:
                with (
                    pyarrow.memory_map(str(file)) as opened,
                    pyarrow.ipc.open_stream(opened) as all_,
                ):
                    for batch in all_:
                        yield from self._of(batch)
            except pyarrow.ArrowInvalid as error:
                raise FileError(f"{str(file)!r} is damaged: {error}") from None

    def _of(self, batch: Any) -> Iterator[ForeignRow]:
        values = {name: _numbers(batch.column(name), shape) for name, shape in self._sites.items()}
        tokens = None
        if self._tokens:
            length = next(iter(self._sites.values()))[0]
            tokens = _numbers(batch.column("token_ids"), (length,)).long()
        for row in range(batch.num_rows):
            yield ForeignRow(
                values={name: one[row] for name, one in values.items()},
                tokens=None if tokens is None else tokens[row],
                real=None,
            )


def _numbers(column: Any, shape: Sequence[int]) -> Tensor:
    """A column of lists of lists as a tensor."""
    flat = getattr(column, "storage", column)  # of datasets' own type, where that is known
    for _ in shape:
        flat = flat.flatten()
    found = flat.to_numpy(zero_copy_only=False)
    return torch.from_numpy(found.copy()).view(-1, *shape)
