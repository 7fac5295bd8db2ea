"""Logits of a few tokens alone: the columns of the unembedding that metrics look at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interpose.taps import bypass


@contextmanager
def only(model: Any, tokens: Tensor | None) -> Iterator[None]:
    """A ``with`` block in which runs of a model compute the logits of some tokens alone, in their order.

    Args:
        model: whose unembedding is one linear map, so that each logit has a column of its own.
        tokens: which; None for all.
    """
    if tokens is None:
        yield
        return
    module = model.anatomy.unembed.module
    bias = None if module.bias is None else module.bias[tokens]
    columns = _Columns(threading.get_ident(), module.weight[tokens], bias)
    bypass.bypass(module, columns)
    try:
        yield
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
class _Columns:
    thread: int
    weight: Tensor
    bias: Tensor | None

    def is_wanted(self) -> bool:
        return threading.get_ident() == self.thread

    def output(self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        return torch.nn.functional.linear(args[0], self.weight, self.bias)
