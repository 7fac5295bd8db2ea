"""Fold norms: what a norm multiplies with and adds goes into the maps that read it.

The readers are found by their numbers in a probe forward: whatever takes just what the norm made. So one
norm may feed attention and MLP, and an encoder's last norm the cross attention of a decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from interpose.errors import Unsupported
from interpose.models.discovery.anatomy import Block, Endpoint, Norm
from interpose.models.discovery.parts import linear_shape
from interpose.models.discovery.record import Event
from interpose.models.discovery.stream import endpoint_of, is_norm
from interpose.models.processing import mixtures, observed
from interpose.models.processing.linear import add_to_bias, check_alone, matrix, put, wide
from interpose.models.processing.mixtures import OwnWeight
from interpose.models.stream.formula import Formula, formula_of
from interpose.models.transformer import TransformerModel
from interpose.models.weights import views


@dataclass(slots=True, kw_only=True)
class Fold:
    """A norm, and what reads it."""

    name: str
    norm: Norm
    maps: list[Endpoint] = field(default_factory=list)
    own: list[OwnWeight] = field(default_factory=list)


def plan(model: TransformerModel) -> list[Fold]:
    """Every norm that is to be folded with its readers; a norm that cannot be is an error that says why."""
    folds = _folds(model)
    events = observed.record(model).events
    of_value: dict[tuple[int, bytes], Fold] = {}
    for event in events:
        for fold in folds:
            if event.module is fold.norm.endpoint.module:
                # Norms that make the same numbers are alike, and are folded by one of them.
                of_value.setdefault(observed.key(event.made[0]), fold)
    _find_readers(model, events, of_value)
    followed = {id(fold) for fold in of_value.values()}
    for fold in folds:
        _check(model, fold, has_readers=bool(fold.maps or fold.own) or id(fold) not in followed)
    return [fold for fold in folds if fold.maps or fold.own or id(fold) not in followed]


def _folds(model: TransformerModel) -> list[Fold]:
    anatomy = model.anatomy
    inside = {
        f"{tower.prefix}blocks.{block.index}.{name}": norm
        for tower in anatomy.towers
        for block in tower.blocks
        for name, norm in block.norms.items()
    }
    before = {name: norm for name, norm in inside.items() if not norm.reads_sum}
    if not before:
        after = next((norm.endpoint.path for norm in inside.values()), None)
        where = f" They stand in the stream or after a branch: {after}, ..." if after else ""
        raise Unsupported(f"no norm stands before a branch of a block.{where}")
    for tower in anatomy.towers:
        for block in tower.blocks:
            if not block.norms and not block.sums and _has_norms(block):
                raise Unsupported(
                    f"how {block.path} adds to the stream is not known, nor so which of its norms "
                    "stand before a branch."
                )
    found: dict[int, Fold] = {}
    final = {f"{tower.prefix}ln_final": tower.final_norm for tower in anatomy.towers}
    for name, norm_or_none in (before | final).items():
        if norm_or_none is not None:
            found.setdefault(id(norm_or_none.endpoint.module), Fold(name=name, norm=norm_or_none))
    return list(found.values())


def _has_norms(block: Block) -> bool:
    return any("norm" in type(part).__name__.lower() for part in block.module.modules())


def _find_readers(
    model: TransformerModel, events: Sequence[Event], of_value: dict[tuple[int, bytes], Fold]
) -> None:
    """Note at each norm the modules that take what it made."""
    reads: dict[int, set[int]] = {}
    for event in events:
        read = [of_value.get(observed.key(v)) for v in event.given if v.is_float]
        fold = next((f for f in read if f is not None), None)
        reads.setdefault(id(event.module), set()).add(id(fold))
        if fold is None or event.module is fold.norm.endpoint.module:
            continue
        if is_norm(event):
            raise Unsupported(
                f"{event.path}, a norm too, reads what {fold.norm.endpoint.path} makes."
            )
        if linear_shape(event.module) is not None:
            if all(endpoint.module is not event.module for endpoint in fold.maps):
                fold.maps.append(endpoint_of(event, "output", event.made[0]))
        elif all(own.module is not event.module for own in fold.own):
            value = next(v for v in event.given if of_value.get(observed.key(v)) is fold)
            fold.own += mixtures.own_weights(model, event, value)
    for fold in of_value.values():
        readers = {r.path: r.module for r in fold.maps} | {r.path: r.module for r in fold.own}
        for path, module in readers.items():
            if reads[id(module)] != {id(fold)}:
                raise Unsupported(
                    f"{path} reads what {fold.norm.endpoint.path} makes, and at other times "
                    "something else."
                )


def _check(model: TransformerModel, fold: Fold, *, has_readers: bool) -> None:
    """Refuse what cannot be folded before anything is written."""
    path = fold.norm.endpoint.path
    found = formula(fold.norm)
    headless = fold.name.endswith("ln_final") and model.anatomy.unembed is None
    if not has_readers and not headless:
        raise Unsupported(f"no linear map reads what {path} makes as it is.")
    for endpoint in fold.maps:
        matrix(endpoint)
        check_alone(model, endpoint)
    if fold.own and torch.as_tensor(found.summand).any():
        raise Unsupported(
            f"{path} adds something, and {fold.own[0].path} ({type(fold.own[0].module).__name__}), "
            "which reads it, has no bias that could take it."
        )


def apply(folds: Sequence[Fold]) -> None:
    """Fold norms into what reads them."""
    for fold in folds:
        found = formula(fold.norm)
        factor, summand = (wide(torch.as_tensor(part)) for part in (found.factor, found.summand))
        for endpoint in fold.maps:
            fold_into(endpoint, factor, summand, centred=found.centred)
        for own in fold.own:
            mixtures.fold_into(own, factor, centred=found.centred)
        neutralise(fold.norm, factor)


def formula(norm: Norm) -> Formula:
    """What a norm multiplies with and adds, if its parameters say so; a parametrised one is refused."""
    for name in ("weight", "bias"):
        views.parameter(norm.endpoint, name)
    found = formula_of(norm, norm.endpoint.shape[-1], torch.empty(0))
    if not found.exact:
        raise Unsupported(
            f"{norm.endpoint.path} ({type(norm.endpoint.module).__name__}) does something else with its parameters "
            "than multiply with its weight (or 1 + weight) and add its bias."
        )
    return found


def neutralise(norm: Norm, factor: Tensor) -> None:
    """Make a norm multiply with 1 and add 0, where it multiplied with a factor."""
    weight, bias = (views.parameter(norm.endpoint, name) for name in ("weight", "bias"))
    if weight is not None:
        offset = factor - wide(weight).reshape(-1)  # 0, or 1 where the module adds it
        put(weight, (1 - offset.round()).reshape(weight.shape))
    if bias is not None:
        put(bias, torch.zeros_like(bias))


def fold_into(endpoint: Endpoint, factor: Tensor, summand: Tensor, *, centred: bool) -> None:
    """Let a linear map do what the norm before it did.

    Args:
        endpoint: the map.
        factor: what the norm multiplies with, ``[d_model]``.
        summand: what it adds, ``[d_model]``.
        centred: whether what the norm makes has mean zero; then the map's mean reads nothing, and goes.
    """
    weight = matrix(endpoint)
    before = wide(weight)
    factor, summand = factor.to(before), summand.to(before)
    after = factor[:, None] * before
    put(weight, after - after.mean(0) if centred else after)
    add_to_bias(endpoint, summand @ before)
