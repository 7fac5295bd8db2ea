"""The texts of a sweep: clean and corrupted ones, token by token beside each other, in batches of one length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.models.running.masks import remember
from interpose.models.running.rows import Row, read

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Examples that run together.

    Attributes:
        numbers: the place of each in the dataset.
        clean: what the module takes, each [example, pos].
        corrupt: the same for the corrupted texts; None if there are none.
        first: the first position at which any of them differ; 0 where there is nothing to compare.
    """

    numbers: tuple[int, ...]
    clean: dict[str, Tensor]
    corrupt: dict[str, Tensor] | None
    first: int

    @property
    def length(self) -> int:
        """How many positions."""
        return self.clean["input_ids"].shape[1]


def batches(
    model: TransformerModel,
    clean: Any,
    corrupt: Any,
    *,
    size: int,
    prepend_bos: bool | None,
    align: str | None,
    fit: Callable[[int], int] | None = None,
    together: bool = False,
) -> list[Batch]:
    """Examples in batches of texts of one length, the shortest first.

    Args:
        model: for its tokenizer, and for what padding needs.
        clean: what `rows.read` takes.
        corrupt: likewise, as many; None for none.
        size: how many examples run together, at most.
        fit: how many of a length fit in memory; by default any number.
        prepend_bos: as in ``to_tokens``, for texts.
        align: ``end`` pads the shorter text of a pair at the left; None refuses pairs of different lengths.
        together: whether with ``end`` all pairs end together, and not each two.
    """
    if align not in (None, "end"):
        raise ValueError(f"align is 'end' or None; got {align!r}")
    if size < 1:
        raise ValueError(f"batch_size is at least 1; got {size}")
    found = read(model, clean, prepend_bos)
    others = None if corrupt is None else read(model, corrupt, prepend_bos)
    if not found:
        raise ValueError("there is no text: give at least one.")
    if others is not None and len(found) != len(others):
        raise ValueError(f"{len(found)} clean texts and {len(others)} corrupted ones.")
    if others is not None and align is None:
        _must_match(model, found, others)
    lengths = [
        max(_length(row), 0 if others is None else _length(others[number]))
        for number, row in enumerate(found)
    ]
    if together and align == "end":
        lengths = [max(lengths)] * len(lengths)
    made = []
    for length in sorted(set(lengths)):
        numbers = [number for number, other in enumerate(lengths) if other == length]
        most = size if fit is None else min(size, fit(length))
        for at in range(0, len(numbers), most):
            some = numbers[at : at + most]
            pair = [
                None if rows is None else _stacked(model, [rows[number] for number in some], length)
                for rows in (found, others)
            ]
            assert pair[0] is not None
            made.append(_batch(some, pair[0], pair[1]))
    return made


def _length(row: Row) -> int:
    return len(row["input_ids"])


def _stacked(model: TransformerModel, rows: Sequence[Row], length: int) -> dict[str, Tensor]:
    """What the module takes for rows, shorter ones padded at the left."""
    holes = any("attention_mask" in row for row in rows)
    short = any(_length(row) < length for row in rows)
    fillers = {"input_ids": model._filler() if short else 0}
    masked = [
        {**row, "attention_mask": row.get("attention_mask", torch.ones_like(row["input_ids"]))}
        for row in rows
    ]
    made = {
        name: torch.stack(
            [
                torch.nn.functional.pad(
                    row[name], (length - _length(row), 0), value=fillers.get(name, 0)
                )
                for row in masked
            ]
        )
        for name in masked[0]
    }
    mask = made.pop("attention_mask").long()
    tokens = remember(made.pop("input_ids"), mask)
    return {**model._with_mask(tokens, mask if holes or short else None), **made}


def _batch(
    numbers: Sequence[int], clean: dict[str, Tensor], corrupt: dict[str, Tensor] | None
) -> Batch:
    first = 0
    if corrupt is not None:
        plain = torch.ones_like(clean["input_ids"])
        differ = plain == 0
        for name in {**clean, **corrupt}:
            if name != "attention_mask" and not (name in clean and name in corrupt):
                differ |= plain != 0  # what the module takes instead is not known
            else:
                differ |= clean.get(name, plain) != corrupt.get(name, plain)
        places = differ.any(0).nonzero()
        first = int(places[0]) if len(places) else clean["input_ids"].shape[1]
    return Batch(numbers=tuple(numbers), clean=clean, corrupt=corrupt, first=first)


def _must_match(model: TransformerModel, rows: Sequence[Row], others: Sequence[Row]) -> None:
    """Refuse pairs whose tokens are not beside each other, and show them."""
    for number, (row, other) in enumerate(zip(rows, others)):
        if _length(row) != _length(other):
            raise ValueError(
                f"pair {number} has {_length(row)} and {_length(other)} tokens, so that positions do not correspond:\n"
                f"  clean:   {_shown(model, row)}\n  corrupt: {_shown(model, other)}\n"
                "Choose words with the same number of tokens; in ip.sweep, align='end' lets both end together."
            )


def _shown(model: TransformerModel, row: Row) -> str:
    tokens = row["input_ids"].tolist()
    if model._tokenizer_or_none() is None:
        return str(tokens)
    return " | ".join(model.to_single_str_token(token) for token in tokens)
