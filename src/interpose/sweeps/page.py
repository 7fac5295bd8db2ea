"""How the result of a sweep looks: in a terminal, in a notebook, and as a page of its own."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interpose.render import colours
from interpose.render.grid import Grid
from interpose.render.html import Markup, bar, html_table, page
from interpose.render.text import table
from interpose.sweeps.statistics import bootstrap

if TYPE_CHECKING:
    from interpose.sweeps.result import SweepResult

_WIDE, _HIGH = 132, 24  # what a grid in a terminal may take
_PLAIN, _NUMBERED, _ACROSS = (
    10,
    20,
    38,
)  # columns with level labels; with numbers; beside each other
_MOST_GRIDS = 48
_LONGEST = 14  # letters of a token that are shown


def as_text(result: SweepResult) -> str:
    """A few lines: what was measured, what it took, and the places, or the strongest of them."""
    parts = [_title(result), *(f"  {line}" for line in _lines(result))]
    for number, name in enumerate(result.metrics):
        view = _View.of(result, number)
        heading = f"{name}: {view.meaning}" if result.several else view.meaning
        parts.append(f"\n{heading}")
        grids = list(view.grids(terminal=True)) if len(result.axes) <= 2 else []
        text = grids[0][1].text(coloured=False) if grids else ""
        lines = text.splitlines()
        if lines and len(lines) <= _HIGH // len(result.metrics) and len(lines[0]) <= _WIDE:
            parts.append(text)
        else:
            parts.append(_strongest(result, number, 10 if len(result.metrics) == 1 else 4))
    return "\n".join(parts)


def as_html(result: SweepResult) -> str:
    """The result as HTML, without a document around it."""
    about = "".join(f"<br>{escape(line)}" for line in _lines(result))
    parts = [f"<p><b>{escape(_title(result))}</b>{about}</p>"]
    for number, name in enumerate(result.metrics):
        view = _View.of(result, number)
        if result.several:
            parts.append(f"<h3>{escape(name)}</h3>")
        parts.append(f'<p class="note">{escape(view.meaning)}</p>')
        if len(result.axes) == 1:
            parts.append(view.bars())
            continue
        parts.append(_legend(view))
        grids = list(itertools.islice(view.grids(), _MOST_GRIDS + 1))
        for heading, grid in grids[:_MOST_GRIDS]:
            caption = f"<p><b>{escape(heading)}</b></p>" if heading else ""
            parts.append(f"{caption}{''.join(part.html() for part in _across(grid))}")
        if len(grids) > _MOST_GRIDS:
            parts.append(f"<p>... and more: the first {_MOST_GRIDS} are shown.</p>")
        parts.append(_strongest_html(result, number))
    return f'<div style="font-size:14px">{"".join(parts)}</div>'


def as_page(result: SweepResult) -> str:
    """The result as a document."""
    return page("interpose: a sweep", as_html(result))


def _title(result: SweepResult) -> str:
    what = ", ".join(result.measured if not result.several else result.metrics) or "metric"
    axes = " x ".join(f"{name} ({len(entries)})" for name, entries in result.axes.items())
    where, sites = "", ", ".join(result.sites)
    if sites:
        where = f"{result.edit} at {sites}, " if result.edit else f"{sites} patched, "
    count = "1 example" if result.examples == 1 else f"{result.examples} examples"
    return f"{what}: {where}by {axes}, {count}"


def _lines(result: SweepResult) -> Iterator[str]:
    """The runs as they are without a change, what ran, and how far to trust it."""
    for number, name in enumerate(result.metrics):
        ends = [f"clean {_shown(result.clean[number].mean())}"]
        if result.corrupt is not None:
            ends.append(f"corrupt {_shown(result.corrupt[number].mean())}")
        changed = "corrupt" if result.baseline is result.corrupt else "clean"
        yield f"{f'{name}: ' if result.several else ''}{', '.join(ends)}; the {changed} run is changed"
    yield str(result.tally)
    if result.noise_floor > 0:
        yield (
            f"noise floor {_shown(result.noise_floor)}: so far the size of a batch alone moves a metric in 16 bits; "
            f"{int(result.within_noise.sum())} of {result.within_noise.numel()} effects are within it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """What is shown of one metric: shares of the way where there is one, else effects."""

    result: SweepResult
    values: Tensor
    faint: Tensor | None
    what: str
    meaning: str
    limit: float

    @staticmethod
    def of(result: SweepResult, number: int) -> _View:
        def one(values: Tensor) -> Tensor:
            return values[number] if result.several else values

        effect, floor = one(result.effect), result.noise_floor
        values, what, meaning = effect, "effect", "how far each place moves the metric"
        limit = float(effect.nan_to_num(0, 0, 0).abs().max())
        if result.corrupt is not None:
            way = float((result.clean[number] - result.corrupt[number]).mean().abs())
            if way > max(floor, 1e-6):
                values, what = one(result.normalised), "share"
                other = "clean" if result.direction == "denoise" else "corrupt"
                meaning = f"how much of the way to the {other} run each place goes (1 is all of it)"
                limit = max(1.0, float(values.nan_to_num(0, 0, 0).abs().max()))
        return _View(
            result=result,
            values=values,
            faint=one(result.within_noise) if floor > 0 else None,
            what=what,
            meaning=meaning,
            limit=limit or 1.0,
        )

    @property
    def digits(self) -> int:
        """So many that the largest number has three."""
        return min(6, max(1, 2 - math.floor(math.log10(self.limit))))

    def bars(self) -> str:
        """The entries of a single axis, each with a bar to the right or to the left."""
        (name,) = self.result.axes
        labels = _labels(self.result, name, terminal=False)
        faint = [False] * len(labels) if self.faint is None else self.faint.tolist()
        rows = []
        for label, value, grey in zip(labels, self.values.tolist(), faint):
            colour = colours.css(colours.diverging(0.5 if value > 0 else -0.5))
            share = abs(value) / self.limit if value == value else 0.0
            sides = [0.0, share] if value > 0 else [share, 0.0]
            colour = "#d0d7de" if grey else colour
            left, right = (bar(side, colour=colour, width=140) for side in sides)
            line = "display:inline-block;width:140px"
            both = (
                f'<span style="{line};text-align:right;border-right:1px solid #57606a">{left}</span>'
                f'<span style="{line}">{right}</span>'
            )
            rows.append((label, f"{value:.{self.digits}f}", Markup(both)))
        return html_table((name, "", ""), rows, most=400)

    def grids(self, *, terminal: bool = False) -> Iterator[tuple[str, Grid]]:
        """Grids of the last two axes, one for each place on those before them."""
        names = list(self.result.axes)
        labels = [_labels(self.result, name, terminal) for name in names]
        if len(names) == 1:  # a column of its own
            names, labels = [*names, ""], [*labels, [self.what]]
        shape = [len(entries) for entries in labels]
        values = self.values.reshape(shape)
        faint = None if self.faint is None else self.faint.reshape(shape)
        for place in itertools.product(*map(range, shape[:-2])):
            entries = (f"{name} {some[at]}" for name, some, at in zip(names, labels, place))
            yield (
                ", ".join(entries),
                Grid(
                    values=values[place].tolist(),
                    rows=labels[-2],
                    columns=labels[-1],
                    corner=" / ".join(filter(None, names[-2:])),
                    limit=self.limit,
                    digits=self.digits,
                    faint=None if faint is None else faint[place].tolist(),
                    upright=shape[-1] > _PLAIN or max(map(len, labels[-1])) > 12,
                    numbers=shape[-1] <= _NUMBERED,
                ),
            )


def _across(grid: Grid) -> Iterator[Grid]:
    """A wide grid as several, below each other."""
    for at in range(0, len(grid.columns), _ACROSS):
        some = slice(at, at + _ACROSS)
        yield dataclasses.replace(
            grid,
            values=[row[some] for row in grid.values],
            columns=grid.columns[some],
            faint=None if grid.faint is None else [row[some] for row in grid.faint],
        )


def _labels(result: SweepResult, axis: str, terminal: bool) -> list[str]:
    labels = result.labels[axis]
    if axis != "pos" or result.tokens is None:
        return labels
    shown = [_printable(token) for token in labels]
    if terminal:
        return [f"{token[: _LONGEST - 1]}…" if len(token) > _LONGEST else token for token in shown]
    return [f"{pos} {token}" for pos, token in zip(result.axes["pos"], shown)]


def _printable(token: str) -> str:
    """A token with line ends and the like written out."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in token) or "''"


