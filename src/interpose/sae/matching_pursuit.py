"""An autoencoder that chooses one latent at a time, each for what those before it have left over."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from interpose.sae.codes import Codes
from interpose.sae.sae import SAE


class MatchingPursuitSAE(SAE):
    """Matching pursuit: the latent whose row fits best is taken off, again and again. Its encoder is its decoder.

    Args:
        d_in: how many features the vectors have.
        d_sae: how many latents there are.
        least: of what norm the rest may be for a vector to be done.
        steps: how many latents are chosen at most; by default ``d_in``.
        once: whether a vector is done as soon as a latent comes again.
        **options: as in `SAE`.
    """

    architecture = "matching_pursuit"
    BIASES: ClassVar[tuple[str, ...]] = ()
    TIED: ClassVar[bool] = True
    _may_be_scaled: ClassVar[bool] = False

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        *,
        least: float = 0.01,
        steps: int | None = None,
        once: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(d_in, d_sae, **options)
        self.least, self.steps, self.once = least, d_in if steps is None else steps, once

    @property
    def W_enc(self) -> Tensor:  # type: ignore[override]
        """The decoder's rows."""
        return self.W_dec.T

    def pre(self, x: Tensor) -> Tensor:  # noqa: ARG002
        """There is none: which latents fire is not decided by what each is given."""
        raise TypeError(
            f"{self!r} has no values before the activation: it chooses latents one by one."
        )

    def encode(self, x: Tensor) -> Tensor:
        """How strongly each latent fires, [..., latent]."""
        return self.pursued(self.normalised(x)[0])

    def pursued(self, x: Tensor) -> Tensor:
        """The codes of vectors that are normalised already."""
        rest = (x - self.b_dec if self.subtract_bias else x).reshape(-1, self.d_in)
        found = rest.new_zeros(len(rest), self.d_sae)
        open_ = torch.ones(len(rest), dtype=torch.bool, device=rest.device)
        for _ in range(self.steps):
            best = (rest.detach() @ self.W_dec.detach().T).relu().argmax(-1)
            rows = self.W_dec[best]
            strength = (rest * rows).sum(-1).relu() * open_
            before = found.detach() != 0
            found = found.index_put(
                (torch.arange(len(rest), device=rest.device), best), strength, accumulate=True
            )
            rest = rest - strength[:, None] * rows
            if self.once:
                open_ = open_ & ((found.detach() != 0) != before).any(-1)
            if self.least > 0:
                open_ = open_ & (rest.detach().norm(dim=-1) >= self.least)
            if not open_.any():
                break
        return found.reshape(*x.shape[:-1], self.d_sae)

    def codes(self, x: Tensor) -> Codes:
        """Which latents fire, and how strongly."""
        return Codes.of_dense(self.encode(x))

    def options(self) -> dict[str, Any]:
        """With how it ends."""
        return {**super().options(), "least": self.least, "steps": self.steps, "once": self.once}

    def fold_scale(self, into: float, out: float | None = None) -> Self:  # noqa: ARG002
        """Refused: its encoder is its decoder, and the one would have to be multiplied and the other divided."""
        raise ValueError(f"{self!r}: its encoder is its decoder, and takes no scale of its own.")
