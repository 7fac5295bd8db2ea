"""`LocalStore`: runs in a folder, each file whole or not there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from interpose.dialects.mi_crow.store.harvested import HarvestedRun
from interpose.dialects.mi_crow.store.store import Batch, Store
from interpose.errors import FileError
from interpose.files.reading import read_json, read_tensors
from interpose.files.schema import ANYTHING, Field, ListOf, MapOf, Text
from interpose.files.writing import replacing, write_whole

_EMPTY = "_empty_list"
_ITEM = re.compile(r"item_(\d{1,9})")
_NAMES = "_tensor_metadata_names"


class LocalStore(Store):
    """Runs in a folder: ``runs/<run>/``.

    Args:
        base_path: the folder; made when something is put into it.
        runs_prefix: what runs are in.
    """

    def __init__(self, base_path: str | Path = "store", runs_prefix: str = "runs") -> None:
        self.base_path = Path(base_path)
        self.runs_prefix = runs_prefix

    def run_path(self, run_id: str) -> Path:
        """The folder of a run."""
        if not isinstance(run_id, str) or not run_id or re.search(r"[/\\\0]|^\.", run_id):
            raise ValueError(
                f"run_id is a name without '/' or '\\\\' that does not begin with '.'; got {run_id!r}."
            )
        return self.base_path / self.runs_prefix / run_id

    # Batches.

    def put_run_batch(
        self, run_id: str, batch_index: int, tensors: Mapping[str, Tensor] | Sequence[Tensor]
    ) -> str:
        """Keep tensors by name, or a list of them, and return where."""
        path = self._batch_file(run_id, batch_index)
        if isinstance(tensors, Mapping):
            kept = dict(tensors)
        else:
            kept = {f"item_{number}": one for number, one in enumerate(tensors)}
            kept = kept or {_EMPTY: torch.zeros(1)}
        _write_tensors(path, kept)
        return str(path)

    def get_run_batch(self, run_id: str, batch_index: int) -> Batch:
        """A batch as it was put; of a run that was harvested, or of detectors, tensors by layer."""
        path = self._batch_file(run_id, batch_index)
        if path.is_file():
            return _as_put(read_tensors(path)[0])
        harvested = self._harvested(run_id)
        if harvested is not None:
            return harvested.batch(batch_index)
        _, tensors = self.get_detector_metadata(run_id, batch_index)
        return {
            layer if key == "activations" else f"{layer}/{key}": tensor
            for layer, of_layer in tensors.items()
            for key, tensor in of_layer.items()
        }

    def list_run_batches(self, run_id: str) -> list[int]:
        """The numbers of all batches, ascending."""
        folder, found = self.run_path(run_id), set[int]()
        if (harvested := self._harvested(run_id)) is not None:
            found |= set(range(harvested.count))
        for path in [*folder.glob("batch_*"), *folder.glob("detectors/batch_*")]:
            number = re.fullmatch(r"batch_(\d+)(\.safetensors)?", path.name)
            if number and (path.is_file() or (path / "metadata.json").is_file()):
                found.add(int(number[1]))
        return sorted(found)

    def delete_run(self, run_id: str) -> None:
        """Remove a run's folder; it is no error if there is none."""
        folder = self.run_path(run_id)
        if folder.exists():
            shutil.rmtree(folder)

    # What is known of a run.

    def put_run_metadata(self, run_id: str, meta: Mapping[str, Any]) -> str:
        """Keep what is known of a run."""
        path = self.run_path(run_id) / "meta.json"
        _write_json(path, dict(meta))
        return str(path)

    def get_run_metadata(self, run_id: str) -> dict[str, Any]:
        """What is known of a run; empty if nothing was put."""
        path = self.run_path(run_id) / "meta.json"
        found: dict[str, Any] = read_json(path, MapOf(ANYTHING)) if path.is_file() else {}
        return found

    # What detectors found.

    def put_detector_metadata(
        self,
        run_id: str,
        batch_index: int,
        metadata: Mapping[str, Mapping[str, Any]],
        tensor_metadata: Mapping[str, Mapping[str, Tensor]],
    ) -> str:
        """Keep what detectors found in a batch; it is there when all of its tensors are."""
        folder = self.run_path(run_id) / f"batch_{_checked(batch_index)}"
        return self._put(folder, metadata, tensor_metadata)

    def put_run_detector_metadata(
        self,
        run_id: str,
        metadata: Mapping[str, Mapping[str, Any]],
        tensor_metadata: Mapping[str, Mapping[str, Tensor]],
    ) -> str:
        """Keep what detectors found in the next batch, in ``detectors/``; what is there is not written again."""
        folder = self.run_path(run_id) / "detectors"
        there = [int(path.name[6:]) for path in folder.glob("batch_*") if path.name[6:].isdigit()]
        return self._put(folder / f"batch_{max(there, default=-1) + 1}", metadata, tensor_metadata)

    def _put(
        self,
        folder: Path,
        metadata: Mapping[str, Mapping[str, Any]],
        tensor_metadata: Mapping[str, Mapping[str, Tensor]],
    ) -> str:
        for layer, tensors in tensor_metadata.items():
            for key, tensor in tensors.items():
                _write_tensors(
                    folder / _quoted(layer) / f"{_quoted(key)}.safetensors", {"tensor": tensor}
                )
        names = {layer: list(tensors) for layer, tensors in tensor_metadata.items()}
        # Last: a batch is there when this file is.
        _write_json(folder / "metadata.json", {**metadata, _NAMES: names})
        return str(folder)

    def get_detector_metadata(
        self, run_id: str, batch_index: int
    ) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Tensor]]]:
        """What detectors found in a batch, by layer: facts, and tensors."""
        harvested = self._harvested(run_id)
        if harvested is not None:
            return harvested.detected(batch_index)
        folder = self._found(run_id, batch_index)
        facts = read_json(folder / "metadata.json", MapOf(ANYTHING))
        field = Field(repr(str(folder / "metadata.json"))).of(_NAMES)
        names = MapOf(ListOf(Text(1000), 100_000), Text(1000), 100_000)(
            facts.pop(_NAMES, {}), field
        )
        tensors = {
            layer: {key: self._tensor(folder, run_id, batch_index, layer, key) for key in keys}
            for layer, keys in names.items()
        }
        return facts, tensors

    def get_detector_metadata_by_layer_by_key(
        self, run_id: str, batch_index: int, layer: str, key: str
    ) -> Tensor:
        """One tensor of what a layer's detector found in a batch; no other is read."""
        harvested = self._harvested(run_id)
        if harvested is not None:
            return harvested.tensor(batch_index, str(layer), key)
        return self._tensor(self._found(run_id, batch_index), run_id, batch_index, str(layer), key)

    def _found(self, run_id: str, batch_index: int) -> Path:
        run = self.run_path(run_id)
        for folder in (run, run / "detectors"):
            if (folder / f"batch_{_checked(batch_index)}" / "metadata.json").is_file():
                return folder / f"batch_{batch_index}"
        there = self.list_run_batches(run_id)
        shown = f"batches {there[0]} to {there[-1]}" if there else "no batches"
        raise FileNotFoundError(
            f"no batch {batch_index} of run {run_id!r} in {str(run)!r}: it has {shown}."
        )

    def _tensor(self, folder: Path, run_id: str, batch_index: int, layer: str, key: str) -> Tensor:
        path = folder / _quoted(layer) / f"{_quoted(key)}.safetensors"
        if not path.is_file():
            there = sorted(
                f"{unquote(one.parent.name)!r} {unquote(one.stem)!r}"
                for one in folder.glob("*/*.safetensors")
            )
            raise FileNotFoundError(
                f"no {key!r} of layer {layer!r} in batch {batch_index} of run {run_id!r} ({str(path)!r}); there are: "
                f"{', '.join(there) or 'none'}."
            )
        return _one(path)

    def _harvested(self, run_id: str) -> HarvestedRun | None:
        return HarvestedRun.of(self.run_path(run_id))

    # Tensors by themselves.

    def put_tensor(self, key: str, tensor: Tensor) -> str:
        """Keep one tensor under a name, which may have folders in it, and return where."""
        path = self._tensor_file(key)
        _write_tensors(path, {"tensor": tensor})
        return str(path)

    save_tensor = put_tensor

    def get_tensor(self, key: str) -> Tensor:
        """A tensor by its name."""
        return _one(self._tensor_file(key))

    load_tensor = get_tensor

    def _tensor_file(self, key: str) -> Path:
        parts = Path(key).parts
        if not parts or Path(key).is_absolute() or ".." in parts:
            raise ValueError(f"the name of a tensor stays in the store; got {key!r}.")
        path = self.base_path / key
        return path if path.suffix == ".safetensors" else path.with_name(f"{path.name}.safetensors")

    def _batch_file(self, run_id: str, batch_index: int) -> Path:
        return self.run_path(run_id) / f"batch_{_checked(batch_index):06d}.safetensors"


