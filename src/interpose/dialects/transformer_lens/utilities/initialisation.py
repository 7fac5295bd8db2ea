"""Initial weights as the usual modes draw them, with TransformerLens's idea of what goes in and out of a weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def fans(weight: Tensor) -> tuple[int, int]:
    """How many features a weight takes and gives: [in, out], [head, in, out] for all heads together, or [out]."""
    if weight.ndim == 1:
        return 1, weight.shape[0]
    if weight.ndim == 3:
        return weight.shape[1], weight.shape[0] * weight.shape[2]
    return weight.shape[0], weight.shape[-1]


def init_kaiming_uniform_(
    param: Tensor, a: float = 0, nonlinearity: str = "relu", gain: float = 1.0, mode: str = "fan_in"
) -> Tensor:
    """Fill a weight from a uniform distribution that keeps the spread of what goes through a nonlinearity.

    Args:
        param: the weight, [in, out] or [head, in, out].
        a: the slope of ``leaky_relu`` below zero.
        nonlinearity: one that ``torch.nn.init.calculate_gain`` knows.
        gain: times which.
        mode: ``fan_in`` or ``fan_out``: whose number of features counts.
    """
    bound = math.sqrt(3) * _kaiming(param, a, nonlinearity, gain, mode)
    with torch.no_grad():
        return param.uniform_(-bound, bound)


def init_kaiming_normal_(
    param: Tensor, a: float = 0, nonlinearity: str = "relu", gain: float = 1.0, mode: str = "fan_in"
) -> Tensor:
    """The same as `init_kaiming_uniform_`, from a normal distribution."""
    with torch.no_grad():
        return param.normal_(0, _kaiming(param, a, nonlinearity, gain, mode))


def init_xavier_uniform_(param: Tensor, gain: float = 1.0) -> Tensor:
    """Fill a weight from a uniform distribution that suits what goes in as much as what comes out.

    Args:
        param: the weight, [in, out] or [head, in, out].
        gain: times which.
    """
    bound = gain * math.sqrt(6 / sum(fans(param)))
    with torch.no_grad():
        return param.uniform_(-bound, bound)


def init_xavier_normal_(param: Tensor, gain: float = 1.0) -> Tensor:
    """The same as `init_xavier_uniform_`, from a normal distribution."""
    with torch.no_grad():
        return param.normal_(0, gain * math.sqrt(2 / sum(fans(param))))


def _kaiming(param: Tensor, a: float, nonlinearity: str, gain: float, mode: str) -> float:
    """The standard deviation."""
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"mode is 'fan_in' or 'fan_out'; got {mode!r}")
    fan = fans(param)[mode == "fan_out"]
    return gain * float(nn.init.calculate_gain(nonlinearity, a)) / math.sqrt(fan)  # type: ignore[arg-type]
