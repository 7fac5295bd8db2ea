"""Numbers in rows and columns as coloured cells, for a page and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from interpose.render import colours


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
    """

    values: Sequence[Sequence[float]]
    rows: Sequence[str]
    columns: Sequence[str]
    corner: str = ""
    limit: float = 1.0

    def html(self) -> str:
        """A table that needs no script."""
        head = "".join(f'<th style="{_HEAD}">{escape(name)}</th>' for name in self.columns)
        body = "".join(
            f'<tr><th style="{_HEAD}">{escape(name)}</th>{"".join(map(self._cell, row))}</tr>'
            for name, row in zip(self.rows, self.values)
        )
        return (
            f'<div style="overflow-x:auto"><table style="border-collapse:collapse"><thead><tr>'
            f'<th style="{_HEAD}">{escape(self.corner)}'
            f"</th>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def _cell(self, value: float) -> str:
        back = colours.diverging(value, self.limit)
        style = f"{_CELL};background:{colours.css(back)};color:{colours.ink(back)}"
        return f'<td style="{style}">{_number(value)}</td>'

    def text(self, *, coloured: bool) -> str:
        """Aligned columns for a terminal, with its 24-bit colours or plain."""
        first = max(map(len, (self.corner, *self.rows)))
        widths = [max(len(name), 6) + 1 for name in self.columns]
        lines = [
            self.corner.rjust(first)
            + " "
            + "".join(name.rjust(width) for name, width in zip(self.columns, widths))
        ]
        for name, row in zip(self.rows, self.values):
            cells = (self._coded(value, width, coloured) for value, width in zip(row, widths))
            lines.append(f"{name.rjust(first)} {''.join(cells)}")
        return "\n".join(lines)

    def _coded(self, value: float, width: int, coloured: bool) -> str:
        shown = _number(value).rjust(width)
        if not coloured:
            return shown
        back = colours.diverging(value, self.limit)
        front = "0;0;0" if colours.ink(back) == "#000000" else "255;255;255"
        return f"\x1b[48;2;{back[0]};{back[1]};{back[2]};38;2;{front}m{shown}\x1b[0m"


_HEAD = "padding:2px 8px;font-weight:normal;color:#57606a;text-align:right;white-space:pre;border:0"
_CELL = (
    "padding:4px 8px;text-align:right;font-variant-numeric:tabular-nums;border:1px solid #ffffff"
)


def _number(value: float) -> str:
    return f"{value + 0.0:.2f}".replace("-0.00", "0.00")
