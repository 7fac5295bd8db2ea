"""Which axis of a value counts what: told by the sizes it had in the probe, never by the value's kind alone.

The probe has a batch size and a length that no part of the model has. An axis of the one size counts
texts, an axis of the other positions, an axis of their product both. Where that leaves two readings,
a probe of other sizes decides. A value that can be read in no way is not offered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import nn

from interpose.models.discovery.anatomy import Anatomy, Attention, Endpoint, Shape, Sizes, Tower
from interpose.models.reach.lenses import Squeezed

Counts = tuple[int, ...]
"""The size of one axis in each run of the probe."""

_ORDERS: dict[int, list[tuple[str, ...]]] = {
    1: [("flat",), ("pos",)],
    2: [("batch", "pos"), ("pos", "batch")],
    3: [("batch", "pos", "stream"), ("stream", "batch", "pos"), ("batch", "stream", "pos")],
}
"""How the axes before a value's features may lie, by their number."""

_CONVOLVED: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Conv1d: ("batch", "d_model", "frame"),
    nn.Conv2d: ("batch", "d_model", "row", "column"),
}
"""What the axes of a convolution's output are, as torch defines them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The axes of a value before its features, and what must be done to see them so."""

    names: tuple[str, ...]
    swapped: bool = False
    """Positions come before texts."""
    flat: bool = False
    """Texts and positions are one axis, text after text."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What a tower works on, or a text is: so many rows of so many positions, by these names."""

    rows: Counts
    places: Counts
    names: tuple[str, str] = ("batch", "pos")
    lead: tuple[Counts, ...] = ()
    """The sizes of its stream's axes before the features."""
    layout: Layout | None = None
    """Of its stream."""

    @property
    def is_text(self) -> bool:
        """Whether its positions are those of the tokens, or at least the only ones there are."""
        return self.names[1] == "pos"


