"""Copies as raw torch makes them, to put where interpose puts its own.

Kernels choose by shape, strides and address. A reference that is to be equal bit for bit has copies at the same places,
with the same strides, at addresses of the same kind. torch's CPU allocator gives multiples of 64 bytes; `odd_addresses`
gives the element behind one, to raw torch and to interpose alike, and so shows what depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from interpose.taps import values

_offset = 0


def copied(value: Tensor) -> Tensor:
    """A copy with the strides of a value; an expanded one is expanded again."""
    if value.layout is not torch.strided or type(value) not in (Tensor, torch.nn.Parameter):
        return value.clone()
    small = value
    for axis, (stride, size) in enumerate(zip(value.stride(), value.shape)):
        if stride == 0 and size > 1:
            small = small.narrow(axis, 0, 1)
    made = _dense_copy(small)
    return made if small is value else made.expand(value.shape)


def _dense_copy(value: Tensor) -> Tensor:
    size = sum(stride * (n - 1) for stride, n in zip(value.stride(), value.shape)) + 1
    if size < value.numel() or not value.numel():  # elements share memory, or there are none
        return value.clone()
    with torch.inference_mode(False), torch.no_grad():
        room = torch.empty(size + _offset, dtype=value.dtype, device=value.device)
        blank = torch.empty(0, dtype=value.dtype, device=value.device)
        blank.set_(room.untyped_storage(), _offset, value.shape, value.stride())
    return blank.copy_(value)


@contextmanager
def odd_addresses() -> Iterator[None]:
    """Let every copy that takes a value's place begin one element behind where the allocator lets tensors begin."""
    global _offset

    def moved(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            new = make(*args, **kwargs)
            return (
                new if 0 in new.stride() else copied(new)
            )  # entries that share memory have gradients of their own

        return made

    made: dict[str, Any] = {name: moved(getattr(values, name)) for name in ("settled", "stand_in")}
    before, _offset = _offset, 1
    try:
        with mock.patch.multiple(values, **made):
            yield
    finally:
        _offset = before
