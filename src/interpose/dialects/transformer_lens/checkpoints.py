"""Checkpoints of a training: written whole or not at all, and taken up only by the same training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from interpose.files.writing import replacing

# What may differ when a training is taken up again; all else decides its numbers.
FREE = tuple("num_epochs device save_every save_dir wandb wandb_project_name print_every".split())


def settings_of(config: Any, rows: int) -> dict[str, Any]:
    """A config as plain values, with the number of rows, which decides their order too."""
    places = {"device": str(config.device), "save_dir": str(config.save_dir)}
    return asdict(config) | places | {"rows": rows}


def save(folder: Path, step: int, model: Any, optimizer: Any, settings: dict[str, Any]) -> Path:
    """Write ``step_N.pt``: the states of model and optimizer, the steps done, the settings."""
    folder.mkdir(parents=True, exist_ok=True)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path = folder / f"step_{step}.pt"
    with replacing(path) as unfinished:  # a stop while writing leaves no broken checkpoint
        torch.save(states | {"step": step, "config": settings}, unfinished)
    return path


def load(place: Path, model: Any, optimizer: Any, settings: dict[str, Any]) -> int:
    """Load a checkpoint, or the last one of a folder; how many steps it has done.

    Args:
        place: the file or the folder.
        model: takes the weights.
        optimizer: takes its state.
        settings: of the training that goes on; other than `FREE`, they must be the checkpoint's.
    """
    if place.is_dir():
        found = sorted(place.glob("step_*.pt"), key=lambda path: int(path.stem[5:]))
        if not found:
            raise FileNotFoundError(f"no checkpoint step_N.pt in {place} to go on from.")
        place = found[-1]
    state = torch.load(place, map_location=next(model.parameters()).device, weights_only=True)
    then = state["config"]
    other = [
        f"{key} was {then[key]!r} and is {now!r}"
        for key, now in settings.items()
        if key not in FREE and then[key] != now
    ]
    if other:
        raise ValueError(f"{place} is of another training: {', '.join(other)}.")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
