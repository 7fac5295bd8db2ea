"""Ways a site's value lies inside a module's: heads, parts of fused projections, multiples, in place.

A lens is plain data. Reading gives a view where memory allows; writing gives a new whole, of the
same strides, so that kernels after it take the same path.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from interpose.sites.lens import Lens, Switch
from interpose.taps import tap, values


def _overwritten(raw: Tensor, value: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    """A copy of a tensor with a part of it replaced; ``part`` must return a view."""
    whole = values.stand_in(raw)
    part(whole).copy_(value)
    return whole


class Plain:
    """What most lenses are: they look at the value alone, and give a new whole."""

    __slots__ = ()
    in_place: ClassVar[bool] = False
    needs_call: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Heads(Plain):
    """Heads in the last axis: ``[..., d]`` shown as ``[..., head, d_head]``.

    ``offsets`` are the columns where the heads begin, in any order and distance.
    """

    offsets: tuple[int, ...]
    size: int

    @property
    def step(self) -> int | None:
        """The distance from head to head, if it is always the same."""
        return _step(self.offsets, self.size)

    def _view(self, raw: Tensor) -> Tensor:
        step = self.step or self.size
        first, count = self.offsets[0], len(self.offsets)
        if step == self.size:
            part = raw.narrow(-1, first, count * step)
            return part.view(*part.shape[:-1], count, step)
        return raw.narrow(-1, first, (count - 1) * step + self.size).unfold(-1, self.size, step)

    def _columns(self, raw: Tensor) -> Tensor:
        starts = torch.tensor(self.offsets, device=raw.device)
        return (starts[:, None] + torch.arange(self.size, device=raw.device)).flatten()

    def read(self, raw: Tensor, call: Any) -> Tensor:  # noqa: ARG002
        """The heads."""
        if self.step is not None:
            return self._view(raw)
        columns = raw.index_select(-1, self._columns(raw))
        return columns.view(*raw.shape[:-1], len(self.offsets), self.size)

    def write(self, raw: Tensor, value: Tensor, call: Any) -> Tensor:  # noqa: ARG002
        """The whole with other heads."""
        if self.step == self.size and raw.shape[-1] == len(self.offsets) * self.size:
            return value.reshape(raw.shape)
        if self.step is not None:
            return _overwritten(raw, value, self._view)
        return values.stand_in(raw).index_copy(-1, self._columns(raw), value.flatten(-2))


@lru_cache(maxsize=1024)
def _step(offsets: tuple[int, ...], size: int) -> int | None:
    if len(offsets) == 1:
        return size
    steps = {b - a for a, b in pairwise(offsets)}
    step = next(iter(steps))
    return step if len(steps) == 1 and step >= size else None


@dataclass(frozen=True, slots=True)
class Part(Plain):
    """A slice of the last axis: one half of a fused gate and up projection."""

    start: int
    stop: int
    step: int = 1

    def _view(self, raw: Tensor) -> Tensor:
        return raw[..., self.start : self.stop : self.step]

    def read(self, raw: Tensor, call: Any) -> Tensor:  # noqa: ARG002
        """The slice."""
        return self._view(raw)

    def write(self, raw: Tensor, value: Tensor, call: Any) -> Tensor:  # noqa: ARG002
        """The whole with another slice."""
        return _overwritten(raw, value, self._view)


@dataclass(frozen=True, slots=True)
class Swapped:
    """Two axes exchanged: ``[batch, head, pos, d_head]`` shown as ``[batch, pos, head, d_head]``.

    Of what another lens shows, if there is one inside.
    """

    first: int
    second: int
    inner: Lens | None = None

    @property
    def needs_call(self) -> bool:
        """As the lens inside."""
        return self.inner is not None and self.inner.needs_call

    @property
    def in_place(self) -> bool:
        """As the lens inside."""
        return self.inner is not None and self.inner.in_place

    def read(self, raw: Tensor, call: Any) -> Tensor:
        """The view."""
        value = raw if self.inner is None else self.inner.read(raw, call)
        return value.transpose(self.first, self.second)

    def write(self, raw: Tensor, value: Tensor, call: Any) -> Tensor | None:
        """Back again."""
        value = value.transpose(self.first, self.second)
        if self.inner is not None:
            return self.inner.write(raw, value, call)
        return values.settled(value, raw)


@dataclass(frozen=True, slots=True)
class Times(Plain):
    """A multiple, where a model scales what a module returned before it adds it to the stream."""

    factor: float

    def read(self, raw: Tensor, call: Any) -> Tensor:  # noqa: ARG002
        """What is really added."""
        return raw * self.factor

    def write(self, raw: Tensor, value: Tensor, call: Any) -> Tensor:  # noqa: ARG002
        """What the module must return for that; bits that nobody changed stay as they are."""
        return torch.where(value == raw * self.factor, raw, value / self.factor)


@dataclass(frozen=True, slots=True)
class InPlace(Plain):
    """The value itself, written to where it lies: the residual stream, which the skip path holds too."""

    in_place: ClassVar[bool] = True

    def read(self, raw: Tensor, call: Any) -> Tensor:  # noqa: ARG002
        """The value."""
        return raw

    def write(self, raw: Tensor, value: Tensor, call: Any) -> None:  # noqa: ARG002
        """Write it in place."""
        raw.copy_(value)


@dataclass(frozen=True, slots=True)
class Squeezed(Plain):
    """Another lens on a value that has one axis more, of size one."""

    axis: int
    inner: Lens

    def read(self, raw: Tensor, call: Any) -> Tensor:
        """The value without that axis."""
        return self.inner.read(raw.squeeze(self.axis), call)

    def write(self, raw: Tensor, value: Tensor, call: Any) -> Tensor:
        """And with it again."""
        made = self.inner.write(raw.squeeze(self.axis), value, call)
        assert made is not None
        return made.unsqueeze(self.axis)


@dataclass(frozen=True, slots=True)
class Folded(Plain):
    """Batch and heads in one axis, ``[batch * head, ...]``, shown as ``[batch, head, ...]``."""

    heads: int

    def read(self, raw: Tensor, call: Any) -> Tensor:  # noqa: ARG002
        """The view."""
        view: Tensor = raw.unflatten(0, (-1, self.heads))
        return view

    def write(self, raw: Tensor, value: Tensor, call: Any) -> Tensor:  # noqa: ARG002
        """Back again."""
        return value.reshape(raw.shape)


@dataclass(frozen=True, slots=True)
class Batched:
    """Batch and positions in one axis, ``[batch * pos, ...]``, shown as ``[batch, pos, ...]``.

    ``around`` knows how many of each there are: the value of a module around this one.
    """

    around: Stash
    inner: Lens | None = None

    @property
    def needs_call(self) -> bool:
        """As the lens inside."""
        return self.inner is not None and self.inner.needs_call

    @property
    def in_place(self) -> bool:
        """As the lens inside."""
        return self.inner is not None and self.inner.in_place

    def read(self, raw: Tensor, call: Any) -> Tensor:
        """The view."""
        value = raw if self.inner is None else self.inner.read(raw, call)
        view: Tensor = value.unflatten(0, self.around.value.shape[:2])
        return view

    def write(self, raw: Tensor, value: Tensor, call: Any) -> Tensor | None:
        """Back again."""
        flat = value.flatten(0, 1)
        return flat if self.inner is None else self.inner.write(raw, flat, call)


class Counted:
    """A switch that is connected while at least one needs it."""

    holders = 0

    def on(self) -> None:
        """One more needs it."""
        with tap._LOCK:
            self.holders += 1
            if self.holders == 1:
                self._connect()

    def off(self) -> None:
        """One less."""
        with tap._LOCK:
            self.holders -= 1
            if self.holders == 0:
                self._disconnect()

    def _connect(self) -> None:
        raise NotImplementedError

    def _disconnect(self) -> None:
        raise NotImplementedError


class Stash(Counted):
    """Keeps what a module was given last, for lenses on modules that run inside or after it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.handle: Any = None
        self.local = threading.local()

    def _connect(self) -> None:
        self.handle = self.module.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _disconnect(self) -> None:
        self.handle.remove()

    def off(self) -> None:
        """One less; this thread needs no value any more."""
        super().off()
        vars(self.local).clear()

    def _keep(self, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        found = (tensor for _, tensor in values.leaves((args, kwargs)))
        self.local.value = next(tensor for tensor in found if tensor.is_floating_point())

    def __reduce__(self) -> tuple[type[Stash], tuple[nn.Module]]:
        return Stash, (nn.Identity(),)  # copies of a hooked module get one that nobody asks

    @property
    def value(self) -> Tensor:
        """What the module was given last, in this thread."""
        return self.local.value  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Switches:
    """Several switches as one."""

    each: tuple[Switch, ...]

    def on(self) -> None:
        """All on."""
        for switch in self.each:
            switch.on()

    def off(self) -> None:
        """All off."""
        for switch in self.each:
            switch.off()
