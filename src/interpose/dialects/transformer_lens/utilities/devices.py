"""Which device to use, and how full it is."""

from __future__ import annotations

import os
from typing import Any

import torch

Memory = list[tuple[int, int]]
"""Devices as (index, free bytes)."""


def get_device() -> str:
    """The best device here: ``cuda``, else ``cpu``.

    ``mps`` only if the environment has ``TRANSFORMERLENS_ALLOW_MPS=1``: some versions of torch compute
    wrong numbers there.
    """
    if torch.cuda.is_available():
        return "cuda"
    allowed = os.environ.get("TRANSFORMERLENS_ALLOW_MPS", "") == "1"
    return "mps" if allowed and torch.backends.mps.is_available() else "cpu"


def print_gpu_mem(step_name: str = "") -> None:
    """Print how much memory torch's tensors take on the current GPU."""
    taken = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    print(f"{step_name} ~ {taken:.2f} GiB allocated on GPU.")  # noqa: T201 - its purpose


def calculate_available_device_cuda_memory(i: int) -> int:
    """How many bytes are free on the i-th GPU."""
    return int(torch.cuda.mem_get_info(i)[0])


def determine_available_memory_for_available_devices(max_devices: int) -> Memory:
    """The first so many GPUs, each with the bytes free on it."""
    count = min(max_devices, torch.cuda.device_count())
    return [(i, calculate_available_device_cuda_memory(i)) for i in range(count)]


def sort_devices_based_on_available_memory(devices: Memory) -> Memory:
    """Devices, the one with the most free memory first."""
    return sorted(devices, key=lambda device: device[1], reverse=True)


def get_best_available_cuda_device(max_devices: int | None = None) -> torch.device:
    """The GPU with the most free memory.

    Args:
        max_devices: look at so many; None for all.
    """
    limit = torch.cuda.device_count() if max_devices is None else max_devices
    found = sort_devices_based_on_available_memory(
        determine_available_memory_for_available_devices(limit)
    )
    if not found:
        raise RuntimeError("torch sees no GPU here; get_device() says what there is.")
    return torch.device("cuda", found[0][0])


def get_best_available_device(cfg: Any) -> torch.device:
    """A config's device; if that is ``cuda`` without a number, the GPU with the most free memory."""
    device = torch.device(cfg.device)
    if str(device) == "cuda":
        return get_best_available_cuda_device(getattr(cfg, "n_devices", None))
    return device
