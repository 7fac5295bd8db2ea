"""Logits of a few tokens alone: the columns of the unembedding that metrics look at, in float32 too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from interpose.taps import bypass


@contextmanager
def only(model: Any, tokens: Tensor | None, *, finer: bool = False) -> Iterator[Columns | None]:
    """A ``with`` block in which runs of a model compute the logits of some tokens alone, in their order.

    Args:
        model: whose unembedding is one linear map, so that each logit has a column of its own.
        tokens: which; None for all.
        finer: where these logits have 16 bits, multiply once more in float32. Both are then columns of logits in
            float32, first the model's own.
    """
    if tokens is None:
        yield None
        return
    module = model.anatomy.unembed.module
    bias = None if module.bias is None else module.bias[tokens]
    columns = Columns(threading.get_ident(), module.weight[tokens], bias, finer)
    bypass.bypass(module, columns)
    try:
        yield columns
    finally:
        bypass.unbypass(module, columns)


def can_be_picked(model: Any) -> bool:
    """Whether the unembedding is a plain linear map."""
    place = model.anatomy.unembed
    return place is not None and type(place.module) is nn.Linear


def others_look(model: Any, sites: Iterable[str] = ()) -> bool:
    """Whether somebody else than metrics looks at the unembedding: sites of it, or hooks of torch on it."""
    place = model.anatomy.unembed
    if place is None:
        return True
    module = place.module
    names = ("unembed", *(path for path, each in model.tree.modules() if each is module))
    at_it = any(site.split(".hook_")[0].removesuffix(".input") in names for site in sites)
    return at_it or bool(module._forward_hooks or module._forward_pre_hooks)


@dataclass(slots=True, eq=False)
class Columns:
    """Some columns of an unembedding, in its place.

    Attributes:
        thread: whose runs are meant.
        weight: [token, d_model].
        bias: [token], if there is one.
        finer: whether 16 bits are multiplied once more in float32.
        last: what it gave last.
    """

    thread: int
    weight: Tensor
    bias: Tensor | None
    finer: bool
    last: Tensor | None = None

    def is_wanted(self) -> bool:
        """Whether it means this call."""
        return threading.get_ident() == self.thread

    def output(self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tensor:  # noqa: ARG002
        """The logits of its tokens; twice, in float32, where both precisions are wanted."""
        found = functional.linear(args[0], self.weight, self.bias)
        if self.finer and found.dtype.itemsize == 2:
            bias = None if self.bias is None else self.bias.float()
            with torch.autocast(found.device.type, enabled=False):
                again = functional.linear(args[0].float(), self.weight.float(), bias)
            found = torch.cat([found.float(), again], dim=-1)
        self.last = found
        return found
