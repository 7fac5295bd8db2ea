"""Activations as mi-crow caches them, written by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


def padded(rows: Sequence[Tensor], *, left: bool = False, fill: float = 7e4) -> Tensor:
    """Rows as one tensor; what is padding would be noticed."""
    longest = max(map(len, rows))
    found = torch.full((len(rows), longest, *rows[0].shape[1:]), fill, dtype=rows[0].dtype)
    for number, row in enumerate(rows):
        found[number, slice(-len(row), None) if left else slice(len(row))] = row
    return found


def as_mi_crow(
    folder: Path,
    layers: dict[str, list[Tensor]],
    *,
    batch: int,
    masks: bool = True,
    tokens: list[list[int]] | None = None,
    unified: bool = False,
    left: bool = False,
) -> Path:
    """A run of mi-crow: of each layer the values of every text, [pos, size]."""
    files: dict[tuple[str, str], dict[str, Tensor]] = {}
    count = len(next(iter(layers.values())))
    for number, at in enumerate(range(0, count, batch)):
        made = {
            (layer, "activations"): padded(rows[at : at + batch], left=left)
            for layer, rows in layers.items()
        }
        lengths = [len(row) for row in next(iter(layers.values()))[at : at + batch]]
        if masks:
            ones = [torch.ones(length, dtype=torch.long) for length in lengths]
            made["attention_masks", "attention_mask"] = padded(ones, left=left, fill=0)
        if tokens is not None:
            ids = [torch.tensor(row) for row in tokens[at : at + batch]]
            made["inputs", "input_ids"] = padded(ids, left=left, fill=0)
        for key, value in made.items():
            files.setdefault(key, {})[f"batch_{number}"] = value
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({"run_name": folder.name, "model": "Some"}))
    for (layer, key), batches in files.items():
        if unified:
            path = folder / "detectors" / layer / f"{key}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(batches, path)
            continue
        for name, value in batches.items():
            path = folder / name / layer / f"{key}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"tensor": value}, path)
    return folder
