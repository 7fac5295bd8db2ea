"""Data sets as mi-crow has them, over lists, files, folders, iterators, and those of the `datasets` library."""

from interpose.dialects.mi_crow.datasets.base_dataset import BaseDataset
from interpose.dialects.mi_crow.datasets.classification_dataset import ClassificationDataset
from interpose.dialects.mi_crow.datasets.loading_strategy import LoadingStrategy
from interpose.dialects.mi_crow.datasets.text_dataset import TextDataset

__all__ = ["BaseDataset", "ClassificationDataset", "LoadingStrategy", "TextDataset"]
