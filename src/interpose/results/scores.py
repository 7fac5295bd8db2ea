"""`Scores`: what most methods return, numbers over named axes, with how they were made and what they show."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from interpose.render import escape
from interpose.render.frame import data_frame
from interpose.render.html import html_table, page, write
from interpose.render.labelled import Labelled
from interpose.render.labels import token_text
from interpose.render.svg import picture
from interpose.render.text import table
from interpose.results.table import number

_POSITIONS = ("pos", "query", "key")  # axes whose entries are places in the text


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Scores:
    """Numbers over named axes.

    ```python
    scores.values                    # a tensor, [*axes]
    scores.at(layer=5, head=3)       # a number, or a tensor of the axes that are left
    scores.sum("pos")                # scores with an axis added up; scores.pick(pos=3): at one place of it
    scores.top(3)                    # the strongest places
    scores.save("scores.html")       # or .svg, .json
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

    @classmethod
    def averaged(cls, each: Tensor, /, **said: Any) -> Self:
        """The mean of numbers [*axes, example] over their last axis, with its standard error if there are several.

        Args:
            each: every number.
            **said: the other attributes.
        """
        count = each.shape[-1]
        errors = each.std(-1) / count**0.5 if count > 1 else None
        return cls(values=each.mean(-1), errors=errors, **said)

    # Numbers.

    def at(self, **entries: Any) -> Any:
        """The number at a place, by the entries of its axes; a tensor where some are left open."""
        if unknown := set(entries) - set(self.axes):
            raise KeyError(f"no axis {sorted(unknown)[0]!r}. The axes are: {', '.join(self.axes)}.")
        place: list[Any] = []
        for name, there in self.axes.items():
            if name in entries and entries[name] not in there:
                raise KeyError(f"no {name} {entries[name]!r} among {there}.")
            place.append(there.index(entries[name]) if name in entries else slice(None))
        found = self.values[tuple(place)]
        return found.item() if found.ndim == 0 else found

    def pick(self, **entries: Any) -> Scores:
        """The scores at one entry of some axes: ``scores.pick(layer=5)``."""
        said = ", ".join(f"{name} {entry}" for name, entry in entries.items())
        return Scores(
            title=f"{self.title}, {said}",
            values=torch.as_tensor(self.at(**entries), dtype=self.values.dtype),
            axes={name: there for name, there in self.axes.items() if name not in entries},
            unit=self.unit,
            protocol=self.protocol,
            evidence=self.evidence,
            tokens=self.tokens,
            noise_floor=self.noise_floor,
        )

    def sum(self, *axes: str) -> Scores:
        """The scores added up over some axes."""
        if missing := set(axes) - set(self.axes):
            raise KeyError(f"no axis {sorted(missing)[0]!r}. The axes are: {', '.join(self.axes)}.")
        numbers = [list(self.axes).index(name) for name in axes]
        return Scores(
            title=f"{self.title}, added up over {' and '.join(axes)}",
            values=self.values.sum(numbers) if numbers else self.values,
            axes={name: entries for name, entries in self.axes.items() if name not in axes},
            unit=self.unit,
            protocol=self.protocol,
            evidence=self.evidence,
            tokens=self.tokens,
            noise_floor=self.noise_floor * math.prod(len(self.axes[name]) for name in axes),
        )

    @property
    def within_noise(self) -> Tensor:
        """Which numbers are no larger than the noise floor, [*axes]; none where there is no floor."""
        return (self.values.abs() <= self.noise_floor) & (self.noise_floor > 0)

    @property
    def labels(self) -> dict[str, list[str]]:
        """What the entries of each axis are called: positions by their number and token."""
        found = {name: [str(entry) for entry in entries] for name, entries in self.axes.items()}
        if self.tokens is not None:
            for name in _POSITIONS:
                if name in self.axes:
                    found[name] = [f"{at} {token_text(self.tokens[at])}" for at in self.axes[name]]
        return found

    def records(self) -> Iterator[dict[str, Any]]:
        """Every place as a dictionary: its entry on each axis, its token, its value, its error where it is known."""
        names: tuple[str, ...] = ("value",) if self.errors is None else ("value", "error")
        numbers = [self.values] if self.errors is None else [self.values, self.errors]
        if self.noise_floor > 0:
            names, numbers = (*names, "within_noise"), [*numbers, self.within_noise]
        flat = zip(*(part.flatten().tolist() for part in numbers))
        for entries, found in zip(itertools.product(*self.axes.values()), flat):
            record = dict(zip(self.axes, entries))
            if self.tokens is not None and "pos" in record:
                record["token"] = self.tokens[record["pos"]]
            yield {**record, **dict(zip(names, found))}

    def top(self, k: int = 10) -> list[dict[str, Any]]:
        """The strongest places, up or down, the strongest first."""
        known = [record for record in self.records() if record["value"] == record["value"]]
        return sorted(known, key=lambda record: -abs(record["value"]))[:k]

    def to_pandas(self) -> Any:
        """A pandas data frame with a row for each place."""
        return data_frame(self.records())

    # Data.

    def to_dict(self) -> dict[str, Any]:
        """Itself as data that JSON takes, every number included."""
        data: dict[str, Any] = {"format": f"interpose.{type(self).__name__}", "version": 1}
        for option in dataclasses.fields(self):
            data[option.name] = _plain(getattr(self, option.name))
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `to_dict` wrote."""
        words = dict(data)
        if words.pop("format", None) != f"interpose.{cls.__name__}" or words.pop("version", 0) != 1:
            raise ValueError(f"this is not what {cls.__name__}.to_dict writes.")
        return cls(**{name: _read(value) for name, value in words.items()})

    # Pictures.

    def view(self) -> Labelled:
        """The numbers with their labels, as they are drawn."""
        faint = self.within_noise if self.noise_floor > 0 else None
        return Labelled(values=self.values, labels=self.labels, what=self.unit, faint=faint)

    def lines(self) -> list[str]:
        """What is said above the numbers: their unit, and how they were made."""
        said = [f"{name.replace('_', ' ')} {_said(value)}" for name, value in self.protocol.items()]
        lines = [f"unit: {self.unit}", "; ".join(said)] if said else [f"unit: {self.unit}"]
        if self.noise_floor > 0:
            within = self.within_noise
            lines.append(
                f"noise floor {number(self.noise_floor)}: so far rounding alone moves a number; {int(within.sum())} of "
                f"{within.numel()} are within it, grey or in brackets"
            )
        return lines

    def __repr__(self) -> str:
        head = [self.title, *(f"  {line}" for line in self.lines())]
        grid = self.view().text()
        if grid is None:
            names, rows = self._strongest()
            grid = table(names, rows, title="the strongest places:")
        return "\n".join([*head, "", grid])

    def html(self) -> str:
        """Heat maps or bars with their labels, how they were made, and what they show; nothing is loaded."""
        about = "".join(f"<br>{escape.html(line)}" for line in self.lines())
        shows = f'<p class="note">{escape.html(self.evidence)}</p>' if self.evidence else ""
        names, rows = self._strongest()
        strongest = html_table(names, rows, title="The strongest places")
        body = self.view().html() + (strongest if len(self.axes) > 1 else "")
        return f'<div style="font-size:14px"><p><b>{escape.html(self.title)}</b>{about}</p>{body}{shows}</div>'

    def _repr_html_(self) -> str:
        return self.html()

    def svg(self, title: str | None = None) -> str:
        """The numbers as a picture for papers and pages, for one or two axes, with a title of your own or none ("")."""
        return picture(self.view(), title=self.title if title is None else title)

    def save(self, path: str | Path) -> Path:
        """Write a page (``x.html``), a picture (``x.svg``) or the numbers (``x.json``), and return where it is."""
        kind = Path(path).suffix
        if kind == ".html":
            return write(path, page("interpose", self.html()))
        if kind == ".svg":
            return write(path, self.svg())
        if kind == ".json":
            return write(path, json.dumps(self.to_dict(), allow_nan=False))
        raise ValueError(f"save writes .html, .svg or .json; got {str(path)!r}.")

    def _strongest(self) -> tuple[list[str], list[list[str]]]:
        found = self.top(10)
        names = [name for name in found[0] if name != "within_noise"] if found else ["value"]
        rows = [[_cell(record[name], name) for name in names] for record in found]
        for record, row in zip(found, rows):
            if record.get("within_noise"):
                row[names.index("value")] += " (within the noise)"
        return names, rows


def _cell(value: Any, name: str) -> str:
    if isinstance(value, float):
        return number(value)
    return repr(value) if name == "token" else str(value)


def _said(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return ", ".join(map(_said, value)) if isinstance(value, (list, tuple)) else str(value)


def _plain(value: Any) -> Any:
    """As JSON has it; tensors are marked, and numbers that JSON lacks are texts."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return {"tensor": _plain(value.tolist()), "dtype": kind, "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return {"number": str(value)}
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


def _read(value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == {"tensor", "dtype", "shape"}:
        kind = getattr(torch, value["dtype"])
        return torch.tensor(_read(value["tensor"]), dtype=kind).reshape(value["shape"])
    if isinstance(value, Mapping) and set(value) == {"number"}:
        return float(value["number"])
    if isinstance(value, Mapping):
        return {name: _read(part) for name, part in value.items()}
    return [_read(part) for part in value] if isinstance(value, list) else value
