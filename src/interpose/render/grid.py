"""Numbers in rows and columns as coloured cells, for a page and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from interpose.render import colours, escape


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A heat map with the number in each cell: red up, blue down, white at zero.

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

    def html(self) -> str:
        """A table that needs no script."""
        head = "".join(map(self._column, self.columns))
        body = "".join(
            f'<tr><th style="{_HEAD}">{escape.html(name)}</th>'
            f"{''.join(self._cell(value, row, column) for column, value in enumerate(line))}</tr>"
            for row, (name, line) in enumerate(zip(self.rows, self.values))
        )
        return (
            f'<div style="overflow-x:auto"><table style="border-collapse:collapse"><thead><tr>'
            f'<th style="{_HEAD};vertical-align:bottom">{escape.html(self.corner)}'
            f"</th>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def _column(self, name: str) -> str:
        if not self.upright:
            return f'<th style="{_HEAD}">{escape.html(name)}</th>'
        return (
            f'<th title="{escape.html(name)}" style="{_HEAD};padding:4px 0;vertical-align:bottom">'
            f'<div style="{_UPRIGHT}">{escape.html(name)}</div></th>'
        )

    def _cell(self, value: float, row: int, column: int) -> str:
        back = colours.diverging(value, self.limit)
        style = f"background:{colours.css(back)};color:{colours.ink(back)}"
        if self.is_faint(row, column):
            style = f"background:{colours.FAINT};color:{colours.FAINT_INK}"
        if self.numbers:
            size = ";font-size:11px;padding:4px 5px" if self.upright else ""
            return f'<td style="{_CELL}{size};{style}">{self.number(value)}</td>'
        hint = f"{self.rows[row]}, {self.columns[column]}: {self.number(value)}"
        hint += ", within the noise floor" if self.is_faint(row, column) else ""
        return f'<td title="{escape.html(hint)}" style="{_DOT};{style}"></td>'

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
        back = colours.diverging(value, self.limit)
        front = "0;0;0" if colours.ink(back) == "#000000" else "255;255;255"
        return f"\x1b[48;2;{back[0]};{back[1]};{back[2]};38;2;{front}m{shown}\x1b[0m"


_HEAD = "padding:2px 8px;font-weight:normal;color:#57606a;text-align:right;white-space:pre;border:0"
_CELL = (
    "padding:4px 8px;text-align:right;font-variant-numeric:tabular-nums;border:1px solid #ffffff"
)
_DOT = "width:20px;min-width:20px;height:20px;padding:0;border:1px solid #eaeef2"
_UPRIGHT = (
    "writing-mode:vertical-rl;transform:rotate(180deg);max-height:11em;overflow:hidden;"
    "text-overflow:ellipsis;white-space:pre;display:inline-block"
)
