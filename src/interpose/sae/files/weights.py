"""Weights of autoencoders in files of any kind, and an autoencoder made of them."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interpose.errors import FileError
from interpose.files.reading import read_tensors, regular_file
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
        return read_tensors(path)[0]
    if path.suffix == ".npz":
        return _of_numpy(path)
    return _of_torch(path, pickles=pickles)


def _of_numpy(path: Path) -> dict[str, Tensor]:
    import numpy

    try:
        with numpy.load(regular_file(path), allow_pickle=False) as data:
            found = {
                name: torch.from_numpy(numpy.ascontiguousarray(data[name])) for name in data.files
            }
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        MemoryError,
        AttributeError,
        zipfile.BadZipFile,
    ) as error:
        raise FileError(
            f"{str(path)!r} is not a file of NumPy arrays: {shown(str(error), 200)}"
        ) from None
    return {str(name): tensor for name, tensor in found.items()}


def _of_torch(path: Path, *, pickles: bool) -> dict[str, Tensor]:
    try:
        found = torch.load(regular_file(path), map_location="cpu", weights_only=not pickles)
    except pickle.UnpicklingError as error:
        raise FileError(
            f"{str(path)!r} holds more than tensors, and reading it could run any program. If you trust whoever wrote "
            f"it, say pickles=True. ({shown(str(error).splitlines()[0] if str(error) else '', 200)})"
        ) from None
    except (
        RuntimeError,
        ValueError,
        TypeError,
        LookupError,
        EOFError,
        AttributeError,
        OSError,
    ) as error:
        raise FileError(f"{str(path)!r} is not a file of torch: {shown(str(error), 200)}") from None
    if not isinstance(found, Mapping):
        raise FileError(
            f"{str(path)!r} holds a {type(found).__name__}, and tensors by name are read here."
        )
    return {
        name: one
        for name, one in found.items()
        if isinstance(name, str) and isinstance(one, Tensor)
    }


def pick(tensors: Tensors, *names: str, source: str) -> Tensor:
    """The first of several names that a file has."""
    for name in names:
        if name in tensors:
            return tensors[name]
    there = ", ".join(sorted(tensors)[:12]) or "nothing"
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
    with torch.device("meta"):
        made = KINDS[kind](d_in, latents, **options)
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
        if not found.is_floating_point():
            raise FileError(f"{source}: {name} is {found.dtype}, and should be of floating point.")
        if not found.isfinite().all():
            raise FileError(f"{source}: {name} has numbers that are not finite.")
        given[name] = (
            found.detach().to(torch.float64 if there.dtype == torch.float64 else dtype).contiguous()
        )
    made.load_state_dict(given, assign=True)
    return made.requires_grad_().eval()


def _matrix(tensors: Tensors, name: str, source: str) -> Tensor:
    found = tensors.get(name)
    if found is None or found.ndim != 2 or 0 in found.shape:
        there = "missing" if found is None else tuple(found.shape)
        raise FileError(f"{source}: {name} is {there}, and should be a matrix.")
    return found
