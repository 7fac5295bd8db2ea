"""The texts of a sweep: clean and corrupted ones, token by token beside each other, in batches of one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interpose.models.running.text import is_text


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
    model: Any,
    clean: Any,
    corrupt: Any,
    *,
    size: int,
    prepend_bos: bool | None,
    align: str | None,
) -> list[Batch]:
    """Examples in batches of texts of one length, the shortest first.

    Args:
        model: for its tokenizer, and for what padding needs.
        clean: a text, several, tokens, or a mapping of what the module takes.
        corrupt: likewise, as many; None for none.
        size: how many examples run together, at most.
        prepend_bos: as in ``to_tokens``, for texts.
        align: ``end`` pads the shorter text of a pair at the left; None refuses pairs of different lengths.
    """
    if align not in (None, "end"):
        raise ValueError(f"align is 'end' or None; got {align!r}")
    if size < 1:
        raise ValueError(f"batch_size is at least 1; got {size}")
    mappings = [isinstance(each, Mapping) for each in (clean, corrupt) if each is not None]
    if any(mappings):
        if not all(mappings):
            raise TypeError("clean and corrupt are both texts or tokens, or both mappings.")
        return [_given(model, clean, corrupt)]
    rows = _rows(model, clean, prepend_bos)
    others = None if corrupt is None else _rows(model, corrupt, prepend_bos)
    if not rows:
        raise ValueError("there is no text: give at least one.")
    if others is not None and len(rows) != len(others):
        raise ValueError(f"{len(rows)} clean texts and {len(others)} corrupted ones.")
    if others is not None and align is None:
        _must_match(model, rows, others)
    lengths = [
        max(len(row), 0 if others is None else len(others[number]))
        for number, row in enumerate(rows)
    ]
    found = []
    for length in sorted(set(lengths)):
        numbers = [number for number, other in enumerate(lengths) if other == length]
        for at in range(0, len(numbers), size):
            some = numbers[at : at + size]
            made = [
                None if each is None else _padded(model, [each[number] for number in some], length)
                for each in (rows, others)
            ]
            assert made[0] is not None
            found.append(_batch(some, made[0], made[1]))
    return found


def _padded(model: Any, rows: Sequence[Tensor], length: int) -> dict[str, Tensor]:
    """What the module takes for tokens, those of shorter texts padded at the left."""
    if all(len(row) == length for row in rows):
        whole = torch.stack(list(rows)).to(model.device)
        return dict(model._with_mask(whole, model.mask_of(whole)))
    tokens, mask = model._as_batch([row.tolist() for row in rows], "left")
    missing = length - tokens.shape[1]
    if missing:
        fill = torch.nn.functional.pad
        tokens = fill(tokens, (missing, 0), value=model._filler())
        mask = fill(torch.ones_like(tokens[:, missing:]) if mask is None else mask, (missing, 0))
    return dict(model._with_mask(tokens, mask))


def _given(model: Any, clean: Mapping[str, Any], corrupt: Any) -> Batch:
    """One batch of what the module takes."""
    made = [
        None if each is None else {name: _placed(model, each, name) for name in each}
        for each in (clean, corrupt)
    ]
    assert made[0] is not None
    if made[1] is not None and made[1]["input_ids"].shape != made[0]["input_ids"].shape:
        shapes = [tuple(each["input_ids"].shape) for each in made if each is not None]
        raise ValueError(f"clean tokens are {shapes[0]} and corrupted ones {shapes[1]}.")
    return _batch(range(len(made[0]["input_ids"])), made[0], made[1])


def _placed(model: Any, given: Mapping[str, Any], name: str) -> Tensor:
    """One thing that the module takes, where the model is; it must have a number for each token."""
    tokens, value = given.get("input_ids"), given[name]
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        raise ValueError("a mapping of what the module takes has input_ids, tokens [batch, pos].")
    if not isinstance(value, Tensor) or value.shape != tokens.shape:
        what = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"{name!r} is {what}: a sweep takes tensors of the shape of input_ids, {tuple(tokens.shape)}, whose rows "
            "and positions can be told apart."
        )
    return value.to(model.device)


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


def _rows(model: Any, given: Any, prepend_bos: bool | None) -> list[Tensor]:
    """Each text as its own tokens, none padded."""
    if not hasattr(model, "to_tokens"):
        raise TypeError(
            f"a model of transformers is wrapped first: ip.wrap(module, tokenizer), or ip.load(name); got "
            f"{type(model).__name__}."
        )
    given = given if isinstance(given, (str, Tensor)) else list(given)
    if is_text(given):
        texts = [given] if isinstance(given, str) else given
        rows = [model.to_tokens(text, prepend_bos=prepend_bos, truncate=False)[0] for text in texts]
        most, longest = model._longest_text(), max(len(row) for row in rows)
        if most is not None and longest > most:
            raise ValueError(
                f"a text has {longest} tokens, and the model {most} positions. Cut it yourself: where it ends is where "
                "the answer is read."
            )
        return rows
    if isinstance(given, Tensor):
        tokens = given if given.ndim == 2 else given[None]
        return list(tokens.to(model.device))
    rows = [torch.as_tensor(row, device=model.device) for row in given]
    if any(row.ndim != 1 for row in rows):
        raise TypeError(
            "texts are strings, or tokens as a tensor [batch, pos] or a list for each text; got "
            f"{str(given)[:60]}."
        )
    return rows


def _must_match(model: Any, rows: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Refuse pairs whose tokens are not beside each other, and show them."""
    for number, (row, other) in enumerate(zip(rows, others)):
        if len(row) != len(other):
            raise ValueError(
                f"pair {number} has {len(row)} and {len(other)} tokens, so that positions do not correspond:\n"
                f"  clean:   {_shown(model, row)}\n  corrupt: {_shown(model, other)}\n"
                "Choose words of as many tokens; in ip.sweep, align='end' lets both end together."
            )


def _shown(model: Any, row: Tensor) -> str:
    if model._tokenizer_or_none() is None:
        return str(row.tolist())
    return " | ".join(model.to_single_str_token(token) for token in row.tolist())
