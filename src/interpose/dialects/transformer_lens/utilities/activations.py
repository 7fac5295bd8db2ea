"""Activation functions that TransformerLens has by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional


def gelu_new(input: Tensor) -> Tensor:
    """GELU with tanh in place of the error function, as GPT-2 has it."""
    return functional.gelu(input, approximate="tanh")


def gelu_fast(input: Tensor) -> Tensor:
    """The same function as `gelu_new`; the two names are from two ways to write it."""
    return functional.gelu(input, approximate="tanh")


def solu(input: Tensor) -> Tensor:
    """Softmax linear unit: ``x * softmax(x)`` over the last dimension."""
    return input * input.softmax(-1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_new": gelu_new,
    "gelu_fast": gelu_fast,
    "gelu_pytorch_tanh": gelu_new,
    "silu": functional.silu,
    "solu": solu,
    "solu_ln": solu,
}
"""By the names that configs have for them; after ``solu_ln`` comes a norm."""
