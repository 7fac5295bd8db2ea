"""Copies of a model that may be written to: without interpose's hooks, embeddings of their own."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NoReturn, TypeVar

from torch import nn

from interpose.errors import Unsupported
from interpose.models.transformer import TransformerModel
from interpose.taps.tap import Tap

Some = TypeVar("Some", bound=TransformerModel)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def copied(module: nn.Module) -> nn.Module:
    """A deep copy of a module, without what interpose has hooked to it."""
    taps = [
        hook
        for part in module.modules()
        for name in _HOOKS
        for hook in getattr(part, name).values()
        if isinstance(hook, Tap)
    ]
    # They lead to the model that they belong to, and must not be copied with it.
    made = copy.deepcopy(module, {id(tap): tap for tap in taps})
    for part in made.modules():
        for name in _HOOKS:
            hooks: dict[Any, Any] = getattr(part, name)
            for key in [key for key, hook in hooks.items() if isinstance(hook, Tap)]:
                del hooks[key]
                getattr(part, f"{name}_with_kwargs").pop(key, None)
                getattr(part, f"{name}_always_called", {}).pop(key, None)
    return made


def rewrapped(model: Some, module: nn.Module) -> Some:
    """A model of the same class, tokenizer and processor around another module."""
    kind, (_, *rest) = model.__reduce__()[:2]
    made: Some = kind(module, *rest)
    return made


def untie(model: TransformerModel) -> None:
    """Give the unembedding a weight of its own, and let the config say so."""
    embed, unembed = model.anatomy.embed, model.anatomy.unembed
    weight = None if unembed is None else unembed.module._parameters.get("weight")
    if embed is None or unembed is None or weight is None:
        return
    tied = weight is getattr(embed.module, "weight", None)
    if tied and embed.module is unembed.module:
        raise Unsupported(f"{embed.path} embeds and unembeds at once: it has no two weights.")
    if tied:
        _own(unembed.module, "weight")
        for part in model.module.modules():
            _say_untied(getattr(part, "config", None))


def settle_ties(module: nn.Module) -> None:
    """Part what else was tied, once all is written: a config that is untied ties nothing when it is loaded."""
    if getattr(getattr(module, "config", None), "tie_word_embeddings", True):
        return
    for part in module.modules():
        tied: Any = vars(part).get("all_tied_weights_keys")
        if not isinstance(tied, dict):
            continue
        for target, source in tied.items():
            names = dict(part.named_parameters(remove_duplicate=False))
            if target in names and names[target] is names.get(source):
                path, _, name = target.rpartition(".")
                _own(part.get_submodule(path), name)
        vars(part)["all_tied_weights_keys"] = {}


def _own(module: nn.Module, name: str) -> None:
    """Replace a parameter by one like it that is the module's alone."""
    old = module.get_parameter(name)
    module.register_parameter(
        name, nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
    )


def _say_untied(config: Any) -> None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for each in (config, text):
        if getattr(each, "tie_word_embeddings", False):
            each.tie_word_embeddings = False


def refuse_saving(module: nn.Module, new: list[str]) -> None:
    """Let a module that has parameters its class does not make refuse to be saved by transformers."""
    if new and hasattr(module, "save_pretrained"):
        vars(module)["save_pretrained"] = partial(_cannot_save, type(module).__name__, tuple(new))


def _cannot_save(label: str, new: tuple[str, ...], *_: Any, **__: Any) -> NoReturn:
    shown = ", ".join(new[:3]) + (", ..." if len(new) > 3 else "")
    raise Unsupported(
        f"this {label} has {shown}, which transformers would leave out when it loads the model "
        "again. Save the model as it was before processing, and process it after loading; or keep "
        "the numbers: torch.save(model.state_dict(), path), and load_state_dict into a model "
        "processed in the same way."
    )
