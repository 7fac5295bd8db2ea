"""A language model as mi-crow has it: layers, inference and activations of one model."""

from interpose.dialects.mi_crow.language_model.activations import LanguageModelActivations
from interpose.dialects.mi_crow.language_model.context import LanguageModelContext
from interpose.dialects.mi_crow.language_model.inference import InferenceEngine
from interpose.dialects.mi_crow.language_model.language_model import LanguageModel
from interpose.dialects.mi_crow.language_model.layers import LanguageModelLayers
from interpose.dialects.mi_crow.language_model.tokenizer import LanguageModelTokenizer

__all__ = [
    "InferenceEngine",
    "LanguageModel",
    "LanguageModelActivations",
    "LanguageModelContext",
    "LanguageModelLayers",
    "LanguageModelTokenizer",
]
