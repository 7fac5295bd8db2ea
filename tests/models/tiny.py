"""A tiny random model of every causal language model type in transformers, and of the usual others.

One shrinker reads the default config of a type and makes every size small by the name of the
attribute; :mod:`tests.models.tiny_data` lists the names and the exceptions. Then every parameter is
randomised, for zeros and ones hide missing effects.

    model = build("llama")
    logits = model(**inputs(model)).logits

``python -m tests.models.tiny [KIND or TYPE ...]`` prints what builds, and why the others do not.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import sys
import time
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models import tiny_data as data

CAUSAL: tuple[str, ...] = tuple(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MASKED: tuple[str, ...] = tuple(data.MASKED.split())
ENCODER_DECODER: tuple[str, ...] = tuple(data.ENCODER_DECODER.split())
VISION: tuple[str, ...] = tuple(data.VISION.split())
AUDIO: tuple[str, ...] = tuple(data.AUDIO.split())
CLASSIFIERS: tuple[str, ...] = tuple(data.CLASSIFIERS.split())
UNBUILDABLE: dict[str, str] = data.UNBUILDABLE  # causal types, each with the reason
KINDS: dict[str, tuple[str, ...]] = {
    "causal": CAUSAL,
    "masked": MASKED,
    "encoder_decoder": ENCODER_DECODER,
    "vision": VISION,
    "audio": AUDIO,
    "classifier": CLASSIFIERS,
}
# kind -> where transformers says which class it is; the first mapping that knows the type wins.
MAPPINGS: dict[str, tuple[str, ...]] = {
    "causal": ("MODEL_FOR_CAUSAL_LM",),
    "masked": ("MODEL_FOR_MASKED_LM",),
    "encoder_decoder": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_SPEECH_SEQ_2_SEQ"),
    "vision": ("MODEL",),
    "audio": ("MODEL_FOR_AUDIO_CLASSIFICATION",),
    "classifier": ("MODEL_FOR_SEQUENCE_CLASSIFICATION",),
}


def build(
    model_type: str,
    kind: str = "causal",
    *,
    layers: int = 2,
    seed: int = 0,
    dropout: float = 0.1,
) -> PreTrainedModel:
    """A tiny model in eval mode and float32, every parameter random.

    Args:
        model_type: the key of transformers' mappings, such as ``"llama"``.
        kind: a key of :data:`KINDS`.
        layers: how many blocks, at least 2; more where the type has more kinds of blocks.
        seed: of the parameters.
        dropout: the value of every dropout probability in the config.
    """
    chosen = model_class(model_type, kind)  # its config may be a part of the type's, as for llama4
    config = shrink(chosen.config_class, layers=max(layers, 2), dropout=dropout, kind=kind)
    if getattr(config, "attn_logit_softcapping", None):
        # transformers 5.9 takes torch's attention for these, which leaves the soft cap out.
        config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = chosen(config)
        randomise(model)
    return model.eval()


def inputs(
    model: PreTrainedModel, *, batch: int = 2, length: int = 7, seed: int = 0
) -> dict[str, Any]:
    """Keyword inputs for a model's forward; token ids avoid every special one."""
    generator = torch.Generator("cpu").manual_seed(seed)
    sizes = {"b": batch, "t": length, "4b": 4 * batch}

    def make(name: str, shape: Any) -> Any:
        if isinstance(shape, dict):
            return {key: make(key, value) for key, value in shape.items()}
        if isinstance(shape[0], tuple):
            return tuple(make(name, value) for value in shape)
        size = [sizes.get(n, n) for n in shape]
        if name.endswith("ids"):
            ids = torch.randint(*data.TOKENS, size, generator=generator, device="cpu")
            return ids.to(model.device)
        return torch.randn(size, generator=generator, device="cpu").to(model.device)

    names = [model.main_input_name]
    if model.config.is_encoder_decoder:
        names.append("decoder_input_ids")
    special = data.INPUTS.get(model.config.model_type)
    shapes = special or {name: data.SHAPES[name] for name in names}
    return {name: make(name, shape) for name, shape in shapes.items()}


def outputs(result: Any) -> Tensor:
    """What a model computes: its logits, or the last hidden state of one without a head."""
    value: Tensor = result.logits if "logits" in result else result[0]
    return value


def model_class(model_type: str, kind: str) -> Any:
    """The class that transformers maps a type to."""
    for name in MAPPINGS[kind]:
        found = getattr(auto, f"{name}_MAPPING_NAMES").get(model_type)
        if found is not None:
            return getattr(transformers, found if isinstance(found, str) else found[0])
    raise KeyError(f"transformers maps no {kind} model to {model_type!r}")


def shrink(
    config_class: Any, *, layers: int, dropout: float, kind: str, **special: Any
) -> PreTrainedConfig:
    """The default config of a class with every size small, its parts likewise."""
    special = data.SPECIAL.get(config_class.model_type, {}) | special
    parts = {}
    for name, part in config_class.sub_configs.items():
        spec = config_class.sub_configs_defaults.get(name)
        if spec is None or not spec.optional or name in special:
            part = part if hasattr(part, "sub_configs") else CONFIG_MAPPING[spec.model_type]
            own = special.pop(name, {})
            parts[name] = shrink(part, layers=layers, dropout=dropout, kind=kind, **own)
    reference = vars(config_class(**parts))
    arguments = inspect.signature(config_class.__init__).parameters
    stored = {name: config_class.attribute_map.get(name, name) for name in arguments}
    found = {
        name: reference[key]
        for name, key in stored.items()
        if key in reference and name not in parts
    }

    lists = layer_lists(found)
    kinds = list(dict.fromkeys(zip(*lists.values())))
    layers = max(layers, len(kinds), data.LEAST_LAYERS.get(config_class.model_type, 0))
    rows = itertools.islice(itertools.cycle(kinds), layers)
    new = {name: small(name, old, layers=layers, dropout=dropout) for name, old in found.items()}
    new = {name: value for name, value in new.items() if value is not None}
    new |= {name: list(column) for name, column in zip(lists, zip(*rows))}
    new |= token_ids(found)
    for name, values in data.TOGETHER.items():
        new |= values if found.get(name) is not None else {}
    new |= {name: value for name, value in data.FORCED.get(kind, {}).items() if name in found}
    for name, value in special.items():
        new[name] = value(layers) if callable(value) else value
    return config_class(**(new | parts))


