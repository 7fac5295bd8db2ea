"""A training in a folder: one file that is whole or not there, from which it goes on to the bit."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from interpose.errors import FileError
from interpose.files.reading import parse_json, read_tensors
from interpose.files.schema import ANYTHING, FLAG, ListOf, MapOf, Record, Text, Whole
from interpose.files.writing import replacing
from interpose.sae.sae import SAE

NAME = "training.safetensors"
_WORD = "interpose.training"
_UNFINISHED = re.compile(r"\.(training|sae_weights|cfg)\.(json|safetensors)\.[0-9a-f]{16}")
_ABOUT = Record(
    {
        "run": MapOf(ANYTHING, Text(100)),
        "done": Whole(0),
        "finished": FLAG,
        "source": ANYTHING,
        "history": ListOf(MapOf(ANYTHING, Text(100))),
        "numbers": ListOf(MapOf(ANYTHING, Text(100))),
        "ended": Text(200),
    }
)


def fingerprint(sae: SAE) -> str:
    """What tells autoencoders apart: class, options, and some of the weights."""
    told = hashlib.sha256(f"{type(sae).__name__} {sae.options()}".encode())
    for name, one in sorted(sae.state_dict().items()):
        flat = one.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // 4096)].double().cpu()
        told.update(f"{name} {tuple(one.shape)}".encode() + some.numpy().tobytes())
    return told.hexdigest()[:32]


def write(
    folder: Path,
    about: Mapping[str, Any],
    states: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Any]]],
) -> None:
    """Put a checkpoint in a folder, in the place of the last one.

    Args:
        folder: it is there.
        about: how far the training is, and what it is of.
        states: tensors and numbers of each autoencoder.
    """
    from safetensors.torch import save_file

    tensors = {
        f"{number}.{name}": one.detach().cpu().contiguous()
        for number, (mine, _) in enumerate(states)
        for name, one in mine.items()
    }
    said = {**about, "numbers": [dict(numbers) for _, numbers in states]}
    with replacing(folder / NAME) as unfinished:
        save_file(tensors, unfinished, metadata={_WORD: json.dumps(said, allow_nan=False)})


def read(
    folder: Path, run: Mapping[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Tensor]]] | None:
    """The checkpoint in a folder, and the tensors of each autoencoder; None where there is none.

    Args:
        folder: of the training.
        run: what the training is of: a checkpoint of another is an error.
    """
    for left in folder.rglob(".*"):
        if _UNFINISHED.fullmatch(left.name):
            left.unlink(missing_ok=True)  # of one that was killed while it wrote
    path = folder / NAME
    if not path.exists():
        return None
    source = repr(str(path))
    tensors, texts = read_tensors(path)
    if _WORD not in texts:
        raise FileError(f"{source} is not what ip.train_sae writes.")
    about: dict[str, Any] = parse_json(texts[_WORD], _ABOUT, source)
    wanted = json.loads(json.dumps(run))
    for name in {*wanted, *about["run"]}:
        before, now = about["run"].get(name), wanted.get(name)
        if before != now:
            raise FileError(
                f"{str(folder)!r} has another training: its {name} is {before!r}, and {now!r} is asked for. Give "
                "another folder, or the arguments that it began with."
            )
    found: list[dict[str, Tensor]] = [{} for _ in about["numbers"]]
    for name, one in tensors.items():
        number, _, rest = name.partition(".")
        if not number.isdigit() or int(number) >= len(found):
            raise FileError(f"{source} has a tensor {name!r} of no autoencoder.")
        found[int(number)][rest] = one
    return about, found
