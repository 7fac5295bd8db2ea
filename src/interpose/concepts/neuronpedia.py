"""A unit with the fields of Neuronpedia's JSON, for those who upload there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from interpose.concepts.counts import edges

if TYPE_CHECKING:
    from interpose.concepts.report import Features

_BARS = 50


def feature(found: Features, unit: int) -> dict[str, Any]:
    """A unit's record.

    Args:
        found: what `ip.features` returned.
        unit: which.
    """
    logits, alike = found.logits(unit), found.alike(unit)
    heights, values = bars(found, unit)
    return {
        "feature_index": unit,
        "frac_nonzero": found.density(unit),
        "maxActApprox": float(found.counts.most[found.row(unit)]),
        "pos_str": [word for word, _ in logits["up"]],
        "pos_values": [value for _, value in logits["up"]],
        "neg_str": [word for word, _ in logits["down"]],
        "neg_values": [value for _, value in logits["down"]],
        "freq_hist_data_bar_heights": heights,
        "freq_hist_data_bar_values": values,
        "topkCosSimIndices": [other for other, _ in alike],
        "topkCosSimValues": [cosine for _, cosine in alike],
        "n_prompts_total": found.text_count,
        "n_tokens_in_prompt": None,
        "hookName": found.protocol.get("site"),
        "activations": [_activation(one) for one in _examples(found, unit)],
    }


def bars(found: Features, unit: int) -> tuple[list[float], list[float]]:
    """A histogram with bars of equal width: heights, and the middle of each.

    Values were counted in four bins an octave; each bin is spread evenly over the bars that it covers.
    """
    row = found.row(unit)
    most = float(found.counts.most[row])
    if most <= 0:
        return [], []
    at, counts = edges(), found.counts.histogram[row].double()
    low, high = at[:-1], at[1:].clamp(max=most)
    steps = torch.linspace(0, most, _BARS + 1, dtype=torch.float64)
    covered = torch.minimum(high[:, None], steps[1:]) - torch.maximum(low[:, None], steps[:-1])
    shares = covered.clamp(min=0) / (high - low).clamp(min=1e-30)[:, None]
    heights = (counts[:, None] * shares).sum(0)
    middle = (steps[1:] + steps[:-1]) / 2
    return heights.tolist(), middle.tolist()


def _examples(found: Features, unit: int) -> list[dict[str, Any]]:
    """The strongest places, then those of the groups, each with the lowest and highest value of its group."""
    top = [{**one, "low": None, "high": None} for one in found.examples(unit)]
    groups = [
        {**one, "low": group["low"], "high": group["high"]}
        for group in found.groups(unit, 10, 5)
        for one in group["examples"]
    ]
    return top + groups


def _activation(one: dict[str, Any]) -> dict[str, Any]:
    there = [(w, v) for w, v in zip(one["words"], one["activations"]) if v == v]
    values = [value for _, value in there]
    before = sum(v == v for v in one["activations"][: len(one["activations"]) // 2])
    return {
        "tokens": [word for word, _ in there],
        "values": values,
        "maxValue": max(values),
        "maxValueTokenIndex": values.index(max(values)),
        "minValue": min(values),
        "qualifyingTokenIndex": before,
        "binMin": one["low"],
        "binMax": one["high"],
        "dataIndex": one["row"],
    }
