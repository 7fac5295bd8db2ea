"""The proof that the axis called ``batch`` counts texts: what is done to other texts leaves the first one's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.sites.tree import Site
from interpose.taps import values

if TYPE_CHECKING:
    from interpose.models.proofs.check import Check

PROMISE = "rows are texts"


def prove_rows(check: Check, sites: Sequence[Site]) -> None:
    """Run the first text in the place of every other, and look at the first row."""
    batch = _batch(check.inputs)
    chosen = [site for site in sites if "batch" in site.axes and site.name in check.clean]
    if batch < 2 or not chosen:
        return
    counts = [check.clean.calls(site.name)[0].shape[site.axes.index("batch")] for site in chosen]
    rows = min((count for count in counts if count > 1 and not batch % count), default=batch)
    first = torch.arange(batch) % (batch // rows)  # some models take several rows for one text
    inputs = values.mapped(
        check.inputs,
        lambda t: t[first.to(t.device)] if t.ndim and t.shape[0] == batch else t,
    )
    try:
        _, cache = check.model.run_with_cache(names_filter=[s.name for s in chosen], **inputs)
    except Exception as error:  # whatever the model's own code says to such a batch
        check.note(PROMISE, "", True, f"not tried, it raised {type(error).__name__}: {error}")
        return
    for site in chosen:
        axis = site.axes.index("batch")
        pairs = zip(check.clean.calls(site.name), cache.calls(site.name))
        alike = all(_alike(before, after, axis) for before, after in pairs)
        check.note(PROMISE, site.name, alike, "the first row hangs on the first text alone")


def _batch(inputs: dict[str, Any]) -> int:
    """How many texts some inputs have."""
    return next((t.shape[0] for _, t in values.leaves(inputs) if t.ndim >= 2), 0)


def _alike(before: Tensor, after: Tensor, axis: int) -> bool:
    """Whether the first rows are the same, to rounding; values that all rows share are."""
    if before.shape != after.shape:
        return False
    a, b = before.select(axis, 0), after.select(axis, 0)
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = a.float().abs().max().clamp_min(1e-12)
    far = (a.float() - b.float()).abs().max() / scale  # about one where it is another text's
    return bool(far <= max(1e-3, 16 * torch.finfo(a.dtype).eps))
