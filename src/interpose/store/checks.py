"""What the tensors of a committed segment must be, so that whoever reads them need not ask again.

A checksum says that a file is the one that was written, and not that whoever wrote it meant well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from interpose.errors import FileError
from interpose.store.records import UNKNOWN, Commit, StoredSite

Tensors = Mapping[str, Tensor]


def index_of(tensors: Tensors, commit: Commit, source: str) -> None:
    """Refuse an index whose rows do not lie side by side, from the first token to the last."""
    _must_be(tensors, "tokens", (commit.tokens,), torch.int32, source)
    _must_be(tensors, "texts", (commit.rows,), torch.int32, source)
    _must_be(tensors, "starts", (commit.rows,), torch.int32, source)
    lengths = _lengths(tensors, "offsets", commit.rows, commit.tokens, source)
    for name, least, most in (
        ("tokens", UNKNOWN, None),
        ("starts", 0, None),
        ("texts", 0, commit.texts[1] - commit.texts[0]),
    ):
        found = tensors[name]
        if len(found) and (
            int(found.min()) < least or (most is not None and int(found.max()) >= most)
        ):
            raise FileError(f"{source}: {name} has numbers that stand for nothing.")
    if ("positions" in tensors) != ("vector_offsets" in tensors):
        raise FileError(f"{source} has one of 'positions' and 'vector_offsets' without the other.")
    if "positions" not in tensors:
        if commit.vectors != commit.tokens:
            raise FileError(f"{source} does not say which of its tokens have vectors.")
        return
    _must_be(tensors, "positions", (commit.vectors,), torch.int32, source)
    counts = _lengths(tensors, "vector_offsets", commit.rows, commit.vectors, source)
    places = tensors["positions"].long()
    room = torch.repeat_interleave(lengths, counts)
    begins = torch.repeat_interleave(tensors["vector_offsets"][:-1].long(), counts)
    rises = torch.ones_like(places, dtype=torch.bool)
    rises[1:] = places.diff() > 0
    first = torch.arange(len(places)) == begins
    if not bool(((places >= 0) & (places < room) & (rises | first)).all()):
        raise FileError(f"{source}: positions are not ascending places in their rows.")


def values_of(tensors: Tensors, site: StoredSite, commit: Commit, source: str) -> None:
    """Refuse vectors that are not those that the store says it has."""
    _must_be(tensors, "values", (commit.vectors, *site.shape), site.torch_dtype, source)
    if (site.dtype == "int8") != ("scales" in tensors):
        raise FileError(f"{source}: vectors of eight bits, and no others, have scales.")
    if "scales" in tensors:
        _must_be(tensors, "scales", (commit.vectors,), torch.bfloat16, source)


def statistics_of(tensors: Tensors, name: str, site: StoredSite, source: str) -> None:
    """Refuse statistics of other units than a site has."""
    units = (torch.Size(site.shape).numel(),)
    for part, dtype in _PARTS.items():
        _must_be(tensors, f"{name}.{part}", units, dtype, source)


_PARTS = {
    "mean": torch.float64,
    "squares": torch.float64,
    "minimum": torch.float32,
    "maximum": torch.float32,
    "zeros": torch.int32,
}


def _lengths(tensors: Tensors, name: str, rows: int, last: int, source: str) -> Tensor:
    """How long the stretches are that offsets divide, [row]."""
    _must_be(tensors, name, (rows + 1,), torch.int32, source)
    offsets = tensors[name].long()
    found = offsets.diff()
    if int(offsets[0]) != 0 or int(offsets[-1]) != last or bool((found < 0).any()):
        raise FileError(f"{source}: {name} do not divide {last} from end to end.")
    return found


def _must_be(
    tensors: Tensors, name: str, shape: Sequence[int], dtype: torch.dtype, source: str
) -> None:
    found = tensors.get(name)
    if found is None:
        raise FileError(f"{source} has no tensor {name!r}.")
    if found.shape != tuple(shape) or found.dtype != dtype:
        raise FileError(
            f"{source}: {name!r} is {found.dtype} of {tuple(found.shape)}, and should be {dtype} of {tuple(shape)}."
        )
