"""A JSON file with its tensors in a safetensors file beside it: both are read as one saver wrote them.

The file of tensors is called by a hash of what it holds, so a new one never takes the place of one that is in use. The
JSON file names it and is renamed last. What the one before it named goes then, and no other file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interpose.errors import FileError
from interpose.files.reading import read_bytes, read_json, tensors_in
from interpose.files.schema import Field, Text
from interpose.files.writing import write_whole

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"(?P<stem>[^/\\\0.][^/\\\0]*)-(?P<hash>[0-9a-f]{16})\.safetensors")


def name_of(stem: str, content: bytes) -> str:
    """What a file of tensors is called."""
    return f"{stem}-{_hash(content)}.safetensors"


def save_beside(path: Path, data: Mapping[str, Any], stem: str, content: bytes | None) -> None:
    """Write a JSON file, and its tensors if it has any.

    Args:
        path: of the JSON file.
        data: what it holds.
        stem: how the name of the file of tensors begins.
        content: the tensors, as safetensors has them.
    """
    with _alone(path.parent):
        before = _named_by(path, stem)
        named = {}
        if content is not None:
            named["tensors"] = name_of(stem, content)
            beside = path.with_name(named["tensors"])
            must_stay(beside)
            write_whole(beside, content)
        write_whole(path, json.dumps({**data, **named}, indent=1, allow_nan=False))
        if before is not None and before.name != named.get("tensors"):
            before.unlink(missing_ok=True)


def load_beside(path: Path, device: Any = "cpu") -> tuple[Any, dict[str, Tensor]]:
    """What a JSON file holds, and the tensors beside it.

    Args:
        path: of the JSON file.
        device: where to put the tensors.
    """
    with _alone(path.parent, shared=True):
        data = read_json(path)
        if not isinstance(data, dict) or "tensors" not in data:
            return data, {}
        field = Field(repr(str(path))).of("tensors")
        name = Text(300)(data.pop("tensors"), field)
        found = _NAME.fullmatch(name)
        if found is None:
            raise field.wrong(
                name, "the name of a file beside it, such as 'x-0123456789abcdef.safetensors'"
            )
        beside = path.with_name(name)
        must_stay(beside)
        content = read_bytes(beside)
    if _hash(content) != found["hash"]:
        raise FileError(
            f"{str(beside)!r} is not what was saved there: its name has a hash of it, and that is another."
        )
    return data, tensors_in(content, repr(str(beside)), device)


def must_stay(path: Path) -> None:
    """Refuse a file that is a link out of its folder."""
    real, folder = os.path.realpath(path), os.path.realpath(path.parent)
    if os.path.dirname(real) != folder:  # noqa: PTH120 - of texts
        raise FileError(
            f"{str(path)!r} is a link out of its folder, and what is shared in a folder stays in it."
        )


def _named_by(path: Path, stem: str) -> Path | None:
    """The file of tensors that a JSON file of ours names, if that is what it was."""
    try:
        name = read_json(path)["tensors"]
        found = _NAME.fullmatch(name)
        if found is None or found["stem"] != stem:
            return None
        beside = path.with_name(name)
        if beside.is_symlink() or _hash(read_bytes(beside)) != found["hash"]:
            return None
    except (OSError, ValueError, LookupError, TypeError):
        return None  # no file of ours
    return beside


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


@contextmanager
def _alone(folder: Path, shared: bool = False) -> Iterator[None]:
    """While one saves in a folder, others wait, where folders can be locked; none is left with half of another's."""
    if os.name == "nt":
        yield
        return
    import fcntl

    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network drives have no locks
            fcntl.flock(opened, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)  # which ends the lock
