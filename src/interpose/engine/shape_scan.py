"""Probe forwards: learn shapes from one run and leave no trace of it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interpose.engine.hooks import Engine
from interpose.engine.listeners import Capturing
from interpose.engine.scope import Binding, Scope
from interpose.sites.grammar import OUTPUT, Tail
from interpose.taps import eager, values

if TYPE_CHECKING:
    from interpose.engine.model import Model


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Put everything a forward pass may change back: random states, buffers, attributes, train and eval mode.

    In it compiled modules run eagerly, so that hooks of torch are heard.
    """
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    parts = [p for p in module.modules() if not isinstance(p, torch.jit.ScriptModule)]
    attributes = [(part, dict(vars(part)), part.training) for part in parts]
    # Also what their dictionaries hold: buffers, and hooks that a model puts on itself.
    registries = [
        (registry, dict(registry))
        for part in parts
        for registry in vars(part).values()
        if isinstance(registry, dict)
    ]
    versions = [p._version for p in module.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        eager.hold()
        try:
            yield
        finally:
            eager.release()
            if versions == [p._version for p in module.parameters()]:
                for part, before, _ in attributes:
                    vars(part).clear()
                    vars(part).update(before)
                for registry, contents in registries:
                    registry.clear()
                    registry.update(contents)
            for part, _, training in attributes:
                # A model that changed its own weights (rwkv in its first call) keeps its note of it.
                part.training = training
            with torch.no_grad():
                for buffer, copy in buffers:
                    if not torch.equal(buffer, copy):
                        buffer.copy_(copy)
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def scan(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Learn the shape and dtype of every site, first without arithmetic, else by a real forward pass."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with untouched(model.module):
        try:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake_args, fake_kwargs = values.mapped((args, kwargs), mode.from_tensor)
                _watch_shapes(model, fake_args, fake_kwargs)
        except Exception:  # any model may branch on values, which fake tensors do not have
            _watch_shapes(model, args, kwargs)


def _watch_shapes(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    scope = Scope(model)
    binding = Binding(Engine("the scan"), "fwd")
    for path, module in model.tree.modules():
        for tail in (Tail(port="input"), OUTPUT):
            site = model.tree.place(path, module, tail)
            binding.listeners.append(Capturing(model, site, scope, outright=False, sink=_Shapes()))
    scope.bindings.append(binding)
    model._seen.clear()
    with torch.no_grad(), scope:
        model.module(*args, **kwargs)
    for listener in binding.listeners:
        if listener.site.tail.port == "output":
            model._calls_of[listener.site.module] = listener.most_calls


class _Shapes:
    """A sink that keeps nothing: shapes were noted on the way here."""

    def keep(self, *_: Any) -> None:
        """Nothing."""

    def done(self, listener: Capturing) -> None:
        """Nothing."""

    def cut(self, value: Tensor, name: str, axes: tuple[str, ...] = ()) -> Tensor:  # noqa: ARG002
        """The value itself."""
        return value
