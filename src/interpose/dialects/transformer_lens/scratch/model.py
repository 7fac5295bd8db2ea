"""The part of a `HookedTransformer` that knows models from scratch: how they are built, looked into and saved."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from interpose.dialects.transformer_lens.config import HookedTransformerConfig
from interpose.dialects.transformer_lens.loading.state_dicts import StateDicts, with_masks
from interpose.dialects.transformer_lens.position_part import PositionPart
from interpose.dialects.transformer_lens.scratch.points import Point
from interpose.dialects.transformer_lens.scratch.transformer import Transformer
from interpose.dialects.transformer_lens.scratch.wiring import PointTable, anatomy_of
from interpose.engine.model import Model
from interpose.files.beside import must_stay
from interpose.files.reading import read_json, read_tensors
from interpose.files.schema import NULL, Field, OneOf, record_of
from interpose.files.writing import replacing, write_whole
from interpose.models import loading
from interpose.models.discovery.anatomy import Anatomy
from interpose.models.naming.tree import SemanticTree
from interpose.models.weights.attributes import Part
from interpose.sites.tree import ModuleTree

CONFIG, WEIGHTS = "hooked_transformer.json", "hooked_transformer.safetensors"


class FromScratch(StateDicts):
    """What is different where the module is one of ours: sites and weights are its own, no probe finds them."""

    @property
    def is_from_scratch(self) -> bool:
        """Whether the model was made from a config, rather than loaded with transformers."""
        return isinstance(vars(self).get("module"), Transformer)

    def _make_tree(self, module: nn.Module) -> ModuleTree:
        if not isinstance(module, Transformer):
            return super()._make_tree(module)
        for name, part in module.named_modules():
            if isinstance(part, Point):
                part.belong(self, name)
        return SemanticTree(module, lambda: PointTable(module))

    def _look(self) -> Anatomy:
        return anatomy_of(self.module) if isinstance(self.module, Transformer) else super()._look()

    def __getattr__(self, name: str) -> Any:
        if self.is_from_scratch:
            return Model.__getattr__(self, name)  # blocks, embed and so on are the module's own
        found = super().__getattr__(name)
        if name == "pos_embed" and isinstance(found, Part):
            return PositionPart(self, name)
        return found

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Weights by TransformerLens's names, with the masks that it writes, and its users delete."""
        if not isinstance(self.module, Transformer) or args or kwargs:
            return super().state_dict(*args, **kwargs)
        return with_masks(self.module.state_dict(), self.module.cfg)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights under TransformerLens's names, or under those of the module."""
        if isinstance(self.module, Transformer):
            return self.module.load_state_dict(state_dict, *args, **kwargs)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Save the model in a folder, for ``from_pretrained``; its tokenizer too."""
        if isinstance(self.module, Transformer):
            save(self.module, Path(folder))
        else:
            super().__getattr__("save_pretrained")(folder, **options)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def build(
    config: HookedTransformerConfig | dict[str, Any], tokenizer: Any, move_to_device: bool
) -> tuple[Transformer, Any]:
    """A module as a config says, and its tokenizer, if there is one.

    Args:
        config: the config, or its fields.
        tokenizer: one to use; by default that of ``tokenizer_name``.
        move_to_device: whether to put the module on the config's device.
    """
    cfg = copy.copy(HookedTransformerConfig.unwrap(config))  # each model has its own
    if tokenizer is None and cfg.tokenizer_name is not None:
        tokenizer = loading.tokenizer_of(cfg.tokenizer_name)
        if tokenizer is None:
            raise ValueError(f"no tokenizer was found for tokenizer_name={cfg.tokenizer_name!r}.")
    if tokenizer is not None and cfg.d_vocab == -1:
        cfg.d_vocab = max(tokenizer.get_vocab().values()) + 1
    if cfg.d_vocab_out == -1:
        cfg.d_vocab_out = cfg.d_vocab
    if cfg.d_vocab < 1:
        raise ValueError("a model needs d_vocab, or a tokenizer to take it from.")
    device = cfg.device
    module = Transformer(cfg)
    return (module.to(device) if move_to_device else module), tokenizer


def save(module: Transformer, folder: Path) -> None:
    """Write a config and weights to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = {**module.cfg.to_dict(), "dtype": str(module.cfg.dtype), "device": None}
    weights: dict[str, Tensor] = {
        name: value.contiguous() for name, value in module.state_dict().items()
    }
    with replacing(folder / WEIGHTS) as unfinished:
        save_file(weights, unfinished)
    write_whole(folder / CONFIG, json.dumps(shown, indent=1))


def saved(name: str) -> bool:
    """Whether a name is that of a folder with a model from scratch."""
    return (Path(name).expanduser() / CONFIG).is_file()


_DTYPES = ("torch.float32", "torch.float64", "torch.float16", "torch.bfloat16")


def _least(cfg: HookedTransformerConfig) -> int:
    """How many weights a model has at least; checked before any is made, for a config may say anything."""
    return cfg.n_layers * cfg.d_model * cfg.d_head * cfg.n_heads + cfg.d_model * cfg.d_vocab


def read(name: str, device: Any = None, dtype: torch.dtype | str | None = None) -> Transformer:
    """The module in a folder."""
    folder = Path(name).expanduser()
    for file in (folder / CONFIG, folder / WEIGHTS):
        must_stay(file)
    kind = record_of(HookedTransformerConfig, device=NULL, dtype=OneOf(*_DTYPES))
    shown = read_json(folder / CONFIG, kind)
    weights, _ = read_tensors(folder / WEIGHTS)
    field = Field(repr(str(folder / CONFIG)))
    try:
        cfg = HookedTransformerConfig.from_dict({**shown, "device": device, "init_weights": False})
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise field.says(f"makes no model: {error}") from error
    if _least(cfg) > 4 * sum(value.numel() for value in weights.values()) + 2**20:
        raise field.says("is of a model that is far larger than the weights beside it.")
    module = Transformer(cfg)
    cfg.init_weights = shown.get("init_weights", True)
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise field.says(f"is of a model with other weights than lie beside it: {error}") from None
    wanted = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    return module.to(device=cfg.device, dtype=wanted)
