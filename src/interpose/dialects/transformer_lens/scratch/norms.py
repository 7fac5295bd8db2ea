"""LayerNorm and RMSNorm with a point at their scale, and without weights where these are folded away."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from interpose.dialects.transformer_lens.config import HookedTransformerConfig
from interpose.dialects.transformer_lens.scratch.points import Point


class Norm(nn.Module):
    """Divides by the root mean square; a centred one takes off the mean before, and adds a bias after.

    Args:
        width: how many features.
        eps: added to the mean square.
        centred: LayerNorm rather than RMSNorm.
        learned: whether it has weights.
        dtype: of the weights, and of what it returns.
    """

    def __init__(
        self, width: int, *, eps: float, centred: bool, learned: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.centred = centred
        self.learned = learned
        self.dtype = dtype
        if learned:
            self.w = nn.Parameter(torch.ones(width, dtype=dtype))
            if centred:
                self.b = nn.Parameter(torch.zeros(width, dtype=dtype))
        self.hook_scale = Point()  # [batch, pos, 1]
        self.hook_normalized = Point()  # [batch, pos, width]

    def forward(self, x: Tensor) -> Tensor:
        """[batch, pos, width], normed."""
        x, scale = self._measured(x)
        return self.hook_normalized(self._finished(x / self.hook_scale(scale)))

    def unheard(self, x: Tensor) -> Tensor:
        """The same for [..., width], past the points."""
        x, scale = self._measured(x)
        return self._finished(x / scale)

    def _measured(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.dtype.itemsize < 4:
            x = x.float()
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        return x, (x.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def _finished(self, x: Tensor) -> Tensor:
        if self.learned:
            x = x * self.w + self.b if self.centred else x * self.w
        return x.to(self.dtype)

    def extra_repr(self) -> str:
        """What kind it is."""
        return f"{self.width}, {'LN' if self.centred else 'RMS'}{'' if self.learned else 'Pre'}"


def make_norm(
    cfg: HookedTransformerConfig, width: int | None = None, kind: str | None = ""
) -> nn.Module:
    """The norm of a config, or a module that does nothing where it has none.

    Args:
        cfg: whose ``eps`` and ``dtype`` count.
        width: how many features; by default ``d_model``.
        kind: ``LN``, ``RMS``, ``LNPre``, ``RMSPre`` or None; by default the config's ``normalization_type``.
    """
    kind = cfg.normalization_type if kind == "" else kind
    if kind is None:
        return nn.Identity()
    return Norm(
        width or cfg.d_model,
        eps=cfg.eps,
        centred=kind.startswith("LN"),
        learned=not kind.endswith("Pre"),
        dtype=cfg.dtype,
    )
