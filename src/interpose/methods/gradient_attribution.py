"""`ip.saliency` and `ip.gradient_times_activation`: what a metric answers to, by its gradient.

For a value a at a site, with g = d metric / d a:

    saliency                     |g|               how strongly the metric answers to small changes there
    gradient times activation    g . a             to first order, what the metric owes to the value being there
    with a baseline              g . (a - a')      to first order, what it owes to not being the baseline's value

One forward and one backward pass give all places at once; a baseline takes one more forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.layers import chosen_layers
from interpose.models.selection import Some
from interpose.progress import ShowProgress, tracked

AXES = ("site", "layer", "head", "neuron", "pos")
ByLayer = dict[int | None, tuple[str, tuple[str, ...]]]
"""By layer: the name of a site, and what its axes are in the words of ``over``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Attribution(ip.Scores):
    """Scores, and every example's own.

    Attributes:
        each: the scores of every example, [*axes, example]; ``values`` is their mean.
        measured: the metric of each example, [example].
        baseline: the metric of each example's baseline text, [example]; None without one.
    """

    each: Tensor
    measured: Tensor
    baseline: Tensor | None = None


def saliency(
    model: ip.TransformerModel,
    texts: Any,
    *,
    metric: Any,
    site: str | Sequence[str] = "embed",
    over: str | Sequence[str] | None = None,
    hooks: Sequence[Any] = (),
    layer: Some = None,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> Attribution:
    """How strongly a metric answers to small changes at each place: the length of its gradient there.

    ```python
    model = ip.load("pocket")
    seen = ip.saliency(model, "The capital of Japan is", metric=ip.metrics.logit(" Tokyo"))
    seen.values                      # [pos]
    ip.saliency(model, "The capital of Japan is", metric=ip.metrics.logit(" Tokyo"), site="z", over=("layer", "head"))
    ```

    Args:
        model: a model of transformers, in eval mode.
        texts: a text, several (the mean over them), or tokens [batch, pos].
        metric: one of `ip.metrics`, or a function of logits that gives a number for each example.
        site: a kind of site (``embed``, ``resid_pre``, ``z``, ``post``, ...); several with ``over=("site", ...)``.
        over: the axes of the result, of ``site``, ``layer``, ``head``, ``neuron`` and ``pos``; the length is taken over
            the others. By default ``layer`` and ``pos``, as far as the site has them.
        hooks: in place during the run, such as `ip.relp`.
        layer: which; by default all that have the site.
        batch_size: how many examples run together, at most.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    evidence = (
        "Evidence for where the metric is sensitive to small changes of a value; not for what the value there did: a "
        "gradient can be large where nothing changes, and zero where a metric or an activation is saturated."
    )
    return _attribution(
        model,
        ip.batches(model, texts, batch_size=batch_size, prepend_bos=prepend_bos),
        "saliency",
        metric,
        site,
        over,
        hooks,
        layer,
        lambda grad, _: grad.float().square(),
        evidence,
        progress,
    )


def gradient_times_activation(
    model: ip.TransformerModel,
    texts: Any,
    *,
    metric: Any,
    site: str | Sequence[str] = "embed",
    over: str | Sequence[str] | None = None,
    baseline: Any = None,
    hooks: Sequence[Any] = (),
    layer: Some = None,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> Attribution:
    """What a metric owes to each value, to first order: gradient times value, added up within each place.

    ```python
    model = ip.load("pocket")
    tokyo = ip.metrics.logit(" Tokyo")
    ip.gradient_times_activation(model, "The capital of Japan is", metric=tokyo, site="z", over=("layer", "head"))
    ```

    Args:
        model: a model of transformers, in eval mode.
        texts: a text, several (the mean over them), or tokens [batch, pos].
        metric: one of `ip.metrics`, or a function of logits that gives a number for each example.
        site: a kind of site (``embed``, ``resid_pre``, ``z``, ``post``, ...); several with ``over=("site", ...)``.
        over: the axes of the result, of ``site``, ``layer``, ``head``, ``neuron`` and ``pos``; the others are added up.
            By default ``layer`` and ``pos``, as far as the site has them.
        baseline: texts of the same lengths whose values are subtracted first; by default zero is the baseline.
        hooks: in place during the run with gradients, such as `ip.relp`.
        layer: which; by default all that have the site.
        batch_size: how many examples run together, at most.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    evidence = (
        "Evidence, to first order, for what the metric owes to a value being there and not the baseline's (or zero); "
        "not for what taking it away would do: a large change leaves the straight line that a gradient draws."
    )
    return _attribution(
        model,
        ip.batches(model, texts, baseline, batch_size=batch_size, prepend_bos=prepend_bos),
        "gradient times activation",
        metric,
        site,
        over,
        hooks,
        layer,
        # Nothing is owed where nothing answers: a masked score is -inf.
        lambda grad, value: (grad.float() * value.float()).where(grad != 0, 0.0),
        evidence,
        progress,
    )


def _attribution(
    model: ip.TransformerModel,
    batches: Sequence[Any],
    title: str,
    metric: Any,
    site: str | Sequence[str],
    over: str | Sequence[str] | None,
    hooks: Sequence[Any],
    layer: Some,
    combine: Callable[[Tensor, Tensor], Tensor],
    evidence: str,
    progress: ShowProgress,
) -> Attribution:
    kinds = [site] if isinstance(site, str) else list(site)
    sites = sites_by_layer(model, kinds, layer)
    words = _words(sites, over)
    must_have_gradient(metric)
    if isinstance(metric, ip.metrics.kl) and batches[0].corrupt is None:
        raise ValueError(
            "kl compares with another run, and there is none: give baseline=... to ip.gradient_times_activation, or "
            "take logit, logit_difference or probability."
        )
    if "pos" in words and len({batch.clean.shape[1] for batch in batches}) > 1:
        raise ValueError(
            "the texts have different lengths, so that positions are not the same places: leave 'pos' out."
        )
    total = batches[0].total
    parts, ends = [], torch.zeros(2, total, device="cpu")
    for batch in tracked(batches, progress):
        here, there, ends[:, list(batch.numbers)] = _run(model, batch, metric, sites, hooks)
        rows = []
        for kind in kinds:
            row = []
            for name, axes in sites[kind].values():
                value = here[name] if there is None else here[name] - there[name]
                if len(value) != len(batch):
                    raise ValueError(
                        f"{name!r} has one value for all texts that run together: give batch_size=1."
                    )
                row.append(folded(combine(here.grad[name], value), axes, words))
            rows.append(row)
        parts.append(_stacked(rows, kinds, words))
    each = torch.zeros(*parts[0].shape[:-1], total, device="cpu")
    for batch, part in zip(batches, parts):
        each[..., list(batch.numbers)] = part.sqrt() if title == "saliency" else part
    paired = batches[0].corrupt is not None
    return Attribution.averaged(
        each,
        title=f"{title} at {', '.join(kinds)}, {ip.metrics.label(metric)}",
        axes={word: _entries(word, each.shape[at], sites) for at, word in enumerate(words)},
        unit="gradient norm" if title == "saliency" else "metric",
        protocol={
            "metric": ip.metrics.label(metric),
            "examples": total,
            "forwards": len(batches) * (1 + paired),
            "backwards": len(batches),
        },
        evidence=evidence,
        tokens=batches[0].str_tokens,
        each=each,
        measured=ends[0],
        baseline=ends[1] if paired else None,
    )


def must_have_gradient(metric: Any) -> None:
    """Refuse a metric that jumps, and a place where there are no gradients whatever is done."""
    if torch.is_inference_mode_enabled():
        raise ip.Unsupported(
            "there are no gradients inside torch.inference_mode(): call this outside of it (torch.no_grad() is fine)."
        )
    if isinstance(metric, ip.metrics.rank):
        raise ValueError(
            f"{ip.metrics.label(metric)} has no gradient: ranks jump. Use logit, logit_difference or probability."
        )


def sites_by_layer(
    model: ip.TransformerModel, kinds: Sequence[str], layer: Some
) -> dict[str, ByLayer]:
    """The sites of each kind, in the layers that have all of them.

    Args:
        model: whose.
        kinds: of sites, each with one in a layer.
        layer: which; None for all.
    """
    found: dict[str, ByLayer] = {}
    for kind in kinds:
        row = found[kind] = {}
        for site in _sites_of(model, kind):
            if site.layer in row:
                raise ValueError(
                    f"{kind!r} has both {row[site.layer][0]!r} and {site.name!r} in one layer: ask for one at a time."
                )
            row[site.layer] = (site.name, _axes(model.hook_dict[site.name]))
    shared = [one for one in found[kinds[0]] if all(one in row for row in found.values())]
    if not shared:
        raise ValueError(f"no layer has all of {', '.join(kinds)}.")
    if layer is not None:
        said, count = ", ".join(kinds), len(model.blocks)
        if shared == [None]:
            raise ValueError(f"{said}: in no layer, so that layer=... means nothing.")
        there = [one for one in shared if one is not None]
        shared = [*chosen_layers(layer, there, count, said)]
    return {kind: {one: row[one] for one in shared} for kind, row in found.items()}


def _sites_of(model: ip.TransformerModel, kind: str) -> list[Any]:
    """The sites of a kind; in a model from scratch, ``embed`` is the site and not the module of that name."""
    found = [model.sites[name] for name in model.sites.select(kind)]
    if all(site.axes for site in found):
        return found
    if f"hook_{kind}" in model.sites:
        return [model.sites[f"hook_{kind}"]]
    raise ValueError(
        f"{kind!r} is a module, and what its axes are is not known: take one of model.sites."
    )


def _axes(point: Any) -> tuple[str, ...]:
    """The axes of a value, the last of which are its neurons: features, or keys of a pattern."""
    names = (*point.axes[:-1], "neuron")
    return tuple("pos" if at == point.pos_axis else name for at, name in enumerate(names))


def _words(sites: Any, over: str | Sequence[str] | None) -> tuple[str, ...]:
    """The axes of the result."""
    rows = [entry for row in sites.values() for entry in row.items()]
    there = {"site"} | ({"layer"} if all(layer is not None for layer, _ in rows) else set())
    there |= set.intersection(*(set(axes) for _, (_, axes) in rows)) & set(AXES)
    if over is None:
        usual = ("site", "layer", "pos") if len(sites) > 1 else ("layer", "pos")
        return tuple(word for word in usual if word in there)
    words = (over,) if isinstance(over, str) else tuple(over)
    if not words or len(set(words)) < len(words) or set(words) - set(AXES):
        raise ValueError(f"over names some of {', '.join(AXES)}, each once; got {words}.")
    if missing := [word for word in words if word not in there]:
        known = ", ".join(word for word in AXES if word in there)
        raise ValueError(f"{', '.join(sites)}: no axis {missing[0]!r}; there are {known}.")
    if len(sites) > 1 and "site" not in words:
        raise ValueError("several sites need over=('site', ...).")
    return words


def _run(
    model: ip.TransformerModel, batch: Any, metric: Any, sites: Any, hooks: Sequence[Any]
) -> tuple[Any, Any, Tensor]:
    """Values and gradients of a batch, values of its baseline, and the metric of both, [2, example]."""
    names = [name for row in sites.values() for name, _ in row.values()]
    last, there, other = batch.last_logits(metric), None, None
    if batch.corrupt is not None:
        with torch.no_grad():
            other, there = model.run_with_cache(batch.corrupt, names_filter=names, **last)
    measure = batch.measure(metric, other)
    found: list[Tensor] = [torch.zeros(len(batch))]
    if other is not None:  # a loss is that of a text's own tokens
        found = [replace(batch, clean=batch.corrupt).measure(metric, other)(other)]

    def loss(logits: Tensor) -> Tensor:
        found.insert(0, measure(logits))
        return found[0].sum()

    with torch.enable_grad():
        _, here = model.run_with_cache(
            batch.clean, names_filter=names, hooks=hooks, incl_bwd=loss, **last
        )
    return here, there, torch.stack([end.detach().float().cpu() for end in found])


def folded(value: Tensor, axes: Sequence[str], words: Sequence[str]) -> Tensor:
    """A value [batch, ...] added up to those of its axes that are in ``words``, in their order, examples last."""
    gone = [at for at, name in enumerate(axes) if name not in ("batch", *words)]
    left = [name for name in axes if name in ("batch", *words)]
    part = value.sum(gone) if gone else value
    order = [left.index(word) for word in (*words, "batch") if word in left]
    return part.permute(order).cpu()


def _stacked(
    rows: Sequence[Sequence[Tensor]], kinds: Sequence[str], words: Sequence[str]
) -> Tensor:
    """Values by site and layer in one tensor [*words, example]; layers that are no axis are added up."""
    if len({part.shape for row in rows for part in row}) > 1:
        raise ValueError(
            f"{', '.join(kinds)} do not have the same places: take them one at a time."
        )
    whole = torch.stack([torch.stack(list(row)) for row in rows])  # [site, layer, *others, example]
    others = [word for word in words if word not in ("site", "layer")]
    if "layer" not in words:
        whole = whole.sum(1, keepdim=True)
    now = ["site", "layer", *others]
    order = [now.index(word) for word in (*words, *(word for word in now if word not in words))]
    return whole.permute(*order, whole.ndim - 1).reshape(
        *(whole.shape[at] for at in order[: len(words)]), -1
    )


def _entries(word: str, count: int, sites: Any) -> list[Any]:
    named = {"site": list(sites), "layer": list(next(iter(sites.values())))}
    return named.get(word, list(range(count)))
