"""Texts as rows of tokens, and which rows are in memory and run together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from interpose.models.running.rows import read, tokens_of
from interpose.models.running.text import raise_empty
from interpose.models.transformer import TransformerModel
from interpose.store.sources import Item, Source, source_of

_LONGEST = 2048
_SAMPLE = 1000


class Row(NamedTuple):
    """Tokens that run by themselves: a text, or a piece of a long one."""

    tokens: list[int]
    text: int
    start: int


def rows_of(
    model: TransformerModel,
    items: Sequence[Item],
    first: int,
    *,
    prepend_bos: bool | None,
    length: int,
) -> list[Row]:
    """Texts as rows; one of more tokens than a row may have becomes several.

    Args:
        model: for its tokenizer.
        items: texts, or tokens.
        first: the number of the first text.
        prepend_bos: as in ``to_tokens``; a token with which every text begins also begins the further rows of it.
        length: how many tokens a row has at most.
    """
    texts = [number for number, item in enumerate(items) if isinstance(item, str)]
    encoded = {}
    if texts:
        said = [str(items[number]) for number in texts]
        encoded = dict(zip(texts, model._encode(said, prepend_bos, False)))
        if not all(encoded.values()):
            raise_empty(said, [encoded[number] for number in texts])
    found = []
    for number, item in enumerate(items):
        tokens = encoded[number] if number in encoded else [int(token) for token in item]
        head = tokens[:1] if number in encoded and _begins(model, tokens, prepend_bos) else []
        body, step = tokens[len(head) :], length - len(head)
        for start in range(0, max(1, len(body)), step):
            row = head + body[start : start + step]
            found.append(Row(row, first + number, start))
        if not tokens:
            raise ValueError(f"text {first + number} has no tokens, so there is nothing to run.")
    return found


def _begins(model: TransformerModel, tokens: list[int], prepend_bos: bool | None) -> bool:
    bos = model._bos()
    if bos is None or tokens[:1] != [bos]:
        return False
    return prepend_bos is True or (prepend_bos is None and model._adds(bos))


def windows(rows: Iterable[Row], most: int) -> Iterator[list[Row]]:
    """Rows that are in memory together: of at most so many tokens, or one row."""
    held: list[Row] = []
    count = 0
    for row in rows:
        if held and count + len(row.tokens) > most:
            yield held
            held, count = [], 0
        held.append(row)
        count += len(row.tokens)
    if held:
        yield held


def batches_of(rows: Sequence[Row], most: int) -> list[list[int]]:
    """Which rows run together: those of like lengths, of at most so many tokens with their padding."""
    order = sorted(range(len(rows)), key=lambda number: (-len(rows[number].tokens), number))
    found: list[list[int]] = []
    for number in order:
        longest = len(rows[found[-1][0]].tokens) if found else 0
        if found and longest * (len(found[-1]) + 1) <= most:
            found[-1].append(number)
        else:
            found.append([number])
    return [sorted(batch) for batch in found]


def texts_of(model: TransformerModel, texts: Any, column: str) -> Source:
    """A source of whatever users have: see `source_of`. Padding of tokens is taken off."""
    return source_of(
        texts, column, lambda given: [tokens_of(row).tolist() for row in read(model, given)]
    )


def row_length(model: TransformerModel, length: int | None) -> int:
    """How many tokens a row has at most: what was asked for, or the model's context."""
    known = getattr(model._text_config(), "max_position_embeddings", None)
    most = known if isinstance(known, int) and known > 0 else None
    if length is None:
        return min(most or _LONGEST, _LONGEST)
    if length < 2 or (most is not None and length > most):
        raise ValueError(
            f"length is 2 to {most or 'any number'}: how many tokens a row has; got {length}."
        )
    return length


def first_rows(
    model: TransformerModel, source: Source, prepend_bos: bool | None, length: int | None
) -> tuple[list[Row], int]:
    """The rows of the first texts, and how many texts these are: what is known beforehand of all of them."""
    some = source.peek(_SAMPLE)
    if not some:
        raise ValueError("there is no text: give at least one.")
    rows = rows_of(model, some, 0, prepend_bos=prepend_bos, length=row_length(model, length))
    return rows, len(some)


def tokens_a_text(
    model: TransformerModel, source: Source, prepend_bos: bool | None, length: int | None
) -> float:
    """How many tokens a text has, by the first of them."""
    rows, texts = first_rows(model, source, prepend_bos, length)
    return sum(len(row.tokens) for row in rows) / texts
