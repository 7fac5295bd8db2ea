"""A drawing of a circuit: nodes by layer from the bottom to the top, edges by sign and strength, as SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interpose.render import colours, escape

if TYPE_CHECKING:
    from interpose.methods.circuit import Circuit

_WIDE, _HIGH, _ROW, _GAP = 52, 20, 62, 14  # of nodes, and between them
_LEFT, _TOP = 20, 40
_READS = {
    "q": -14,
    "k": 0,
    "v": 14,
}  # where on a head's lower side its queries, keys and values come in


def picture(circuit: Circuit, title: str) -> str:
    """The circuit as an SVG document that loads nothing."""
    middle, width, height = _places(circuit.nodes)
    parts = [_text(width / 2, 18, title, bold=True), *_edges(circuit, middle)]
    for name, (x, y) in middle.items():
        fill = "#ddf4ff" if "." in name else "#fff8c5" if name.startswith("m") else "#eaeef2"
        parts.append(
            f'<rect x="{x - _WIDE / 2:.1f}" y="{y - _HIGH / 2:.1f}" width="{_WIDE}" height="{_HIGH}" rx="5" '
            f'fill="{fill}" stroke="#57606a"/>'
        )
        parts.append(_text(x, y + 4, name))
    if circuit.scores:
        parts.append(
            _text(
                width / 2,
                height - 8,
                "blue: carrying its corrupt value would lower the metric; red: raise it",
            )
        )
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui,sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{inside}\n</svg>\n'
    )


def _places(nodes: list[str]) -> tuple[dict[str, tuple[float, float]], float, float]:
    """The middle of each node, and the size of the drawing: heads to the left, MLPs in a column of their own."""
    rows: dict[str, list[str]] = {}
    for name in nodes:
        rows.setdefault(name.partition(".")[0], []).append(name)
    widest = max(map(len, rows.values()), default=1) * (_WIDE + _GAP)
    width, height = max(widest + 2 * _WIDE + 3 * _LEFT, 460), _TOP + len(rows) * _ROW + 20
    middle: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(rows.values()):
        for at, name in enumerate(row):
            x = width - _LEFT - 1.5 * _WIDE
            if not name.startswith("m"):
                x = _LEFT + widest / 2 + (at - (len(row) - 1) / 2) * (_WIDE + _GAP)
            middle[name] = (x, height - 44 - level * _ROW)
    return middle, width, height


def _edges(circuit: Circuit, middle: dict[str, tuple[float, float]]) -> list[str]:
    """The weakest first, so that the strongest lie on top; red adds to the metric, blue takes from it."""
    scores = circuit.scores or (0.0,) * len(circuit)
    most = max(map(abs, scores), default=0.0)
    drawn = []
    for (writer, reader), score in sorted(
        zip(circuit.edges, scores), key=lambda edge: abs(edge[1])
    ):
        share = abs(score) / most if most else 0.3
        colour = "#8c959f"
        if score:
            colour = colours.css(colours.diverging(0.6 if score > 0 else -0.6))
        hint = f"{writer} to {reader}" + (f": {score:.4g}" if circuit.scores else "")
        x, y = middle[writer]
        for node in circuit.graph.nodes_of(reader):
            right, low = middle[node]
            right += _READS.get(reader.rpartition(".")[2], 0) if "." in reader else 0
            bend = (y - low) / 2.5
            # Nodes above each other are joined past those in between.
            aside = (
                min(_WIDE, (y - low) / 6) if abs(right - x) < _WIDE / 2 and y - low > _ROW else 0
            )
            path = (
                f"M{x:.1f} {y - _HIGH / 2:.1f}C{x + aside:.1f} {y - bend:.1f} {right + aside:.1f} {low + bend:.1f} "
                f"{right:.1f} {low + _HIGH / 2:.1f}"
            )
            drawn.append(
                f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{0.6 + 4.4 * share:.2f}" '
                f'stroke-opacity="{0.35 + 0.6 * share:.2f}"><title>{escape.svg(hint)}</title></path>'
            )
    return drawn


def _text(x: float, y: float, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold" font-size="13"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" fill="#1b1f24"{weight}>{escape.svg(text)}</text>'
