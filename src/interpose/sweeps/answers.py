"""Logits of a few positions and tokens alone: what metrics look at of the unembedding, in float32 too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from interpose.taps import bypass, eager

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel


@dataclass(frozen=True, slots=True)
class Kept:
    """Which positions' logits are wanted.

    Attributes:
        positions: which, counted from the end, ascending.
        picked: whether `only` leaves out the others; else the model is asked for so many from the end.
    """

    positions: tuple[int, ...]
    picked: bool = False

    @staticmethod
    def last(count: int | None, *, picked: bool = False) -> Kept | None:
        """The last so many; None for all."""
        return None if count is None else Kept(tuple(range(-count, 0)), picked)

    @property
    def count(self) -> int:
        """How many there are from the first of them to the end."""
        return -self.positions[0]

    def of(self, values: Tensor) -> Tensor:
        """These of values at the last positions, [row, pos, ...]: of fewer, those that are there."""
        there = [place for place in self.positions if place >= -values.shape[1]]
        at_the_end = bool(there) and there[0] == -len(there)
        return values[:, there[0] :] if at_the_end else values[:, there]

    def taken(self, logits: Tensor) -> Tensor:
        """These of the logits that a model gave."""
        return logits if self.picked else self.of(logits)


@contextmanager
def only(
    model: TransformerModel, tokens: Tensor | None, *, kept: Kept | None = None, finer: bool = False
) -> Iterator[Columns | None]:
    """A ``with`` block in which runs of a model compute the logits of some tokens alone, in their order.

    Args:
        model: whose unembedding is one linear map, so that each logit has a column of its own.
        tokens: which; None for all.
        kept: at which positions, if they are to be picked here.
        finer: where these logits have 16 bits, multiply once more in float32. Both are then columns of logits in
            float32, first the model's own.
    """
    kept = kept if kept is not None and kept.picked else None
    if tokens is None and kept is None:
        yield None
        return
    module = unembedding(model)
    weight: Tensor = module.weight
    bias: Tensor | None = module.bias
    if tokens is not None:
        weight, bias = weight[tokens], None if bias is None else bias[tokens]
    columns = Columns(threading.get_ident(), weight, bias, kept, finer and tokens is not None)
    eager.hold()
    bypass.bypass(module, columns)
    try:
        yield columns
    finally:
        eager.release()
        bypass.unbypass(module, columns)


def can_be_picked(model: TransformerModel) -> bool:
    """Whether the unembedding is a plain linear map."""
    place = model.anatomy.unembed
    return place is not None and type(place.module) is nn.Linear


def unembedding(model: TransformerModel) -> nn.Linear:
    """The unembedding of a model of which `can_be_picked` is true."""
    place = model.anatomy.unembed
    assert place is not None
    assert isinstance(place.module, nn.Linear)
    return place.module


def others_look(model: TransformerModel, sites: Iterable[str] = ()) -> bool:
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
        kept: at which positions; None for all that come.
        finer: whether 16 bits are multiplied once more in float32.
        last: what it gave last.
    """

    thread: int
    weight: Tensor
    bias: Tensor | None
    kept: Kept | None
    finer: bool
    last: Tensor | None = None

    def is_wanted(self) -> bool:
        """Whether it means this call."""
        return threading.get_ident() == self.thread

    def output(self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tensor:  # noqa: ARG002
        """The logits of its tokens; twice, in float32, where both precisions are wanted."""
        # Torch multiplies row by row what does not lie together: 8 times slower for one position of many rows.
        stream = args[0] if self.kept is None else self.kept.of(args[0]).contiguous()
        found = functional.linear(stream, self.weight, self.bias)
        if self.finer and found.dtype.itemsize == 2:
            bias = None if self.bias is None else self.bias.float()
            with torch.autocast(found.device.type, enabled=False):
                again = functional.linear(stream.float(), self.weight.float(), bias)
            found = torch.cat([found.float(), again], dim=-1)
        self.last = found
        return found
