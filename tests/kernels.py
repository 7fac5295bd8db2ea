"""Kernels that round by the number of rows: what a CPU does that chooses them by shape, on every CPU.

INTERPOSE_TEST_KERNELS=rows lets linear maps and attention be off by a few roundings, which follow from how many rows
they are given and with which strides. So a test that compares bits of runs with other rows or positions fails here too
(`make cpus`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_MOST = 2
"""How many roundings a result is off, up or down, at most."""


@contextmanager
def rounding_by_rows() -> Iterator[None]:
    """Let torch's linear maps and attention round by the number of their rows."""
    with ExitStack() as stack:
        for home, name, given in (
            (torch.nn.functional, "linear", 0),
            (torch, "addmm", 1),
            (torch.nn.functional, "scaled_dot_product_attention", 0),
        ):
            stack.enter_context(mock.patch.object(home, name, _by_rows(getattr(home, name), given)))
        yield


def _by_rows(kernel: Callable[..., Tensor], given: int) -> Callable[..., Tensor]:
    @functools.wraps(kernel)
    def rounded(*args: Any, **kwargs: Any) -> Tensor:
        made = kernel(*args, **kwargs)
        if len(args) <= given or type(made) is not Tensor or not made.is_floating_point():
            return made
        rows, strides = tuple(args[given].shape[:-1]), args[given].stride()
        off = hash((rows, strides)) % (2 * _MOST + 1) - _MOST
        return made * (1 + off * torch.finfo(made.dtype).eps) if off else made

    return rounded
