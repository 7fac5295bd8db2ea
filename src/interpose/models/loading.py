"""`ip.wrap` and `ip.load`: a model from a module, from a folder, or from a hub."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from interpose.engine.model import Model
from interpose.errors import FileError
from interpose.explain.words import nearest
from interpose.models.hub import within_reach
from interpose.models.transformer import TransformerModel

POCKET = Path(__file__).parents[1] / "pocket"
"""The folder of the small trained model inside the package; see docs/pocket.md."""


def wrap(module: nn.Module, tokenizer: Any = None, processor: Any = None) -> Model:
    """Look inside a module: its sites by name, hooks, runs, caches. The module itself stays as it is.

    A model of transformers also gets semantic sites (`TransformerModel`); any other module has
    those of its own parts.

    ```python
    model = ip.wrap(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()))
    output, cache = model.run_with_cache(torch.randn(2, 4))
    cache["1"]                                    # what the ReLU returned
    ```

    Args:
        module: any ``nn.Module``.
        tokenizer: for text, if it is a language model.
        processor: for text with images or sound.
    """
    _must_be_module(module)
    if is_transformer(module):
        return TransformerModel(module, tokenizer=tokenizer, processor=processor)
    if tokenizer is not None or processor is not None:
        raise TypeError(
            f"{type(module).__name__} is not a model of transformers: it takes no tokenizer. Leave it out: "
            "ip.wrap(module)."
        )
    return Model(module)


def _must_be_module(given: Any) -> None:
    """Refuse a name or a class in the place of a module, and say what to write."""
    if isinstance(given, str):
        raise TypeError(
            f"wrap takes a module and not its name; to load a model: ip.load({given!r})."
        )
    if isinstance(given, type):
        name = given.__name__
        raise TypeError(
            f"wrap takes a module, and {name} is a class: make one first, ip.wrap({name}(...))."
        )


def as_model(model: Model | nn.Module) -> Model:
    """A model, wrapped if it is not yet."""
    return model if isinstance(model, Model) else wrap(model)


def is_transformer(module: nn.Module) -> bool:
    """Whether a module is a model of transformers, also inside an adapter's wrapper or torch's."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, nn.Module):
        return False
    for inner in ("_orig_mod", "module"):
        if isinstance(getattr(module, inner, None), nn.Module):
            module = getattr(module, inner)
    base = getattr(module, "get_base_model", None)
    kind = transformers.PreTrainedModel
    return isinstance(module, kind) or (base is not None and isinstance(base(), kind))


