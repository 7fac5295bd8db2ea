"""How much of vectors an autoencoder keeps, added up batch by batch; every number by its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from interpose.sae.sae import SAE


class Reconstruction:
    """Sums over vectors, in float64.

    Args:
        sae: the autoencoder.
    """

    def __init__(self, sae: SAE) -> None:
        self.sae = sae
        self.vectors = 0
        self._sums: dict[str, Tensor] = {}
        self._shift: Tensor | None = None

    @torch.no_grad()
    def add(self, x: Tensor, y: Tensor) -> None:
        """Some more vectors.

        Args:
            x: what is encoded, [vector, d_in].
            y: what the output should be, [vector, d_out]; of all but transcoders ``x``.
        """
        if not len(x):
            return
        codes = self.sae.codes(x)
        y = y.double()
        out = self.sae.decode(codes, x).double()
        if self._shift is None:
            self._shift = y.mean(0)  # so that squares of little are added, not of much
        moved = y - self._shift
        norms = y.norm(dim=-1), out.norm(dim=-1)
        products = (y * out).sum(-1)
        more = {
            "error": (out - y).square().sum(),
            "sum": moved.sum(0),
            "squares": moved.square().sum(),
            "cosine": (products / (norms[0] * norms[1]).clamp(min=1e-30)).sum(),
            "ratio": (norms[1] / norms[0].clamp(min=1e-30)).sum(),
            "made": out.square().sum(),
            "products": products.sum(),
            "strength": codes.values.double().abs().sum(),
            "fired": codes.fired,
        }
        self._sums = {name: one + self._sums.get(name, 0) for name, one in more.items()}
        self.vectors += len(x)

    def mean(self) -> Tensor:
        """Of what the output should be, [d_out]."""
        assert self._shift is not None
        return self._shift + self._sums["sum"] / self.vectors

    def density(self) -> Tensor:
        """At which share of the vectors each latent fires, [latent]."""
        return self._sums["fired"].double().cpu() / self.vectors

    def numbers(self) -> dict[str, float]:
        """All of them, by name."""
        sums = {name: one.double().cpu() for name, one in self._sums.items()}
        count = self.vectors
        variance = float(sums["squares"] - sums["sum"].square().sum() / count)
        error, products = float(sums["error"]), float(sums["products"])
        return {
            "explained_variance": 1 - error / variance if variance > 0 else float("nan"),
            "mse": error / count,
            "cosine": float(sums["cosine"]) / count,
            "norm_ratio": float(sums["ratio"]) / count,
            "bias": float(sums["made"]) / products if products else float("nan"),
            "l0": float(sums["fired"].sum()) / count,
            "l1": float(sums["strength"]) / count,
            "dead": float((sums["fired"] == 0).double().mean()),
        }
