"""`steering_vector`: directions out of texts that have something and texts that have not.

With x+ and x- the values of the two kinds of texts at a site, and d = mean x+ - mean x-, a direction u of length one is

    means:     d / |d|
    pca:       the first principal axis of the differences x+ - x- of pairs, about zero (repeng's pca_center)
    pca_diff:  the same about their mean
    probe:     the weights of a logistic regression on standardised units, as features have them

and the vector is (d u) u: added once, it moves the mean of the one kind to that of the other, as far as u goes. So a
strength of one means the same whatever the method is, and the sign is always right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.batches import batches_to_read
from interpose.methods.layers import sites_in
from interpose.methods.linear_fits import Task, fitted
from interpose.methods.probes import vectors_at
from interpose.models.selection import Some
from interpose.progress import ShowProgress, tracked
from interpose.steering.vector import SteeringVector, model_type_of

WAYS = ("means", "pca", "pca_diff", "probe")
_PENALTY = 0.01


@torch.no_grad()
def steering_vector(
    model: ip.TransformerModel,
    positive: Any,
    negative: Any,
    *,
    site: str = "resid_post",
    layer: Some = None,
    head: int | None = None,
    pos: int | str | slice = -1,
    by: str = "means",
    batch_size: int = 16,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> SteeringVector:
    """Directions from texts that have something to texts that have not, for several layers at once.

    ```python
    good, bad = ["I love it", "What a lovely day"], ["I hate it", "What an awful day"]
    vector = ip.steering_vector(model, good, bad)
    model.run_with_hooks("The film was", hooks=[vector.add(2.0, layer=4)])
    ```

    Texts of different lengths are run without padding.

    Args:
        model: a model of transformers, in eval mode.
        positive: texts that have it, tokens, or a store (`ip.open_store`), whose rows are read instead of running the
            model.
        negative: texts that have not. With ``pca`` and ``pca_diff`` the first is the partner of the first, and so on.
        site: a kind of site.
        layer: which; by default all that have the site.
        head: for sites with heads, which.
        pos: which position of each text: a number, a text (its last token, where it last occurs), or a slice: the mean
            of these positions, as ``slice(None)`` is of all.
        by: how a direction is made of the examples: ``means``, ``pca``, ``pca_diff`` or ``probe``.
        batch_size: how many texts run together.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    if by not in WAYS:
        raise ValueError(f"by is {', '.join(map(repr, WAYS))}; got {by!r}.")
    if not isinstance(pos, (int, str, slice)):
        raise TypeError(f"pos is a number, a text or a slice; got {pos!r}.")
    layers = list(sites_in(model, site, layer, repr(site)))
    kinds = []
    for texts in (positive, negative):
        read = batches_to_read(model, texts, batch_size=batch_size, prepend_bos=prepend_bos)
        parts = [
            vectors_at(model, batch, site, layers, pos, head) for batch in tracked(read, progress)
        ]
        order = torch.tensor([number for batch in read for number in batch.numbers]).argsort()
        kinds.append(torch.cat(parts, 1).double().cpu()[:, order])  # [layer, example, unit]
    there, away = kinds
    moved = there.mean(1) - away.mean(1)
    if not bool((moved.norm(dim=-1) > 0).all()):
        raise ValueError(
            f"the two kinds of texts have the same mean at {site!r}: at pos={pos!r} nothing tells them apart. Choose a "
            "position at or after the first token that differs."
        )
    unit = _axes(there, away, by)
    directions = (moved * unit).sum(-1, keepdim=True) * unit
    return SteeringVector(
        site=site,
        layers=layers,
        directions=directions.float(),
        head=head,
        by=by,
        model_type=model_type_of(model),
        norms=torch.cat(kinds, 1).norm(dim=-1).mean(1).float(),
        separation=_separation(kinds, moved, unit),
        protocol={"examples": [len(there[0]), len(away[0])], "pos": _said(pos)},
    )


def _separation(kinds: list[Tensor], moved: Tensor, unit: Tensor) -> Tensor:
    """How many standard deviations lie between the means along a direction, [layer]; nothing of single examples."""
    if min(values.shape[1] for values in kinds) < 2:
        return torch.empty(0)
    centred = [values - values.mean(1, keepdim=True) for values in kinds]
    spread = torch.stack([(one * unit[:, None]).sum(-1).var(1) for one in centred]).mean(0)
    return ((moved * unit).sum(-1).abs() / spread.sqrt()).float()


def _axes(there: Tensor, away: Tensor, by: str) -> Tensor:
    """For each layer a direction of length one, [layer, unit]."""
    if by == "means":
        found = there.mean(1) - away.mean(1)
    elif by == "probe":
        found = _probed(there, away)
    else:
        found = _principal(there, away, by)
    unit: Tensor = found / found.norm(dim=-1, keepdim=True)
    return unit


def _principal(there: Tensor, away: Tensor, by: str) -> Tensor:
    """The first principal axis of the differences of pairs."""
    if there.shape[1] != away.shape[1]:
        raise ValueError(
            f"by={by!r} takes pairs, as many positive as negative texts; got {there.shape[1]} and {away.shape[1]}."
        )
    differences = there - away
    if by == "pca_diff":
        if there.shape[1] < 3:
            raise ValueError("by='pca_diff' takes three pairs or more.")
        differences = differences - differences.mean(1, keepdim=True)
    axes: Tensor = torch.linalg.svd(differences, full_matrices=False)[2]
    return axes[:, 0]


def _probed(there: Tensor, away: Tensor) -> Tensor:
    """The weights of a logistic regression that tells the two kinds apart."""
    features = torch.cat([away, there], 1)
    labels = torch.arange(features.shape[1]) >= away.shape[1]
    task = Task(
        target=labels.long(), classes=[0, 1], fold_of=torch.zeros(len(labels)).long(), folds=0
    )
    data = [(torch.arange(len(labels)), features)]
    weight, _ = fitted(lambda: data, [task], "logistic", _PENALTY)[0][-1]
    return weight[:, 0]


def _said(pos: Any) -> Any:
    return f"{pos.start}:{pos.stop}" if isinstance(pos, slice) else pos
