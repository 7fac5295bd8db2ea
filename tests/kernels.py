"""Kernels that round by the number of rows: what a CPU does that chooses them by shape, on every CPU.

INTERPOSE_TEST_KERNELS=rows lets linear maps be off by a few roundings, which follow from how many rows they are given
and with which strides. So a test that compares bits of runs with other rows or positions fails here too (`make cpus`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

_MOST = 2
"""How many roundings a result is off, up or down, at most."""


@contextmanager
def rounding_by_rows() -> Iterator[None]:
    """Let linear maps round by the number of their rows."""
    linear = mock.patch.object(nn.Linear, "forward", _by_rows(nn.Linear.forward))
    with linear, mock.patch.object(torch, "addmm", _by_rows(torch.addmm)):  # what GPT-2 calls
        yield


def _by_rows(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(kernel)
    def rounded(*args: Any, **kwargs: Any) -> Tensor:
        made = kernel(*args, **kwargs)
        if type(made) is not Tensor or not made.is_floating_point():
            return made
        x = args[1] if len(args) > 1 else kwargs["input"]
        off = hash((tuple(x.shape[:-1]), x.stride())) % (2 * _MOST + 1) - _MOST
        return made * (1 + off * torch.finfo(made.dtype).eps) if off else made

    return rounded
