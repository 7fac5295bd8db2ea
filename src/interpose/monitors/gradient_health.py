"""Does the gradient reach every layer, and in what size? One forward and one backward pass.

The backward pass is linear: what a layer receives is what the loss sends in, times what lies
between. So each site's gradient is compared with the gradient where the backward pass begins (the
last site in execution order that is not a single number), and the ratio does not depend on how
large the loss is, or has become.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interpose.engine.model import Model
from interpose.errors import GradientError
from interpose.models.loading import as_model
from interpose.render.html import bar
from interpose.results.result import Result
from interpose.sites.tree import Filter

_COLOURS = {"": "#4c78a8", "vanishing": "#b8b8b8"}
_DECADES = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteHealth:
    """Sizes at one site, as root mean squares: the L2 norm over the root of the number of elements.

    ``gradient`` is None where no gradient came. ``ratio`` is the gradient over that of the last
    site, None for single numbers and scales of norms. ``flag`` is empty or says what is wrong.
    """

    site: str
    activation: float
    gradient: float | None
    ratio: float | None
    flag: str


@dataclass(frozen=True, slots=True, repr=False)
class GradientHealth(Result):
    """Sizes of activations and gradients by site, in execution order."""

    rows: tuple[SiteHealth, ...]

    @property
    def flagged(self) -> tuple[SiteHealth, ...]:
        """The rows that have a flag."""
        return tuple(row for row in self.rows if row.flag)

    @property
    def healthy(self) -> bool:
        """Whether no site has a flag."""
        return not self.flagged

    @property
    def title(self) -> str:
        """One line that says what this is."""
        kinds = [row.flag for row in self.flagged]
        found = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        return f"Gradient health of {len(self.rows)} sites: {found or 'nothing to report'}"

    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return ("site", "activation", "gradient", "ratio", "flag")

    def html_cells(self) -> list[tuple[str, ...]]:
        """The same, with the ratio as a bar on a logarithmic scale (1e-6 to 1e6)."""
        rows: list[tuple[str, ...]] = []
        for row, (site, activation, gradient, ratio, flag) in zip(self.rows, self.cells()):
            share = 0.0
            if row.ratio is not None and 0 < row.ratio < math.inf:
                share = 0.5 + math.log10(row.ratio) / (2 * _DECADES)
            colour = _COLOURS.get(row.flag, "#d1495b")
            rows.append((site, activation, gradient, bar(share, ratio, colour=colour), flag))
        return rows

    def records(self) -> Iterator[dict[str, Any]]:
        """Every site as a dictionary; its value is the size of its gradient, if one came."""
        for row in self.rows:
            sizes = {"activation": row.activation, "value": row.gradient, "ratio": row.ratio}
            yield {"site": row.site, **sizes, "flag": row.flag}


def gradient_health(
    model: Model | nn.Module,
    *inputs: Any,
    loss: Callable[[Any], Tensor],
    site: Filter = None,
    vanishing: float = 1e-4,
    exploding: float = 1e4,
    **kwargs: Any,
) -> GradientHealth:
    """Find layers whose gradient vanishes or explodes. The parameters' ``.grad`` stay as they are.

    Example:
        ``ip.gradient_health(model, x, loss=lambda output: F.cross_entropy(output, y))``

    Args:
        model: the model, run once in the mode (train or eval) it is in.
        *inputs: what the model takes.
        loss: a function from the model's output to one number.
        site: where to look; None for the output of every module, or of a model of transformers for its stream and what
            its parts read and make (not for what only shows with another attention kernel, nor for norms).
        vanishing: flag a site whose gradient is below this times the one at the last site.
        exploding: flag a site whose gradient is above this times the one at the last site.
        **kwargs: what the model takes by name.
    """
    model = as_model(model)
    site = _of_layers(model) if site is None else site
    _, cache = model.run_with_cache(
        *inputs, names_filter=site, incl_bwd=loss, keep=_size_and_axes, **kwargs
    )
    sizes = {name: cache[name].tolist() for name in cache if not name.endswith("_grad")}
    gradients = {name: value.tolist()[0] for name, value in cache.grad.items()}
    received = [name for name in sizes if name in gradients]
    if not received:
        raise GradientError(
            f"no gradient reached any of the {len(sizes)} sites. The loss must depend on the "
            "model's output, and gradients must be on."
        )
    # A single number, such as a loss that the model returns itself, is no layer to compare with; nor is a norm's
    # scale, one number for what a whole vector received.
    arrays = [name for name in received if sizes[name][1] and not name.endswith("hook_scale")]
    start = gradients[(arrays or received)[-1]]
    rows, comparable = [], set(arrays)
    for name, (activation, _) in sizes.items():
        gradient = gradients.get(name)
        ratio = None
        if gradient is not None and (name in comparable or not arrays):
            ratio = gradient / start if start else math.nan
        flag = _flag(gradient, ratio, vanishing, exploding)
        rows.append(
            SiteHealth(site=name, activation=activation, gradient=gradient, ratio=ratio, flag=flag)
        )
    return GradientHealth(tuple(rows))


def _of_layers(model: Model) -> Filter:
    """Where to look by default: of a transformer, sites that are there anyway, so that no more is computed or kept."""
    sites = [site for site, _ in model.tree.select(None)]
    if not any(site.kind for site in sites):
        return None
    left_out = ("scale", "normalized")
    return [site.name for site in sites if site.switch is None and site.kind not in left_out]


def _size_and_axes(value: Tensor) -> Tensor:
    """The root mean square of a value and its number of axes: all that is kept of it."""
    real = value.abs() if value.is_complex() else value
    wide = real.to(torch.float32 if value.device.type == "mps" else torch.float64)
    size = wide.norm() / max(value.numel(), 1) ** 0.5
    return torch.stack([size, size.new_tensor(value.ndim)])


def _flag(gradient: float | None, ratio: float | None, vanishing: float, exploding: float) -> str:
    if gradient is None or ratio is None:
        return ""
    if not math.isfinite(gradient):
        return "not finite"
    if gradient == 0 or ratio < vanishing:
        return "vanishing"
    return "exploding" if ratio > exploding else ""
