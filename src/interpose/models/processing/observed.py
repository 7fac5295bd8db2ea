"""What a probe forward shows processing: who reads a value, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from interpose.models.discovery.inputs import BATCH, LENGTH, probe_inputs
from interpose.models.discovery.record import Recorder, Value
from interpose.models.reach import interface
from interpose.models.running.trial import first_tensor, trial
from interpose.models.transformer import TransformerModel
from interpose.sites.tree import ModuleTree

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""How far apart, in units of their size, two outputs may be that only rounding sets apart."""


def record(model: TransformerModel) -> Recorder:
    """Every call of a module in one probe forward."""
    interface.install()
    recorder = Recorder(ModuleTree(model.module).modules(), batch=BATCH, length=LENGTH)
    with trial(model):
        recorder.run(lambda: model.module(**probe_inputs(model.module)))
    return recorder


def output(model: TransformerModel) -> Tensor:
    """What the model computes from the probe: its logits, or the first tensor of one without a head."""
    with trial(model):
        return first_tensor(model.module(**probe_inputs(model.module))).detach().clone()


def cached(model: TransformerModel, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Values of sites in a probe forward, of those that are reached once."""
    if not names:
        return {}
    with trial(model):
        _, cache = model.run_with_cache(names_filter=list(names), **probe_inputs(model.module))
    return {name: cache[name] for name in names if len(cache.calls(name)) == 1}


def arguments(model: TransformerModel, module: nn.Module) -> tuple[Any, Any]:
    """What a module is first called with in a probe forward."""
    seen: list[tuple[Any, Any]] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append((args, kwargs))

    with trial(model):
        handle = module.register_forward_pre_hook(note, with_kwargs=True)
        try:
            model.module(**probe_inputs(model.module))
        finally:
            handle.remove()
    return seen[0]


def key(value: Value) -> tuple[int, bytes]:
    """Equal for values of the same numbers, in whatever shape."""
    return value.numel, value.sketch.tobytes()


def tolerance(model: TransformerModel) -> float:
    """How far apart rounding may set two outputs, in units of their size."""
    floats = [p.dtype for p in model.module.parameters() if p.is_floating_point()]
    return max((TOLERANCE.get(dtype, 1e-1) for dtype in floats), default=1e-4)
