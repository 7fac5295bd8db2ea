"""Weights of autoencoders in files of any kind, and an autoencoder made of them."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interpose.errors import FileError
from interpose.files.reading import must_be_plain, read_tensors, read_torch, regular_file
from interpose.files.schema import Field, Kind, MapOf, Whole, shown
from interpose.sae.matching_pursuit import MatchingPursuitSAE
from interpose.sae.relu import GatedSAE, JumpReLUSAE, StandardSAE
from interpose.sae.sae import SAE
from interpose.sae.topk import AbsTopKSAE, BatchTopKSAE, MatryoshkaSAE, TopKSAE

Tensors = Mapping[str, Tensor]
SIZE = Whole(1, 2**31)
KINDS: dict[str, type[SAE]] = {
    kind.architecture: kind
    for kind in (
        *(StandardSAE, TopKSAE, AbsTopKSAE, BatchTopKSAE, MatryoshkaSAE),
        *(JumpReLUSAE, GatedSAE, MatchingPursuitSAE),
    )
}
"""Architectures by SAELens's names for them."""


def read_weights(path: Path, *, pickles: bool = False) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors``, ``.npz`` or ``.pt`` file by name.

    Args:
        path: of the file.
        pickles: whether to read a ``.pt`` file that holds more than tensors, which can run any program.
    """
    if path.suffix == ".safetensors":
        found = read_tensors(path)[0]
    elif path.suffix == ".npz":
        found = _of_numpy(path)
    else:
        found = _of_torch(path, pickles=pickles)
    for name, tensor in found.items():
        must_be_plain(tensor, f"{str(path)!r}: {shown(name)}")
    return found


def _of_numpy(path: Path) -> dict[str, Tensor]:
    import numpy

    try:
        with regular_file(path).open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _must_not_swell(zipfile.ZipFile(file))
            with numpy.load(file, allow_pickle=False) as data:
                return {
                    str(name): torch.from_numpy(numpy.ascontiguousarray(data[name]))
                    for name in data.files
                }
    except (FileNotFoundError, FileError):
        raise
    except Exception as error:  # of a broken file, anything
        raise FileError(
            f"{str(path)!r} is not a file of NumPy arrays: {shown(str(error), 200)}"
        ) from None


def _must_not_swell(file: zipfile.ZipFile) -> None:
    """Refuse what is packed as weights never are, since it would fill the memory."""
    for one in file.infolist():
        if one.file_size > _SWELLS * max(one.compress_size, 1) and one.file_size > 2**20:
            raise ValueError(
                f"{one.filename!r} would be {one.file_size} bytes of {one.compress_size}"
            )


_SWELLS = 50


def _of_torch(path: Path, *, pickles: bool) -> dict[str, Tensor]:
    trusted = " If you trust whoever wrote it, say pickles=True."
    found = read_torch(path, pickles=pickles, otherwise=trusted)
    if not isinstance(found, Mapping):
        raise FileError(
            f"{str(path)!r} holds a {type(found).__name__}, and tensors by name are read here."
        )
    return {
        name: one
        for name, one in found.items()
        if isinstance(name, str) and isinstance(one, Tensor)
    }


def pick(tensors: Tensors, *names: str, source: str, axes: int | None = None) -> Tensor:
    """The first of several names that a file has; of so many axes, if that is said, none of them empty."""
    for name in names:
        if name in tensors:
            found = tensors[name]
            if axes is not None and (found.ndim != axes or 0 in found.shape):
                raise FileError(
                    f"{source}: {name} is {tuple(found.shape)}, and should have {axes} axes."
                )
            return found
    there = ", ".join(map(shown, sorted(tensors)[:12])) or "nothing"
    raise FileError(f"{source} has no tensor {' or '.join(map(repr, names))}; it has {there}.")


def entry(data: Mapping[str, Any], name: str, kind: Kind, source: str, default: Any = None) -> Any:
    """A field of a file among others, checked; a default where it is missing or null, unless that is ``...``."""
    if data.get(name) is None:
        if default is ...:
            raise FileError(f"{source} has no field {name!r}, and should have one: {kind.what}.")
        return default
    return kind(data[name], Field(source).of(name))


def inner(data: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    """An object in a file; an empty one where it is missing."""
    found: dict[str, Any] = entry(data, name, MapOf(_Any()), source, {})
    return found


class _Any:
    what = "anything"

    def __call__(self, value: Any, field: Field) -> Any:  # noqa: ARG002
        return value


ANY_OBJECT = MapOf(_Any())


def built(kind: str, tensors: Tensors, *, source: str, **options: Any) -> SAE:
    """An autoencoder of an architecture with these weights, whose sizes they say.

    Args:
        kind: the architecture.
        tensors: the weights, by the names that they have in its class.
        source: what errors call the file.
        **options: for its class.
    """
    rows = _matrix(tensors, "W_dec", source)
    latents, d_out = rows.shape
    d_in = d_out if KINDS[kind].TIED else _matrix(tensors, "W_enc", source).shape[0]
    try:
        with torch.device("meta"):
            made = KINDS[kind](d_in, latents, **options)
    except ValueError as error:
        raise FileError(f"{source}: {error}") from None
    dtype = rows.dtype
    wanted = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    given = {}
    for name, there in wanted.items():
        found = tensors.get(name)
        if found is None:
            raise FileError(f"{source} has no {name!r}, which an autoencoder of kind {kind!r} has.")
        if found.shape != there.shape:
            raise FileError(
                f"{source}: {name} is {tuple(found.shape)}, and should be {tuple(there.shape)} with {latents} latents."
            )
        must_be_numbers(found, name, source)
        given[name] = (
            found.detach().to(torch.float64 if there.dtype == torch.float64 else dtype).contiguous()
        )
    made.load_state_dict(given, assign=True)
    return made.requires_grad_().eval()


def must_be_numbers(tensor: Tensor, name: str, source: str) -> None:
    """Refuse weights that are not finite numbers of floating point."""
    if not tensor.is_floating_point():
        raise FileError(f"{source}: {name} is {tensor.dtype}, and should be of floating point.")
    if not tensor.isfinite().all():
        raise FileError(f"{source}: {name} has numbers that are not finite.")


def _matrix(tensors: Tensors, name: str, source: str) -> Tensor:
    found = tensors.get(name)
    if found is None or found.ndim != 2 or 0 in found.shape:
        there = "missing" if found is None else tuple(found.shape)
        raise FileError(f"{source}: {name} is {there}, and should be a matrix.")
    return found