def _checked(batch_index: int) -> int:
    if not isinstance(batch_index, int) or isinstance(batch_index, bool) or batch_index < 0:
        raise ValueError(f"batch_index is a number from 0 on; got {batch_index!r}.")
    return batch_index


def _quoted(name: str) -> str:
    """A name that stays one name of a file."""
    made = quote(str(name), safe=" #@[]()=+,")
    return made.replace(".", "%2E") if not made.strip(".") else made


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    for name, one in tensors.items():
        if not isinstance(one, Tensor):
            raise TypeError(f"a batch is of tensors; {name!r} is {type(one).__name__}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}
    with replacing(path) as unfinished:
        save_file(kept, unfinished)


def _write_json(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(data, indent=1, allow_nan=False))


def _one(path: Path) -> Tensor:
    """The tensor of a file that has one."""
    found = read_tensors(path)[0]
    if len(found) != 1:
        raise FileError(f"{str(path)!r} has {len(found)} tensors, and one is read here.")
    return next(iter(found.values()))


def _as_put(tensors: dict[str, Tensor]) -> Batch:
    """Tensors by name, or the list that was put."""
    if set(tensors) == {_EMPTY}:
        return []
    numbers = {
        int(found[1]): one for name, one in tensors.items() if (found := _ITEM.fullmatch(name))
    }
    if len(numbers) == len(tensors) and set(numbers) == set(range(len(numbers))):
        return [numbers[number] for number in range(len(numbers))]
    return tensors
