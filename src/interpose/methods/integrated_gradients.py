"""`ip.integrated_gradients`: what a metric owes to each value, added up along a path from a baseline.

A gradient at one point says little about a value as a whole: where the metric is saturated it is zero. Integrated
gradients take the gradient all the way from a baseline x' to the value x, in a straight line:

    attribution = (x - x') * mean over t in [0, 1] of d metric / d x at x' + t (x - x')

All attributions together are exactly metric(x) - metric(x') (completeness). The integral is a sum over steps, so that
the two differ a little; the result says by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.gradient_attribution import folded, must_have_gradient, sites_by_layer
from interpose.models.selection import Some
from interpose.progress import ShowProgress, tracked
from interpose.results.result import number

_CLOSE = 0.01
_ROWS = 64  # that run together
_EVIDENCE = (
    "Evidence for how the change of the metric from the baseline to this text is shared out over values, along one "
    "straight path; not for what taking a value away does, and another baseline or path shares out differently."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class IntegratedGradients(ip.Scores):
    """Attributions, and how nearly they add up to what they should.

    Attributes:
        each: the attributions of every example, [*axes, example]; ``values`` is their mean.
        paths: the sites that were moved, each on a path of its own.
        difference: the metric less that at the baseline, for each path, the mean over examples.
        added: what the attributions of each path add up to.
        gap: how far the two are apart in each text, as a share of the difference, both as means over texts.
        steps: how many points each path was cut into.
    """

    each: Tensor
    paths: list[str]
    difference: list[float]
    added: list[float]
    gap: list[float]
    steps: list[int]

    @property
    def converged(self) -> bool:
        """Whether every path adds up to within one percent."""
        return all(gap <= _CLOSE for gap in self.gap)

    def lines(self) -> list[str]:
        """What is said above the numbers, and how well they add up."""
        worst = max(range(len(self.gap)), key=self.gap.__getitem__)
        said = (
            f"{self.paths[worst]} adds up to {number(self.added[worst])} of {number(self.difference[worst])}, a gap "
            f"of {self.gap[worst]:.2%} {'by text ' if self.each.shape[-1] > 1 else ''}in {self.steps[worst]} steps"
        )
        verdict = (
            "complete" if self.converged else "NOT COMPLETE, take more steps or another baseline"
        )
        return [*ip.Scores.lines(self), f"{verdict}: {said}"]


def integrated_gradients(
    model: ip.TransformerModel,
    texts: Any,
    *,
    metric: Any,
    site: str = "embed",
    over: str | Sequence[str] | None = None,
    baseline: Any = None,
    steps: int | str = 32,
    method: str = "midpoint",
    layer: Some = None,
    max_steps: int = 512,
    max_rows: int | None = None,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> IntegratedGradients:
    """What a metric owes to each token, or to each place of a site, so that all together add up.

    ```python
    model = ip.load("pocket")
    owed = ip.integrated_gradients(model, "The capital of Japan is", metric=ip.metrics.logit(" Tokyo"))
    owed.values                      # [pos]
    owed.gap, owed.converged         # how nearly they add up
    ```

    Args:
        model: a model of transformers, in eval mode.
        texts: a text, several (the mean over them), or tokens [batch, pos].
        metric: one of `ip.metrics`, or a function of logits that gives a number for each example.
        site: a kind of site: ``embed`` for the input, ``resid_pre``, ``mlp_out``, ...; each layer has its own path.
        over: the axes of the result, of ``layer``, ``head``, ``neuron`` and ``pos``; the others are added up. By
            default ``layer`` and ``pos``, as far as the site has them.
        baseline: where paths begin: zeros (None), the values in texts of the same lengths (texts, or tokens), the mean
            over positions (``"mean"``), or a tensor of floats that fits the value [example, pos, ...].
        steps: how many points each path has; ``auto`` doubles them from 8 until the gap is at most one percent.
        method: where the points lie: ``midpoint`` (evenly) or ``gauss`` (Gauss-Legendre), better from some 64 steps on.
        layer: which; by default all that have the site.
        max_steps: where ``auto`` gives up.
        max_rows: how many rows run together, at most; by default 64.
        batch_size: how many examples are read together, at most.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    if method not in ("gauss", "midpoint"):
        raise ValueError(f"method is 'gauss' or 'midpoint'; got {method!r}.")
    if steps != "auto" and (not isinstance(steps, int) or steps < 1):
        raise ValueError(f"steps is a number, at least 1, or 'auto'; got {steps!r}.")
    if not isinstance(site, str):
        raise TypeError(f"site is one kind of site, such as 'embed' or 'z'; got {site!r}.")
    must_have_gradient(metric)
    sites = dict(sites_by_layer(model, [site], layer)[site].values())
    words = _words(site, sites, over)
    others = baseline if _is_text(baseline) else None
    options: dict[str, Any] = {"batch_size": batch_size, "prepend_bos": prepend_bos}
    batches = ip.batches(model, texts, others, **options)
    if "pos" in words and len({batch.clean.shape[1] for batch in batches}) > 1:
        raise ValueError(
            "the texts have different lengths, so that positions are not the same places: leave 'pos' out."
        )
    found = [
        _Paths(model, batch, metric, list(sites), baseline, method, max_rows or _ROWS)
        for batch in batches
    ]
    parts, taken = [], [0] * len(sites)
    for paths in tracked(found, progress, size=lambda paths: len(paths.batch)):
        made = [paths.until(name, steps, max_steps) for name in sites]
        taken = [max(pair) for pair in zip(taken, (count for _, count in made))]
        rows = [folded(value, axes, words) for (value, _), axes in zip(made, sites.values())]
        parts.append(torch.stack(rows) if "layer" in words else rows[0])
    return _result(
        model, batches, found, parts, sites, words, taken, metric, site, baseline, method
    )


