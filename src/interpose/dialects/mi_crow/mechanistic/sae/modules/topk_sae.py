"""`TopKSae`: the k largest latents of each vector fire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from interpose.dialects.mi_crow.mechanistic.sae.sae import Sae
from interpose.dialects.mi_crow.mechanistic.sae.train import SaeTrainingConfig
from interpose.sae.topk import TopKSAE


@dataclass
class TopKSaeTrainingConfig(SaeTrainingConfig):
    """How a `TopKSae` is trained.

    Attributes:
        k: how many latents fire; it takes the place of the autoencoder's own.
    """

    k: int = 10


class TopKSae(Sae):
    """An autoencoder of which k latents fire at each vector.

    Args:
        n_latents: how many latents there are.
        n_inputs: how many features a vector has.
        k: how many fire.
        hook_id: how it is known as a hook.
        device: where it is.
        store: where its training may be kept.
    """

    def __init__(
        self,
        n_latents: int,
        n_inputs: int,
        k: int = 10,
        hook_id: str | None = None,
        device: str | torch.device = "cpu",
        store: Any = None,
    ) -> None:
        super().__init__(TopKSAE(n_inputs, n_latents, k=k), hook_id, device, store)

    @property
    def k(self) -> int:
        """How many latents fire."""
        assert isinstance(self.engine, TopKSAE)
        return self.engine.k

    def configure(self, config: SaeTrainingConfig) -> None:
        """Take k from what it is trained with."""
        k = getattr(config, "k", None)
        if k is not None:
            if not 1 <= k <= self.n_latents:
                raise ValueError(f"k is how many of {self.n_latents} latents fire; got {k}.")
            assert isinstance(self.engine, TopKSAE)
            self.engine.k = k

    def _options(self) -> dict[str, Any]:
        return {"k": self.k}
