"""`ip.ablation`: what a model can do without.

Take a unit away (a head, a layer's attention or MLP, a neuron) and measure how far the metric moves:

    effect(unit) = metric(run in which unit := replacement) - metric(run as it is)

The replacement is zero, the unit's mean over reference texts, or its value in another text. Zero is a value that the
model may never have seen; the mean keeps what all texts share; another text's value is always one the model makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.batches import rows_of
from interpose.progress import ShowProgress

_EVIDENCE = (
    "Evidence that the model needs a unit for this metric on these texts; not for what the unit computes, nor that a "
    "unit without effect is idle: others may stand in for it, and a replaced value may be one that it never makes."
)


def ablation(
    model: ip.TransformerModel,
    texts: Any,
    *,
    metric: Any,
    site: str | Sequence[str] = "z",
    over: str | Sequence[str] = ("layer", "head"),
    replace_by: str = "zero",
    reference: Any = None,
    per_position: bool | None = None,
    seed: int = 0,
    layer: Sequence[int] | None = None,
    head: Sequence[int] | None = None,
    neuron: Sequence[int] | None = None,
    pos: Sequence[int] | None = None,
    batch_size: int = 16,
    max_rows: int | None = None,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> ip.Scores:
    """How far the metric moves without each unit: below zero, the unit was needed.

    ```python
    model = ip.load("pocket")
    text = "When Mary and John went to the store, John gave a drink to"
    lead = ip.metrics.logit_difference(" Mary", " John")
    ip.ablation(model, text, metric=lead).top(3)                                     # heads
    ip.ablation(model, text, metric=lead, site=["attn_out", "mlp_out"], over=("site", "layer"))
    ```

    Args:
        model: a model of transformers, in eval mode.
        texts: a text, several, or tokens [batch, pos].
        metric: one of `ip.metrics`, or a function of logits that gives a number for each example.
        site: the kind of site that units are parts of: ``z`` for heads, ``attn_out``, ``mlp_out``, ``post`` for
            neurons; several with ``over=("site", ...)``.
        over: which axes to go through, of ``site``, ``layer``, ``head``, ``neuron`` and ``pos``.
        replace_by: ``zero``, ``mean`` (over the reference texts), or ``resample`` (the value of another text as long).
        reference: the texts that means and other values come from; by default the given ones.
        per_position: whether each position has a mean of its own; by default if there are several reference texts and
            all texts are of one length.
        seed: of the draw of other texts.
        layer: which; by default all that have the site.
        head: which; by default all.
        neuron: which features of the site's last axis; needed for that axis.
        pos: which; by default all.
        batch_size: how many texts run together, at most.
        max_rows: how many rows of a sweep run together, at most; by default as many as fit in memory.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    rows = rows_of(model, texts, prepend_bos)
    if reference is not None:
        reference = rows_of(model, reference, prepend_bos)
    options, how = _replacement(
        model, rows, site, replace_by, reference, per_position, seed, batch_size
    )
    sweep = functools.partial(
        ip.sweep,
        model,
        rows,
        **options,
        metric={"metric": metric},  # one alone: a mapping of several is refused
        site=site,
        over=over,
        layer=layer,
        head=head,
        neuron=neuron,
        pos=pos,
        batch_size=batch_size,
        max_rows=max_rows,
        progress=progress,
    )
    try:
        return _scores(sweep(), how)
    except ip.Cancelled as error:
        error.result = _scores(error.result, how)
        raise


