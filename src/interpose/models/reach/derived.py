"""Values that a model never makes, though they follow from what it does: per-head results and inputs, norm scales.

Each is a lens on the module that consumes them. Read, it is computed from the call's own values;
edited, the module's output is moved by what the edit changes, so that an untouched value leaves
every bit as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from interpose.errors import Unsupported
from interpose.models.discovery.parts import linear_shape
from interpose.models.reach.lenses import Heads, Plain, Stash
from interpose.taps import values
from interpose.taps.tap import given_arguments, named_arguments


def weight_of(module: nn.Module) -> Tensor:
    """A linear map's weight as ``[in, out]``, a view."""
    weight = getattr(module, "weight", None)
    shape = linear_shape(module)
    if (
        not isinstance(weight, Tensor)
        or shape is None
        or not weight.is_floating_point()
        or (weight.ndim != 2 or set(weight.shape) != set(shape))
    ):
        raise Unsupported(
            f"{type(module).__name__} keeps its weight in a form that cannot be viewed as a matrix "
            "(quantised?). Its activations can be hooked; values derived from the weight cannot."
        )
    return weight if type(module).__name__ == "Conv1D" else weight.T


def _first(call: Any) -> Tensor:
    args = call.given[0]
    if args and type(args[0]) is Tensor:
        return args[0]
    return next(tensor for _, tensor in values.leaves(call.given))


class Derived(Plain):
    """A lens that computes its value; one that was written stays known, for it cannot be seen in the output."""

    __slots__ = ()
    needs_call: ClassVar[bool] = True

    def read(self, raw: Tensor, call: Any) -> Tensor:
        """What an edit before this one left here, else what follows from the call."""
        known: Tensor | None = getattr(raw, "_derived", {}).get(self)
        return self.computed(raw, call) if known is None else known

    def write(self, raw: Tensor, value: Tensor, call: Any) -> Tensor:
        """The module's new output, which knows what was written into it."""
        whole = self.moved(raw, value, call)
        whole._derived = {**getattr(raw, "_derived", {}), self: value}  # type: ignore[attr-defined]
        return whole

    def computed(self, raw: Tensor, call: Any) -> Tensor:
        """The value as it follows from a call."""
        raise NotImplementedError

    def moved(self, raw: Tensor, value: Tensor, call: Any) -> Tensor:
        """The output with the value changed; where the values add up to it, by what their sum changes."""
        return raw + (value - self.read(raw, call)).sum(-2)


@dataclass(frozen=True, slots=True)
class HeadResults(Derived):
    """What each head adds: ``z @ W_O`` head by head; their sum and the bias are the projection's output."""

    heads: Heads

    def computed(self, raw: Tensor, call: Any) -> Tensor:  # noqa: ARG002
        """``[batch, pos, head, d_model]``."""
        z = self.heads.read(_first(call), call)
        weight = self.heads.read(weight_of(call.module).T, call).permute(1, 2, 0)
        return torch.einsum("...hd,hdm->...hm", z, weight)


@dataclass(frozen=True, slots=True)
class NormScale(Derived):
    """What a norm divides by, ``[batch, pos, 1]``."""

    centred: bool
    eps: float

    def computed(self, raw: Tensor, call: Any) -> Tensor:
        """The square root of variance (or mean square) plus epsilon, in the precision of the norm's own."""
        x = _first(call).float() if raw.dtype in (torch.float16, torch.bfloat16) else _first(call)
        if self.centred:  # torch's own kernel, which is many times faster than `var` on a CPU
            return torch.native_layer_norm(x, x.shape[-1:], None, None, self.eps)[2].reciprocal()
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (length.square() / x.shape[-1] + self.eps).sqrt()

    def moved(self, raw: Tensor, value: Tensor, call: Any) -> Tensor:
        """Divide by the new scale instead."""
        old = self.read(raw, call)
        bias = getattr(call.module, "bias", None)
        shift = 0.0 if bias is None else bias
        moved = ((raw - shift) * (old / value) + shift).to(raw.dtype)
        kept = raw
        if value.requires_grad:  # a gradient at the scale needs the quotient also where it is one
            quotient = (raw.detach() - shift) * (old / value)
            kept = raw + (quotient - quotient.detach()).to(raw.dtype)
        return torch.where(value == old, kept, moved)


@dataclass(frozen=True, slots=True)
class HeadInputs(Derived):
    """The stream as each head reads it, ``[batch, pos, head, d_model]``: an edit reaches that head alone.

    The norm is run again on the edited copy, and the head's columns of the projection on its result.
    """

    heads: Heads
    stash: Stash | None

    def computed(self, raw: Tensor, call: Any) -> Tensor:  # noqa: ARG002
        """The stream, repeated for each head."""
        stream = _first(call) if self.stash is None else self.stash.value
        count = len(self.heads.offsets)
        return stream.unsqueeze(-2).expand(*stream.shape[:-1], count, stream.shape[-1])

    def moved(self, raw: Tensor, value: Tensor, call: Any) -> Tensor:
        """Move each head by what its input changed."""
        before, after = self.read(raw, call), value
        if self.stash is not None:
            # Without hooks: this is not a call of the model.
            after = type(self.stash.module).forward(self.stash.module, after)
            before = type(self.stash.module).forward(self.stash.module, before)
        weight = self.heads.read(weight_of(call.module), call)
        moved = torch.einsum("...hm,mhd->...hd", after - before, weight)
        return self.heads.write(raw, self.heads.read(raw, call) + moved, call)


@dataclass(frozen=True, slots=True)
class ExpertOutputs(Derived):
    """What each chosen expert adds, weighted: the experts' module run again for one choice at a time."""

    indices: str
    weights: str

    def computed(self, raw: Tensor, call: Any) -> Tensor:  # noqa: ARG002
        """``[token, chosen, d_model]``; their sum is what the module returns."""
        module = call.module
        given = named_arguments(module, *call.given)
        chosen, weights = given[self.indices], given[self.weights]
        parts = []
        for at in range(chosen.shape[-1]):
            one = {self.indices: chosen[..., at : at + 1], self.weights: weights[..., at : at + 1]}
            args, kwargs = call.given
            args, kwargs = given_arguments(module, args, kwargs, {**given, **one})
            # Without hooks: this is not a call of the model.
            parts.append(type(module).forward(module, *args, **kwargs))
        return torch.stack(parts, dim=-2)
