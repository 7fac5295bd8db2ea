"""Experiments as data and as files: JSON, with a safetensors file beside it if edits hold tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from interpose.edits.edit import Edit
from interpose.edits.reading import made_of as made_edit
from interpose.errors import FileError
from interpose.experiments.tensors import expressions, raw
from interpose.files.beside import load_beside, save_beside
from interpose.files.schema import (
    ANYTHING,
    FLAG,
    Either,
    Field,
    ListOf,
    MapOf,
    OneOf,
    Record,
    Text,
    Whole,
    shown,
)
from interpose.sweeps.metrics import Metric, metric_of
from interpose.sweeps.result import OF_DIRECTION

if TYPE_CHECKING:
    from interpose.experiments.experiment import Experiment

FORMAT, VERSION = "interpose.experiment", 2
_OLD = {"layers": "layer", "heads": "head", "neurons": "neuron", "positions": "pos"}
SWEEP_WORDS = (
    "site",
    "over",
    "edit",
    "patch",
    "layer",
    "head",
    "neuron",
    "pos",
    "plan",
    "align",
    "batch_size",
    "max_rows",
)
"""What an experiment may say of a sweep."""
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


def made_of(
    cls: type[Experiment], data: Any, tensors: Mapping[str, Tensor] | None, field: Field
) -> Experiment:
    """An experiment, from what `as_data` wrote.

    Args:
        cls: its type.
        data: what was written.
        tensors: those that its edits name.
        field: what errors call it.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise FileError(f"{field.source} holds no experiment, as ip.Experiment.save writes them.")
    version = data.get("version")
    if version not in (1, VERSION):
        raise FileError(
            f"{field.source} is of version {shown(version)}, and this interpose reads versions 1 and {VERSION}."
        )
    data = {name: value for name, value in data.items() if name not in ("format", "version")}
    if version == 1 and isinstance(data.get("sweep"), Mapping):
        data["sweep"] = _with_new_words(data["sweep"])
    words = _EXPERIMENT(data, field)
    found, there = words["metrics"], field.of("metrics")
    words["metrics"] = (
        metric_of(found, there)
        if isinstance(found.get("type"), str)
        else {name: metric_of(metric, there.of(name)) for name, metric in found.items()}
    )
    listed = field.of("edits")
    words["edits"] = [
        made_edit(Edit, edit, tensors, listed.of(number))
        for number, edit in enumerate(words.get("edits", []))
    ]
    if "edit" in words.get("sweep", {}):
        edit = made_edit(Edit, words["sweep"]["edit"], tensors, field.of("sweep").of("edit"))
        words["sweep"] = {**words["sweep"], "edit": edit}
    try:
        return cls(**words)
    except (TypeError, ValueError, LookupError) as error:
        raise field.says(f"makes no experiment: {error}") from error


_TOKENS = ListOf(Whole(0, 2**40), least=1)
_TEXTS = Either(Text(), ListOf(Either(Text(), _TOKENS)))
_NAMES = Either(Text(10_000), ListOf(Text(10_000), 1000))
_SOME = Either(Whole(), Text(10_000), ListOf(Either(Whole(), Text(10_000)), 1_000_000))
_SWEEP = Record(
    {
        "site": _NAMES,
        "over": _NAMES,
        "edit": MapOf(ANYTHING),
        "patch": OneOf("clean", "corrupt"),
        "layer": _SOME,
        "head": _SOME,
        "neuron": _SOME,
        "pos": _SOME,
        "plan": Text(100),
        "align": Text(100),
        "batch_size": Whole(1, 2**31),
        "max_rows": Whole(1, 2**31),
    },
    optional=SWEEP_WORDS,
)
_EXPERIMENT = Record(
    {
        "model": Text(4096, 1),
        "dtype": Text(30),
        "inputs": _TEXTS,
        "clean": _TEXTS,
        "corrupt": _TEXTS,
        "prepend_bos": FLAG,
        "edits": ListOf(MapOf(ANYTHING), 100_000),
        "metrics": MapOf(ANYTHING, Text(1000)),
        "sweep": _SWEEP,
    },
    optional=set(_FIELDS) - {"model", "metrics"},
)


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
    content = tensors_of(experiment)
    save_beside(path, data, stem_of(path), content if tensors else None)


def stem_of(path: Path) -> str:
    """How the name of the tensors' file begins: as the experiment's own."""
    return path.name.removesuffix(".json")


def tensors_of(experiment: Experiment) -> bytes:
    """What the file of tensors holds: those of the edits, and those that a script needs besides."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    as_data(experiment, tensors)
    with suppress(ValueError):  # no script, then
        expressions(edits_of(experiment), tensors)
    return save({name: tensor.contiguous() for name, tensor in tensors.items()})


def load(cls: type[Experiment], path: Path) -> Experiment:
    """An experiment that was saved."""
    data, tensors = load_beside(path)
    return made_of(cls, data, tensors, Field(repr(str(path))))
