"""Forward passes over packed tokens: the texts of many requests behind one another, [1, rows, ...].

Continuous batching feeds each pass what its requests need next: a prompt, a part of one, one token. So
a row says nothing by its place; here each gets its request and its position in that request's text.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from interpose.engine.hooks import Detector, Hook, TorchHook, skip
from interpose.engine.points import HookPoint
from interpose.errors import Unsupported
from interpose.models.batching.labelled_rows import Labels
from interpose.taps import values
from interpose.taps.context import Whereabouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive rows of one request: ``length`` of them from row ``start`` on, from position ``first`` on."""

    request: int
    start: int
    length: int
    first: int
    prompt: int
    draws: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The rows of one forward pass. ``cut``: whether the model unembeds only rows that a token is drawn from."""

    spans: Sequence[Span]
    tokens: Sequence[int]
    cut: bool

    @property
    def length(self) -> int:
        """How many rows are text; what comes after them is padding."""
        return len(self.tokens)

    @property
    def drawing(self) -> list[Span]:
        """The requests that get a token from this pass, in the order of what is unembedded."""
        return [span for span in self.spans if span.draws]

    def labels(self, rows: Sequence[int] | None = None) -> Labels:
        """Labels of some rows, by default of all."""
        request = [span.request for span in self.spans for _ in range(span.length)]
        position = [span.first + i for span in self.spans for i in range(span.length)]
        columns = [request, position, list(self.tokens)]
        if rows is not None:
            columns = [[column[row] for row in rows] for column in columns]
        found = [torch.tensor(column, dtype=torch.long, device="cpu") for column in columns]
        return Labels(request=found[0], position=found[1], token=found[2])


_HERE: ContextVar[Packed | None] = ContextVar("packed", default=None)


def packed_rows() -> Labels:
    """Inside a hook that `generate_batch` calls: whose the rows of its value are.

    ```python
    def only_the_third_token(value, hook):      # value: [1, row, d_model]
        value[0, packed_rows().position == 2] = 0
    ```
    """
    return here_and_now().labels()


def here_and_now() -> Packed:
    """The batch that is in the model."""
    here = _HERE.get()
    if here is None:
        raise RuntimeError("packed_rows() is for hooks that generate_batch calls; none is running.")
    return here


@contextmanager
def packed(batch: Packed) -> Iterator[None]:
    """While a batch is in the model."""
    token = _HERE.set(batch)
    try:
        yield
    finally:
        _HERE.reset(token)


# Hooks that see one request at a time.


def apart(hook: Hook, *, always: bool) -> Hook:
    """A hook that is shown each request's rows by themselves, if it must be or that is wished."""
    if not (always or looks_at_positions(hook)):
        return hook
    if isinstance(hook, (TorchHook, skip)):
        raise Unsupported(
            f"{hook.label} takes whole arguments and outputs, which cannot be split by request. Leave "
            "per_request out, and find out whose rows they are with packed_rows()."
        )
    return ApartDetector(hook) if isinstance(hook, Detector) else Apart(hook)


class _Stand:
    """Stands in a hook's place."""

    def __init__(self, hook: Any, **options: Any) -> None:
        super().__init__(getattr(hook, "site", None), **options)  # type: ignore[call-arg]
        self.hook = hook

    @property
    def label(self) -> str:
        """That of the hook itself."""
        return str(self.hook.label)

    @property
    def enabled(self) -> bool:
        """That of the hook itself."""
        return bool(self.hook.enabled)

    def directions(self) -> tuple[str, ...]:
        """Those of the hook itself."""
        return self.hook.directions()  # type: ignore[no-any-return]

    def must_fire(self, direction: str) -> bool:
        """That of the hook itself."""
        return bool(self.hook.must_fire(direction))


class Apart(_Stand, Hook):
    """Calls a hook once per request: with its rows alone, as `generate` would."""

    def on_value(self, value: Tensor, hook: HookPoint) -> Tensor:
        """Call it for each request, and put what it makes together again."""
        made = []
        axis, views = _views(value, hook)
        for part, point, batch in views:
            with packed(batch):
                new = self.hook.on_value(part, point)
            new = part if new is None else new
            made.append(values.check_replacement(new, part, self.hook, point.name))
        done = sum(part.shape[axis] for part in made)
        return torch.cat([*made, value.narrow(axis, done, value.shape[axis] - done)], dim=axis)


class ApartDetector(_Stand, Detector):
    """Shows a detector one request at a time."""

    def __init__(self, hook: Detector) -> None:
        super().__init__(hook, copies=hook.copies)

    def read(self, value: Tensor, hook: HookPoint) -> None:
        """Show it each request's rows."""
        for part, point, batch in _views(value, hook)[1]:
            with packed(batch):
                self.hook.on_value(part, point)


def _views(value: Tensor, hook: HookPoint) -> tuple[int, list[tuple[Tensor, HookPoint, Packed]]]:
    """The axis of rows, and for each request its rows, a hook point that counts as its text does, and its batch."""
    here = here_and_now()
    axis = max(0, min(1, value.ndim - 2)) if hook.pos_axis is None else hook.pos_axis
    length = value.shape[axis] if value.ndim else 0
    cut = here.cut and (hook.canonical.startswith("unembed.") or length != here.length)
    if length != (len(here.spans) if cut else here.length):
        raise Unsupported(
            f"{hook.name!r} is {tuple(value.shape)} in a pass over {here.length} packed tokens: its "
            "rows cannot be told apart by request."
        )
    views = []
    for number, span in enumerate(here.drawing if cut else here.spans):
        end = span.start + span.length
        count = 1 if cut else span.length
        alone = replace(span, start=0, length=count, first=span.first + span.length - count)
        point = copy.copy(hook)
        point.where = Whereabouts(alone.first, span.prompt, count)
        batch = Packed(spans=[alone], tokens=here.tokens[end - count : end], cut=here.cut)
        views.append((value.narrow(axis, number if cut else span.start, count), point, batch))
    return axis, views


def looks_at_positions(hook: Hook) -> bool:
    """Whether an edit means positions in its text."""
    return any(getattr(hook, name, None) is not None for name in ("pos", "phase"))
