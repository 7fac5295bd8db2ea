"""`Scores`: what most analyses return, numbers over named axes, with how they were made and what they show."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from interpose.render import escape
from interpose.render.html import html_table
from interpose.render.labelled import Labelled
from interpose.render.labels import cut, token_label
from interpose.render.text import table
from interpose.results.result import Result, number, shown

_TOKENS = {"pos": "token", "query": "query_token", "key": "key_token"}
"""Axes whose entries are positions of the text, and how records call their tokens."""
_APART = ("metric", "measure")  # axes along which numbers are of different kinds, and not compared
_MANY = 38  # columns, beyond which the strongest places are shown before the picture


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Scores(Result):
    """Numbers over named axes.

    ```python
    scores.values                    # a tensor, [*axes]
    scores.at(layer=5, head=3)       # a number, or a tensor of the axes that are left
    scores.sum("pos")                # scores with an axis added up; scores.pick(pos=3): at one place of it
    scores.top(3)                    # the strongest places
    scores.save("scores.html")       # or .svg, .png, .csv, .json, .safetensors
    ```

    Attributes:
        title: what was done, in a line.
        values: the numbers, [*axes].
        axes: the entries of each axis, by its name: ``{"layer": [0, 1, ...], "head": [...]}``.
        unit: what a number is: ``logits``, ``share of the way``.
        protocol: how they were made: metric, options, how many forward and backward passes it took.
        evidence: what the numbers are evidence for, and what not.
        tokens: of the text, where there is one alone; positions are shown by them.
        errors: how far each number may be off, [*axes]: its standard error over examples or draws; None if there
            was one alone.
        noise_floor: in 16 bits, how far rounding alone moves a number; numbers no larger are marked. 0 where it was
            not measured.
    """

    title: str
    values: Tensor
    axes: dict[str, list[Any]]
    unit: str
    protocol: dict[str, Any] = field(default_factory=dict)
    evidence: str = ""
    tokens: list[str] | None = None
    errors: Tensor | None = None
    noise_floor: float = 0.0

    def __post_init__(self) -> None:
        shape = tuple(len(entries) for entries in self.axes.values())
        if tuple(self.values.shape) != shape:
            raise ValueError(f"values are {tuple(self.values.shape)}, and axes {shape}.")
        if self.errors is not None and tuple(self.errors.shape) != shape:
            raise ValueError(f"errors are {tuple(self.errors.shape)}, and axes {shape}.")
        count = len(self.tokens or ())
        for name in _TOKENS if self.tokens is not None else ():
            for at in self.axes.get(name, ()):
                if type(at) is not int or not -count <= at < count:
                    raise ValueError(
                        f"{name} {at!r} is not a position of a text of {count} tokens."
                    )

    @classmethod
    def averaged(cls, each: Tensor, /, **said: Any) -> Self:
        """The mean of numbers [*axes, example] over their last axis, with its standard error if there are several.

        Args:
            each: every number.
            **said: the other attributes.
        """
        return cls(values=each.mean(-1), errors=standard_error(each), **said)

    # Numbers.

    def at(self, **entries: Any) -> Any:
        """The number at a place, by the entries of its axes; a tensor where some are left open."""
        found = self.values[self._index(entries)]
        return found.item() if found.ndim == 0 else found

    def _index(self, entries: dict[str, Any]) -> tuple[Any, ...]:
        self._must_have(entries)
        place: list[Any] = []
        for name, there in self.axes.items():
            if name in entries and entries[name] not in there:
                raise KeyError(f"no {name} {entries[name]!r} among {there}.")
            place.append(there.index(entries[name]) if name in entries else slice(None))
        return tuple(place)

    def _must_have(self, axes: Iterable[str]) -> None:
        if unknown := sorted(set(axes) - set(self.axes)):
            raise KeyError(f"no axis {unknown[0]!r}. The axes are: {', '.join(self.axes)}.")

    def _derived(self, **said: Any) -> Scores:
        """Other numbers that were made in the same way."""
        kept = {one.name: getattr(self, one.name) for one in dataclasses.fields(Scores)}
        return Scores(**{**kept, "errors": None, **said})

    def pick(self, **entries: Any) -> Scores:
        """The scores at one entry of some axes: ``scores.pick(layer=5)``."""
        place = self._index(entries)
        said = ", ".join(f"{name} {entry}" for name, entry in entries.items())
        return self._derived(
            title=f"{self.title}, {said}",
            values=self.values[place],
            errors=None if self.errors is None else self.errors[place],
            axes={name: there for name, there in self.axes.items() if name not in entries},
        )

    def sum(self, *axes: str) -> Scores:
        """The scores added up over some axes."""
        self._must_have(axes)
        numbers = [list(self.axes).index(name) for name in axes]
        return self._derived(
            title=f"{self.title}, added up over {' and '.join(axes)}",
            values=self.values.sum(numbers) if numbers else self.values,
            axes={name: entries for name, entries in self.axes.items() if name not in axes},
            noise_floor=self.noise_floor * math.prod(len(self.axes[name]) for name in axes),
        )

    @property
    def within_noise(self) -> Tensor:
        """Which numbers are no larger than the noise floor, [*axes]; none where there is no floor."""
        return (self.values.abs() <= self.noise_floor) & (self.noise_floor > 0)

    # Places.

    @property
    def labels(self) -> dict[str, list[str]]:
        """What the entries of each axis are called, everywhere: positions by their number and token."""
        return {name: self._labels(name, entries) for name, entries in self.axes.items()}

    def _labels(self, axis: str, entries: list[Any]) -> list[str]:
        if self.tokens is None or axis not in _TOKENS:
            return [str(entry) for entry in entries]
        return [token_label(cut(self.tokens[pos]), pos) for pos in entries]

    def columns(self) -> dict[str, Sequence[Any]]:
        """What there is of every place, by name: in the order of ``values.flatten()``."""
        found: dict[str, Any] = {"value": self.values}
        if self.errors is not None:
            found["error"] = self.errors
        if self.noise_floor > 0:
            found["within_noise"] = self.within_noise
        return {name: column.flatten().tolist() for name, column in found.items()}

    def places(self) -> Iterable[int]:
        """The places that there are, as numbers in ``values.flatten()``."""
        return range(self.values.numel())

    def _records(
        self,
        places: Iterable[int],
        axes: dict[str, list[Any]] | None = None,
        columns: dict[str, Sequence[Any]] | None = None,
    ) -> Iterator[dict[str, Any]]:
        axes = self.axes if axes is None else axes
        entries = list(itertools.product(*axes.values()))
        columns = self.columns() if columns is None else columns
        for place in places:
            record = dict(zip(axes, entries[place]))
            if self.tokens is not None:
                there = {name: at for name, at in record.items() if name in _TOKENS}
                record |= {_TOKENS[name]: self.tokens[at] for name, at in there.items()}
            yield {**record, **{name: column[place] for name, column in columns.items()}}

    def records(self) -> Iterator[dict[str, Any]]:
        """Every place as a dictionary: its entry on each axis, its token, its value, its error where it is known."""
        return self._records(self.places())

    def _order(self, k: int) -> list[int]:
        """The strongest places; so many of each metric, where there are several."""
        strong = self.columns()[self.ranked]
        there = [place for place in self.places() if strong[place] == strong[place]]
        there.sort(key=lambda place: -abs(strong[place]))
        first = next(iter(self.axes), "")
        if first not in _APART or not there:
            return there[:k]
        each = len(strong) // len(self.axes[first])
        parts = ([p for p in there if p // each == n] for n in range(len(self.axes[first])))
        return [place for part in parts for place in part[:k]]

    def top(self, k: int = 10) -> list[dict[str, Any]]:
        """The strongest places, up or down, the strongest first; so many of each metric, where there are several."""
        return list(self._records(self._order(k)))

    # Pictures.

    def view(self) -> Labelled:
        """The numbers with their labels, as a picture shows them."""
        faint = self.within_noise if self.noise_floor > 0 else None
        if not self.axes:  # a single number
            labels, faint = {"": [self.title]}, None if faint is None else faint.reshape(1)
            return Labelled(
                values=self.values.reshape(1), labels=labels, what=self.unit, faint=faint
            )
        return Labelled(values=self.values, labels=self.labels, what=self.unit, faint=faint)

    def drawings(self) -> dict[str, Labelled]:
        """Everything that is drawn, each by what is said above it."""
        return {"": self.view()}

    def lines(self) -> list[str]:
        """What is said below the title: the unit, and how the numbers were made."""
        said = [f"{name.replace('_', ' ')} {shown(value)}" for name, value in self.protocol.items()]
        lines = [f"unit: {self.unit}", "; ".join(said)] if said else [f"unit: {self.unit}"]
        if self.noise_floor > 0:
            within = self.within_noise
            lines.append(
                f"noise floor {number(self.noise_floor)}: so far rounding alone moves a number; {int(within.sum())} of "
                f"{within.numel()} are within it, grey or in brackets"
            )
        return lines

    def strongest_table(self, k: int = 10) -> tuple[list[str], list[list[str]]]:
        """The strongest places as a table: its head, and its rows with the labels of places."""
        found, labels = self.top(k), self.labels
        kept = [name for name in (found[0] if found else {}) if not _is_said(name, self.axes)]
        rows = []
        for record in found:
            names = {axis: labels[axis][self.axes[axis].index(record[axis])] for axis in self.axes}
            cells = {name: names.get(name) or _cell(record[name]) for name in kept}
            if record.get("within_noise"):
                cells[self.ranked] += " (within the noise)"
            rows.append(list(cells.values()))
        return kept, rows

    def text_body(self, high: int) -> str:
        """A grid of each drawing, or the strongest places where they do not fit.

        Args:
            high: how many lines there are for it.
        """
        drawings = self.drawings()
        share = (high - 1) // max(1, len(drawings)) - 2
        grids = [(caption, drawn.text(high=share)) for caption, drawn in drawings.items()]
        if all(grid is not None for _, grid in grids):
            return "".join(
                f"\n{caption}\n{grid}" if caption else f"\n{grid}" for caption, grid in grids
            )
        first = next(iter(self.axes), "")
        apart = len(self.axes[first]) if first in _APART else 1
        head, rows = self.strongest_table(max(1, min(10, (high - 4) // apart)))
        return (
            "\n" + table(head, rows, title="the strongest places:")
            if rows
            else "\nno number is known."
        )

    def html_body(self) -> str:
        """Heat maps or bars with their labels, and the strongest places."""
        drawn = [
            (f"<p><b>{escape.html(caption)}</b></p>" if caption else "") + drawing.html()
            for caption, drawing in self.drawings().items()
        ]
        head, rows = self.strongest_table() if len(self.axes) > 1 else ([], [])
        if rows:
            many = len(self.axes) > 2 or self.values.shape[-1] > _MANY
            drawn.insert(
                0 if many else len(drawn), html_table(head, rows, title="The strongest places")
            )
        return "".join(drawn)


def standard_error(each: Tensor) -> Tensor | None:
    """That of the mean of numbers [..., example]; None of a single example."""
    count = each.shape[-1]
    return each.std(-1) / count**0.5 if count > 1 else None


def _cell(value: Any) -> str:
    return token_label(value) if isinstance(value, str) else shown(value)


def _is_said(name: str, axes: Iterable[str]) -> bool:
    """Whether a part of a record is said already by another of its cells: tokens by labels, noise by a remark."""
    return name == "within_noise" or name in (_TOKENS[axis] for axis in axes if axis in _TOKENS)
