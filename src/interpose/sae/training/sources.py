"""Where training has its vectors from: a store, batches of one or of a live model, or a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from interpose.activations import ActivationBatch, ActivationBatches, Activations
from interpose.errors import SiteNotFound
from interpose.explain.words import some
from interpose.names import Speller
from interpose.sae.crosscoder import CrossCoder
from interpose.sae.matching import said
from interpose.sae.sae import SAE
from interpose.store.pools import Pool, PooledBatches

BATCH = 4096
"""How many vectors a batch has, unless it is said."""


class InMemory:
    """The rows of a tensor as a source of pools."""

    def __init__(self, vectors: Tensor) -> None:
        if vectors.ndim < 2 or not vectors.is_floating_point():
            raise TypeError(
                f"vectors are a tensor of numbers [..., d]; got {vectors.dtype} of shape {tuple(vectors.shape)}."
            )
        self.vectors = vectors.detach().flatten(0, -2)

    def of(self, epoch: int, state: Any, first: int) -> Iterator[Pool]:  # noqa: ARG002 - all are the same
        """All of them, once."""
        if first:
            return
        count = len(self.vectors)
        none = torch.zeros(count, dtype=torch.long)
        yield Pool(values={"values": self.vectors}, tokens=none, row=none, pos=torch.arange(count))


def batches_of(
    source: Any,
    site: Sequence[Any] | None,
    *,
    batch_size: int | None,
    seed: int,
    epochs: int | None,
    **options: Any,
) -> ActivationBatches:
    """Batches of vectors of whatever source.

    Args:
        source: a store, or what has its ``batches``; batches themselves, of a store or a live model; or a tensor.
        site: which sites are needed, as far as that is known.
        batch_size: how many vectors a batch has.
        seed: of the order.
        epochs: how often all of them come; None for ever.
        **options: of ``Store.batches``; those that are None are not said.
    """
    given = {name: one for name, one in options.items() if one is not None}
    if isinstance(source, Tensor):
        return PooledBatches(
            InMemory(source),
            batch_size=batch_size or BATCH,
            shuffle=True,
            seed=seed,
            epochs=epochs,
            **given,
        )
    if hasattr(source, "__next__") and hasattr(source, "state_dict"):
        if batch_size is not None or given:
            word = next(iter(given), "batch_size")
            raise TypeError(f"{word} is said to what makes batches: ip.stream(..., {word}=...).")
        found: ActivationBatches = source
        return found
    if isinstance(source, Activations):
        return source.batches(
            site, batch_size=batch_size or BATCH, seed=seed, epochs=epochs, **given
        )
    raise TypeError(
        "vectors come from a store (ip.open_store), from batches (store.batches, ip.stream) or from a tensor [..., d]; "
        f"got {type(source).__name__}."
    )


def known_site(source: Any, asked: Any) -> Any:
    """The canonical name of a site, where the source knows names; else as it was asked for."""
    return source.site(asked) if asked is not None and hasattr(source, "site") else asked


def wanted(sae: SAE, site: Any, out: Any) -> list[Any]:
    """What an autoencoder reads and, if that is another, writes; None where it does not say so."""
    if isinstance(sae, CrossCoder):
        return list(sae.site)
    into = site if site is not None else next(iter(said(sae, "hook_name")), None)
    if not sae.is_transcoder:
        return [into]
    out = out if out is not None else next(iter(said(sae, "hook_name_out")), None)
    if out is None:
        raise TypeError(f"{sae!r} is a transcoder: say which site it writes, out=...")
    return [into, out]


def found_in(batch: ActivationBatch, asked: Any) -> str:
    """The name that a site has in a batch."""
    there = list(batch.values)
    if asked is None:
        if len(there) == 1:
            return there[0]
        raise ValueError(f"there are {len(there)} sites: {some(map(repr, there))}. Say site=...")
    if asked in batch.values:
        return str(asked)
    name = Speller(dict.fromkeys(there, True))(asked)
    if name not in batch.values:
        raise SiteNotFound(
            f"{asked!r} is not in these batches. They have: {some(map(repr, there))}."
        )
    return name


def vectors_of(batch: ActivationBatch, names: Sequence[str], device: torch.device) -> Tensor:
    """The vectors of some sites, side by side, [vector, d]."""
    each = [batch[name].flatten(1).to(device, non_blocking=True) for name in names]
    return each[0] if len(each) == 1 else torch.cat(each, dim=-1)
