"""Autoencoders as mi-crow has them: hooks whose concepts can be tracked and manipulated."""

from interpose.dialects.mi_crow.mechanistic.sae import concepts, modules, train
from interpose.dialects.mi_crow.mechanistic.sae.concepts import (
    AutoencoderConcepts,
    Concept,
    ConceptDictionary,
    NeuronText,
)
from interpose.dialects.mi_crow.mechanistic.sae.modules import L1Sae, TopKSae
from interpose.dialects.mi_crow.mechanistic.sae.sae import Sae
from interpose.dialects.mi_crow.mechanistic.sae.train import SaeTrainer, SaeTrainingConfig

__all__ = [
    "AutoencoderConcepts",
    "Concept",
    "ConceptDictionary",
    "L1Sae",
    "NeuronText",
    "Sae",
    "SaeTrainer",
    "SaeTrainingConfig",
    "TopKSae",
    "concepts",
    "modules",
    "train",
]