def _replacement(
    model: ip.TransformerModel,
    rows: list[Tensor],
    site: str | Sequence[str],
    replace_by: str,
    reference: Any,
    per_position: bool | None,
    seed: int,
    batch_size: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What tells `ip.sweep` the values to put in, and what is said of them."""
    if replace_by not in ("zero", "mean", "resample"):
        raise ValueError(f"replace_by is 'zero', 'mean' or 'resample'; got {replace_by!r}.")
    if replace_by == "zero" and reference is not None:
        raise ValueError(
            "reference goes with replace_by='mean' or replace_by='resample'; replace_by='zero' needs none."
        )
    if replace_by != "mean" and per_position is not None:
        raise ValueError(f"per_position goes with replace_by='mean'; got {replace_by!r}.")
    others = rows if reference is None else reference
    if replace_by == "zero":
        return {"edit": ip.zero}, {"replaced by": replace_by}
    if replace_by == "mean":
        apart = _keeps_positions(rows, others, per_position)
        names = list(model.sites.select(site))
        batches = ip.batches(model, others, batch_size=batch_size)
        said = f"{len(others)} texts" + ("" if apart else " and their positions")
        how = {"replaced by": replace_by, "mean over": said, "reference forwards": len(batches)}
        return {"edit": _put_in(_means(model, batches, names, apart))}, how
    draw = _drawn(rows, others, seed)
    # Patching corrupt values in is just that: another run's values go into the run as it is.
    corrupt = [others[number] for number in draw]
    return {"corrupt": corrupt, "patch": "corrupt"}, {
        "replaced by": replace_by,
        "seed": seed,
        "draw": draw,
    }


# The mean.


def _keeps_positions(rows: Any, others: Any, asked: bool | None) -> bool:
    """Whether means are taken position by position."""
    lengths = sorted({len(row) for row in (*rows, *others)})
    if asked and len(lengths) > 1:
        raise ValueError(
            f"the texts have {lengths[0]} to {lengths[-1]} tokens, so that positions are not the same places. Give "
            "texts of one length, or per_position=False."
        )
    return len(lengths) == 1 and len(others) > 1 if asked is None else asked


@torch.no_grad()
def _means(
    model: ip.TransformerModel, batches: Sequence[ip.Batch], names: list[str], apart: bool
) -> dict[str, Tensor]:
    """The mean of each site over texts, [1, pos or 1, ...]."""
    sums: dict[str, Tensor] = {}
    for name in names:
        if not apart and model.hook_dict[name].pos_axis != 1:
            raise ValueError(
                f"{name!r} is {model.hook_dict[name].axes}: it has no mean over positions. Give several texts of one "
                "length, whose mean is taken at each position."
            )
    for batch in batches:
        _, cache = model.run_with_cache(batch.clean, names_filter=names, return_type=None)
        for name in names:
            value = cache[name].float().sum(0 if apart else (0, 1), keepdim=True)
            sums[name] = sums[name] + value if name in sums else value
    count = sum(len(batch) if apart else batch.clean.numel() for batch in batches)
    return {name: total / count for name, total in sums.items()}


def _put_in(means: dict[str, Tensor]) -> Callable[..., Any]:
    """What makes the edit of a unit: `ip.sweep` calls it with the site and the unit."""

    def mean(name: str, **unit: Any) -> Any:
        return ip.mean(name, means[name], **unit)

    return mean


# Another text's value.


def _drawn(rows: Any, others: Any, seed: int) -> list[int]:
    """For each text the index of another one of the same length in tokens; never of an equal one."""
    generator = torch.Generator("cpu").manual_seed(seed)
    found = []
    for number, row in enumerate(rows):
        fitting = [
            n for n, o in enumerate(others) if len(o) == len(row) and not torch.equal(o, row)
        ]
        if not fitting:
            raise ValueError(
                f"text {number} has {len(row)} tokens, and no other text has as many: a value is taken from the same "
                "position of another text. Give reference=[...] with such texts, or replace_by='mean'."
            )
        place = torch.randint(len(fitting), (), generator=generator, device="cpu")
        found.append(fitting[int(place)])
    return found


def _scores(found: ip.SweepResult, how: dict[str, Any]) -> ip.Scores:
    each = found.each[0] - found.clean[0]  # [*axes, example]
    count = each.shape[-1]
    kinds = ", ".join(found.sites)
    return ip.Scores.averaged(
        each,
        title=f"{kinds} ablated by {how['replaced by']}, {count} text{'s' * (count > 1)}",
        axes={name: entries for name, entries in found.axes.items() if name != "metric"},
        unit="change of the metric",
        protocol={
            "metric": found.measured[0],
            "unablated": float(found.clean.mean()),
            **found.fixed,
            **how,
            **found.tally.protocol,
            **({} if found.own is None else {"logits": found.logits}),
        },
        evidence=_EVIDENCE,
        tokens=found.tokens,
        noise_floor=found.noise_floor,
    )
