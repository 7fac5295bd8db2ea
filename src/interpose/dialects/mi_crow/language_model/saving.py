"""Language models as files: the weights, and which hooks there were."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from interpose.dialects.mi_crow.hooks import (
    Hook,
    LayerActivationDetector,
    ModelInputDetector,
    ModelOutputDetector,
)
from interpose.errors import FileError
from interpose.files.writing import replacing
from interpose.models.loading import POCKET, load

if TYPE_CHECKING:
    from interpose.dialects.mi_crow.language_model.language_model import LanguageModel

_KNOWN: dict[str, tuple[type[Hook], tuple[str, ...]]] = {
    "LayerActivationDetector": (LayerActivationDetector, ()),
    "ModelInputDetector": (ModelInputDetector, ("save_input_ids", "save_attention_mask")),
    "ModelOutputDetector": (
        ModelOutputDetector,
        ("save_output_logits", "save_output_hidden_state"),
    ),
}
"""Hooks that are data, and what they are made of besides their layer and id."""


def save(language_model: LanguageModel, path: str | Path | None) -> Path:
    """Write a file with the weights and a list of the hooks."""
    context = language_model.context
    if path is None:
        if context.store is None:
            raise ValueError("say where: save_model(path), or give the language model a store.")
        name = str(context.model_id).replace("/", "_")
        path = Path(context.store.base_path) / "models" / name / "model.pt"
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    hooks = [
        {
            "id": one.hook.id,
            "class": type(one.hook).__name__,
            "layer": one.path,
            "type": one.hook_type.value,
            "options": {
                n: getattr(one.hook, n) for n in _KNOWN.get(type(one.hook).__name__, (None, ()))[1]
            },
        }
        for one in language_model.layers.registrations()
    ]
    own = getattr(getattr(context.model, "config", None), "_name_or_path", None)
    metadata = {
        "model_id": context.model_id,
        "hooks": hooks,
        "model_path": "pocket" if own == str(POCKET) else own or context.model_id,
    }
    with replacing(file) as unfinished:
        torch.save(
            {"model_state_dict": context.model.state_dict(), "metadata": metadata}, unfinished
        )
    return file


def restore(
    cls: type[LanguageModel], path: str | Path, store: Any, model_id: str | None, device: str
) -> LanguageModel:
    """A language model as a file has it."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}.")
    saved = torch.load(file, map_location=device, weights_only=True)
    if not isinstance(saved, dict) or not {"model_state_dict", "metadata"} <= set(saved):
        raise FileError(f"{str(path)!r} is not what save_model writes.")
    about = saved["metadata"]
    source = model_id or about.get("model_path") or about.get("model_id")
    loaded = load(source, device=device)
    loaded.module.load_state_dict(saved["model_state_dict"])
    made = cls(loaded.module, loaded.tokenizer, store, model_id=model_id or about.get("model_id"))
    for one in about.get("hooks") or ():
        kind, words = _KNOWN.get(one.get("class", ""), (None, ()))
        if kind is None or "layer" not in one:
            warnings.warn(
                f"hook {one.get('id')!r} ({one.get('class')}) is code, which no file has; register it again.",
                stacklevel=3,
            )
            continue
        options = {name: one["options"][name] for name in words}
        layer = one["layer"] or None
        signature = made.layers.path_of(layer) if kind is LayerActivationDetector else layer
        hook = kind(signature, hook_id=one["id"], **options)
        made.layers.register_hook(layer, hook, one["type"])
    return made
