"""Numbers in rows and columns as coloured cells, for a page and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from interpose.render import colours, escape
from interpose.render.html import NUMBERS, QUIET_HEAD, scrolled


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A heat map with the number in each cell: by default red up, blue down, white at zero.

    Labels may repeat, as tokens of a prompt do: cells are told apart by place alone.

    Attributes:
        values: The numbers, row by row.
        rows: A label for each row.
        columns: A label for each column.
        corner: What rows and columns are, such as ``layer`` or ``layer / head``.
        limit: The number that has full colour.
        digits: How many of a number's are shown after the point.
        faint: Which cells say nothing: they are grey on a page, and in brackets in a terminal.
        upright: On a page, labels of columns stand upright.
        numbers: On a page, whether each cell has its number, or shows it when pointed at.
        scale: The colours.
        unit: What a number is, such as ``logits``.
    """

    values: Sequence[Sequence[float]]
    rows: Sequence[str]
    columns: Sequence[str]
    corner: str = ""
    limit: float = 1.0
    digits: int = 2
    faint: Sequence[Sequence[bool]] | None = None
    upright: bool = False
    numbers: bool = True
    scale: colours.Scale = colours.diverging
    unit: str = ""

    def html(self) -> str:
        """A table that needs no script; a page's script tells more of the cell that is pointed at."""
        head = "".join(map(self._column, self.columns))
        body = "".join(
            f'<tr><th scope="row" style="{QUIET_HEAD}">{escape.html(name)}</th>'
            f"{''.join(self._cell(value, row, column) for column, value in enumerate(line))}</tr>"
            for row, (name, line) in enumerate(zip(self.rows, self.values))
        )
        return scrolled(
            f'<table class="ip-grid" data-corner="{escape.html(self.corner)}" data-unit="{escape.html(self.unit)}" '
            f'style="border-collapse:collapse"><thead><tr>'
            f'<td style="{QUIET_HEAD};vertical-align:bottom">{escape.html(self.corner)}'
            f"</td>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    def _column(self, name: str) -> str:
        if not self.upright:
            return f'<th scope="col" style="{QUIET_HEAD}">{escape.html(name)}</th>'
        return (
            f'<th scope="col" title="{escape.html(name)}" style="{QUIET_HEAD};padding:4px 0;vertical-align:bottom">'
            f'<div style="{_UPRIGHT}">{escape.html(name)}</div></th>'
        )

    def _cell(self, value: float, row: int, column: int) -> str:
        faint = self.is_faint(row, column)
        style = colours.FAINT_STYLE if faint else self.scale.style(value, self.limit)
        mark = ' class="ip-faint"' if faint else ""
        if self.numbers:
            size = ";font-size:11px;padding:4px 5px" if self.upright else ""
            return f'<td{mark} style="{_CELL}{size};{style}">{self.number(value)}</td>'
        hint = f"{self.rows[row]}, {self.columns[column]}: {self.number(value)}"
        hint += ", within the noise floor" if faint else ""
        return f'<td{mark} title="{escape.html(hint)}" style="{_DOT};{style}">{self.number(value)}</td>'

    def number(self, value: float) -> str:
        """A number as a cell shows it."""
        shown = f"{value + 0.0:.{self.digits}f}"
        return shown if shown.strip("-0.") else shown.removeprefix("-")

    def is_faint(self, row: int, column: int) -> bool:
        """Whether a cell says nothing."""
        return self.faint is not None and bool(self.faint[row][column])

    def text(self, *, coloured: bool) -> str:
        """Aligned columns for a terminal, with its 24-bit colours or plain."""
        corner, *rows = map(escape.terminal, (self.corner, *self.rows))
        columns = [escape.terminal(name) for name in self.columns]
        first = max(map(len, (corner, *rows)))
        least = self.digits + (4 if self.faint is None else 5)
        widths = [max(len(name), least) + 1 for name in columns]
        names = (name.rjust(width) for name, width in zip(columns, widths))
        lines = [f"{corner.rjust(first)} {''.join(names)}"]
        for number, (name, row) in enumerate(zip(rows, self.values)):
            cells = (
                self._coded(value, width, coloured, self.is_faint(number, column))
                for column, (value, width) in enumerate(zip(row, widths))
            )
            lines.append(f"{name.rjust(first)} {''.join(cells)}")
        return "\n".join(lines)

    def _coded(self, value: float, width: int, coloured: bool, faint: bool) -> str:
        shown = (f"({self.number(value)})" if faint else self.number(value)).rjust(width)
        if not coloured or faint:
            return shown
        back = self.scale(value, self.limit)
        front = "0;0;0" if colours.ink(back) == "#000000" else "255;255;255"
        return f"\x1b[48;2;{back[0]};{back[1]};{back[2]};38;2;{front}m{shown}\x1b[0m"


_GAP = "border:1px solid transparent;background-clip:padding-box"  # the page is seen between cells
_CELL = f"padding:4px 8px;text-align:right;{NUMBERS};{_GAP}"
# The number is there for those who have the page read to them, and for sorting and copying.
_DOT = f"width:20px;min-width:20px;height:20px;padding:0;font-size:0;{_GAP}"
_UPRIGHT = (
    "writing-mode:vertical-rl;transform:rotate(180deg);max-height:11em;overflow:hidden;"
    "text-overflow:ellipsis;white-space:pre;display:inline-block"
)
