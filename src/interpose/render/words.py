"""Words in rows and columns, the bluer the likelier: for a page and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from interpose.render import colours, escape
from interpose.render.html import QUIET_HEAD, scrolled
from interpose.render.labels import cut, token_label, token_text

_ACROSS, _WIDE = 12, 110  # columns on a page, before the next ones go below; letters in a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class WordGrid:
    """A word with its probability in each cell.

    Attributes:
        cells: Row by row, the words of a cell with their probabilities, the likeliest first. The first is shown,
            the others when it is pointed at.
        rows: A label for each row.
        columns: A label for each column.
        corner: What the rows are.
    """

    cells: Sequence[Sequence[Sequence[tuple[str, float]]]]
    rows: Sequence[str]
    columns: Sequence[str]
    corner: str = ""

    def text(self) -> str:
        """Aligned columns for a terminal: the last ones, if not all fit."""
        lines = [[*map(escape.terminal, (self.corner, *self.rows))]]
        for number, name in enumerate(self.columns):
            best = (row[number][0] for row in self.cells)
            lines.append(
                [
                    cut(escape.terminal(name)),
                    *(f"{cut(token_label(word))} {chance:4.0%}" for word, chance in best),
                ]
            )
        first, *columns = [[cell.rjust(max(map(len, line))) for cell in line] for line in lines]
        shown = len(columns)
        while (
            shown > 1
            and sum(len(column[0]) + 2 for column in columns[-shown:]) + len(first[0]) > _WIDE
        ):
            shown -= 1
        made = ["  ".join(row) for row in zip(first, *columns[-shown:])]
        if shown < len(columns):
            made.insert(0, f"the last {shown} of {len(columns)} positions:")
        return "\n".join(made)

    def html(self) -> str:
        """Tables that need no script, one below the other where there are many columns."""
        return "".join(self._table(start) for start in range(0, len(self.columns), _ACROSS))

    def _table(self, start: int) -> str:
        some = slice(start, start + _ACROSS)
        heads = "".join(_head(name, "col") for name in self.columns[some])
        rows = (
            f"<tr>{_head(name, 'row')}{''.join(map(_cell, row[some]))}</tr>"
            for name, row in zip(self.rows, self.cells)
        )
        corner = escape.html(self.corner)
        return scrolled(
            f'<table class="ip-grid" data-corner="{corner}" style="border-collapse:collapse;margin-bottom:1em">'
            f'<thead><tr><td style="{QUIET_HEAD}">{corner}</td>{heads}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table>"
        )


def _head(name: str, scope: str) -> str:
    return f'<th scope="{scope}" style="{QUIET_HEAD}">{escape.html(cut(name))}</th>'


def _cell(best: Sequence[tuple[str, float]]) -> str:
    word, chance = best[0]
    hint = "\n".join(f"{token_label(other)}  {share:.1%}" for other, share in best)
    style = (
        "padding:2px 6px;text-align:center;white-space:pre;border:1px solid transparent;background-clip:padding-box;"
        f"line-height:1.25;{colours.positive.style(0.8 * chance)}"
    )
    shown = f"{escape.html(cut(token_text(word)))}<br><small>{chance:.0%}</small>"
    return f'<td title="{escape.html(hint)}" style="{style}">{shown}</td>'
