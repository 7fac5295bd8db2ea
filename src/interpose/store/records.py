"""What a store's JSON files say: `About`, what all of it is of, and `Commit`, that a segment is there.

```text
store.json                      About: written first, once
hooks/                          the edits that were live while harvesting, if there were any
commits/00000042.json           Commit: a segment counts when this is there
segments/00000042-9f86d081/     index.safetensors, statistics.safetensors, blocks.3.hook_resid_post.safetensors
unfinished/                     what a writer is at; nobody reads it
```

Commits are created where none is, so of two writers of a segment one counts. Both files hold nothing of the time or the
machine: the same harvest writes the same bytes. Files that no commit names are nobody's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import torch

from interpose.errors import FileError
from interpose.files.reading import parse_json, read_bytes
from interpose.files.schema import (
    ANYTHING,
    NULL,
    Either,
    Field,
    ListOf,
    MapOf,
    OneOf,
    Record,
    Text,
    Whole,
    record_of,
    shown,
)
from interpose.names import Speller
from interpose.store.tensor_files import NAMES, Written

FORMAT, VERSION = "interpose.store", 1
ABOUT, COMMITS, SEGMENTS, UNFINISHED, HOOKS = (
    "store.json",
    "commits",
    "segments",
    "unfinished",
    "hooks",
)
INDEX, STATISTICS = "index.safetensors", "statistics.safetensors"
UNKNOWN = -1
"""What a store has for tokens that were not kept, where others cached its values."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}
"""Dtypes by the words of files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSite:
    """A site of a store.

    Attributes:
        shape: of one vector: ``(768,)``, or by head ``(12, 64)``.
        dtype: as it is stored; ``int8`` has a scale for each vector.
        made: the dtype that the model computed it in.
        axes: what the axes of a vector count.
        aliases: its other names.
    """

    shape: tuple[int, ...]
    dtype: str
    made: str
    axes: tuple[str, ...] = ()
    kind: str | None = None
    layer: int | None = None
    aliases: tuple[str, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in which it is stored."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """How many bytes a vector has."""
        scale = 2 if self.dtype == "int8" else 0
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize + scale

    @property
    def dtype_made(self) -> torch.dtype:
        """The dtype in which vectors come before they are stored."""
        return DTYPES[self.made if self.dtype == "int8" else self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAbout:
    """Which model the values are of.

    Attributes:
        name: what it was loaded from, as far as it knows.
        kind: its class.
        config: a hash of its config.
        weights: a hash of its parameters and buffers, the same on every device.
        dtype: of its first parameter.
    """

    name: str
    kind: str
    config: str
    weights: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsAbout:
    """Which texts they are, and how they became rows.

    Attributes:
        fingerprint: a hash of all of them; None where they come one by one, and each commit has that of its own.
        count: how many there are; None if it was not known beforehand.
        tokenizer: a hash of the tokenizer; None if tokens were given.
        prepend_bos: as in ``to_tokens``.
        length: how many tokens a row has at most.
    """

    fingerprint: str | None
    count: int | None
    tokenizer: str | None
    prepend_bos: bool | None
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the work is cut; the same cut gives the same bytes.

    Attributes:
        texts: how many texts a segment has.
        window: how many tokens are in memory at a time, of one segment.
        batch_tokens: how many tokens run together, padding included.
    """

    texts: int
    window: int
    batch_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a store is of. Two harvests go into one store if all of this but the versions is the same.

    Attributes:
        pos: which positions of each row were kept; None for all.
        hooks: what was live meanwhile, by its label; edits are in ``hooks/``, functions cannot be.
        edits: a hash of the edits.
        versions: of the packages that made it.
        names: the names of the model's sites.
    """

    model: ModelAbout
    texts: TextsAbout
    sites: Mapping[str, StoredSite]
    pos: Any
    plan: Plan
    hooks: tuple[str, ...] = ()
    edits: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Itself as a file has it."""
        return _canonical({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, 1)

    @classmethod
    def read(cls, path: Path) -> Self:
        """What `to_json` wrote to a file, checked."""
        return cls.from_json(read_bytes(path).decode("utf-8", "replace"), repr(str(path)))

    @classmethod
    def from_json(cls, text: str, source: str) -> Self:
        """What `to_json` wrote, checked.

        Args:
            text: as JSON.
            source: what errors call it.
        """
        data = parse_json(text, None, source)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise FileError(f"{source} is not of a store that interpose wrote.")
        if data.get("version") != VERSION:
            raise FileError(
                f"{source} is of version {shown(data.get('version'))}, and this interpose reads {VERSION}."
            )
        rest = {name: one for name, one in data.items() if name not in ("format", "version")}
        about = _ABOUT(rest, Field(source))
        made = {
            **about,
            "model": ModelAbout(**about["model"]),
            "texts": TextsAbout(**about["texts"]),
            "plan": Plan(**about["plan"]),
            "sites": {name: StoredSite(**_tuples(one)) for name, one in about["sites"].items()},
        }
        return cls(**_tuples(made))

    def differs(self, other: Self) -> str | None:
        """In what it is not the store that another harvest would fill, in words; None if it is the same."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        for name in ("versions", "names"):
            mine.pop(name), theirs.pop(name)
        for name, value in _flat(mine).items():
            new = _flat(theirs).get(name)
            if _canonical(new) != _canonical(value):
                return f"{name} is {shown(value)} there, and {shown(new)} here"
        more = set(_flat(theirs)) - set(_flat(mine))
        return f"{min(more)} is not there" if more else None

    @property
    def speller(self) -> Speller:
        """The names of the model's sites."""
        return Speller(**self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A segment that is there.

    Attributes:
        segment: its number.
        folder: where it is, below ``segments/``; the name has a hash of what it holds.
        texts: the first of its texts, and the one after its last.
        rows: how many rows it has.
        tokens: how many tokens they have.
        vectors: how many vectors each site has.
        files: by name, their sizes and checksums.
        digest: a hash of its texts.
        last: whether no texts come after it.
        resume: where the source of texts was after it, if it can tell.
    """

    segment: int
    folder: str
    texts: tuple[int, int]
    rows: int
    tokens: int
    vectors: int
    files: Mapping[str, Written]
    digest: str
    last: bool
    resume: Any = None

    def to_json(self) -> str:
        """Itself as a file has it, with a checksum of itself."""
        text = _canonical(dataclasses.asdict(self))
        return _canonical({"commit": json.loads(text), "sha256": _hash(text)}) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """What `to_json` wrote to a file, checked."""
        return cls.from_json(read_bytes(path).decode("utf-8", "replace"), repr(str(path)))

    @classmethod
    def from_json(cls, text: str, source: str) -> Self:
        """What `to_json` wrote, checked.

        Args:
            text: as JSON.
            source: what errors call it.
        """
        said = parse_json(text, _COMMIT, source)
        if _hash(_canonical(said["commit"])) != said["sha256"]:
            raise FileError(
                f"{source} is not what was committed: its checksum is another. Delete it, and the same ip.harvest(...) "
                "makes its segment anew."
            )
        data = _SEGMENT(said["commit"], Field(source))
        folder = Field(source).of("folder")
        if not re.fullmatch(r"\d{8,}-[0-9a-f]{8}", data["folder"]):
            raise folder.wrong(data["folder"], "the name of a folder such as '00000042-9f86d081'")
        files = {name: Written(**one) for name, one in data["files"].items()}
        for name in files:
            if "/" in name or "\\" in name or name.startswith(".") or "\0" in name:
                raise Field(source).of("files").wrong(name, "a name of a file without a folder")
        return cls(**{**data, "files": files, "texts": tuple(data["texts"])})


@dataclass(frozen=True, slots=True)
class _Checksum:
    """A hash as files have it."""

    what: str = "64 of the signs 0 to 9 and a to f"

    def __call__(self, value: Any, field: Field) -> str:
        """The same."""
        if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
            raise field.wrong(value, self.what)
        return value


_COUNT, _SIZE = Whole(0), Whole(1, 2**31)
_SITE = record_of(
    StoredSite,
    shape=ListOf(_SIZE, 8),
    dtype=OneOf(*DTYPES),
    made=OneOf(*DTYPES),
    layer=Either(Whole(0, 2**31), NULL),
)
_ABOUT = record_of(
    About,
    sites=MapOf(_SITE, Text(1000), 100_000),
    texts=record_of(TextsAbout, length=_COUNT, count=Either(_COUNT, NULL)),
    plan=record_of(Plan, texts=_COUNT, window=_COUNT, batch_tokens=_COUNT),
    names=record_of(Speller),
    pos=ANYTHING,
)
_SEGMENT = record_of(
    Commit,
    segment=_COUNT,
    texts=ListOf(_COUNT, 2, 2),
    rows=Whole(0, 2**31 - 1),
    tokens=Whole(0, 2**31 - 1),
    vectors=Whole(0, 2**31 - 1),
    files=MapOf(record_of(Written, size=_COUNT, sha256=_Checksum()), Text(300), 100_000),
    resume=ANYTHING,
)
_COMMIT = Record({"commit": MapOf(ANYTHING), "sha256": _Checksum()})


def commit_name(segment: int) -> str:
    """What the record of a segment is called."""
    return f"{segment:08d}.json"


def folder_name(segment: int, files: Mapping[str, Written]) -> str:
    """What the folder of a segment is called: two writers whose values differ do not write into one."""
    held = _canonical({name: one.sha256 for name, one in files.items()})
    return f"{segment:08d}-{_hash(held)[:8]}"


def file_name(site: str) -> str:
    """What the file of a site is called."""
    name = quote(site, safe="._- ").lstrip(".")
    return f"{name if len(name) <= 200 else name[:180] + '-' + _hash(site)[:16]}.safetensors"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical(data: Any, indent: int | None = None) -> str:
    """JSON in which the same data is always the same text."""
    return json.dumps(data, sort_keys=True, indent=indent, allow_nan=False, ensure_ascii=True)


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(one) if isinstance(one, list) else one for name, one in data.items()}


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Fields of fields, by names with dots."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        found |= (
            _flat(value, f"{prefix}{name}.")
            if isinstance(value, dict) and value
            else {f"{prefix}{name}": value}
        )
    return found
