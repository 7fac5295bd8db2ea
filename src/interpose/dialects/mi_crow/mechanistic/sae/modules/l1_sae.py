"""`L1Sae`: latents above zero fire, and training makes them few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from interpose.dialects.mi_crow.mechanistic.sae.sae import Sae
from interpose.dialects.mi_crow.mechanistic.sae.train import SaeTrainingConfig
from interpose.sae.relu import StandardSAE


@dataclass
class L1SaeTrainingConfig(SaeTrainingConfig):
    """How an `L1Sae` is trained."""


class L1Sae(Sae):
    """An autoencoder whose latents fire above zero.

    Args:
        n_latents: how many latents there are.
        n_inputs: how many features a vector has.
        hook_id: how it is known as a hook.
        device: where it is.
        store: where its training may be kept.
    """

    def __init__(
        self,
        n_latents: int,
        n_inputs: int,
        hook_id: str | None = None,
        device: str | torch.device = "cpu",
        store: Any = None,
    ) -> None:
        super().__init__(StandardSAE(n_inputs, n_latents), hook_id, device, store)
