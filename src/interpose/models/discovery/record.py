"""One probe forward, written down: which module took and gave what, in order, in a few numbers each.

Values are kept as sketches (a few hundred entries at fixed random places), so that a probe of a
large model costs little memory and one transfer from the device, and `a + b == c` can still be
asked of any three values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from interpose.models.reach import interface
from interpose.precision import wide
from interpose.taps import values
from interpose.taps.tap import named_arguments

Array = npt.NDArray[np.float64]
PLACES = 256


@dataclass(slots=True, eq=False)
class Value:
    """A tensor that flowed: where, of what shape, a sketch of it, and its first and last token's rows."""

    leaf: values.Leaf
    shape: tuple[int, ...]
    is_float: bool
    source: Tensor | None
    sketch: Array = field(default_factory=lambda: np.zeros(0))
    row: Array = field(default_factory=lambda: np.zeros(0))
    last: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def numel(self) -> int:
        """How many entries it has."""
        return int(np.prod(self.shape))

    @property
    def is_finite(self) -> bool:
        """Whether no number that was kept of it is NaN or infinite."""
        return all(bool(np.isfinite(part).all()) for part in (self.sketch, self.row, self.last))


@dataclass(slots=True, eq=False)
class Event:
    """One call of a module."""

    path: str
    module: nn.Module
    start: int
    call: int = 0
    call_counts: bool = False
    """Whether the module is called at several places, so that the number of the call says which."""
    end: int = -1
    given: list[Value] = field(default_factory=list)
    made: list[Value] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class KernelCall:
    """One attention computation: by the interface, by a fused kernel, or by a softmax of its own."""

    by: str
    path: str
    time: int
    scores_ndim: int = 4
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of queries, keys and scores (``q``, ``k``, ``scores``) as far as they are known."""
    q: Value | None = None
    k: Value | None = None
    v: Value | None = None


class Recorder(TorchFunctionMode):
    """Hooks on every module for one forward pass, and an eye on attention kernels.

    ``instead`` are tensors that stand in for some of the model's own, by their ids: it computes
    with these, and is not touched.
    """

    def __init__(
        self,
        modules: Iterator[tuple[str, nn.Module]],
        *,
        batch: int,
        length: int,
        instead: Mapping[int, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.batch = batch
        self.length = length
        self._instead = instead or {}
        self._thread = threading.get_ident()
        self.modules = list(modules)
        self.events: list[Event] = []
        self.kernels: list[KernelCall] = []
        self.softmaxes: list[tuple[str, int, tuple[int, ...]]] = []
        """Every softmax outside of the interface: in which module, when, of what shape."""
        self.calls: dict[str, int] = {}
        self._stack: list[Event] = []
        self._time = 0
        self._pending: list[Value] = []
        self._products: list[tuple[Tensor, Tensor] | None] = []
        self._waits_for_v: list[KernelCall] = []

    def run(self, call: Callable[[], Any]) -> Any:
        """Make the call and write down what happens."""
        handles = []
        try:
            for path, module in self.modules:
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                before, after = self._hooks(path)
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(after, with_kwargs=True))
            with torch.no_grad(), interface.observed(self._on_interface), self:
                return call()
        finally:
            for handle in handles:
                handle.remove()
            self._settle()
            self._count_calls()

    @property
    def is_finite(self) -> bool:
        """Whether what the modules made is, as far as it was kept, neither NaN nor infinite."""
        return all(value.is_finite for event in self.events for value in event.made)

    def _hooks(self, path: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if threading.get_ident() != self._thread:
                return  # someone else is using the model
            event = Event(path, module, self._tick(), self.calls.get(path, 0))
            self.calls[path] = event.call + 1
            event.given = self._values(named_arguments(module, args, kwargs))
            self.events.append(event)
            self._stack.append(event)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG001
            if threading.get_ident() != self._thread:
                return
            event = self._stack.pop()
            event.end = self._tick()
            event.made = self._values(output)

        return before, after

    def _count_calls(self) -> None:
        """A module called more often than the parts around it is called at several places."""
        for event in self.events:
            calls, path = self.calls[event.path], event.path
            around = 1
            while "." in path:
                path = path.rsplit(".", 1)[0]
                if path in self.calls:
                    around = self.calls[path]
                    break
            event.call_counts = calls > 1 and around == 1

    def _tick(self) -> int:
        self._time += 1
        return self._time

    def _values(self, given: Any) -> list[Value]:
        return [self._value(leaf, tensor) for leaf, tensor in values.leaves(given)]

    def _value(self, leaf: values.Leaf, tensor: Tensor) -> Value:
        if values.is_shard(tensor):
            tensor = tensor.to_local()  # type: ignore[attr-defined]
        value = Value(leaf, tuple(tensor.shape), tensor.is_floating_point(), None)
        if tensor.is_floating_point() and tensor.numel() and values.is_plain(tensor):
            flat = tensor.detach().reshape(-1)
            places = torch.as_tensor(_places(flat.numel()), device=flat.device)
            first, last = self._rows(tensor.detach())
            value.source = wide(torch.cat([flat[places], first, last]))
            self._pending.append(value)
        return value

    def _rows(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of the first and of the last token, all their heads where they have an axis."""
        if tensor.ndim == 4 and tensor.shape[2] == self.length != tensor.shape[1]:
            return tensor[0, :, 0].reshape(-1), tensor[-1, :, -1].reshape(-1)
        if tensor.ndim == 4:
            return tensor[0, 0].reshape(-1), tensor[-1, -1].reshape(-1)
        flat = tensor.reshape(-1)
        width = tensor.shape[-1] if tensor.ndim else 1
        return flat[:width], flat[-width:]

    def _settle(self) -> None:
        """Bring all sketches over in one go."""
        by_device: dict[torch.device, list[Value]] = {}
        for value in self._pending:
            assert value.source is not None
            by_device.setdefault(value.source.device, []).append(value)
        for found in by_device.values():
            sizes = [value.source.numel() for value in found]  # type: ignore[union-attr]
            joined = torch.cat([value.source for value in found])  # type: ignore[misc]
            whole = joined.double().cpu().numpy()
            for value, part in zip(found, np.split(whole, np.cumsum(sizes)[:-1])):
                value.sketch = part[:PLACES]
                value.row, value.last = np.split(part[PLACES:], 2)
                value.source = None
        self._pending = []

    # Attention kernels.

    def _on_interface(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> None:
        if threading.get_ident() != self._thread:
            return
        path = next((p for p, m in self.modules if m is module), "")
        self._add_kernel("interface", path, q, k, v)

    def _add_kernel(
        self, by: str, path: str, q: Tensor | None, k: Tensor | None, v: Tensor | None
    ) -> KernelCall:
        call = KernelCall(by, path, self._tick())
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor is not None:
                setattr(call, name, self._first_token(tensor))
                call.shapes[name] = tuple(tensor.shape)
        if q is not None and k is not None:
            call.shapes["scores"] = (*q.shape[:-1], k.shape[-2])
        self.kernels.append(call)
        return call

    def _first_token(self, tensor: Tensor) -> Value:
        """The heads of the first token, of ``[batch, head, pos, d_head]`` or with the first two joined."""
        if tensor.ndim == 4:
            heads, ends = tensor[0, :, 0], tensor[-1, :, -1]
        elif tensor.ndim == 3:
            count = max(1, len(tensor) // self.batch)
            heads, ends = tensor[:count, 0], tensor[-count:, -1]
        else:
            heads = ends = tensor.reshape(1, -1)
        value = self._value((), heads.contiguous())
        if value.source is not None:
            both = (wide(heads.reshape(-1)), wide(ends.reshape(-1)))
            value.source = torch.cat([value.source[:PLACES], *both])
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note attention computed without the interface: products before and after a softmax."""
        kwargs = kwargs or {}
        if self._instead:
            args, kwargs = values.mapped((args, kwargs), lambda t: self._instead.get(id(t), t))
        name = getattr(func, "__name__", "")
        if name not in _TOLD or not self._stack:
            return func(*args, **kwargs)
        path = self._stack[-1].path
        if isinstance(self._stack[-1].module, nn.Softmax):
            path = self._stack[-2].path
        seen = self.kernels and self.kernels[-1].path == path and self.kernels[-1].by == "interface"
        if seen and self.kernels[-1].time > self._stack[-1].start:
            return func(*args, **kwargs)
        tensors = [part for _, part in values.leaves((args, kwargs))]
        if name == "scaled_dot_product_attention":
            self._add_kernel("kernel", path, *tensors[:3])
        elif name == "softmax":
            if tensors and tensors[0].ndim >= 3:
                self._on_softmax(path, tensors[0])
        elif name == "einsum":
            self._products = [None]  # which axes are queries and keys, only its equation knows
        elif len(tensors) >= 2 and tensors[-1].ndim >= 3 and tensors[-2].ndim >= 3:
            if self._waits_for_v and self._waits_for_v[-1].path == path:
                self._waits_for_v.pop().v = self._first_token(tensors[-1])
            self._products = [(tensors[-2], tensors[-1])]
        return func(*args, **kwargs)

    def _on_softmax(self, path: str, scores: Tensor) -> None:
        """Scores are what queries and keys multiply to, one number per pair of positions."""
        self.softmaxes.append((path, self._tick(), tuple(scores.shape)))
        last = self._products[-1] if self._products else None
        if scores.shape[-2] != self.length or not self._products:
            return
        if last is None:
            found = self._add_kernel("softmax", path, None, None, None)
            found.scores_ndim, found.shapes["scores"] = scores.ndim, tuple(scores.shape)
            return
        q, k = last
        if scores.shape[-2:] == (q.shape[-2], k.shape[-1]):
            found = self._add_kernel("softmax", path, q, k.transpose(-1, -2), None)
            found.scores_ndim, found.shapes["scores"] = scores.ndim, tuple(scores.shape)
            self._waits_for_v.append(found)


_TOLD = {
    "scaled_dot_product_attention",
    "softmax",
    "matmul",
    "__matmul__",
    "bmm",
    "baddbmm",
    "einsum",
}


@lru_cache(maxsize=512)
def _places(size: int) -> npt.NDArray[np.int64]:
    """The same random places for every value of one size."""
    return np.random.default_rng(size).integers(0, size, PLACES)


def inside(path: str, events: Sequence[Event]) -> list[Event]:
    """Calls of modules below a path."""
    return [event for event in events if event.path.startswith(f"{path}.")]


def in_and_out(event: Event) -> tuple[Value, Value] | None:
    """The value a block takes and the one of the same shape that it returns."""
    for given in event.given:
        if given.is_float and len(given.shape) >= 2:
            for made in event.made:
                if made.is_float and made.shape == given.shape:
                    return given, made
    return None
