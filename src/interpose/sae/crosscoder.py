"""Crosscoders: one set of latents for several sites, usually the stream at several layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from interpose.sae.relu import StandardSAE


class CrossCoder(StandardSAE):
    """Latents that read and write several sites: an autoencoder of their values side by side.

    What a latent costs (L1) is the sum of the norms of what it writes to each site.

    Args:
        d_in: how many features each site has.
        d_sae: how many latents there are.
        site: the sites, in order.
        **options: as in `SAE`.
    """

    architecture = "crosscoder"

    def __init__(self, d_in: int, d_sae: int, *, site: Sequence[str], **options: Any) -> None:
        self.site = list(site)
        super().__init__(d_in * len(self.site), d_sae, **{"subtract_bias": False, **options})

    def by_site(self, rows: Tensor) -> Tensor:
        """What is of all sites side by side [..., site * d_in], apart: [..., site, d_in]."""
        apart: Tensor = rows.unflatten(-1, (len(self.site), -1))
        return apart

    def costs(self) -> Tensor:
        """What each latent costs when it fires with a strength of one."""
        costs: Tensor = self.by_site(self.W_dec).norm(dim=-1).sum(-1)
        return costs

    def options(self) -> dict[str, Any]:
        """With its sites."""
        return {**super().options(), "site": self.site}
