"""Where a text is among the tokens of a run, in each row of the batch.

The tokens come with the forward pass. While text is generated, a text is looked for in the prompt, so
that it means the same with and without a KV cache; what was found in the prompt is remembered for the
steps after it, and for a checkpoint that repeats a forward pass (which has no tokens with it).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.engine.points import HookPoint
from interpose.errors import NothingSelected, Unsupported
from interpose.models.batching import packed
from interpose.models.running.masks import side_of
from interpose.models.selection import missing_text, spans_of
from interpose.taps.context import graph_task, under_checkpoint

if TYPE_CHECKING:
    from interpose.engine.points import Window


class Seen:
    """The tokens [batch, pos] of a forward pass from position ``first`` on, and where texts are in them."""

    def __init__(self, tokens: Tensor, mask: Tensor | None, first: int) -> None:
        self.tokens = tokens
        self.mask = mask
        self.first = first
        self.marks: dict[tuple[str, int | None], Tensor] = {}  # of values that may be repeated
        self._pieces: dict[int, list[str]] = {}
        self._spans: dict[tuple[str, int], list[range]] = {}

    def pieces(self, model: Any, row: int) -> list[str]:
        """The tokens of a row as strings."""
        if row not in self._pieces:
            self._pieces[row] = list(model.to_str_tokens(self.tokens[row]))
        return self._pieces[row]

    def spans(self, model: Any, text: str, row: int, end: int | None) -> list[range]:
        """Where a text is in a row: tokens that together are this text, and no padding."""
        if (text, row) not in self._spans:
            pieces, ids = self.pieces(model, row), self.tokens[row].tolist()
            alone = model._ids([text], special=False)[0]
            real = [True] * len(ids) if self.mask is None else (self.mask[row] != 0).tolist()
            self._spans[text, row] = [
                range(self.first + span.start, self.first + span.stop)
                for span in spans_of(text, pieces, ids, alone)
                if all(real[span.start : span.stop])
            ]
        return [span for span in self._spans[text, row] if end is None or span.stop <= end]


_MEMORY: weakref.WeakKeyDictionary[Any, dict[int, list[Seen]]] = weakref.WeakKeyDictionary()
"""What each selector has seen: by thread, the passes that may be gone on with or repeated."""
_MOST = 32


def is_text(pos: Any) -> bool:
    """Whether positions are given as texts."""
    if isinstance(pos, str):
        return True
    return isinstance(pos, (list, tuple)) and any(isinstance(one, str) for one in pos)


def by_row(
    where: Any, wanted: Sequence[Any], window: Window, hook: HookPoint, value: Tensor, batch: int
) -> list[Tensor]:
    """The positions of some texts in each row, ascending."""
    if not all(isinstance(text, str) and text for text in wanted):
        raise TypeError(f"{where.label}: pos is numbers or texts, not both; got {wanted!r}.")
    seen = _seen(where, window, hook, value, batch)
    complete = seen.first == 0 and seen.tokens.shape[1] >= window.total
    found = []
    needed = range(batch) if where.rows is None else _rows(where.rows, batch)
    for row in range(batch):
        there: set[int] = set()
        for text in wanted:
            line = row if seen.tokens.shape[0] > 1 else 0
            spans = seen.spans(hook.model, text, line, window.prompt)
            if not spans and complete and row in needed and not where._is_exclusion:
                said = missing_text(text, f"row {row}", seen.pieces(hook.model, line))
                raise NothingSelected(f"{where.label}: {said}")
            pick = {"first": spans[:1], "last": spans[-1:]}.get(where.occurrence, spans)
            there.update(place for span in pick for place in span)
        found.append(torch.tensor(sorted(there), dtype=torch.long, device="cpu"))
    return found


def _rows(chosen: Any, batch: int) -> list[int]:
    if not isinstance(chosen, (slice, Tensor)):
        chosen = [chosen] if isinstance(chosen, int) else list(chosen)
    return torch.arange(batch, device="cpu")[chosen].tolist()


def _seen(where: Any, window: Window, hook: HookPoint, value: Tensor, batch: int) -> Seen:
    """The tokens to look in: those of this pass, or of the prompt that it goes on from."""
    if packed._HERE.get() is not None:
        raise Unsupported(
            f"{where.label}: a position by its text is known to model(...) and model.generate; for "
            "generate_batch give numbers, or one call for each text (model.get_token_position)."
        )
    side = side_of(window.sequence, hook)
    name = f"{side}input_ids"
    tokens = None if side is None else hook.given.get(name)
    mine = _MEMORY.setdefault(where, {}).setdefault(threading.get_ident(), [])
    if tokens is None and graph_task() != -1:
        return _repeated(where, hook, value)
    last = mine[-1] if mine else None
    if window.prompt is not None and window.offset >= window.prompt and last is not None:
        return last  # a step after the prompt, in which alone texts are looked for
    if tokens is None or tokens.ndim != 2 or not hasattr(hook.model, "to_str_tokens"):
        raise Unsupported(
            f"{where.label}: a position by its text needs the tokens of the run and a tokenizer, and "
            f"{hook.name!r} was reached without. Give positions as numbers."
        )
    seen: Seen | None = hook.given.get(f"{name} seen")
    if seen is None:
        mask = hook.given.get(f"{side}attention_mask")
        ids, first = tokens.detach().cpu(), window.offset
        if window.prompt is not None and last is not None and last.tokens.shape[1] == first:
            ids, first = torch.cat([last.tokens, ids], 1), 0  # a prompt that comes in parts
        if mask is not None:
            fits = mask.ndim == 2 and mask.shape[1] >= ids.shape[1]
            mask = mask[:, -ids.shape[1] :].cpu() if fits else None
        seen = Seen(ids, mask, first)
        hook.given[f"{name} seen"] = seen
    if seen.tokens.shape[0] not in (1, batch) or window.offset + tokens.shape[1] != window.end:
        raise Unsupported(
            f"{where.label}: {hook.name!r} has {batch} rows of {window.length} positions, and the run "
            f"{tuple(tokens.shape)} tokens: which belong together is not known. Give numbers."
        )
    if under_checkpoint():
        seen.marks[hook.canonical, hook.call] = _mark(value)
    if last is not seen:
        # Passes that a checkpoint may still repeat stay; the others nobody will ask for.
        mine[:] = [*[one for one in mine if one.marks][-_MOST:], seen]
    return seen


def _mark(value: Tensor) -> Tensor:
    """A number to know a value again by, whatever its size, and also from one with other rows first."""
    flat = value.detach().float().reshape(-1).sin().nan_to_num()
    return flat @ torch.linspace(1, 2, len(flat), device=flat.device)


def _repeated(where: Any, hook: HookPoint, value: Tensor) -> Seen:
    """A checkpoint repeats a forward pass: the one that had this very value."""
    found: list[Seen] = []
    for seen in [one for passes in _MEMORY[where].values() for one in passes]:
        marks = [mark for (name, _), mark in seen.marks.items() if name == hook.canonical]
        if any(torch.equal(mark, _mark(value)) for mark in marks):
            if not any(torch.equal(seen.tokens, known.tokens) for known in found):
                found.append(seen)
    if len(found) != 1:
        raise Unsupported(
            f"{where.label}: activation checkpointing repeats a forward pass, and which one had these tokens "
            f"cannot be known at {hook.name!r}. Give positions as numbers, or as a mask [batch, pos]."
        )
    return found[0]
