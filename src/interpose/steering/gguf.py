"""Control vectors of llama.cpp: GGUF files whose tensors ``direction.N`` are added after the blocks of their numbers.

llama.cpp adds ``direction.N`` to what block N gives to the stream, so it is our ``resid_post`` of layer N; it has no
place for layer 0. Of the format (version 3, little-endian) only what such files have is written here; the package that
writes all of it brings a web client along, trusts what it reads, and is what the tests compare with.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.errors import FileError, Unsupported
from interpose.files.reading import read_bytes
from interpose.files.schema import shown
from interpose.files.writing import write_whole

if TYPE_CHECKING:
    from interpose.steering.vector import SteeringVector

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
LARGEST = 2**30
"""How many bytes a file may have."""
_UINT32, _STRING, _ARRAY, _F32 = 4, 8, 9, 0
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_DTYPES = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
_MOST = 100_000  # fields, or tensors


def save_control_vector(vector: SteeringVector, path: str | Path) -> Path:
    """Write a steering vector as llama.cpp and repeng read it: ``llama-cli --control-vector FILE``.

    Args:
        vector: at ``resid_post``.
        path: the file.
    """
    if vector.site != "resid_post" or vector.head is not None:
        raise Unsupported(
            f"llama.cpp adds control vectors to the stream after blocks, 'resid_post'; this one is of {vector.site!r}."
        )
    if 0 in vector.layers:
        raise Unsupported(
            "llama.cpp has no place for the direction of layer 0. Leave it out: vector.only("
            f"{', '.join(str(layer) for layer in vector.layers if layer) or 'another layer'})."
        )
    fields = [
        _string("general.architecture") + struct.pack("<I", _STRING) + _string("controlvector"),
        _string("controlvector.model_hint")
        + struct.pack("<I", _STRING)
        + _string(vector.model_type),
        _string("controlvector.layer_count") + struct.pack("<II", _UINT32, len(vector.layers)),
    ]
    infos, data = [], b""
    for layer in sorted(vector.layers):
        row = vector[layer].detach().cpu().float()
        infos.append(
            _string(f"direction.{layer}") + struct.pack("<IQIQ", 1, len(row), _F32, len(data))
        )
        data += _padded(row.contiguous().numpy().astype("<f4").tobytes())
    head = MAGIC + struct.pack("<IQQ", 3, len(infos), len(fields)) + b"".join(fields + infos)
    return write_whole(path, _padded(head) + data)


def load_control_vector(kind: type[SteeringVector], path: str | Path) -> Any:
    """A steering vector out of a control vector of llama.cpp, of whoever wrote it.

    Args:
        kind: `ip.SteeringVector`.
        path: the file.
    """
    fields, tensors = _Reader(read_bytes(path, LARGEST), repr(str(path))).read()
    source = repr(str(path))
    architecture = fields.get("general.architecture")
    if architecture != "controlvector":
        raise FileError(
            f"{source} is a GGUF file of {shown(architecture)}, and not of a controlvector."
        )
    by_layer = {}
    for name, row in tensors.items():
        stem, _, number = name.rpartition(".")
        if stem != "direction" or not (number.isascii() and number.isdigit()) or len(number) > 6:
            raise FileError(f"{source} has the tensor {shown(name)}, and no direction.N.")
        if int(number) == 0:
            raise FileError(f"{source} has direction.0, which llama.cpp has no place for.")
        if int(number) in by_layer:
            raise FileError(f"{source} has the direction of layer {int(number)} twice.")
        by_layer[int(number)] = row
    widths = {tuple(row.shape) for row in by_layer.values()}
    if len(widths) != 1 or len(next(iter(widths))) != 1:
        raise FileError(
            f"{source} has directions of shapes {shown(sorted(widths))}: one size of one axis is needed."
        )
    hint = fields.get("controlvector.model_hint", "")
    if not isinstance(hint, str):
        raise FileError(f"{source}: controlvector.model_hint is {shown(hint)}, and no text.")
    layers = sorted(by_layer)
    rows = torch.stack([by_layer[layer] for layer in layers])
    if not bool(torch.isfinite(rows).all()):
        raise FileError(f"{source} has directions that are no finite numbers.")
    protocol = {"file": Path(path).name}
    return kind(
        site="resid_post", layers=layers, directions=rows, model_type=hint, protocol=protocol
    )


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % ALIGNMENT)


@dataclass(slots=True)
class _Reader:
    """Goes through the bytes of a file; whatever is said about sizes is compared with what is there first."""

    raw: bytes
    source: str
    at: int = 0

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The fields, and the tensors."""
        if self.raw[:4] != MAGIC:
            raise FileError(f"{self.source} is no GGUF file.")
        self.at = 4
        version = self.number("I")
        if version not in VERSIONS:
            raise self.wrong(f"is of GGUF version {version}, and versions 2 and 3 are read")
        tensors, fields = self.count("tensors"), self.count("fields")
        said: dict[str, Any] = {}
        for _ in range(fields):
            name = self.text()
            if name in said:
                raise self.wrong(f"has the field {shown(name)} twice")
            said[name] = self.value(self.number("I"))
        infos = [self.info() for _ in range(tensors)]
        alignment = said.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**16:
            raise self.wrong(f"aligns its tensors to {shown(alignment)} bytes")
        start = self.at + -self.at % alignment
        found: dict[str, Tensor] = {}
        for name, shape, dtype, offset in infos:
            if name in found:
                raise self.wrong(f"has the tensor {shown(name)} twice")
            found[name] = self.tensor(name, shape, dtype, start + offset)
        return said, found

    def wrong(self, what: str) -> FileError:
        return FileError(f"{self.source} {what}.")

    def take(self, size: int) -> bytes:
        if size > len(self.raw) - self.at:
            raise self.wrong("ends before all that it announces")
        self.at += size
        return self.raw[self.at - size : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def count(self, what: str) -> int:
        found: int = self.number("Q")
        if found > _MOST:
            raise self.wrong(f"announces {found} {what}")
        return found

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise self.wrong("has a text that is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise self.wrong(f"has a field of type {kind}, which GGUF does not have")
        inner, count = self.number("I"), self.number("Q")
        if inner == _STRING:
            return [self.text() for _ in range(self.fitting(count, 8))]
        if inner not in _NUMBERS:
            raise self.wrong(f"has a list of type {inner}")
        size = struct.calcsize(f"<{_NUMBERS[inner]}")
        raw = self.take(self.fitting(count, size) * size)
        return list(struct.unpack(f"<{count}{_NUMBERS[inner]}", raw))

    def fitting(self, count: int, size: int) -> int:
        if count * size > len(self.raw) - self.at:
            raise self.wrong("ends before all that it announces")
        return count

    def info(self) -> tuple[str, list[int], torch.dtype, int]:
        """Name, shape, type and place of a tensor."""
        name, axes = self.text(), self.number("I")
        if axes > 4:
            raise self.wrong(f"has a tensor of {axes} axes")
        shape = [self.number("Q") for _ in range(axes)][::-1]
        kind, offset = self.number("I"), self.number("Q")
        if kind not in _DTYPES:
            raise self.wrong(
                f"has {shown(name)} in type {kind}: directions are in 16 to 64 bits, not quantised"
            )
        return name, shape, _DTYPES[kind], offset

    def tensor(self, name: str, shape: list[int], dtype: torch.dtype, start: int) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if start + size > len(self.raw) or not size:
            raise self.wrong(f"has no bytes for {shown(name)} of shape {shape}")
        part = bytearray(self.raw[start : start + size])
        return torch.frombuffer(part, dtype=dtype).reshape(shape).float()
