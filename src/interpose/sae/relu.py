"""Autoencoders whose latents fire when they are given enough: above zero, a threshold each, or a gate."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from interpose.sae.sae import SAE


class StandardSAE(SAE):
    """Latents fire above zero; few of them do because their sum costs something (L1)."""

    architecture = "standard"

    def activated(self, pre: Tensor) -> Tensor:
        """What is above zero."""
        return pre.relu()


class JumpReLUSAE(SAE):
    """Latents fire above a threshold of their own; few of them do because each costs the same (L0).

    Thresholds are learnt with an estimated gradient, which looks at what is within ``bandwidth`` around them.
    """

    architecture = "jumprelu"

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        *,
        threshold: float = 0.01,
        bandwidth: float = 0.05,
        **options: Any,
    ) -> None:
        super().__init__(d_in, d_sae, **options)
        self.bandwidth = bandwidth
        self.threshold = nn.Parameter(torch.full((d_sae,), float(threshold)))

    def activated(self, pre: Tensor) -> Tensor:
        """What is above zero and the threshold."""
        pre = pre.relu()
        if torch.is_grad_enabled() and self.threshold.requires_grad:
            return pre * passes(pre, self.threshold, self.bandwidth)
        return pre * (pre > self.threshold)

    def _scaled(self, norms: Tensor, *, counted: bool) -> None:
        if not counted:
            self.threshold.data.mul_(norms)


class GatedSAE(SAE):
    """A gate says which latents fire; how strongly is another sum over the same weights."""

    architecture = "gated"
    BIASES: ClassVar[tuple[str, ...]] = ("b_gate", "b_mag")
    b_gate: Tensor
    b_mag: Tensor

    def __init__(self, d_in: int, d_sae: int, **options: Any) -> None:
        super().__init__(d_in, d_sae, **options)
        self.r_mag = nn.Parameter(torch.zeros(d_sae))

    def pre(self, x: Tensor) -> Tensor:
        """What the gates are given: above zero they are open."""
        x, _ = self.normalised(x)
        if self.subtract_bias:
            x = x - self.b_dec
        return self.weighed(x @ self.W_enc + self.b_gate)

    def activated(self, pre: Tensor) -> Tensor:
        """The strengths of those whose gates are open."""
        shift, strength = self.weighed(self.b_gate), self.weighed(self.b_mag)
        return (pre > 0) * ((pre - shift) * self.r_mag.exp() + strength).relu()


class _Passes(torch.autograd.Function):
    """Whether values are above thresholds, with the estimated gradient of Rajamanoharan et al. (2024) for these."""

    @staticmethod
    def forward(ctx: Any, pre: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(pre, threshold)
        ctx.bandwidth = bandwidth
        return (pre > threshold).to(pre.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        pre, threshold = ctx.saved_tensors
        near = (pre - threshold).abs() < ctx.bandwidth / 2
        found = (grad * near).flatten(0, -2).sum(0) / -ctx.bandwidth
        return None, found, None


def passes(pre: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
    """One where a value is above its threshold, else zero.

    Args:
        pre: the values, [..., latent].
        threshold: of each latent.
        bandwidth: how wide around a threshold values count for its gradient.
    """
    made: Tensor = _Passes.apply(pre, threshold, bandwidth)  # type: ignore[no-untyped-call]
    return made