def _legend(view: _View) -> str:
    """What the colours mean."""
    steps = (colours.css(colours.diverging(step / 4 - 1)) for step in range(9))
    strip = (
        f"display:inline-block;width:120px;height:0.8em;background:linear-gradient(to right,{','.join(steps)});"
        "margin:0 6px;border:1px solid #d0d7de"
    )
    faint = "; grey: within the noise floor" if view.faint is not None else ""
    limit = f"{view.limit:.{view.digits}f}"
    return f'<p class="note">-{limit}<span style="{strip}"></span>{limit}{faint}</p>'


def _rows(result: SweepResult, number: int, count: int) -> tuple[list[str], list[list[str]]]:
    """The strongest places as a table: its head and its rows."""
    name = result.metrics[number]
    found = [record for record in result.top(count) if record["metric"] == name]
    keys = [key for key in (found[0] if found else {}) if key != "metric"]
    rows = []
    for record in found:
        line = [_cell(record[key], key) for key in keys]
        if abs(record["effect"]) <= result.noise_floor and result.noise_floor:
            line[keys.index("effect")] += " (within the noise)"
        rows.append(line)
    return keys, rows


def _cell(value: object, key: str) -> str:
    if isinstance(value, float):
        return _shown(value)
    return repr(value) if key == "token" else str(value)


def _strongest(result: SweepResult, number: int, count: int) -> str:
    head, rows = _rows(result, number, count)
    return table(head, rows, title="the strongest places:") if rows else "no effect is a number."


def _strongest_html(result: SweepResult, number: int) -> str:
    head, rows = _rows(result, number, 10)
    if result.examples > 1 and rows:
        head = [*head, "95% of the effect over examples"]
        effects = result._effects()[number].reshape(-1, result.examples)
        known = effects.mean(-1).abs()
        order = torch.where(known.isnan(), -1.0, known).argsort(descending=True, stable=True)
        low, high = bootstrap(effects[order[: len(rows)]])
        for row, bottom, top in zip(rows, low.tolist(), high.tolist()):
            row.append(Markup(f"{_shown(bottom)} to {_shown(top)}"))
    return html_table(head, rows, title="The strongest places") if rows else ""


def _shown(value: float | Tensor) -> str:
    return f"{float(value):.4g}"
