"""How the result of a sweep looks: in a terminal, in a notebook, and as a page of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interpose.render import escape
from interpose.render.html import Markup, html_table, page
from interpose.render.labelled import Labelled
from interpose.render.labels import token_text
from interpose.render.text import table
from interpose.results.bootstrap import bootstrap

if TYPE_CHECKING:
    from interpose.sweeps.result import SweepResult

_HIGH = 24  # lines that a grid in a terminal may take
_MANY = 38  # columns, before which the strongest places are named first
_FAINT = 0.25  # the largest share below which colours are scaled to the data


def as_text(result: SweepResult) -> str:
    """A few lines: what was measured, what it took, and the places, or the strongest of them."""
    parts = [title(result), *(f"  {line}" for line in _lines(result, "in brackets"))]
    for number, name in enumerate(result.metrics):
        meaning, shown = view(result, number, terminal=True)
        parts.append(f"\n{name}: {meaning}" if result.several else f"\n{meaning}")
        grid = shown.text(high=_HIGH // len(result.metrics))
        count = 10 if len(result.metrics) == 1 else 4
        parts.append(_strongest(result, number, count) if grid is None else grid)
    return "\n".join(parts)


def as_html(result: SweepResult) -> str:
    """The result as HTML, without a document around it."""
    about = "".join(f"<br>{escape.html(line)}" for line in _lines(result, "grey"))
    parts = [f"<p><b>{escape.html(title(result))}</b>{about}</p>"]
    for number, name in enumerate(result.metrics):
        meaning, shown = view(result, number)
        if result.several:
            parts.append(f"<h3>{escape.html(name)}</h3>")
        parts.append(f'<p class="note">{escape.html(meaning)}</p>')
        drawn = [shown.html()]
        if len(result.axes) > 1:
            many = len(result.axes) > 2 or result.values.shape[-1] > _MANY
            drawn.insert(0 if many else 1, _strongest_html(result, number))
        parts += drawn
    return f'<div style="font-size:14px">{"".join(parts)}</div>'


def as_page(result: SweepResult) -> str:
    """The result as a document."""
    return page("interpose: a sweep", as_html(result))


def title(result: SweepResult) -> str:
    """What was done, in a line."""
    what = ", ".join(result.measured if not result.several else result.metrics) or "metric"
    axes = " x ".join(f"{name} ({len(entries)})" for name, entries in result.axes.items())
    where, sites = "", ", ".join(result.sites)
    sites += "".join(f" at {name} {entry}" for name, entry in result.fixed.items())
    if sites:
        where = f"{result.edit} at {sites}, " if result.edit else f"{sites} patched, "
    count = "1 example" if result.examples == 1 else f"{result.examples} examples"
    return f"{what}: {where}by {axes}, {count}"


def _lines(result: SweepResult, marked: str) -> Iterator[str]:
    """The runs as they are without a change, what ran, and how far to trust it."""
    for number, name in enumerate(result.metrics):
        ends = [f"clean {_shown(result.clean[number].mean())}"]
        if result.corrupt is not None:
            ends.append(f"corrupt {_shown(result.corrupt[number].mean())}")
        changed = "corrupt" if result.baseline is result.corrupt else "clean"
        yield f"{f'{name}: ' if result.several else ''}{', '.join(ends)}; the {changed} run is changed"
    yield str(result.tally)
    if result.corrupt is not None and result.clean.equal(result.corrupt):
        yield "the two texts give the same: there is nothing to carry over"
    if result.own is not None:
        yield (
            f"logits of these tokens in float32, from a stream in {result.own.logits}; result.own has the same by the "
            f"model's own logits, in {result.own.logits}"
        )
    elif result.noise_floor > 0:
        yield f"logits are the model's own, in {result.logits}"
    if result.noise_floor > 0:
        floors, within = ", ".join(map(_shown, result.noise_floors)), result.within_noise
        yield (
            f"noise floor {floors}: so far rounding alone moves the metric; {int(within.sum())} of {within.numel()} "
            f"effects are within it ({marked})"
        )


def view(result: SweepResult, number: int = 0, *, terminal: bool = False) -> tuple[str, Labelled]:
    """What is shown of one metric, and what it means: shares of the way where there is one, else effects."""

    def one(values: Tensor) -> Tensor:
        return values[number] if result.several else values

    floor = result.noise_floors[number]
    values, what, meaning = one(result.effect), "effect", "how far each place moves the metric"
    limit = None
    if result.corrupt is not None:
        way = float((result.clean[number] - result.corrupt[number]).mean().abs())
        if way > max(floor, 1e-6):
            values, what = one(result.normalised), "share"
            other = "clean" if result.patch == "clean" else "corrupt"
            meaning = f"how much of the way to the {other} run each place goes (1 is all of it)"
            most = float(values.nan_to_num(0, 0, 0).abs().max())
            limit = max(1.0, most) if most > _FAINT else most or 1.0
    return meaning, Labelled(
        values=values,
        labels={name: _labels(result, name, terminal) for name in result.axes},
        what=what,
        limit=limit,
        faint=one(result.within_noise) if floor > 0 else None,
    )


def _labels(result: SweepResult, axis: str, terminal: bool) -> list[str]:
    labels = result.labels[axis]
    if axis != "pos" or result.tokens is None:
        return labels
    shown = [token_text(token) for token in labels]
    if terminal:
        return shown
    return [f"{pos} {token}" for pos, token in zip(result.axes["pos"], shown)]


def _rows(result: SweepResult, number: int, count: int) -> tuple[list[str], list[list[str]]]:
    """The strongest places as a table: its head and its rows."""
    name = result.metrics[number]
    found = [record for record in result.top(count) if record["metric"] == name]
    keys = [key for key in (found[0] if found else {}) if key not in ("metric", "within_noise")]
    rows = []
    for record in found:
        line = [_cell(record[key], key) for key in keys]
        if record.get("within_noise"):
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