class _Paths:
    """The paths of one batch of examples."""

    def __init__(
        self,
        model: ip.TransformerModel,
        batch: Any,
        metric: Any,
        names: list[str],
        baseline: Any,
        method: str,
        rows: int,
    ) -> None:
        self.model, self.batch, self.method, self.rows = model, batch, method, rows
        self.forwards = self.backwards = 0
        with torch.no_grad():
            logits, self.values = model.run_with_cache(batch.clean, names_filter=names)
            self.measure = batch.measure(metric, logits)
            self.end = self.measure(logits).float()  # [example]
            for name in names:
                if not self.values[name].is_floating_point():
                    raise ValueError(
                        f"{name!r} is {self.values[name].dtype}: only floating point values have gradients."
                    )
            self.starts = self._starts(names, baseline)
        self.forwards += 1
        self.begin = {name: torch.zeros(len(batch)) for name in names}
        self.sums = {name: torch.zeros(len(batch)) for name in names}

    def _starts(self, names: list[str], baseline: Any) -> dict[str, Tensor]:
        """The value at which each path begins, of the value's own shape."""
        if self.batch.corrupt is not None:
            self.forwards += 1
            _, there = self.model.run_with_cache(self.batch.corrupt, names_filter=names)
            return {name: there[name] for name in names}
        if baseline is None:
            return {name: torch.zeros_like(self.values[name]) for name in names}
        if isinstance(baseline, str):  # "mean"
            return {
                name: self.values[name].mean(1, keepdim=True).expand_as(self.values[name])
                for name in names
            }
        return {name: self._own(baseline, self.values[name], name) for name in names}

    def _own(self, baseline: Tensor, value: Tensor, name: str) -> Tensor:
        """What a tensor that was given for the whole dataset has for these examples."""
        if baseline.ndim == value.ndim and len(baseline) == self.batch.total:
            baseline = baseline[list(self.batch.numbers)]
        elif baseline.ndim == value.ndim and len(baseline) != 1:
            raise ValueError(
                f"the baseline has {len(baseline)} rows for {self.batch.total} examples: give one for each, or one "
                "for all."
            )
        try:
            return baseline.to(value).expand_as(value)
        except RuntimeError:
            raise ValueError(
                f"a baseline {tuple(baseline.shape)} does not fit the value at {name!r}, {tuple(value.shape)}."
            ) from None

    def until(self, name: str, steps: int | str, most: int) -> tuple[Tensor, int]:
        """The attributions of a site, shaped as its value, and how many steps they took."""
        if steps != "auto":
            return self.attributions(name, int(steps)), int(steps)
        count = 8
        while True:
            made = self.attributions(name, count)
            if self.gap(name) <= _CLOSE or 2 * count > most:
                return made, count
            count *= 2

    def attributions(self, name: str, steps: int) -> Tensor:
        """With so many steps."""
        points, weights = _points(steps, self.method)
        # The baseline itself comes along as a point without weight, for its metric.
        points, weights = torch.cat([torch.zeros(1), points]), torch.cat([torch.zeros(1), weights])
        way = self.values[name] - self.starts[name]
        mean = torch.zeros_like(way, dtype=torch.float32)
        together = max(1, self.rows // len(self.batch))
        for at in range(0, len(points), together):
            some = points[at : at + together].to(way)
            grads, measured = self._grads(name, some)  # [point, example, ...], [point, example]
            # Not nothing times its gradient: where a stream of zeros meets a norm, that may be infinite.
            grads, parts = grads[int(at == 0) :], weights[at : at + together][int(at == 0) :]
            mean += torch.einsum("p,p...->...", parts.to(mean), grads.float())
            if at == 0:
                self.begin[name] = measured[0].float()
        made: Tensor = mean * way.float()
        self.sums[name] = made.flatten(1).sum(1)
        return made

    @torch.enable_grad()
    def _grads(self, name: str, points: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient at each point of a path, and the metric there."""
        start, value = self.starts[name], self.values[name]
        shape = (-1, *[1] * value.ndim)
        rows = (start + points.reshape(shape) * (value - start)).flatten(0, 1).requires_grad_()
        tokens = self.batch.clean.repeat(len(points), 1)
        try:
            logits = self.model.run_with_hooks(tokens, fwd_hooks=[(name, lambda _: rows)])
        except ip.EditShapeError:
            raise ValueError(
                f"{name!r} has one value for all rows that run together: give batch_size=1 and max_rows=1."
            ) from None
        measured = torch.stack([self.measure(part) for part in logits.split(len(self.batch))])
        if not measured.requires_grad:
            raise ValueError(
                f"the metric has no gradient at {name!r}: it does not depend on it, or it jumps."
            )
        (grads,) = torch.autograd.grad(measured.sum(), rows)
        self.forwards, self.backwards = self.forwards + len(points), self.backwards + len(points)
        return grads.unflatten(0, (len(points), -1)), measured.detach()

    def gap(self, name: str) -> float:
        """How far the attributions of a site are from adding up, as a share of what they should add up to."""
        return _gap(self.sums[name], self.end - self.begin[name])


def _gap(added: Tensor, difference: Tensor) -> float:
    return float((added - difference).abs().mean() / difference.abs().mean().clamp_min(1e-12))


def _points(steps: int, method: str) -> tuple[Tensor, Tensor]:
    """Points in [0, 1] and their weights, which add up to 1."""
    if method == "midpoint":
        return (torch.arange(steps) + 0.5) / steps, torch.full((steps,), 1 / steps)
    # Golub and Welsch: the eigenvalues of the Jacobi matrix of Legendre's polynomials.
    order = torch.arange(1, steps, dtype=torch.float64)
    beside = order / (4 * order.square() - 1).sqrt()
    points, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return ((points + 1) / 2).float(), vectors[0].square().float()


def _is_text(baseline: Any) -> bool:
    """Whether a baseline is texts or tokens, and no value."""
    if isinstance(baseline, Tensor):
        return not baseline.is_floating_point()
    return baseline is not None and not (isinstance(baseline, str) and baseline == "mean")


def _words(
    kind: str, sites: dict[str, tuple[str, ...]], over: str | Sequence[str] | None
) -> tuple[str, ...]:
    """The axes of the result."""
    layered = ["layer"] if all("blocks." in name for name in sites) else []
    there = [*layered, *next(iter(sites.values()))[1:]]
    if over is None:
        return tuple(word for word in ("layer", "pos") if word in there)
    words = (over,) if isinstance(over, str) else tuple(over)
    if not words or len(set(words)) < len(words) or set(words) - set(there):
        raise ValueError(
            f"over names some of {', '.join(there)}, each once, at {kind}; got {words}."
        )
    if "layer" not in words and len(sites) > 1:
        raise ValueError(
            f"{kind} has a path for each of {len(sites)} layers, and their attributions do not add up to anything: put "
            "'layer' into over, or choose one with layer=[...]."
        )
    return words


def _result(
    model: ip.TransformerModel,
    batches: Sequence[Any],
    found: Sequence[_Paths],
    parts: Sequence[Tensor],
    sites: dict[str, tuple[str, ...]],
    words: Sequence[str],
    taken: list[int],
    metric: Any,
    site: str,
    baseline: Any,
    method: str,
) -> IntegratedGradients:
    total = batches[0].total
    each = torch.zeros(*parts[0].shape[:-1], total, device="cpu")
    ends = torch.zeros(
        2, len(sites), total, device="cpu"
    )  # what was added up, and what it should be
    for batch, paths, part in zip(batches, found, parts):
        numbers = list(batch.numbers)
        each[..., numbers] = part
        for at, name in enumerate(sites):
            ends[0, at, numbers] = paths.sums[name].cpu()
            ends[1, at, numbers] = (paths.end - paths.begin[name]).cpu()
    if "layer" in words:  # layers were stacked in front
        each = each.movedim(0, words.index("layer"))
    named = {"layer": [model.sites[name].layer for name in sites]}
    said = "zeros" if baseline is None else baseline if isinstance(baseline, str) else "given"
    return IntegratedGradients.averaged(
        each,
        title=f"integrated gradients at {site}, {ip.metrics.label(metric)}",
        axes={word: named.get(word, list(range(each.shape[at]))) for at, word in enumerate(words)},
        unit="metric",
        protocol={
            "metric": ip.metrics.label(metric),
            "baseline": said,
            "method": method,
            "examples": total,
            "forwards": sum(paths.forwards for paths in found),
            "backwards": sum(paths.backwards for paths in found),
        },
        evidence=_EVIDENCE,
        tokens=batches[0].str_tokens,
        each=each,
        paths=list(sites),
        difference=ends[1].mean(-1).tolist(),
        added=ends[0].mean(-1).tolist(),
        gap=[_gap(*pair) for pair in zip(ends[0], ends[1])],
        steps=taken,
    )