class Axes:
    """Tells the axes of a model's values by one run of the probe, or by two."""

    def __init__(self, anatomy: Anatomy, runs: Sequence[Sizes]) -> None:
        self._runs = runs
        self._reads_text = anatomy.reads_text
        self.is_open = False
        """Whether something had two readings, so that another run would tell more."""
        self.batch = tuple(run.batch for run in runs)
        lengths = [run.lengths for run in runs]
        alike = len({len(each) for each in lengths}) == 1
        self.texts = [Rows(self.batch, each) for each in zip(*lengths)] if alike else []

    def of_tower(self, tower: Tower) -> Rows:
        """What a tower's blocks work on."""
        stream = tower.blocks[0].sites["resid_pre"]
        lead = self._sizes(stream)
        found = self._read(lead, self.texts)
        if found is not None and found[0] != ("flat",):
            order, text = found
            return Rows(text.rows, text.places, text.names, tuple(lead), _layout(order, text.names))
        return self._own(tower.prefix, lead)

    def _own(self, prefix: str, lead: list[Counts]) -> Rows:
        """A sequence that is not that of the tokens: patches, frames, slots that a model puts in."""
        sense = next((word for start, word in _SENSES if re.match(start, prefix)), "")
        place = "slot" if self._reads_text and self.texts and not sense else "pos"
        if len(lead) == 1:
            name = {"image": "patch", "sound": "frame"}.get(sense, "slot")
            return Rows((), lead[0], ("", name), tuple(lead), Layout((name,)))
        if len(lead) == 2 and _alike(lead[1], self.batch) and not _alike(lead[0], self.batch):
            names = ("batch", place)
            return Rows(lead[1], lead[0], names, tuple(lead), Layout(names, swapped=True))
        first = "batch" if lead and _alike(lead[0], self.batch) else sense or "row"
        if len(lead) == 2:
            if any(_alike(lead[1], text.places) for text in self.texts):
                place = "pos"  # some rows of tokens make one row here (a codebook each)
                first = "row" if self.batch[0] % lead[0][0] else "batch"
            names = (first, place)
            return Rows(lead[0], lead[1], names, tuple(lead), Layout(names))
        layout = Layout((first, *(f"axis_{i}" for i in range(1, len(lead)))))
        places = tuple(prod(sizes) for sizes in zip(*lead[1:]))
        return Rows(lead[0] if lead else (), places, (first, "slot"), tuple(lead), layout)

    def of_value(
        self,
        endpoint: Endpoint,
        known: Sequence[Rows],
        *,
        in_order: bool = False,
        loose: bool = False,
    ) -> Layout | str:
        """How a value lies; a sentence if that cannot be told.

        Args:
            endpoint: the value.
            known: what it may count, first of all what its tower does.
            in_order: whether an axis of texts and positions is known to have text after text.
            loose: whether it may have another number of positions, of a sequence that is not known.
        """
        lead = self._sizes(endpoint)
        own = next(iter(known), None)
        if own is not None and own.layout is not None and _all_alike(lead, own.lead):
            return own.layout
        if loose and len(lead) == 2:
            known = [*known, *(Rows(self.batch, places) for places in reversed(lead))]
        found = self._read(lead, known)
        if found is None:
            here = "" if own is None or not own.rows else f" for {own.rows[0]} x {own.places[0]}"
            return f"it is {list(endpoint.shape)}{here}, and which axis counts what cannot be told"
        order, rows = found
        if order == ("flat",):
            if in_order and own is not None and own.layout is not None:
                if own.layout.names[:2] == own.names:
                    return Layout(own.names, swapped=own.layout.swapped, flat=True)
            return "its texts and positions are one axis, in which order is not known"
        return _layout(order, rows.names)

    def of_embedding(
        self, endpoint: Endpoint, tower: Rows | None
    ) -> Layout | str | tuple[str, ...]:
        """How an embedding lies; all its axes, if its features are not the last one."""
        convolved = _CONVOLVED.get(type(endpoint.module))
        if convolved is not None and len(convolved) == len(endpoint.shape):
            return convolved
        known = [each for each in (tower, *self.texts) if each is not None]
        shared = [Rows((1,) * len(each.places), each.places, each.names) for each in known]
        found = self.of_value(endpoint, [*known, *shared])
        lead = self._sizes(endpoint)
        if isinstance(found, str) and len(lead) == 2 and not self._reads_text:
            return Layout(("batch", "patch")) if _alike(lead[0], self.batch) else found
        return found

    def of_attention(
        self, found: Attention, tower: Rows, what: str, names: tuple[str, ...]
    ) -> tuple[str, ...] | str:
        """The axes of queries or keys as the kernel gets them, or of scores; a sentence if they are not these.

        Queries and keys are shown with positions before heads.

        Args:
            found: the attention.
            tower: what its tower works on.
            what: ``q``, ``k`` or ``scores``.
            names: what the axes are called in a text.
        """
        if what == "scores" and found.other_softmax is not None:
            return f"its module takes another softmax too, of {list(found.other_softmax)}"
        shape = found.shapes.get(what)
        if shape is None or not tower.rows:
            return names
        if what == "scores" and len(shape) == 3:
            shape = (shape[0] // found.n_heads, found.n_heads, *shape[1:])
        if (
            len(shape) != 4
            or shape[0] != tower.rows[0]
            or (what != "k" and shape[2] != tower.places[0])
        ):
            return (
                f"it is {list(found.shapes[what])} for {tower.rows[0]} x {tower.places[0]}, and which "
                "axis counts what cannot be told"
            )
        slots = {}
        if not tower.is_text:
            slots = {"pos": tower.names[1], "query": "query_slot", "key": "key_slot"}
        elif found.name == "attn" and shape[3 if what == "scores" else 2] != tower.places[0]:
            slots = {"key": "key_slot"}  # summaries of several tokens stand among them
        return tuple(slots.get(name, name) for name in names)

    def _sizes(self, endpoint: Endpoint) -> list[Counts]:
        """The sizes of a value's axes before its features, in each run; in the first if it is not in all."""
        shapes: list[Shape] = [endpoint.shape]
        for run in self._runs[1:]:
            shape = run.shapes.get((endpoint.path, endpoint.tail), ())
            shapes += [shape] if len(shape) == len(endpoint.shape) else []
        found = [tuple(sizes) for sizes in zip(*shapes)][:-1]
        if isinstance(endpoint.lens, Squeezed):
            del found[endpoint.lens.axis]
        return found

    def _read(
        self, lead: Sequence[Counts], known: Sequence[Rows]
    ) -> tuple[tuple[str, ...], Rows] | None:
        """The order in which axes lie, and of what."""
        fits = [
            (order, rows)
            for rows in known
            if rows.rows
            for order in _ORDERS.get(len(lead), [])
            if all(_counts(name, sizes, rows) for name, sizes in zip(order, lead))
        ]
        self.is_open |= len({order for order, _ in fits}) > 1
        return fits[0] if fits else None


_SENSES = [("vision", "image"), ("audio", "sound")]


def _layout(order: tuple[str, ...], names: tuple[str, str]) -> Layout:
    if order == ("pos", "batch"):
        return Layout(names, swapped=True)
    told = {"batch": names[0], "pos": names[1]}
    return Layout(tuple(told.get(name, name) for name in order))


def _counts(name: str, sizes: Counts, rows: Rows) -> bool:
    """Whether an axis of such sizes may count that."""
    if name == "stream":
        return len(set(sizes)) == 1
    if name == "flat":
        return _alike(sizes, tuple(a * b for a, b in zip(rows.rows, rows.places)))
    return _alike(sizes, rows.rows if name == "batch" else rows.places)


def _alike(a: Counts, b: Counts) -> bool:
    """Whether two sizes are the same in every run that both were in."""
    return bool(a) and bool(b) and all(x == y for x, y in zip(a, b))


def _all_alike(a: Sequence[Counts], b: Sequence[Counts]) -> bool:
    return len(a) == len(b) and all(_alike(x, y) for x, y in zip(a, b))
