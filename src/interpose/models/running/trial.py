"""Trials: a small forward that proves something about this very model, unheard by hooks and without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from interpose.engine.model import Model
from interpose.engine.shape_scan import untouched
from interpose.taps import values
from interpose.taps.context import unheard


@contextmanager
def trial(model: Model) -> Iterator[None]:
    """A ``with`` block for forwards that nobody is to notice."""
    with unheard(), untouched(model.module), torch.no_grad():
        model.module.eval()
        yield


def first_tensor(output: Any) -> Tensor:
    """What a model computes: its logits, or the first tensor of one without a head."""
    for name in ("logits", "last_hidden_state"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    return next(tensor for _, tensor in values.leaves(output) if tensor.is_floating_point())
