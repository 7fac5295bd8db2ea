"""SAELens's layout: ``cfg.json`` and ``sae_weights.safetensors`` in a folder, as versions before 6.0 wrote them too.

What is trained here is saved as what SAELens uses for inference: norms of decoder rows are folded in, and autoencoders
whose largest latents of a batch fire are saved with their threshold (``jumprelu``), as SAELens itself does.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interpose.errors import FileError, Unsupported
from interpose.files.reading import read_json
from interpose.files.schema import ANYTHING, FLAG, Field, ListOf, Number, OneOf, Text, Whole, shown
from interpose.files.writing import write_whole
from interpose.sae.files.weights import ANY_OBJECT, KINDS, SIZE, built, entry, inner, read_weights
from interpose.sae.relu import StandardSAE
from interpose.sae.sae import NORMALISATIONS, SAE
from interpose.sae.topk import BatchTopKSAE

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
_VERSION = "6.54.0"
"""The version of SAELens's layout that is written."""
_OF_TRANSCODERS = {
    "transcoder": "standard",
    "skip_transcoder": "standard",
    "jumprelu_transcoder": "jumprelu",
    "jumprelu_skip_transcoder": "jumprelu",
}
_ABOUT = """
    model_name model_class_name model_from_pretrained_kwargs hook_name hook_name_out hook_layer hook_head_index
    hook_head_index_out hf_hook_name hf_hook_name_out prepend_bos context_size seqpos_slice dataset_path
    exclude_special_tokens neuronpedia_id training_architecture training_architecture_details
""".split()
_FORMER = {
    "hook_point": "hook_name",
    "hook_point_layer": "hook_layer",
    "hook_point_head_index": "hook_head_index",
    "activation_fn_str": "activation_fn",
}


def read_saelens(folder: Path) -> SAE:
    """An autoencoder in SAELens's layout."""
    path = folder / CONFIG
    source = repr(str(path))
    cfg = read_json(path, ANY_OBJECT, most=10**7)
    cfg, about = _as_now(cfg, source)
    tensors = read_weights(folder / WEIGHTS)
    name = cfg["architecture"]
    kind = _OF_TRANSCODERS.get(name, name)
    if kind not in KINDS:
        known = ", ".join([*KINDS, *_OF_TRANSCODERS])
        raise Unsupported(
            f"{source} has the architecture {shown(name)}; those that can be read are {known}."
        )
    options = _options(cfg, kind, source)
    if name in _OF_TRANSCODERS:
        options |= {"d_out": entry(cfg, "d_out", SIZE, source, ...), "skip": "skip" in name}
        options["subtract_bias"] = False
    elif entry(cfg, "d_out", SIZE, source) not in (None, cfg["d_in"]):
        raise FileError(
            f"{source} has an output of another size than its input, and is no transcoder."
        )
    made = built(
        kind,
        _weights(dict(tensors), kind, cfg, source),
        source=repr(str(folder)),
        about=about,
        **options,
    )
    for size, there in (("d_in", made.d_in), ("d_sae", made.d_sae)):
        if cfg[size] != there:
            raise FileError(
                f"{source} says that {size} is {cfg[size]}, and the weights have {there}."
            )
    return made