def load(
    name_or_folder: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> TransformerModel:
    """Load a model of transformers with its tokenizer, from a folder or a hub, ready to be looked into.

    Args:
        name_or_folder: what ``from_pretrained`` takes; or ``pocket``, the small trained model that comes
            with interpose (a folder of that name is ``./pocket``).
        device: where to put it; by default the accelerator, if there is one.
        dtype: of its weights; by default the one it was saved in.
        **options: for ``from_pretrained``, such as ``device_map``, ``attn_implementation`` or ``gguf_file``. Code that
            a folder or a hub brings is not run, and nobody is asked, unless you say ``trust_remote_code=True``.
    """
    transformers = _transformers()
    trusted = options.setdefault("trust_remote_code", False)
    if not isinstance(trusted, bool):
        raise TypeError(f"trust_remote_code is True or False; got {trusted!r}.")
    name_or_folder = _as_name(name_or_folder)
    if name_or_folder == "pocket":
        name_or_folder = str(POCKET)
    elif "/" not in name_or_folder and _is_misspelt(name_or_folder):
        raise FileNotFoundError(
            f"no folder {name_or_folder!r}; did you mean 'pocket', the model in the package?"
        )
    elif name_or_folder.startswith((".", "/", "~")) and not Path(name_or_folder).is_dir():
        raise FileNotFoundError(f"no folder {name_or_folder!r}.")
    options = within_reach(name_or_folder, options)
    config = options.pop("config", None)
    if config is None:
        known = {key: options[key] for key in _FOR_FILES if key in options}
        with _own_code(name_or_folder):
            config = transformers.AutoConfig.from_pretrained(name_or_folder, **known)
        if not trusted and "attn_implementation" not in options:
            _must_bring_no_kernel(config, name_or_folder)
    kind = _class_for(transformers, config)
    with _own_code(name_or_folder):
        module = kind.from_pretrained(
            name_or_folder, config=config, dtype="auto" if dtype is None else dtype, **options
        )
    if "device_map" not in options:
        module = module.to(device or best_device())
    module.eval()
    tokenizer, processor = _readers(transformers, name_or_folder, options)
    return TransformerModel(module, tokenizer=tokenizer, processor=processor)


def skeleton(name_or_folder: str) -> Any:
    """A model without its weights, of which it has only names and shapes: by its config, on the meta device.

    Args:
        name_or_folder: as in `load`.
    """
    transformers = _transformers()
    name = str(POCKET) if name_or_folder == "pocket" else name_or_folder
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise FileNotFoundError(f"no folder {name!r}.")
    options = within_reach(name, {"trust_remote_code": False})
    with _own_code(name):
        config = transformers.AutoConfig.from_pretrained(name, **options)
    with torch.device("meta"):
        return _class_for(transformers, config)._from_config(config)


_FOR_FILES = (
    "revision",
    "token",
    "cache_dir",
    "local_files_only",
    "trust_remote_code",
    "subfolder",
    "gguf_file",
)


@contextmanager
def _own_code(name: str) -> Iterator[None]:
    """What transformers says of code that a model brings, in our words; it runs only if that was asked for."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise FileError(
            f"{name!r} brings code of its own, which is not run unless you ask for it. Read it, and if you trust it: "
            f"ip.load({name!r}, trust_remote_code=True)."
        ) from None


def _must_bring_no_kernel(config: Any, name: str) -> None:
    """Refuse a config that has an attention fetched from a hub: a kernel is code too."""
    parts = (getattr(config, part, None) for part in config.sub_configs)
    for one in (config, *(part for part in parts if part is not None)):
        kernel = getattr(one, "_attn_implementation", None)
        if isinstance(kernel, str) and "/" in kernel:
            raise FileError(
                f"{name!r} asks for the attention {kernel!r}, which is code from a hub and is not run unless you ask "
                f"for it: ip.load({name!r}, attn_implementation='sdpa'), or trust_remote_code=True."
            )


def _as_name(given: Any) -> str:
    """A name or folder as text."""
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            f"load takes a name or a folder; got {type(given).__name__}. A module is wrapped: ip.wrap(module)."
        )
    return str(os.fspath(given))


def _is_misspelt(name: str) -> bool:
    """Whether a name was meant to be the pocket model's: no folder, and nothing a hub would have by that name."""
    return nearest(name, ["pocket"], 0.8) is not None and not Path(name).exists()


def _transformers() -> Any:
    """The library, or an error with the line that installs it."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "ip.load needs transformers: pip install 'interpose[transformers]'"
        ) from error
    return transformers


def best_device() -> torch.device:
    """The accelerator, if there is one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def _class_for(transformers: Any, config: Any) -> Any:
    """The class a checkpoint was saved with, else the first that knows its kind of config."""
    for name in config.architectures or ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    brought = getattr(config, "auto_map", None) or {}
    for name in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"):
        if name in brought:
            return getattr(transformers, name)
    for name in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"):
        if type(config) in getattr(transformers, name)._model_mapping:
            return getattr(transformers, name)
    return transformers.AutoModel


def tokenizer_of(name_or_folder: str) -> Any:
    """The tokenizer of a model on a hub, in a folder, or in the package; None if it has none."""
    name = str(POCKET) if name_or_folder == "pocket" else name_or_folder
    try:
        options = within_reach(name, {"trust_remote_code": False}, file="tokenizer_config.json")
    except FileNotFoundError:
        return None
    return _readers(_transformers(), name, options)[0]


def _readers(transformers: Any, name: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Tokenizer and processor, as far as the checkpoint has them."""
    known = {key: options[key] for key in _FOR_FILES if key in options}
    found: list[Any] = []
    for reader in (transformers.AutoTokenizer, transformers.AutoProcessor):
        try:
            found.append(reader.from_pretrained(name, **known))
        except (OSError, ValueError, KeyError, ImportError) as error:
            found.append(None)  # no such files: the model works on tensors
            if "trust_remote_code" in str(error):
                warnings.warn(
                    f"the tokenizer or processor of {name!r} is code of its own, which was not run: the model takes "
                    "tokens. To run it: trust_remote_code=True.",
                    stacklevel=3,
                )
    tokenizer, processor = found
    return tokenizer, None if processor is tokenizer or isinstance(
        processor, type(tokenizer)
    ) else processor
