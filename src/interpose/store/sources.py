"""Where texts come from: lists, files, data sets, iterators. All are cut into shards of a fixed number of texts.

What can be counted and indexed is; an iterator is gone through, and goes on from its own state where it has one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from interpose.errors import FileError

Item = str | Sequence[int]
"""A text, or the tokens of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Some texts that are done together, wherever.

    Attributes:
        number: which shard it is.
        first: the number of its first text.
        items: its texts, or their tokens.
        last: whether nothing comes after it.
        resume: where the source was after it, as data; None if it cannot tell.
    """

    number: int
    first: int
    items: tuple[Item, ...]
    last: bool
    resume: Any = None


class Done(NamedTuple):
    """What is known of a shard that was done: what `Shard.resume` was, and the hash of its texts."""

    resume: Any = None
    digest: str | None = None


class Source(Protocol):
    """Texts in a fixed order."""

    count: int | None

    def fingerprint(self) -> str | None:
        """A hash of all of them, where that can be had without using them up."""

    def peek(self, count: int) -> list[Item]:
        """The first of them."""

    def shards(self, size: int, done: Mapping[int, Done]) -> Iterator[Shard]:
        """Those that are not done yet.

        Args:
            size: how many texts a shard has.
            done: what is done, by number.
        """


class Indexed:
    """Texts that can be counted and taken by their number."""

    def __init__(
        self, count: int, take: Callable[[int, int], Sequence[Item]], fingerprint: Callable[[], str]
    ) -> None:
        self.count: int | None = count
        self._take = take
        self.fingerprint = fingerprint

    def peek(self, count: int) -> list[Item]:
        """The first of them."""
        assert self.count is not None
        return list(self._take(0, min(count, self.count)))

    def shards(self, size: int, done: Mapping[int, Done]) -> Iterator[Shard]:
        """Those that are not done yet."""
        assert self.count is not None
        for number, first in enumerate(range(0, self.count, size)):
            if number not in done:
                end = min(first + size, self.count)
                items = tuple(self._take(first, end))
                yield Shard(number=number, first=first, items=items, last=end == self.count)


class Streamed:
    """Texts that come one by one, from an iterator or an iterable that may know where it is.

    Args:
        items: an iterable; with ``state_dict`` and ``load_state_dict``, as streamed data sets have, a harvest goes on
            where it was without going through what came before.
        text: what makes a text of one of its items.
    """

    def __init__(self, items: Any, text: Callable[[Any], Item]) -> None:
        self.count: int | None = None
        self._items, self._text = items, text
        self._head: deque[tuple[Item, Any]] = deque()
        self._at: Any = None
        self._rest: Iterator[Any] | None = None

    def fingerprint(self) -> str | None:
        """Unknown until it is used up; each commit has the hash of its own texts."""
        return None

    def peek(self, count: int) -> list[Item]:
        """The first of them, which are kept for the harvest."""
        if self._rest is None:
            self._rest = iter(self._items)
        for item in islice(self._rest, max(0, count - len(self._head))):
            self._head.append((self._text(item), self._state()))
        return [item for item, _ in islice(self._head, count)]

    def shards(self, size: int, done: Mapping[int, Done]) -> Iterator[Shard]:
        """Those that are not done yet."""
        number = 0
        while number in done:
            number += 1
        state = done[number - 1].resume if number else None
        rest: Iterator[Item]
        if state is not None and hasattr(self._items, "load_state_dict"):
            self._items.load_state_dict(state)
            rest = self._all(iter(self._items))
        else:
            number = 0
            stream = iter(self._items) if self._rest is None else self._rest
            self._rest = None
            rest = self._all(stream)
        items = list(islice(rest, size))
        while items:
            resume, more = self._at, list(islice(rest, 1))
            if number in done:
                _must_be(items, done[number].digest, number)
            else:
                yield Shard(
                    number=number,
                    first=number * size,
                    items=tuple(items),
                    last=not more,
                    resume=resume,
                )
            items = more + list(islice(rest, size - 1)) if more else []
            number += 1

    def _all(self, rest: Iterator[Any]) -> Iterator[Item]:
        while self._head:
            item, self._at = self._head.popleft()
            yield item
        for one in rest:
            self._at = self._state()
            yield self._text(one)

    def _state(self) -> Any:
        """Where it is, if it says that in a form that JSON has."""
        if not hasattr(self._items, "state_dict"):
            return None
        state = self._items.state_dict()
        try:
            return json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError):
            return None


def source_of(
    texts: Any, column: str = "text", rows: Callable[[Any], list[list[int]]] | None = None
) -> Source:
    """A source of whatever users have.

    Args:
        texts: a text, several, tokens, a file of lines (``.txt``) or of JSON lines (``.jsonl``), a data set, an
            iterator.
        column: which field of records is the text.
        rows: what reads tensors and mappings of tokens, without their padding.
    """
    if isinstance(texts, str) and not _is_file(texts):
        texts = [texts]
    if isinstance(texts, (str, os.PathLike)):
        return _file(Path(texts), column)
    if isinstance(texts, (Tensor, Mapping)) or _is_tokens(texts):
        assert rows is not None
        return _listed(rows(texts))
    if isinstance(texts, (list, tuple)):
        return _listed([_text_of(one, column) for one in texts])
    if hasattr(texts, "__len__") and hasattr(texts, "__getitem__"):
        return _dataset(texts, column)
    if hasattr(texts, "__iter__"):
        return Streamed(texts, lambda item: _text_of(item, column))
    raise TypeError(
        f"texts are a text, several, tokens, a file, a data set or an iterator; got {type(texts).__name__}."
    )


def _must_be(items: Sequence[Item], known: str | None, number: int) -> None:
    """Refuse texts that are not those that were done, as far as that is known."""
    if known is not None and digest(items) != known:
        raise FileError(
            f"shard {number} was made of other texts: the iterator must give the same ones, in the same order, as when "
            "the store was begun. Give another folder for these."
        )


def digest(items: Sequence[Item]) -> str:
    """A hash of texts, in their order."""
    made = hashlib.sha256()
    for item in items:
        content = item.encode() if isinstance(item, str) else repr(list(item)).encode()
        made.update(b"%d %d:" % (isinstance(item, str), len(content)))
        made.update(content)
    return made.hexdigest()


def _is_file(text: str) -> bool:
    return len(text) < 1000 and "\n" not in text and text.endswith((".txt", ".jsonl", ".json"))


def _is_tokens(texts: Any) -> bool:
    if not isinstance(texts, (list, tuple)) or not texts:
        return False
    first = texts[0]
    return isinstance(first, (int, Tensor)) or (
        isinstance(first, (list, tuple)) and all(isinstance(one, int) for one in first)
    )


def _listed(items: list[Any]) -> Source:
    return Indexed(len(items), lambda first, end: items[first:end], lambda: digest(items))


def _text_of(item: Any, column: str) -> Item:
    if isinstance(item, Mapping):
        if column not in item:
            there = ", ".join(map(repr, item))
            raise ValueError(f"a record has no field {column!r}; it has {there}. Say column=.")
        item = item[column]
    if isinstance(item, Tensor):
        item = item.tolist()
    if not isinstance(item, (str, list, tuple)):
        raise TypeError(f"a text is a string, or tokens in a list; got {type(item).__name__}.")
    return item


def _dataset(texts: Any, column: str) -> Source:
    """A data set that is indexed by number, and may know its own fingerprint."""

    def take(first: int, end: int) -> list[Item]:
        return [_text_of(texts[number], column) for number in range(first, end)]

    known = getattr(texts, "_fingerprint", None)
    count = len(texts)
    return Indexed(count, take, lambda: f"dataset:{known}" if known else digest(take(0, count)))


def _file(path: Path, column: str) -> Source:
    """Lines of a file, each at its own place in it, so that none before it has to be read."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}.")
    if path.suffix not in (".txt", ".jsonl", ".json"):
        raise FileError(
            f"{str(path)!r}: texts are read from .txt (a text a line) and .jsonl files."
        )
    made, starts = hashlib.sha256(), []
    with path.open("rb") as file:
        at = 0
        for line in file:
            made.update(line)
            if line.strip():
                starts.append(at)
            at += len(line)

    def take(first: int, end: int) -> list[Item]:
        found = []
        with path.open("rb") as file:
            for number in range(first, end):
                file.seek(starts[number])
                found.append(_line(file.readline(), path, number, column))
        return found

    return Indexed(len(starts), take, lambda: f"file:{made.hexdigest()}")


def _line(content: bytes, path: Path, number: int, column: str) -> Item:
    try:
        text = content.decode().rstrip("\r\n")
        return text if path.suffix == ".txt" else _text_of(json.loads(text), column)
    except ValueError as error:
        raise FileError(f"{str(path)!r}, text {number}: {error}") from None
