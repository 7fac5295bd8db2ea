"""Layouts of others, each a function from a folder or a file to an autoencoder.

What a file does not say of itself is in the names of its folders, as its publishers chose them: the layer
(``layer_12``), the site (``gemma-scope-2b-pt-res``), the number of latents that fire (``L0_50``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interpose.errors import FileError, Unsupported
from interpose.files.reading import read_json
from interpose.files.schema import FLAG, Field, ListOf, Number, Text, Whole, shown
from interpose.sae.files.weights import (
    ANY_OBJECT,
    SIZE,
    built,
    entry,
    inner,
    must_be_numbers,
    pick,
    read_weights,
)
from interpose.sae.sae import SAE

_LAYER = Whole(0, 10_000)
_POSITIVE = Number(1e-30, 1e30)


def read_gemma_scope(path: Path, source: str) -> SAE:
    """Gemma Scope 1, ``params.npz``, and 2, ``params.safetensors`` with ``config.json``."""
    found = read_weights(path)
    tensors = {
        ("W_" + name[2:] if name.startswith("w_") else name): tensor.float()
        for name, tensor in found.items()
    }
    skip = (
        pick(tensors, "affine_skip_connection", source=source, axes=2)
        if "affine_skip_connection" in tensors
        else None
    )
    tensors.pop("affine_skip_connection", None)
    folder = path.parent
    cfg = (
        read_json(folder / "config.json", ANY_OBJECT) if (folder / "config.json").is_file() else {}
    )
    words = "/".join(folder.parts[-5:])
    about = _of_gemma(cfg, words, source)
    options: dict[str, Any] = {"subtract_bias": False, "about": about}
    if "hook_name_out" in about:
        options |= {
            "d_out": pick(tensors, "W_dec", source=source, axes=2).shape[-1],
            "skip": skip is not None,
        }
        tensors |= {} if skip is None else {"W_skip": skip.T}
    elif skip is not None:
        raise FileError(
            f"{source} has a path around the latents, and its folder does not say that it is a transcoder."
        )
    made = built("jumprelu", tensors, source=source, **options)
    return _on_scaled_embeddings(made) if "embedding" in words else made


@torch.no_grad()
def _on_scaled_embeddings(sae: SAE) -> SAE:
    """Gemma multiplies embeddings by the root of their width before the model has them; it was trained before that."""
    root = sae.d_in**0.5
    sae.W_enc.div_(root)
    sae.W_dec.mul_(root)
    return sae


def _of_gemma(cfg: Mapping[str, Any], words: str, source: str) -> dict[str, Any]:
    layer = re.search(r"layer_(\d+)", words)
    name = entry(cfg, "model_name", Text(200), source)
    model = name or _word(r"(2b|9b|27b)", words, "gemma-2-{}")
    about = {"model_name": model} if model else {}
    for theirs, ours in (
        ("hf_hook_point_in", "hf_hook_name"),
        ("hf_hook_point_out", "hf_hook_name_out"),
    ):
        if said := entry(cfg, theirs, Text(500), source):
            about[ours] = said
    if "embedding" in words:
        return {**about, "hook_name": "hook_embed"}
    if layer is None:
        return about
    at = f"blocks.{int(layer[1])}"
    if re.search("transcoder|clt", words):
        read = "ln2.hook_normalized" if "hf_hook_name" not in about else "hook_mlp_in"
        return {**about, "hook_name": f"{at}.{read}", "hook_name_out": f"{at}.hook_mlp_out"}
    for word, hook in (("att", "attn.hook_z"), ("mlp", "hook_mlp_out"), ("res", "hook_resid_post")):
        if re.search(rf"(^|[-_/]){word}", words):
            return {**about, "hook_name": f"{at}.{hook}"}
    return about


def read_sparsify(folder: Path, source: str) -> SAE:
    """sparsify: ``cfg.json`` and ``sae.safetensors``; the folder is called after the module that it is of."""
    cfg = read_json(folder / "cfg.json", ANY_OBJECT)
    found = read_weights(folder / "sae.safetensors")
    k = entry(cfg, "k", SIZE, source, ...)
    rows = pick(found, "W_dec", source=source, axes=2)
    encoder = pick(found, "W_enc", "encoder.weight", source=source, axes=2)
    encoder = encoder.T if "W_enc" in found else encoder
    latents = encoder.shape[0]
    tensors = {
        "W_enc": encoder.T,
        "W_dec": rows,
        "b_enc": found.get(
            "encoder.bias", found.get("b_enc", torch.zeros(latents, dtype=rows.dtype))
        ),
        "b_dec": pick(found, "b_dec", source=source),
    }
    skip = pick(found, "W_skip", source=source, axes=2) if "W_skip" in found else None
    transcodes = entry(cfg, "transcode", FLAG, source, False) or skip is not None
    _count(entry(cfg, "d_in", SIZE, source), encoder.shape[-1], "d_in", source)
    _count(entry(cfg, "num_latents", Whole(0), source) or None, latents, "num_latents", source)
    run = (
        read_json(folder.parent / "config.json", ANY_OBJECT)
        if (folder.parent / "config.json").is_file()
        else {}
    )
    about: dict[str, Any] = {"hf_hook_name": folder.name}
    if model := entry(run, "model", Text(500), source):
        about["model_name"] = model
    layer = re.search(r"layers[._](\d+)(?:[._](mlp|attn|self_attn))?$", folder.name)
    if layer is not None and layer[2] is None:
        about["hook_name"] = f"blocks.{int(layer[1])}.hook_resid_post"
    if layer is not None and layer[2] == "mlp":
        about["hook_name"] = f"blocks.{int(layer[1])}.hook_mlp_out"
    if folder.name == "embed_tokens":
        about["hook_name"] = "hook_embed"
    options: dict[str, Any] = {"k": k, "about": about}
    if transcodes:
        if "hook_name" in about:
            about["hook_name_out"] = about["hook_name"]
            about["hook_name"] = about["hook_name"].replace("hook_mlp_out", "mlp.hook_in")
        about["hf_hook_name"] = f"{folder.name}.input"
        options |= {"d_out": rows.shape[-1], "skip": skip is not None}
        tensors |= {} if skip is None else {"W_skip": skip}
    kind = "abstopk" if entry(cfg, "signed", FLAG, source, False) else "topk"
    return built(kind, tensors, source=source, **options)


_OF_DICTIONARIES = {
    "AutoEncoder": "standard",
    "AutoEncoderNew": "standard",
    "AutoEncoderTopK": "topk",
    "BatchTopKSAE": "jumprelu",
    "MatryoshkaBatchTopKSAE": "jumprelu",
    "JumpReluAutoEncoder": "jumprelu",
    "GatedAutoEncoder": "gated",
}


def read_dictionary_learning(folder: Path, source: str, *, pickles: bool = False) -> SAE:
    """dictionary_learning: ``ae.pt`` and ``config.json``."""
    cfg = read_json(folder / "config.json", ANY_OBJECT)
    trainer = inner(cfg, "trainer", source)
    name = entry(trainer, "dict_class", Text(200), source, ...)
    if name not in _OF_DICTIONARIES:
        raise Unsupported(
            f"{source} has the class {shown(name)}; those that can be read are {', '.join(_OF_DICTIONARIES)}."
        )
    kind = _OF_DICTIONARIES[name]
    found = read_weights(folder / "ae.pt", pickles=pickles)
    encoder = pick(found, "W_enc", "encoder.weight", source=source, axes=2)
    encoder = encoder if "W_enc" in found else encoder.T
    rows = pick(found, "W_dec", "decoder.weight", source=source, axes=2)
    tensors: dict[str, Tensor] = {
        "W_enc": encoder,
        "W_dec": rows if "W_dec" in found else rows.T,
        "b_dec": pick(found, "b_dec", "bias", "decoder_bias", "decoder.bias", source=source),
    }
    if kind == "gated":
        for ours, theirs in (("b_gate", "gate_bias"), ("b_mag", "mag_bias"), ("r_mag", "r_mag")):
            tensors[ours] = pick(found, theirs, source=source)
    else:
        tensors["b_enc"] = pick(found, "encoder.bias", "b_enc", source=source)
    if kind == "jumprelu":
        threshold = pick(found, "threshold", source=source)
        tensors["threshold"] = (
            threshold.expand(encoder.shape[-1]) if threshold.numel() == 1 else threshold
        )
    about: dict[str, Any] = {}
    if model := entry(trainer, "lm_name", Text(500), source):
        about["model_name"] = model
    layer = entry(trainer, "layer", _LAYER, source)
    if layer is not None:
        site = entry(trainer, "submodule_name", Text(500), source, "")
        hook = (
            "hook_mlp_out"
            if "mlp" in site
            else "hook_attn_out"
            if "att" in site
            else "hook_resid_post"
        )
        about["hook_name"] = f"blocks.{layer}.{hook}"
    if (length := entry(inner(cfg, "buffer", source), "ctx_len", SIZE, source)) is not None:
        about["context_size"] = length
    options: dict[str, Any] = {
        "about": about,
        "subtract_bias": name not in ("JumpReluAutoEncoder", "AutoEncoderNew"),
    }
    if kind == "topk":
        said = entry(trainer, "k", SIZE, source)
        options["k"] = said or SIZE(pick(found, "k", source=source).tolist(), Field(source).of("k"))
    return built(kind, tensors, source=source, **options)


def read_llama_scope(folder: Path, source: str) -> SAE:
    """Llama Scope: ``hyperparams.json`` and ``checkpoints/final.safetensors``, or ``config.json`` and weights."""
    old = (folder / "hyperparams.json").is_file()
    cfg = read_json(folder / ("hyperparams.json" if old else "config.json"), ANY_OBJECT)
    found = read_weights(
        folder / ("checkpoints/final.safetensors" if old else "sae_weights.safetensors")
    )
    encoder = pick(found, "encoder.weight", source=source, axes=2)
    tensors = {
        "W_enc": encoder.T,
        "b_enc": pick(found, "encoder.bias", source=source),
        "W_dec": pick(found, "decoder.weight", source=source, axes=2).T,
        "b_dec": pick(found, "decoder.bias", source=source),
    }
    width = encoder.shape[-1]
    _count(entry(cfg, "d_model", SIZE, source), width, "d_model", source)
    norms = inner(cfg, "dataset_average_activation_norm", source)
    into, out = (_scale(norms, word, width, source) for word in ("in", "out"))
    if old:
        threshold = entry(cfg, "jump_relu_threshold", Number(0, 1e30), source, ...)
        # In the units of the codes, which `fold_scale` leaves as they are.
        tensors["threshold"] = torch.full(
            (encoder.shape[0],), threshold * into, dtype=encoder.dtype
        )
    else:
        tensors["threshold"] = pick(found, "log_jumprelu_threshold", source=source).exp()
    about = {}
    for theirs, ours in (("hook_point_in", "hook_name"), ("hook_point_out", "hook_name_out")):
        if said := entry(cfg, theirs, Text(500), source):
            about[ours] = said
    options: dict[str, Any] = {"subtract_bias": False}
    if about.get("hook_name_out") == about.get("hook_name"):
        about.pop("hook_name_out", None)
    elif "hook_name_out" in about:
        options["d_out"] = tensors["W_dec"].shape[-1]
    made = built("jumprelu", tensors, source=source, about=about, **options)
    return (
        made.fold_scale(into, out)
        if "out" in norms and made.is_transcoder
        else made.fold_scale(into)
    )


def _scale(norms: Mapping[str, Any], word: str, width: int, source: str) -> float:
    """What vectors of an average norm are multiplied by, so that it becomes the root of their width."""
    norm: float | None = entry(norms, word, _POSITIVE, source)
    return 1.0 if norm is None else width**0.5 / norm


def read_qwen_scope(path: Path, source: str, *, k: int | None = None, pickles: bool = False) -> SAE:
    """Qwen Scope: ``layer12.sae.pt`` in a folder whose name says how many latents fire: ``...-W32K-L0_50``."""
    found = read_weights(path, pickles=pickles)
    words = re.search(r"SAE-Res-(.+)-W\d+K-L0_(\d+)", path.parent.name)
    layer = re.search(r"layer(\d+)\.sae", path.name)
    k = int(words[2]) if k is None and words is not None else k
    if k is None:
        raise FileError(
            f"{source} does not say how many latents fire, and its folder is not called as Qwen calls it "
            "(SAE-Res-Qwen3-1.7B-Base-W32K-L0_50). Say k=..."
        )
    about: dict[str, Any] = {} if words is None else {"model_name": f"Qwen/{words[1]}"}
    if layer is not None:
        about |= {
            "hook_name": f"blocks.{int(layer[1])}.hook_resid_post",
            "hf_hook_name": f"model.layers.{int(layer[1])}",
        }
    tensors = {
        "W_enc": pick(found, "W_enc", source=source, axes=2).T,
        "W_dec": pick(found, "W_dec", source=source, axes=2).T,
        "b_enc": pick(found, "b_enc", source=source),
        "b_dec": pick(found, "b_dec", source=source),
    }
    if k > tensors["W_dec"].shape[0]:
        raise FileError(f"{source}: {k} of {tensors['W_dec'].shape[0]} latents cannot fire.")
    return built("topk", tensors, source=source, k=k, subtract_bias=False, about=about)


def read_crosscoder(folder: Path, source: str, *, pickles: bool = False) -> SAE:
    """dictionary_learning's crosscoders: ``ae.pt`` (or ``model.safetensors``), with one decoder for each layer."""
    from interpose.sae.crosscoder import CrossCoder

    path = folder / ("ae.pt" if (folder / "ae.pt").is_file() else "model.safetensors")
    found = read_weights(path, pickles=pickles)
    encoder = pick(found, "encoder.weight", source=source)
    decoder = pick(found, "decoder.weight", source=source)
    bias, shift = (
        pick(found, "encoder.bias", source=source),
        pick(found, "decoder.bias", source=source),
    )
    if encoder.ndim != 3 or decoder.shape != (encoder.shape[0], encoder.shape[2], encoder.shape[1]):
        raise FileError(
            f"{source}: encoder.weight is {tuple(encoder.shape)} and decoder.weight {tuple(decoder.shape)}; they "
            "should be [layer, d, latent] and [layer, latent, d]."
        )
    layers, width, latents = encoder.shape
    if bias.shape != (latents,) or shift.shape != (layers, width):
        raise FileError(f"{source}: its biases are {tuple(bias.shape)} and {tuple(shift.shape)}.")
    cfg = (
        read_json(folder / "config.json", ANY_OBJECT) if (folder / "config.json").is_file() else {}
    )
    names = entry(
        cfg, "site", ListOf(Text(500)), source, [f"layer {number}" for number in range(layers)]
    )
    if len(names) != layers:
        raise FileError(f"{source} names {len(names)} sites, and has {layers}.")
    made = CrossCoder(width, latents, site=names)
    for name, one in found.items():
        must_be_numbers(one, name, source)
    weights = {
        "W_enc": encoder.reshape(-1, latents),
        "W_dec": decoder.permute(1, 0, 2).reshape(latents, -1),
        "b_enc": bias,
        "b_dec": shift.reshape(-1),
    }
    made.load_state_dict(
        {name: one.detach().to(encoder.dtype).contiguous() for name, one in weights.items()},
        assign=True,
    )
    return made.requires_grad_().eval()


def _count(said: int | None, there: int, name: str, source: str) -> None:
    if said is not None and said != there:
        raise FileError(f"{source} says that {name} is {said}, and the weights have {there}.")


def _word(pattern: str, words: str, text: str) -> str | None:
    found = re.search(rf"(?:^|[-_/]){pattern}(?:[-_/]|$)", words)
    return None if found is None else text.format(found[1])
