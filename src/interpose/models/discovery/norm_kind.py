"""Norms: which formula one follows, checked on the probe's numbers, so that its scale can be named.

What it multiplies with and adds is measured on the live module, in `models/stream/formula.py`.
"""

from __future__ import annotations

import numpy as np

from interpose.models.discovery.anatomy import Norm
from interpose.models.discovery.record import Event
from interpose.models.discovery.stream import endpoint_of

_EPS = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_epsilon")


def describe(event: Event) -> Norm:
    """A norm with its formula: ``(x - mean) / sqrt(var + eps)`` or ``x / sqrt(mean(x^2) + eps)``, times a weight."""
    module = event.module
    endpoint = endpoint_of(event, "output", event.made[0])
    name = next((name for name in _EPS if hasattr(module, name)), None)
    given, made = event.given[0].row, event.made[0].row
    if name is None or given.size != made.size or not given.size:
        return Norm(endpoint=endpoint, why_not=f"{type(module).__name__} names no epsilon")
    if not (event.given[0].is_finite and event.made[0].is_finite):
        return Norm(
            endpoint=endpoint, why_not="its values are not finite in the probe (NaN or Inf)"
        )
    eps = float(getattr(module, name))
    weight = getattr(module, "weight", None)
    weights = [np.ones_like(given)]
    if weight is not None and weight.numel() == given.size:
        numbers = weight.detach().double().cpu().numpy().reshape(-1)
        weights = [numbers, 1 + numbers]
    bias = getattr(module, "bias", None)
    shift = 0.0 if bias is None else bias.detach().double().cpu().numpy().reshape(-1)
    # A NaN in the weight says nothing: the other entries follow the formula or do not.
    told = np.isfinite(weights[0] + shift)
    if not told.any():
        return Norm(
            endpoint=endpoint, why_not=f"no weight of its {type(module).__name__} is finite"
        )
    fits: list[tuple[float, bool]] = []
    for centred in (False, True):
        unit = given - given.mean() if centred else given
        unit = unit / np.sqrt((unit**2).mean() + eps)
        errors = [np.abs(unit * factor + shift - made)[told].max() for factor in weights]
        fits.append((float(min(errors)), centred))
    error, centred = min(fits)
    if not error <= 3e-2 * np.abs(made[told]).max():
        return Norm(
            endpoint=endpoint, why_not=f"{type(module).__name__} follows neither usual formula"
        )
    return Norm(endpoint=endpoint, centred=centred, eps=eps, eps_name=name)
