"""A default device of torch is a mode that sees every call, and turns fused kernels off: a block without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_device_mode() -> Iterator[None]:
    """Without the default device that tests have, where that is the CPU."""
    device = torch.get_default_device()
    torch.set_default_device(None if device.type == "cpu" else device)
    held = torch._GLOBAL_DEVICE_CONTEXT
    if getattr(held, "device_context", device) is None:
        del held.device_context  # torch 2.6 would ask None for its device
    try:
        yield
    finally:
        torch.set_default_device(device)
