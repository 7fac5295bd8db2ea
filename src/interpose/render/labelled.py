"""Numbers over named axes with labels, as heat maps or bars: in a terminal, on a page, as a picture."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from interpose.render import colours, escape
from interpose.render.grid import Grid
from interpose.render.html import Markup, bar, html_table, legend

_WIDE = 132  # what a grid in a terminal may take
_PLAIN, _NUMBERED, _ACROSS = 10, 20, 38  # columns: level labels; with numbers; beside each other
_MOST_GRIDS = 48
GREY = "grey: within the noise floor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """Numbers with the labels of their places.

    Attributes:
        values: [*axes].
        labels: what the entries of each axis are called, by its name.
        what: what a number is, in a word: its unit.
        limit: the number that has full colour; the largest one by default.
        faint: [*axes], places that say nothing.
        scale: the colours: `colours.positive` for what cannot be negative.
    """

    values: Tensor
    labels: Mapping[str, Sequence[str]]
    what: str = ""
    limit: float | None = None
    faint: Tensor | None = None
    scale: colours.Scale = colours.diverging

    @property
    def most(self) -> float:
        """The number that has full colour."""
        if self.limit is not None:
            return self.limit
        return (
            float(self.values.float().nan_to_num(0, 0, 0).abs().max())
            if self.values.numel()
            else 1.0
        )

    @property
    def digits(self) -> int:
        """So many that the largest number has three."""
        return min(6, max(1, 2 - math.floor(math.log10(self.most or 1.0))))

    def text(self, high: int = 24) -> str | None:
        """Grids for a terminal, wide ones below each other; None where they would not fit.

        Args:
            high: how many lines there are for it.
        """
        if len(self.labels) > 2 or not self.values.numel():
            return None
        ((_, grid),) = self.grids()
        names = max(map(len, (grid.corner, *grid.rows)))
        each = max(*map(len, grid.columns), self.digits + 5) + 1
        folds = -(-len(grid.columns) // max(1, (_WIDE - names) // each))
        if folds * (len(grid.rows) + 2) - 1 > high:
            return None
        across = -(-len(grid.columns) // folds)
        drawn = [part.text(coloured=False) for part in _across(grid, across)]
        fits = all(len(part.split("\n")[0]) <= _WIDE for part in drawn)
        return "\n\n".join(drawn) if fits else None

    def html(self) -> str:
        """Bars for one axis, heat maps of the last two for several."""
        if not self.values.numel():
            return ""
        if len(self.labels) == 1:
            return self._bars()
        parts = [self._legend()]
        grids = list(itertools.islice(self.grids(), _MOST_GRIDS + 1))
        for heading, grid in grids[:_MOST_GRIDS]:
            caption = f"<p><b>{escape.html(heading)}</b></p>" if heading else ""
            parts.append(f"{caption}{''.join(part.html() for part in _across(grid, _ACROSS))}")
        if len(grids) > _MOST_GRIDS:
            parts.append(f"<p>... and more: the first {_MOST_GRIDS} are shown.</p>")
        return "".join(parts)

    def single(self) -> Grid:
        """All numbers as one grid, for a picture."""
        if len(self.labels) > 2 or not self.values.numel():
            raise ValueError(
                f"a picture has one or two axes; here there are {', '.join(self.labels)}. Save a page, which shows "
                "them all; of Scores, pick(...) and sum(...) leave fewer."
            )
        ((_, grid),) = self.grids()
        return grid

    def grids(self) -> Iterator[tuple[str, Grid]]:
        """Grids of the last two axes, one for each place on those before them, with its heading."""
        names, labels = list(self.labels), [list(some) for some in self.labels.values()]
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
                    limit=self.most or 1.0,
                    digits=self.digits,
                    faint=None if faint is None else faint[place].tolist(),
                    upright=shape[-1] > _PLAIN or max(map(len, labels[-1])) > 12,
                    numbers=shape[-1] <= _NUMBERED,
                    scale=self.scale,
                    unit=self.what,
                ),
            )

    def _bars(self) -> str:
        """The entries of a single axis, each with a bar to the right or to the left."""
        ((name, labels),) = self.labels.items()
        faint = [False] * len(labels) if self.faint is None else self.faint.tolist()
        rows = []
        for label, value, grey in zip(labels, self.values.tolist(), faint):
            share = abs(value) / (self.most or 1.0) if value == value else 0.0
            sides = [0.0, share] if value > 0 else [share, 0.0]
            colour = (
                colours.FAINT_BAR if grey else colours.css(self.scale(0.6 if value > 0 else -0.6))
            )
            left, right = (bar(side, colour=colour, width=140) for side in sides)
            line = "display:inline-block;width:140px"
            both = (
                f'<span style="{line};text-align:right;border-right:1px solid {colours.EDGE}">{left}</span>'
                f'<span style="{line}">{right}</span>'
            )
            number = f"{value:.{self.digits}f}"
            shown = Markup(f'<span style="{colours.QUIET}">{number}</span>')
            rows.append((label, shown if grey else number, Markup(both)))
        note = f'<p class="note">{GREY}</p>' if any(faint) else ""
        return note + html_table((name, "", ""), rows, most=400)

    def _legend(self) -> str:
        """What the colours mean."""
        low = -self.most if self.scale.two_sided and bool((self.values < 0).any()) else 0.0
        note = GREY if self.faint is not None and bool(self.faint.any()) else ""
        return legend(self.scale, low, self.most, digits=self.digits, unit=self.what, note=note)


def _across(grid: Grid, most: int) -> Iterator[Grid]:
    """A wide grid as several, below each other."""
    for at in range(0, len(grid.columns), most):
        some = slice(at, at + most)
        yield dataclasses.replace(
            grid,
            values=[row[some] for row in grid.values],
            columns=grid.columns[some],
            faint=None if grid.faint is None else [row[some] for row in grid.faint],
        )
