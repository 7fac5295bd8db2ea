"""`LanguageModel`: a model, its tokenizer and a store, in mi-crow's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from interpose.dialects.mi_crow.language_model.activations import LanguageModelActivations
from interpose.dialects.mi_crow.language_model.context import LanguageModelContext
from interpose.dialects.mi_crow.language_model.device_manager import normalize_device
from interpose.dialects.mi_crow.language_model.inference import InferenceEngine
from interpose.dialects.mi_crow.language_model.layers import LanguageModelLayers
from interpose.dialects.mi_crow.language_model.saving import restore, save
from interpose.dialects.mi_crow.language_model.tokenizer import LanguageModelTokenizer, that_pads
from interpose.dialects.mi_crow.store.harvested import INPUTS
from interpose.engine.model import Model
from interpose.models.loading import is_transformer, load, tokenizer_of, wrap
from interpose.models.transformer import TransformerModel

_KEPT = ("input_ids", "attention_mask")


class LanguageModel:
    """A model with its layers, inference and activations.

    Args:
        model: the module, which is not changed; it stays where it is unless a device is given.
        tokenizer: its tokenizer. One without a token for padding is copied.
        store: where runs are kept; None if nowhere.
        model_id: how it is called; by default as it calls itself.
        device: where to put it.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        store: Any = None,
        model_id: str | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        view = _viewed(model, tokenizer)
        if device is not None:
            _put(view.module, normalize_device(device))
        filler = view._filler() if isinstance(view, TransformerModel) else 0
        tokenizer = that_pads(tokenizer, filler)
        own = getattr(getattr(view.module, "config", None), "_name_or_path", None)
        self.context = LanguageModelContext(
            language_model=self,
            model_id=model_id or own or type(view.module).__name__,
            device=str(view.device),
            model=view.module,
            tokenizer=tokenizer,
            store=store,
            view=view,
            special_token_ids=set(getattr(tokenizer, "all_special_ids", ())),
        )
        self.layers = LanguageModelLayers(self.context)
        self.lm_tokenizer = LanguageModelTokenizer(self.context)
        self.inference = InferenceEngine(self.context)
        self.activations = LanguageModelActivations(self.context)

    @classmethod
    def from_huggingface(
        cls,
        model_name: str,
        store: Any = None,
        tokenizer_params: Mapping[str, Any] | None = None,
        model_params: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
    ) -> LanguageModel:
        """A model from a hub, from a folder, or ``pocket``, the one in the package.

        Args:
            model_name: its name or folder.
            store: where runs are kept.
            tokenizer_params: for the tokenizer's ``from_pretrained``.
            model_params: for the model's, such as ``dtype`` or ``device_map``.
            device: where to put it; by default the CPU, unless ``device_map`` says it.
        """
        options = dict(model_params or {})
        if "torch_dtype" in options:
            options["dtype"] = options.pop("torch_dtype")
        if "device_map" not in options:
            options["device"] = normalize_device(device)
        loaded = load(model_name, **options)
        tokenizer = loaded.tokenizer
        if tokenizer_params:
            tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path, **tokenizer_params)
        return cls(loaded.module, tokenizer, store, model_id=str(model_name))

    @classmethod
    def from_local_torch(
        cls,
        model_path: str | Path,
        tokenizer_path: str | Path,
        store: Any = None,
        device: str | torch.device | None = None,
    ) -> LanguageModel:
        """A model and a tokenizer from folders.

        Args:
            model_path: the model's.
            tokenizer_path: the tokenizer's.
            store: where runs are kept.
            device: where to put it; by default the CPU.
        """
        loaded = load(model_path, device=normalize_device(device))
        tokenizer = tokenizer_of(str(tokenizer_path))
        if tokenizer is None:
            raise FileNotFoundError(f"no tokenizer in {str(tokenizer_path)!r}.")
        return cls(loaded.module, tokenizer, store, model_id=str(model_path))

    @classmethod
    def from_local(
        cls,
        saved_path: str | Path,
        store: Any = None,
        model_id: str | None = None,
        device: str | torch.device | None = None,
    ) -> LanguageModel:
        """What `save_model` wrote: weights, and the hooks that are in the package.

        Args:
            saved_path: the file.
            store: where runs are kept.
            model_id: what the model was loaded from; by default what the file says.
            device: where to put it; by default the CPU.
        """
        return restore(cls, saved_path, store, model_id, normalize_device(device))

    def save_model(self, path: str | Path | None = None) -> Path:
        """Write weights and hooks to a file that `from_local` reads; it is whole or not there.

        Args:
            path: of the file; by default ``models/<name>/model.pt`` in the store.
        """
        return save(self, path)

    @property
    def model(self) -> Any:
        """The module."""
        return self.context.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.context.tokenizer

    @property
    def model_id(self) -> str | None:
        """How it is called."""
        return self.context.model_id

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.context.view.device

    @property
    def store(self) -> Any:
        """Where runs are kept."""
        return self.context.store

    @store.setter
    def store(self, store: Any) -> None:
        self.context.store = store

    def attach_sae(self, sae: Any, layer_signature: str | int | None = None) -> str:
        """Register an autoencoder on a layer, and return its id: see `mechanistic.sae.Sae`.

        Args:
            sae: the autoencoder.
            layer_signature: of the layer; by default the one it was made or saved with.
        """
        layer = sae.layer_signature if layer_signature is None else layer_signature
        if layer is None:
            raise ValueError("say which layer: attach_sae(sae, layer_signature=...).")
        sae.layer_signature = layer
        return self.layers.register_hook(layer, sae)

    def tokenize(self, texts: Sequence[str], **options: Any) -> Any:
        """Texts as tokens: see `LanguageModelTokenizer.tokenize`."""
        return self.lm_tokenizer.tokenize(texts, **options)

    # What detectors found.

    def get_all_detector_metadata(
        self,
    ) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Tensor]]]:
        """What all detectors have, by layer: facts, and tensors. A layer's second detector is ``layer#id``."""
        facts: dict[str, dict[str, Any]] = {}
        tensors: dict[str, dict[str, Tensor]] = {}
        for detector in self.layers.get_detectors():
            layer = str(detector.layer_signature)
            name = f"{layer}#{detector.id}" if layer in facts else layer
            facts[name] = dict(detector.metadata)
            tensors[name] = dict(detector.tensor_metadata)
        return facts, tensors

    def clear_detectors(self) -> None:
        """Let all detectors forget what they found."""
        for detector in self.layers.get_detectors():
            detector.metadata.clear()
            detector.tensor_metadata.clear()

    def save_detector_metadata(
        self,
        run_name: str,
        batch_idx: int | None,
        unified: bool = False,
        clear_after_save: bool = True,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> str:
        """Put what all detectors have into the store, and return where.

        Args:
            run_name: of the run.
            batch_idx: of the batch.
            unified: all batches of the run in one place, each beside those before it.
            clear_after_save: let detectors forget it then.
            inputs: what the model was given, to be kept with it: by the mask, what is padding is known afterwards.
        """
        store = self.context.store
        if store is None:
            raise ValueError("Store must be provided or set on the language model.")
        facts, tensors = self.get_all_detector_metadata()
        if inputs is not None:
            tensors[INPUTS] = {name: inputs[name] for name in _KEPT if name in inputs}
        if unified:
            where = store.put_run_detector_metadata(run_name, facts, tensors)
        else:
            where = store.put_detector_metadata(run_name, batch_idx or 0, facts, tensors)
        if clear_after_save:
            self.clear_detectors()
        return str(where)

    def __repr__(self) -> str:
        return f"LanguageModel({self.model_id!r}, {len(self.layers.registrations())} hooks on {self.device})"


def _viewed(model: Any, tokenizer: Any) -> Model:
    """A module as interpose sees it."""
    if isinstance(model, Model):
        return model
    return wrap(model, tokenizer=tokenizer) if is_transformer(model) else wrap(model)


def _put(module: nn.Module, device: str) -> None:
    """Put a model on a device, unless it is spread over several."""
    if getattr(module, "hf_device_map", None):
        raise ValueError(
            "this model was loaded with a device_map, which says where each part is. Leave device out."
        )
    module.to(device)
