"""Which layout a folder or a file has, and the autoencoder in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from interpose.errors import FileError
from interpose.files.reading import regular_file
from interpose.models.loading import POCKET
from interpose.sae.files import foreign
from interpose.sae.files.saelens import CONFIG, WEIGHTS, read_saelens
from interpose.sae.sae import SAE


def load_sae(
    path: str | Path,
    *,
    device: Any = None,
    dtype: torch.dtype | None = None,
    k: int | None = None,
    pickles: bool = False,
) -> SAE:
    """An autoencoder from a folder or a file on this machine; which layout it has is seen by the files that are there.

    Read are those of SAELens (of all versions), Gemma Scope 1 and 2, sparsify, dictionary_learning with its
    crosscoders, Llama Scope and Qwen Scope. It comes in eval mode, as it is in the file.

    Args:
        path: the folder, or the file of weights itself; or ``pocket``, the autoencoder of the pocket model that comes
            with interpose.
        device: where to put it.
        dtype: of its weights; by default that of the file.
        k: how many latents fire, where the file does not say so.
        pickles: whether to read ``.pt`` files that hold more than tensors: such a file can run any program.
    """
    there = POCKET / "sae" if path == "pocket" else Path(path)
    if not there.exists():
        raise FileNotFoundError(
            f"there is no folder {str(path)!r}. Nothing is downloaded here: get it with huggingface_hub's "
            "snapshot_download, and give the folder."
        )
    made = _read(there, repr(str(path)), k, pickles=pickles)
    return made if device is None and dtype is None else made.to(device=device, dtype=dtype)


def _read(there: Path, source: str, k: int | None, *, pickles: bool) -> SAE:
    if there.is_file():
        if there.name in (
            WEIGHTS,
            CONFIG,
            "sae.safetensors",
            "ae.pt",
            "config.json",
            "hyperparams.json",
        ):
            return _read(there.parent, source, k, pickles=pickles)
        if there.suffix == ".npz" or there.name == "params.safetensors":
            return foreign.read_gemma_scope(there, source)
        if ".sae." in there.name:
            return foreign.read_qwen_scope(there, source, k=k, pickles=pickles)
        raise FileError(f"{source} has no name that is known of autoencoders. {_KNOWN}")
    if not there.is_dir():
        regular_file(there)  # which says what it is
    has = {one.name for one in there.iterdir()}
    if {CONFIG, WEIGHTS} <= has:
        return read_saelens(there)
    if {CONFIG, "sae.safetensors"} <= has:
        return foreign.read_sparsify(there, source)
    if "hyperparams.json" in has or {"config.json", WEIGHTS} <= has:
        return foreign.read_llama_scope(there, source)
    if {"ae.pt", "config.json"} <= has or "model.safetensors" in has:
        if _is_crosscoder(there, has):
            return foreign.read_crosscoder(there, source, pickles=pickles)
        return foreign.read_dictionary_learning(there, source, pickles=pickles)
    for name in ("params.npz", "params.safetensors"):
        if name in has:
            return foreign.read_gemma_scope(there / name, source)
    several = sorted(name for name in has if ".sae." in name)
    if len(several) == 1:
        return foreign.read_qwen_scope(there / several[0], source, k=k, pickles=pickles)
    if several:
        raise FileError(
            f"{source} has {len(several)} autoencoders, such as {several[0]!r}: give the file."
        )
    raise FileError(f"{source} has no files of an autoencoder in a layout that is known. {_KNOWN}")


def _is_crosscoder(there: Path, has: set[str]) -> bool:
    if "ae.pt" not in has:
        return True
    from interpose.files.reading import read_json
    from interpose.files.schema import Text
    from interpose.sae.files.weights import ANY_OBJECT, entry, inner

    source = repr(str(there / "config.json"))
    trainer = inner(read_json(there / "config.json", ANY_OBJECT), "trainer", source)
    return "cross" in str(entry(trainer, "dict_class", Text(200), source, "")).lower()


_KNOWN = (
    "Known are cfg.json with sae_weights.safetensors (SAELens) or sae.safetensors (sparsify), params.npz and "
    "params.safetensors (Gemma Scope), ae.pt with config.json (dictionary_learning), hyperparams.json or config.json "
    "with safetensors (Llama Scope), layerN.sae.pt (Qwen Scope)."
)
