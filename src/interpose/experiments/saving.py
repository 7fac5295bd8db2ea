"""Experiments as data and as files: JSON, with a safetensors file beside it if edits hold tensors."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from interpose.edits.edit import Edit
from interpose.experiments.tensors import expressions, raw
from interpose.files.writing import write_whole
from interpose.sweeps.metrics import Metric
from interpose.sweeps.result import OF_DIRECTION

if TYPE_CHECKING:
    from interpose.experiments.experiment import Experiment

FORMAT, VERSION = "interpose.experiment", 2
_OLD = {"layers": "layer", "heads": "head", "neurons": "neuron", "positions": "pos"}
_FIELDS = (
    "model",
    "dtype",
    "inputs",
    "clean",
    "corrupt",
    "prepend_bos",
    "edits",
    "metrics",
    "sweep",
)


def as_data(experiment: Experiment, tensors: dict[str, Tensor] | None) -> dict[str, Any]:
    """An experiment as data that JSON takes; what is not said is left out."""
    if not isinstance(experiment.model, str):
        raise ValueError(
            f"this experiment holds a {type(experiment.model).__name__} itself, and a model is not written down. Name "
            "it: model='pocket', a folder, or a name on a hub."
        )
    data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    for name in _FIELDS:
        value = getattr(experiment, name)
        if name == "metrics":
            single = isinstance(value, Metric)
            value = value.to_dict() if single else {n: m.to_dict() for n, m in value.items()}
        if name == "edits":
            value = [edit.to_dict(tensors) for edit in value]
        if name == "sweep" and value is not None and "edit" in value:
            value = {**value, "edit": value["edit"].to_dict(tensors)}
        if value is not None and value != []:
            data[name] = list(value) if isinstance(value, tuple) else value
    return data


def from_data(data: Mapping[str, Any], tensors: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """The words of an experiment, from what `as_data` wrote."""
    words = dict(data) if isinstance(data, Mapping) else {}
    if words.pop("format", None) != FORMAT:
        raise ValueError("this is no experiment, as ip.Experiment.save writes them.")
    version = words.pop("version", None)
    if version not in (1, VERSION):
        raise ValueError(
            f"this experiment is of version {version!r}, and this interpose reads versions 1 and {VERSION}."
        )
    if version == 1 and "sweep" in words:
        words["sweep"] = _with_new_words(words["sweep"])
    unknown, missing = sorted(set(words) - set(_FIELDS)), {"model", "metrics"} - set(words)
    if unknown:
        raise ValueError(f"an experiment has {', '.join(_FIELDS)}; {unknown[0]!r} is none of them.")
    if missing:
        raise ValueError(f"this experiment has no {min(missing)}.")
    found = words["metrics"]
    single = isinstance(found.get("type"), str)
    words["metrics"] = (
        Metric.from_dict(found)
        if single
        else {name: Metric.from_dict(metric) for name, metric in found.items()}
    )
    words["edits"] = [Edit.from_dict(edit, tensors) for edit in words.get("edits", [])]
    if "edit" in words.get("sweep", {}):
        edit = Edit.from_dict(words["sweep"]["edit"], tensors)
        words["sweep"] = {**words["sweep"], "edit": edit}
    return words


def _with_new_words(sweep: Mapping[str, Any]) -> dict[str, Any]:
    """What version 1 said of a sweep."""
    made = {_OLD.get(name, name): value for name, value in sweep.items()}
    if made.get("direction") in OF_DIRECTION:
        made["patch"] = OF_DIRECTION[made.pop("direction")]
    return made


def digest(experiment: Experiment) -> str:
    """A hash of what an experiment says, tensors included."""
    tensors: dict[str, Tensor] = {}
    data = as_data(experiment, tensors)
    made = hashlib.sha256(json.dumps(data, sort_keys=True).encode())
    for name, tensor in tensors.items():
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        made.update(raw(tensor).numpy().tobytes())
    return made.hexdigest()


def edits_of(experiment: Experiment) -> list[Edit]:
    """Its edits, and last the one of its sweep, if it has one."""
    words = experiment.sweep or {}
    return [*experiment.edits, *([words["edit"]] if "edit" in words else [])]


# Files.


def save(experiment: Experiment, path: Path) -> None:
    """Write an experiment: first its tensors under a name of their own, then the file that names them."""
    if path.is_dir():
        raise IsADirectoryError(
            f"an experiment is saved as a JSON file, and {str(path)!r} is a folder."
        )
    tensors: dict[str, Tensor] = {}
    data = as_data(experiment, tensors)
    file, content = tensors_file(experiment, path)
    if tensors:
        write_whole(path.with_name(file), content)
        data["tensors"] = file
    write_whole(path, json.dumps(data, indent=1, allow_nan=False).encode())
    ours = re.compile(rf"{re.escape(path.stem)}-[0-9a-f]{{16}}\.safetensors")
    for old in path.parent.iterdir():
        if ours.fullmatch(old.name) and old.name != data.get("tensors"):
            old.unlink(missing_ok=True)


def tensors_file(experiment: Experiment, path: Path) -> tuple[str, bytes]:
    """The name and the bytes of the file of tensors: those of the edits, and those that a script needs besides."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    as_data(experiment, tensors)
    with suppress(ValueError):  # no script, then
        expressions(edits_of(experiment), tensors)
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return f"{path.stem}-{hashlib.sha256(content).hexdigest()[:16]}.safetensors", content


def load(path: Path) -> dict[str, Any]:
    """The words of an experiment that was saved."""
    from safetensors.torch import load_file

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{str(path)!r} holds no experiment.")
    file = data.pop("tensors", None)
    tensors = None if file is None else load_file(path.with_name(file))
    try:
        return from_data(data, tensors)
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from None
