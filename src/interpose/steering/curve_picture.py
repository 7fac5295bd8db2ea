"""Effect against damage as SVG: a line for each layer through its strengths, and the choice in a ring."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from interpose.render import colours, escape
from interpose.render.svg import document, letters
from interpose.results.result import number

if TYPE_CHECKING:
    from interpose.steering.steer import SteeringCurve

_LEFT, _TOP, _WIDE, _HIGH, _RIGHT, _LOW = 70, 34, 470, 260, 110, 50
_INKS = (
    "#0969da", "#cf222e", "#1a7f37", "#8250df", "#bc4c00", "#57606a", "#bf3989", "#0a7ea4", "#7d4e00", "#116329",
)  # fmt: skip


def curve_picture(curve: SteeringCurve, title: str) -> str:
    """The curves as an SVG document that loads nothing.

    Args:
        curve: what to draw.
        title: above it.
    """
    effects, damages = curve.values[0].tolist(), curve.values[2].tolist()
    points = [(d, e) for ds, es in zip(damages, effects) for d, e in zip(ds, es)]
    known = [pair for pair in points if all(map(math.isfinite, pair))] or [(0.0, 0.0)]
    # Damage far beyond the bound is drawn at the edge: what is below it is what matters.
    bound = curve.most_damage if math.isfinite(curve.most_damage) else 0.0
    most = max(
        min(max(d for d, _ in known), 4 * bound if bound > 0 else math.inf), bound * 1.2, 1e-9
    )
    low, high = min(0.0, *(e for _, e in known)), max(0.0, *(e for _, e in known))
    span = (high - low) or 1.0

    def at(damage: float, effect: float) -> tuple[float, float]:
        x = _LEFT + _WIDE * min(max(damage, 0.0), most) / most
        return x, _TOP + _HIGH * (high - effect) / span

    parts = [letters(_LEFT, 18, title, bold=True)] if title else []
    parts += _axes(most, low, high, cut=any(d > most for d, _ in known))
    zero = at(0.0, 0.0)[1]
    parts.append(
        f'<path d="M{_LEFT} {zero:.1f}h{_WIDE}" stroke="{colours.LINE}" stroke-dasharray="1 4"/>'
    )
    if 0 < bound <= most:
        x, _ = at(bound, 0)
        parts.append(f'<path d="M{x:.1f} {_TOP}v{_HIGH}" stroke="#cf222e" stroke-dasharray="4 3"/>')
        parts.append(letters(x + 4, _TOP + 12, f"most damage {number(bound)}", ink="#cf222e"))
    for row, layer in enumerate(curve.axes["layer"]):
        ink = _INKS[row % len(_INKS)]
        line = [(d, e, s) for d, e, s in zip(damages[row], effects[row], curve.axes["strength"])]
        line = [one for one in line if all(map(math.isfinite, one[:2]))]
        path = " ".join("{:.1f},{:.1f}".format(*at(d, e)) for d, e, _ in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-opacity="0.7"/>')
        for d, e, strength in line:
            x, y = at(d, e)
            hint = f"layer {layer}, strength {number(strength)}: effect {e:.3f}, damage {d:.3f}"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{ink}"><title>{escape.svg(hint)}</title></circle>'
            )
            if curve.chosen == {"layer": layer, "strength": strength}:
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="none" stroke="{ink}" stroke-width="2"/>'
                )
                parts.append(letters(x + 12, y + 4, f"{number(strength)}", ink=ink, bold=True))
        y = _TOP + 12 + 16 * row
        if row < 16:
            parts.append(
                f'<path d="M{_LEFT + _WIDE + 14} {y - 4}h14" stroke="{ink}" stroke-width="2"/>'
            )
            parts.append(letters(_LEFT + _WIDE + 34, y, f"layer {layer}"))
    return document(_LEFT + _WIDE + _RIGHT, _TOP + _HIGH + _LOW, parts)


def _axes(most: float, low: float, high: float, *, cut: bool) -> list[str]:
    base = _TOP + _HIGH
    parts = [
        f'<path d="M{_LEFT} {_TOP}V{base}H{_LEFT + _WIDE}" fill="none" stroke="{colours.LINE}"/>'
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = _LEFT + _WIDE * share, _TOP + _HIGH * (1 - share)
        more = " or more" if share == 1.0 and cut else ""
        parts.append(letters(x, base + 16, f"{most * share:.3g}{more}", "middle"))
        parts.append(letters(_LEFT - 6, y + 4, f"{low + (high - low) * share:.2f}", "end"))
    parts.append(letters(_LEFT + _WIDE / 2, base + 36, "damage on other texts", "middle"))
    turn = f' transform="rotate(-90 16 {_TOP + _HIGH / 2:.0f})"'
    parts.append(letters(16, _TOP + _HIGH / 2, "effect", "middle", extra=turn))
    return parts
