"""How far two ways of computing the same may be apart: one bound for every comparison that is about rounding.

Kernels add up in an order that depends on shapes and on the CPU. So a run of fewer rows or positions, or one through
another path, equals up to some roundings of the largest numbers that took part, in their dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROUNDINGS = 64
"""How many roundings of the largest number may add up: some in each of the few layers that the tests' models have."""


def rounding(*sizes: Tensor | float, dtype: torch.dtype = torch.float32, times: float = 1) -> float:
    """The bound for numbers that came from some others, the largest of which tell.

    Args:
        *sizes: what took part: the logits, where a difference of logits is compared.
        dtype: of numbers that are no tensors.
        times: how much more, where a computation amplifies what goes in; say why.
    """
    bound = 0.0
    for size in sizes:
        tensor = torch.as_tensor(size, dtype=None if isinstance(size, Tensor) else dtype)
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        tensor = tensor.detach() if tensor.is_floating_point() else tensor.to(dtype)
        finite = tensor[tensor.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        bound = max(bound, torch.finfo(tensor.dtype).eps * largest)
    return times * ROUNDINGS * bound


def assert_near(found: Any, wanted: Any, *sizes: Tensor | float, times: float = 1) -> None:
    """Equal to rounding; the numbers that are compared have a part in the size. One number may stand for all."""
    found, wanted = (torch.as_tensor(value).detach() for value in (found, wanted))
    wanted = wanted if wanted.ndim else wanted.expand_as(found)
    bound = rounding(found, wanted, *sizes, times=times)
    torch.testing.assert_close(found, wanted, rtol=0, atol=bound, check_dtype=False)


def are_near(found: Tensor, wanted: Tensor, *sizes: Tensor | float, times: float = 1) -> bool:
    """Whether `assert_near` holds, for a condition inside a larger one."""
    try:
        assert_near(found, wanted, *sizes, times=times)
    except AssertionError:
        return False
    return True
