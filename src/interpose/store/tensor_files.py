"""Safetensors files that are written piece by piece and read where they lie.

The library of the format holds a file's tensors in memory to write them, and copies them to read them. A store writes
more than fits, and gathers single vectors out of what is mapped into memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interpose.errors import FileError
from interpose.files.reading import parse_json, regular_file
from interpose.files.schema import ListOf, MapOf, OneOf, Record, Text, Whole

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
"""How the format calls dtypes."""
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_HEADER = MapOf(
    Record(
        {
            "dtype": OneOf(*_DTYPES),
            "shape": ListOf(Whole(0), 8),
            "data_offsets": ListOf(Whole(0), 2, 2),
        }
    ),
    Text(1000),
    10_000,
)
_LONGEST_HEADER = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a commit says of a file."""

    size: int
    sha256: str


class TensorWriter:
    """A safetensors file whose tensors come piece by piece, one after the other, with its checksum.

    Args:
        path: a new file.
        tensors: by name, the dtype and the shape that each will have, in the order in which they come.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]
    ) -> None:
        self.path = path
        self._hash = hashlib.sha256()
        head = _header(tensors)
        self.size = len(head) + sum(_bytes(*tensor) for tensor in tensors.values())
        self._done = 0
        self._file = path.open("xb", buffering=0)
        try:
            if hasattr(os, "posix_fallocate"):  # a full disk is told of now
                os.posix_fallocate(self._file.fileno(), 0, self.size)
            self._put(memoryview(head))
        except BaseException:
            self._file.close()
            raise

    def write(self, part: Tensor) -> None:
        """The next numbers."""
        if part.numel():
            flat = part.detach().contiguous().reshape(-1).view(torch.uint8)
            self._put(memoryview(flat.numpy()))  # type: ignore[arg-type]

    def _put(self, content: memoryview) -> None:
        self._hash.update(content)
        while content:
            count = self._file.write(content)
            assert count is not None
            self._done += count
            content = content[count:]

    def close(self) -> Written:
        """All of it is there: on the disk, too."""
        if self._done != self.size:
            raise RuntimeError(f"{self.path.name} has {self._done} bytes of {self.size}.")
        os.fsync(self._file.fileno())
        self._file.close()
        return Written(size=self.size, sha256=self._hash.hexdigest())

    def discard(self) -> None:
        """Close what is not complete."""
        self._file.close()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """A safetensors file of some small tensors.

    Args:
        path: a new file.
        tensors: by name.
    """
    file = TensorWriter(path, {name: (one.dtype, one.shape) for name, one in tensors.items()})
    try:
        for tensor in tensors.values():
            file.write(tensor)
        return file.close()
    except BaseException:
        file.discard()
        raise


def _bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return dtype.itemsize * math.prod(shape)


def _header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    """The head of a safetensors file: its length, and JSON that is filled up with spaces."""
    described: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + _bytes(dtype, shape)
        described[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # numbers begin at a multiple of eight
    return len(text).to_bytes(8, "little") + text


class Mapped(Mapping[str, Tensor]):
    """The tensors of a safetensors file, mapped into memory: nothing is read before it is looked at.

    What is written into them reaches neither the file nor another reader.

    Args:
        path: of the file.
        written: what a commit says of it.
        verify: whether its checksum is compared: that reads the whole file once.
    """

    def __init__(self, path: Path, written: Written, *, verify: bool) -> None:
        with _opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != written.size:
                raise FileError(
                    f"{str(path)!r} has {size} bytes, and {written.size} were committed: it is cut off, or was "
                    f"changed. {REPAIR}"
                )
            if size < 8:
                raise FileError(f"{str(path)!r} is not a safetensors file: it has {size} bytes.")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if verify and (found := hashlib.sha256(self._map).hexdigest()) != written.sha256:
            raise FileError(
                f"{str(path)!r} is not what was committed: its checksum is {found[:16]}..., and was "
                f"{written.sha256[:16]}.... {REPAIR}"
            )
        self._tensors = _tensors_in(self._map, repr(str(path)))

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


REPAIR = "To have it made anew: store.drop_damaged(), then the same ip.harvest(...) again."


def _opened(path: Path) -> Any:
    try:
        return regular_file(path).open("rb")
    except FileNotFoundError:
        raise FileError(f"{str(path)!r} is gone, and was committed. {REPAIR}") from None
    except IsADirectoryError as error:
        raise FileError(str(error)) from None


def _tensors_in(content: mmap.mmap, source: str) -> dict[str, Tensor]:
    start = 8 + int.from_bytes(content[:8], "little")
    if start > min(len(content), _LONGEST_HEADER):
        raise FileError(f"{source} is not a safetensors file: its header would have {start} bytes.")
    described = parse_json(content[8:start].decode("utf-8", "replace"), _HEADER, source)
    found = {}
    for name, one in described.items():
        dtype, shape, (first, last) = _DTYPES[one["dtype"]], one["shape"], one["data_offsets"]
        if last - first != _bytes(dtype, shape) or start + last > len(content):
            raise FileError(f"{source} is not a safetensors file: {name!r} does not fit into it.")
        count = math.prod(shape)
        if (start + first) % dtype.itemsize:
            raise FileError(f"{source}: {name!r} lies at an odd address.")
        flat = torch.empty(0, dtype=dtype)
        if count:
            flat = torch.frombuffer(content, dtype=dtype, count=count, offset=start + first)
        found[name] = flat.view(shape)
    return found
