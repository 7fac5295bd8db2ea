"""The kinds of autoencoders, and what each is trained with."""

from interpose.dialects.mi_crow.mechanistic.sae.modules.l1_sae import L1Sae, L1SaeTrainingConfig
from interpose.dialects.mi_crow.mechanistic.sae.modules.topk_sae import (
    TopKSae,
    TopKSaeTrainingConfig,
)

__all__ = ["L1Sae", "L1SaeTrainingConfig", "TopKSae", "TopKSaeTrainingConfig"]