def _as_now(cfg: Mapping[str, Any], source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration as SAELens has written it since 6.0, and what it says of the model; of any version."""
    said = inner(cfg, "metadata", source)
    version = entry({**cfg, **said}, "sae_lens_version", Text(100), source, "0")
    old = not version.split(".")[0].isdigit() or int(version.split(".")[0]) < 6
    found = {_FORMER.get(name, name): one for name, one in cfg.items()} if old else dict(cfg)
    if old:
        said = {"prepend_bos": True, **found}
        found.setdefault("architecture", "standard")
        found.setdefault("apply_b_dec_to_input", True)
        kwargs = inner(found, "activation_fn_kwargs", source)
        if found.get("activation_fn") == "topk" and "k" in kwargs:
            found |= {"architecture": "topk", "k": kwargs["k"]}
        hook = found.get("hook_name")
        if isinstance(hook, str) and "hook_z" in hook:
            found.setdefault("reshape_activations", "hook_z")
        if isinstance(found.get("normalize_activations"), bool):
            scaled = found["normalize_activations"]
            found["normalize_activations"] = "expected_average_only_in" if scaled else "none"
    found["architecture"] = entry(found, "architecture", Text(100), source, ...)
    for size in ("d_in", "d_sae"):
        found[size] = entry(found, size, SIZE, source, ...)
    about = {name: said[name] for name in _ABOUT if said.get(name) is not None}
    return found, ANYTHING(about, Field(source).of("metadata"))


def _options(cfg: Mapping[str, Any], kind: str, source: str) -> dict[str, Any]:
    """What a class of autoencoders is to be called with."""
    known = (*NORMALISATIONS, "expected_average_only_in", "covariance_whitening")
    normalize = entry(cfg, "normalize_activations", OneOf(*known), source, "none")
    if normalize not in NORMALISATIONS:
        raise Unsupported(
            f"{source}: its inputs were normalised with numbers of the training data ({normalize!r}), which are not in "
            "the file. SAELens folds them into the weights: save it again from there."
        )
    options: dict[str, Any] = {
        "subtract_bias": entry(cfg, "apply_b_dec_to_input", FLAG, source, True),
        "normalize": normalize,
    }
    if kind in ("topk", "abstopk", "batchtopk", "matryoshka_batchtopk"):
        options["by_norm"] = entry(cfg, "rescale_acts_by_decoder_norm", FLAG, source, False)
        number = SIZE if kind in ("topk", "abstopk") else Number(0)
        options["k"] = entry(cfg, "k", number, source, ...)
        if options["k"] > cfg["d_sae"]:
            raise FileError(f"{source} says that {options['k']} of {cfg['d_sae']} latents fire.")
    if kind == "matryoshka_batchtopk":
        widths = ListOf(Whole(1, cfg["d_sae"]), 1000)
        options["widths"] = entry(cfg, "matryoshka_widths", widths, source, [])
    if kind == "matching_pursuit":
        options["least"] = entry(cfg, "residual_threshold", Number(0), source, 0.01)
        options["steps"] = entry(cfg, "max_iterations", SIZE, source)
        options["once"] = entry(cfg, "stop_on_duplicate_support", FLAG, source, True)
    return options


def _weights(
    tensors: dict[str, Tensor], kind: str, cfg: Mapping[str, Any], source: str
) -> dict[str, Tensor]:
    """The weights by the names that they have here."""
    factor = tensors.pop("scaling_factor", tensors.pop("finetuning_scaling_factor", None))
    if factor is not None and not bool((factor == 1).all()):
        raise Unsupported(
            f"{source}: its latents have a factor each for decoding alone (finetuning_scaling_factor): not read."
        )
    if "log_threshold" in tensors:
        tensors["threshold"] = tensors.pop("log_threshold").exp()
    if "topk_threshold" in tensors:
        tensors["threshold"] = tensors.pop("topk_threshold").double()
    if kind == "matching_pursuit" and not cfg.get("apply_b_dec_to_input", True):
        tensors["b_dec"] = (
            torch.zeros_like(tensors["b_dec"]) if "b_dec" in tensors else torch.zeros(0)
        )
    return tensors


def save_sae(sae: SAE, folder: str | Path) -> Path:
    """Write an autoencoder in a folder, as SAELens reads it: weights first, so that ``cfg.json`` is never without them.

    Args:
        sae: the autoencoder; it is not changed.
        folder: of the two files; it is made.
    """
    from safetensors.torch import save

    kept = for_inference(sae)
    cfg, tensors = _written(kept)
    there = Path(folder)
    there.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(there / WEIGHTS, save(plain, metadata={"format": "pt"}))
    write_whole(there / CONFIG, json.dumps(cfg, indent=1, allow_nan=False))
    return there


def for_inference(sae: SAE) -> SAE:
    """A copy with norms folded in, and thresholds for each latent in place of one for all."""
    if type(sae).architecture not in KINDS:
        raise Unsupported(f"{sae!r} has no place in SAELens's layout.")
    made = copy.deepcopy(sae).eval()
    return made.fold_norms() if made.by_norm else made


def _written(sae: SAE) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = dict(sae.state_dict())
    name = sae.architecture
    cfg: dict[str, Any] = {
        "d_in": sae.d_in,
        "d_sae": sae.d_sae,
        "dtype": str(sae.W_dec.dtype).removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": sae.subtract_bias,
        "normalize_activations": sae.normalize,
        "reshape_activations": "hook_z"
        if str(sae.about.get("hook_name", "")).endswith("hook_z")
        else "none",
    }
    about = {**sae.about, "sae_lens_version": _VERSION}
    if isinstance(sae, BatchTopKSAE):
        about |= {"training_architecture": name}
        tensors["threshold"] = sae.threshold.to(sae.W_dec).expand(sae.d_sae).clone()
        name = "jumprelu"
    if sae.is_transcoder:
        if name not in ("standard", "jumprelu"):
            raise Unsupported(f"SAELens has no place for transcoders of kind {name!r}.")
        skip = "skip_" if sae.W_skip is not None else ""
        name = f"{'' if isinstance(sae, StandardSAE) else 'jumprelu_'}{skip}transcoder"
        cfg["d_out"] = sae.d_out
    elif sae.W_skip is not None:
        raise Unsupported("SAELens has no place for autoencoders with a path around the latents.")
    for option, written in (
        ("k", "k"),
        ("least", "residual_threshold"),
        ("steps", "max_iterations"),
        ("once", "stop_on_duplicate_support"),
    ):
        if hasattr(sae, option) and name != "jumprelu":
            cfg[written] = getattr(sae, option)
    if name in ("topk", "abstopk"):
        cfg["rescale_acts_by_decoder_norm"] = False
    return {"architecture": name, **cfg, "metadata": about}, tensors
