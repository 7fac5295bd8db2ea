"""Where a model runs."""

from __future__ import annotations

import torch


def normalize_device(device: str | torch.device | None) -> str:
    """A device by its full name: None is the CPU, ``cuda`` is ``cuda:0``; an error if it is not there."""
    if device is None:
        return "cpu"
    try:
        made = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is no device: {error}") from None
    if made.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (made.index or 0) >= count:
            raise ValueError(
                f"device {str(device)!r} is not available: there are {count} CUDA devices."
            )
        return f"cuda:{made.index or 0}"
    if made.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device 'mps' is not available.")
    return str(made)
