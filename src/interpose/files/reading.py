"""Files that come from anywhere, read so that whatever is in them ends in a value or in an error with a sentence."""

from __future__ import annotations

import json
import math
import stat
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interpose.errors import FileError
from interpose.files.schema import Field, Kind, shown
from interpose.files.writing import kind_of_file

if TYPE_CHECKING:
    from torch import Tensor

DEPTH = 50
"""How deep lists and objects may lie in one another."""
LARGEST = 2**31
"""How many bytes a JSON file may have."""


def read_json(path: str | Path, kind: Kind | None = None, *, most: int = LARGEST) -> Any:
    """What a JSON file holds, checked.

    Args:
        path: a regular file.
        kind: what it should hold; see `interpose.files.schema`.
        most: how many bytes it may have.
    """
    source = repr(str(path))
    try:
        text = read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise FileError(f"{source} is not JSON: byte {error.start} is not UTF-8.") from None
    return parse_json(text, kind, source)


def read_bytes(path: str | Path, most: int | None = None) -> bytes:
    """What a regular file holds.

    Args:
        path: of the file.
        most: how many bytes it may have; None for any number.
    """
    return regular_file(path, most).read_bytes()


def parse_json(text: str, kind: Kind | None = None, source: str = "this text") -> Any:
    """What JSON says, checked; no NaN, no field twice, nothing that lies too deep.

    Args:
        text: as JSON.
        kind: what it should hold.
        source: what errors call it.
    """
    try:
        data = json.loads(
            text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_once
        )
    except RecursionError:
        raise FileError(f"{source} has lists in lists, deeper than {DEPTH}.") from None
    except ValueError as error:
        raise FileError(f"{source} is not JSON: {error}") from None
    _must_be_shallow(data, source)
    return data if kind is None else kind(data, Field(source))


def read_tensors(
    path: str | Path, device: Any = "cpu", *, what: str = "a safetensors file"
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file by name, and the texts of its header.

    Args:
        path: a regular file.
        device: where to put them.
        what: what it should be, for errors.
    """
    from safetensors import safe_open

    file = regular_file(path)
    with (
        _refused(f"{str(path)!r} is not {what}"),
        safe_open(file, framework="pt", device=str(device)) as opened,
    ):
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return tensors, dict(opened.metadata() or {})


def read_torch(path: str | Path, *, pickles: bool = False, otherwise: str = "") -> Any:
    """What a file of ``torch.save`` holds: tensors, texts, numbers, lists and dictionaries of them.

    Args:
        path: a regular file.
        pickles: whether it may hold more than that, and run any program when it is read.
        otherwise: a sentence that says how to ask for that.
    """
    import pickle

    import torch

    file = regular_file(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=not pickles)
    except pickle.UnpicklingError as error:
        if pickles:
            raise FileError(
                f"{str(path)!r} is not a file of torch: {shown(str(error), 200)}"
            ) from None
        said = shown(str(error).splitlines()[0] if str(error) else "", 200)
        raise FileError(
            f"{str(path)!r} holds more than tensors, and reading it could run any program.{otherwise} ({said})"
        ) from None
    except Exception as error:  # of a broken file, anything
        raise FileError(f"{str(path)!r} is not a file of torch: {shown(str(error), 200)}") from None


def must_be_plain(tensor: Tensor, what: str) -> None:
    """Refuse what is no array of real numbers, each of which the file has.

    Args:
        tensor: as `read_torch` found it.
        what: what errors call it.
    """
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise FileError(f"{what} is a {type(tensor).__name__} of layout {tensor.layout}.")
    if tensor.is_complex() or tensor.is_quantized or tensor.device.type != "cpu":
        raise FileError(f"{what} is {tensor.dtype} on {tensor.device}: not plain numbers.")
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise FileError(
            f"{what} says that it is {tuple(tensor.shape)}, and the file has fewer numbers."
        )


def tensors_in(content: bytes, source: str, device: Any = "cpu") -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, of its bytes.

    Args:
        content: of the file.
        source: what errors call it.
        device: where to put them.
    """
    from safetensors.torch import load

    with _refused(f"{source} is not a safetensors file"):
        found = load(content)
    return {name: tensor.to(device) for name, tensor in found.items()}


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """What safetensors says of a file that is none, in our words."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, *_CORRUPT) as error:
        raise FileError(f"{what}: {error}") from None


_CORRUPT = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError)


def read_shared(
    path: str | Path, word: str, kind: Kind, writer: str, device: Any = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, of which several may be one and the same, and what else the header says.

    Args:
        path: a safetensors file whose header has a JSON text; its ``same`` has for each name that of its tensor.
        word: what the text goes by.
        kind: what it should hold.
        writer: what writes such files, for errors.
        device: where to put the tensors.
    """
    tensors, texts = read_tensors(path, device)
    if word not in texts:
        raise FileError(f"{str(path)!r} is not what {writer} writes: its header has no {word!r}.")
    about = parse_json(texts[word], kind, repr(str(path)))
    if missing := set(about["same"].values()) - set(tensors):
        raise FileError(f"{str(path)!r} has no tensor {shown(min(missing))}, which it names.")
    return {name: tensors[kept] for name, kept in about["same"].items()}, about


def regular_file(path: str | Path, most: int | None = None) -> Path:
    """A file that can be read to its end.

    Args:
        path: of the file.
        most: how many bytes it may have; None for any number.
    """
    file = Path(path)
    try:
        there = file.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {str(path)!r}.") from None
    except ValueError as error:  # a zero byte in the name
        raise FileError(f"{str(path)!r} is not a name of a file: {error}") from None
    if stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(f"{str(path)!r} is a folder, and a file is read here.")
    if not stat.S_ISREG(there.st_mode):
        raise FileError(f"{str(path)!r} is {kind_of_file(there.st_mode)}, and a file is read here.")
    if most is not None and there.st_size > most:
        raise FileError(f"{str(path)!r} has {there.st_size} bytes, and may have {most}.")
    return file


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is not a number in JSON")


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise ValueError(f"the number {word[:30]} is too large")
    return number


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the field {shown(twice, 30)} is there twice")
    return found


def _must_be_shallow(data: Any, source: str) -> None:
    level = [data] if isinstance(data, (dict, list)) else []
    for _ in range(DEPTH):
        parts = (one.values() if isinstance(one, dict) else one for one in level)
        level = [part for some in parts for part in some if isinstance(part, (dict, list))]
    if level:
        raise FileError(f"{source} has lists in lists, deeper than {DEPTH}.")
