"""Language models as files: the weights, and which hooks there were."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from interpose.dialects.mi_crow.hooks import (
    Hook,
    HookType,
    LayerActivationDetector,
    ModelInputDetector,
    ModelOutputDetector,
)
from interpose.errors import FileError
from interpose.files.reading import must_be_plain, read_torch
from interpose.files.schema import (
    ANYTHING,
    FLAG,
    NULL,
    Either,
    Field,
    ListOf,
    MapOf,
    OneOf,
    Record,
    Text,
    shown,
)
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
    field = Field(repr(str(path)))
    saved = read_torch(path)
    if not isinstance(saved, dict) or not {"model_state_dict", "metadata"} <= set(saved):
        raise FileError(f"{str(path)!r} is not what save_model writes.")
    about = _metadata(saved["metadata"], field.of("metadata"))
    source = str(model_id or about.get("model_path") or about.get("model_id"))
    loaded = load(source, device=device)
    _take(loaded.module, saved["model_state_dict"], field.of("model_state_dict"))
    made = cls(loaded.module, loaded.tokenizer, store, model_id=model_id or about.get("model_id"))
    for number, one in enumerate(about.get("hooks") or ()):
        kind, words = _KNOWN.get(str(one.get("class")), (None, ()))
        if kind is None or "layer" not in one:
            warnings.warn(
                f"hook {one.get('id')!r} ({shown(one.get('class'))}) is code, which no file has; register it again.",
                stacklevel=3,
            )
            continue
        said = _HOOK(one, field.of("metadata").of("hooks").of(number))
        options = {name: said["options"][name] for name in words if name in said["options"]}
        layer = said["layer"] or None
        signature = made.layers.path_of(layer) if kind is LayerActivationDetector else layer
        hook = kind(signature, hook_id=said["id"], **options)
        made.layers.register_hook(layer, hook, said["type"])
    return made


_NAME = Either(Text(1000), NULL)
_HOOK = Record(
    {
        "id": Text(1000),
        "class": Text(100),
        "layer": _NAME,
        "type": OneOf(*(one.value for one in HookType)),
        "options": MapOf(FLAG, Text(100), 100),
    }
)
_HOOKS = Either(ListOf(MapOf(ANYTHING), 100_000), NULL)
"""Those of mi-crow have other fields."""


def _metadata(given: Any, field: Field) -> dict[str, Any]:
    about: dict[str, Any] = MapOf(ANYTHING)(given, field)
    for name, kind in (("model_id", _NAME), ("model_path", _NAME), ("hooks", _HOOKS)):
        kind(about.get(name), field.of(name))
    if not (about.get("model_path") or about.get("model_id")):
        raise field.says("does not say which model it is of: model_id.")
    return about


def _take(module: Any, state: Any, field: Field) -> None:
    """Give a module the weights of a file."""
    if not isinstance(state, Mapping):
        raise field.wrong(state, "an object of tensors by name")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise field.of(name).wrong(tensor, "a tensor")
        must_be_plain(tensor, f"{field.source}: {shown(name)}")
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise field.says(f"is of another model: {shown(str(error), 500)}") from None
