"""Pages of units: an index with search and sorting, and a page for each with its examples, counts and effects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interpose.concepts.neuronpedia import bars
from interpose.files.writing import write_whole
from interpose.render import escape
from interpose.render.colours import QUIET, positive
from interpose.render.html import Markup, bar, html_table, legend, page, section
from interpose.render.labels import token_label, token_text
from interpose.results.result import number

if TYPE_CHECKING:
    from interpose.concepts.naming import Concepts
    from interpose.concepts.report import Features

_EACH = 5  # examples of a group


def save_pages(
    found: Features,
    folder: Path,
    *,
    neuron: Sequence[int] | None,
    concepts: Concepts | None,
    groups: int,
) -> Path:
    """An index, and a page for each unit; returns the index."""
    folder.mkdir(parents=True, exist_ok=True)
    active = found.counts.fired.tolist()
    units = [u for row, u in enumerate(found.units) if active[row]] if neuron is None else neuron
    units = list(units)
    there = set(units)
    for unit in units:
        title = f"{unit} {concepts.get(unit) if concepts else ''}".strip()
        body = unit_body(found, unit, concepts=concepts, groups=groups, linked=there)
        write_whole(folder / f"{unit}.html", page(title, *body))
    return write_whole(folder / "index.html", _index(found, units, concepts))


def _index(found: Features, units: Sequence[int], concepts: Concepts | None) -> str:
    rows = []
    for unit in units:
        one = found.record(unit)
        name = [] if concepts is None else [concepts.get(unit)]
        tokens, raises = (" ".join(map(token_label, one[kind])) for kind in ("tokens", "raises"))
        rows.append(
            [_link(unit), *name, f"{one['density']:.3%}", number(one["value"]), tokens, raises]
        )
    head = ["unit", *(["concept"] if concepts is not None else []), "density", "max"]
    head += ["strongest at", "raises"]
    said = "<br>".join(map(escape.html, found.lines()))
    return page(
        found.title,
        f"<p>{said}</p>",
        '<p><input class="ip-find" type="search" placeholder="find a unit, a token, a concept" '
        'aria-label="find in the table"></p>',
        html_table(head, rows, most=len(rows)),
        f'<p class="note">{escape.html(found.evidence)}</p>',
    )


def unit_body(
    found: Features,
    unit: int,
    *,
    concepts: Concepts | None = None,
    groups: int = 5,
    linked: set[int] | frozenset[int] = frozenset(),
) -> list[str]:
    """The parts of a unit's page, as HTML.

    Args:
        found: what `ip.features` returned.
        unit: which.
        concepts: names of units.
        groups: how many groups by value.
        linked: the units that have pages beside this one.
    """
    row = found.row(unit)
    limit = float(found.counts.most[row])
    mean = float(found.counts.sums[row]) / max(1, int(found.counts.fired[row]))
    said = (
        f"active at {found.density(unit):.3%} of {found.token_count:,} tokens; "
        f"largest {number(limit)}, mean where active {number(mean)}"
    )
    back = '<a href="index.html">all units</a>; ' if linked else ""
    parts = [
        f"<p>{back}{escape.html(str(found.protocol.get('site', '')))}<br>{escape.html(said)}</p>"
    ]
    parts.append(legend(positive, 0.0, limit, unit="activation"))
    parts.append(section("Strongest", _lines(found.examples(unit), limit)))
    low = found.examples(unit, bottom=True)
    if low:
        most = max(-one["value"] for one in low)
        parts.append(section("Farthest below zero", _lines(low, -most)))
    for group in found.groups(unit, groups, _EACH):
        title = f"From {number(group['low'])} to {number(group['high'])}"
        parts.append(section(title, _lines(group["examples"], limit)))
    parts.append(section("How strongly it is active", _histogram(*bars(found, unit))))
    logits = found.logits(unit)
    if logits["up"]:
        parts.append(
            section(
                "Logits",
                '<div style="display:flex;gap:3em;flex-wrap:wrap">',
                _logits(logits["up"], "raises"),
                _logits(logits["down"], "lowers"),
                "</div>",
            )
        )
    for title, others in (
        ("Active at the same tokens", found.together(unit)),
        ("Writes in a similar direction", found.alike(unit)),
    ):
        if others:
            parts.append(section(title, _others(others, concepts, linked)))
    parts.append(f'<p class="note">{escape.html(found.evidence)}</p>')
    return parts


def _lines(examples: list[dict[str, Any]], limit: float) -> str:
    """Examples, one below the other, tokens on the colour of the unit's value."""
    rows = []
    for one in examples:
        middle = len(one["words"]) // 2
        line = "".join(
            _token(word, value, limit, here=at == middle)
            for at, (word, value) in enumerate(zip(one["words"], one["activations"]))
            if value == value
        )
        kept = Markup(f'<span style="white-space:pre-wrap">{line}</span>')
        rows.append((number(one["value"]), str(one["row"]), str(one["pos"]), kept))
    return html_table(("value", "text", "pos", "context"), rows)


def _token(word: str, value: float, limit: float, *, here: bool) -> str:
    """A token on white where the unit is not active, and the darker the more it is; its value under the pointer."""
    style = positive.style(0.75 * value, limit) if value * limit > 0 else ""
    frame = "outline:1px solid" if here else ""
    kept = ";".join(one for one in (style, frame) if one)
    return f'<span style="{kept}" title="{number(value)}">{escape.html(token_text(word))}</span>'


def _histogram(heights: list[float], values: list[float]) -> str:
    """Bars of equal width, as a small picture that says its numbers."""
    if not heights:
        return ""
    most, width, high = max(heights) or 1.0, 8, 90
    bars_ = "".join(
        f'<rect x="{at * width}" y="{high - high * height / most:.1f}" width="{width - 1}" '
        f'height="{high * height / most:.1f}" fill="#4c78a8"><title>{number(value)}: {height:.0f} tokens</title></rect>'
        for at, (height, value) in enumerate(zip(heights, values))
    )
    size = len(heights) * width
    end = number(2 * values[-1] - values[-2] if len(values) > 1 else values[-1])
    return (
        f'<svg viewBox="0 0 {size} {high}" width="{size}" height="{high}" role="img" '
        f'aria-label="histogram of activations">{bars_}</svg>'
        f'<p style="{QUIET}">0 to {end}, at how many tokens; the highest bar is {most:,.0f}</p>'
    )


def _logits(words: list[tuple[str, float]], title: str) -> str:
    limit = max((abs(value) for _, value in words), default=1.0) or 1.0
    colour = "#4c78a8" if title == "raises" else "#c44e52"
    rows = [
        (token_label(word), bar(abs(value) / limit, f"{value:+.2f}", colour=colour))
        for word, value in words
    ]
    return html_table((title, "by"), rows)


def _others(
    others: list[tuple[int, float]], concepts: Concepts | None, linked: set[int] | frozenset[int]
) -> str:
    rows = []
    for unit, share in others:
        name = "" if concepts is None else concepts.get(unit)
        rows.append(
            (_link(unit) if unit in linked else str(unit), name, bar(share, f"{share:.2f}"))
        )
    return html_table(("unit", "concept", ""), rows)


def _link(unit: int) -> Markup:
    return Markup(f'<a href="{unit}.html">{unit}</a>')


def save_neuronpedia(found: Features, path: Path, neuron: Sequence[int] | None = None) -> Path:
    """Units with the fields of Neuronpedia's JSON, in one file."""
    units = found.units if neuron is None else neuron
    return write_whole(path, json.dumps([found.neuronpedia(unit) for unit in units]))
