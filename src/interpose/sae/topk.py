"""Autoencoders in which so many latents fire: of each vector, or of a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from interpose.sae.codes import Codes
from interpose.sae.sae import SAE


class TopKSAE(SAE):
    """The k largest latents of each vector fire, those of them that are above zero."""

    architecture = "topk"
    dense_training: ClassVar[bool] = False
    _may_be_scaled: ClassVar[bool] = False

    def __init__(self, d_in: int, d_sae: int, *, k: int, **options: Any) -> None:
        if not 1 <= k <= d_sae:
            raise ValueError(f"k is how many of {d_sae} latents fire; got {k}.")
        super().__init__(d_in, d_sae, **options)
        self.k = k

    def sparse(self, pre: Tensor) -> Codes:
        """The k largest."""
        values, indices = pre.topk(self.k, dim=-1, sorted=False)
        return Codes.of_top(indices, values.relu(), self.d_sae)

    def activated(self, pre: Tensor) -> Tensor:
        """The k largest, and zeros."""
        return self.sparse(pre).dense()

    def options(self) -> dict[str, Any]:
        """With k."""
        return {**super().options(), "k": self.k}


class AbsTopKSAE(TopKSAE):
    """The k latents that are farthest from zero, up or down."""

    architecture = "abstopk"

    def sparse(self, pre: Tensor) -> Codes:
        """Those farthest from zero."""
        indices = pre.abs().topk(self.k, dim=-1, sorted=False).indices
        return Codes.of_top(indices, pre.gather(-1, indices), self.d_sae)


class BatchTopKSAE(SAE):
    """In training the largest latents of a batch fire, k for each vector on average; afterwards all above a threshold.

    The threshold is the least that still fired, averaged over batches as they come.
    """

    architecture = "batchtopk"
    dense_training: ClassVar[bool] = False
    _may_be_scaled: ClassVar[bool] = False

    threshold: Tensor

    def __init__(self, d_in: int, d_sae: int, *, k: float, **options: Any) -> None:
        if not 0 < k <= d_sae:
            raise ValueError(f"k is how many of {d_sae} latents fire on average; got {k}.")
        super().__init__(d_in, d_sae, **options)
        self.k = k
        self.register_buffer("threshold", torch.zeros((), dtype=torch.float64))

    def sparse(self, pre: Tensor) -> Codes:
        """The largest of the batch, or those above the threshold."""
        if not self.training:
            return Codes.of_dense(self.activated(pre))
        flat = pre.relu().flatten()
        count = min(max(1, int(self.k * (flat.numel() // self.d_sae))), flat.numel())
        values, places = flat.topk(count, sorted=False)
        found = values.detach()
        least = torch.where(found > 0, found, torch.inf).amin().to(self.threshold)
        was = self.threshold
        now = torch.where(was == 0, least, was.lerp(least, 0.01))
        was.copy_(torch.where(least.isfinite(), now, was))  # and nothing waits for the device
        return Codes.of_places(places, values, pre.shape)

    def activated(self, pre: Tensor) -> Tensor:
        """The same, and zeros."""
        if self.training:
            return self.sparse(pre).dense()
        return pre.relu() * (pre > self.threshold.to(pre.dtype))

    def options(self) -> dict[str, Any]:
        """With k."""
        return {**super().options(), "k": self.k}


class MatryoshkaSAE(BatchTopKSAE):
    """Its first latents have to do with less: each of several widths, from the first latent on, decodes by itself."""

    architecture = "matryoshka_batchtopk"

    def __init__(
        self, d_in: int, d_sae: int, *, k: float, widths: Sequence[int], **options: Any
    ) -> None:
        super().__init__(d_in, d_sae, k=k, **options)
        self.widths = [*sorted({int(width) for width in widths if width < d_sae}), d_sae]
        if min(self.widths) < 1:
            raise ValueError(f"widths are of 1 latent and more; got {list(widths)}.")

    def options(self) -> dict[str, Any]:
        """With the widths."""
        return {**super().options(), "widths": self.widths}