def layer_lists(found: dict[str, Any]) -> dict[str, list[Any]]:
    """The lists that say of which kind each layer is."""
    return {
        name: list(value)
        for name, value in found.items()
        if isinstance(value, list | tuple)
        and len(value) == found.get("num_hidden_layers")
        and len(set(map(str, value))) <= data.MOST_KINDS
        and small(name, value, layers=2, dropout=0.0) is None
    }


def small(name: str, old: Any, *, layers: int, dropout: float) -> Any:
    """The tiny value of one attribute; None leaves the default."""
    items = list(old) if isinstance(old, list | tuple) else [old]
    if not items or any(isinstance(x, bool) or not isinstance(x, int | float) for x in items):
        return None
    if re.search("dropout|pdrop", name):
        return dropout
    rules: Any = data.FACTORS if isinstance(items[0], float) else data.SIZES
    value = next((value for pattern, value in rules if re.fullmatch(pattern, name)), None)
    value = layers if value == "layers" else value
    if value is None or not isinstance(old, list | tuple):
        return value
    return [value] * (layers if len(items) > 6 else len(items))  # one for each layer, or a few


def token_ids(found: dict[str, Any]) -> dict[str, int]:
    """Special tokens: pad, bos and eos are 0, 1 and 2; the others count down from the last id."""
    first = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    pattern = r"\w+_token_(id|index)"
    names = [name for name in found if re.fullmatch(pattern, name) and found[name] is not None]
    others = itertools.count(data.VOCAB - 1, -1)
    return {name: first[name] if name in first else next(others) for name in names}


def randomise(model: nn.Module) -> None:
    """Every parameter random, of a size that keeps activations of order one.

    Constant vectors and scalars (norms, biases, gates) get jitter around their value, the rest is
    drawn anew; what transformers computes (sinusoids, rotations) stays.
    """
    seen: set[Tensor] = set()
    for prefix, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, old in own:
            if old not in seen and old.numel():
                seen.add(old)
                old.data.copy_(drawn(module, f"{prefix}.{name}", old))


def drawn(module: nn.Module, name: str, old: Tensor) -> Tensor:
    """The random value of one parameter or buffer."""
    if choices := next((n for ending, n in data.TABLES.items() if name.endswith(ending)), None):
        return torch.rand(old.shape[0], choices).argsort()[:, : old.shape[1]]
    computed = not old.requires_grad and re.search(data.COMPUTED, name)
    if computed or not (isinstance(old, nn.Parameter) or re.search(data.LEARNED, name)):
        return old
    old = old.detach()
    noise = torch.randn_like(old)
    if re.search(data.KEEP, name):
        return old + 0.1 * noise
    if old.numel() == 1:
        return 0.5 + 0.1 * noise  # a gate: neither open nor shut
    if old.dim() < 2:
        ones = bool((old == 1).all())
        return ones + 0.2 * noise
    if isinstance(module, nn.Embedding):
        return 0.5 * noise
    convolution = "Conv" in type(module).__name__ and old.dim() > 2
    return noise / math.sqrt(math.prod(old.shape[1:]) if convolution else old.shape[-1])


def attempt(model_type: str, kind: str = "causal") -> tuple[str, float, int]:
    """Builds and runs a type: what is wrong (empty where nothing is), seconds, parameters."""
    if kind == "causal" and model_type in UNBUILDABLE:
        return UNBUILDABLE[model_type], 0.0, 0
    start = time.perf_counter()
    try:
        model = build(model_type, kind)
        seconds = time.perf_counter() - start
        with torch.no_grad():
            one, two = (outputs(model(**inputs(model, seed=seed))) for seed in (0, 1))
    except Exception as error:
        return f"{type(error).__name__}: {error}", 0.0, 0
    count = sum(parameter.numel() for parameter in model.parameters())
    if not (one.isfinite().all() and two.isfinite().all()):
        return "the outputs are not finite", seconds, count
    if not 0.01 < one.std() < 50 or (one - two).abs().mean() < 0.01:
        return "the outputs hardly depend on the inputs, or are huge", seconds, count
    return "", seconds, count


def main(chosen: list[str]) -> None:
    """Prints a line for every type, or for the chosen types and kinds."""
    transformers.logging.set_verbosity_error()
    for kind, types in KINDS.items():
        types = tuple(t for t in types if not chosen or kind in chosen or t in chosen)
        good = 0
        for model_type in types:
            wrong, seconds, count = attempt(model_type, kind)
            good += not wrong
            line = f"{kind:16}{model_type:26}{seconds:6.2f} s {count:9,}  {' '.join(wrong.split())}"
            print(line.rstrip(), flush=True)
        print(f"{kind}: {good} of {len(types)}\n" if types else "", end="")


if __name__ == "__main__":
    main(sys.argv[1:])
