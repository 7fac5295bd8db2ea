"""Plain-text tables that stay under a screenful."""

from __future__ import annotations

from collections.abc import Sequence

from interpose.render import escape

MOST_ROWS = 34


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", most: int = MOST_ROWS
) -> str:
    """A table with aligned columns; the middle of a long one is left out, and says so."""
    head, *shown = (tuple(map(escape.terminal, row)) for row in (head, *rows))
    cut = len(shown) - most
    if cut > 0:
        shown = shown[: most // 2] + shown[len(shown) - most + most // 2 :]
    widths = [max(len(row[i]) for row in (head, *shown)) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        for row in (head, *shown)
    ]
    if cut > 0:
        lines.insert(1 + most // 2, f"... {cut} more ...")
    return "\n".join([escape.terminal(title, lines=True), *lines] if title else lines)


def human_bytes(count: float) -> str:
    """1536 as ``1.5 KB``."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TB"
