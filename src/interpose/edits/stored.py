"""Values out of a store, at the places that `ip.at` means, as a run of the model would give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.activations import ActivationRows
from interpose.engine.cache import Cache
from interpose.engine.points import HookPoint
from interpose.errors import SiteNotFound, Unsupported
from interpose.explain.words import some
from interpose.models.running.text import encodes
from interpose.sites.tree import Site
from interpose.taps.context import Whereabouts

if TYPE_CHECKING:
    from interpose.edits.selector import at
    from interpose.models.transformer import TransformerModel


def read_stored(
    rows: ActivationRows,
    model: TransformerModel,
    where: at,
    numbers: Sequence[int],
    tokens: Tensor,
) -> Cache:
    """What a place is in some rows of one length, on the model's device, in the dtype that the model computes it in.

    Args:
        rows: where the values are.
        model: whose they are.
        where: which sites, and which part of each value: by layer, head, neuron and pos.
        numbers: which rows.
        tokens: of these rows, [row, pos].
    """
    if where.rows is not None or where.phase is not None or where.exclude or where.at is not ...:
        raise Unsupported(
            f"{where.label}: places in a store are said with site, layer, head, neuron and pos."
        )
    sites = [site for site, _ in model.select(where)]
    must_have(rows, sites)
    values: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for site in sites:
        values[site.name] = _part(rows, model, where, site, torch.tensor(numbers), tokens)
        aliases |= dict.fromkeys((site.canonical, *site.aliases), site.name)
    return Cache(values, aliases=aliases, spelling=model.tree.speller())


def must_have(rows: ActivationRows, sites: Sequence[Site]) -> None:
    """Refuse sites that are not stored, and say what to write."""
    if missing := [site.canonical for site in sites if site.canonical not in rows.sites]:
        wanted = "', '".join(missing[:3]) + ("', ..." if missing[3:] else "'")
        raise SiteNotFound(
            f"this needs {some(map(repr, missing))}, and the store has {some(map(repr, rows.sites))}. Harvest "
            f"them into another store: ip.harvest(model, texts, ['{wanted}], store=...)."
        )


def _part(
    rows: ActivationRows,
    model: TransformerModel,
    where: at,
    site: Site,
    numbers: Tensor,
    tokens: Tensor,
) -> Tensor:
    """First which positions, and only their vectors are read; then which part of them."""
    stored, (count, length) = rows.sites[site.canonical], tokens.shape
    point = _point(model, site, tokens)
    places = torch.arange(count * length).view(count, length, *[1] * len(stored.shape))
    if where.pos is not None:
        cut = replace(where, site=None, layer=None, head=None, neuron=None).cut(places, point)
        assert cut is not None  # it is the whole text
        places = cut
    row, pos = places.flatten() // length, places.flatten() % length
    found = rows.gather(site.canonical, numbers[row], pos)
    value = found.view(count, -1, *stored.shape).to(model.device, getattr(torch, stored.made))
    if where.head is None and where.neuron is None:
        return value
    part = replace(where, site=None, layer=None, pos=None).cut(value, point)
    assert part is not None
    return part


def _point(model: TransformerModel, site: Site, tokens: Tensor) -> HookPoint:
    """The site as a hook on a run of these tokens would have it."""
    given: dict[str, Any] = {"input_ids": tokens}
    return HookPoint(
        model,
        site.name,
        site.canonical,
        site.module,
        axes=site.axes,
        where=Whereabouts(length=tokens.shape[1], encodes=encodes(model)),
        given=given,
    )
