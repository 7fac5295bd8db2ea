"""`SAERecipe`: how an autoencoder is trained, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CENTRES = ("geometric_median", "mean", "zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class SAERecipe:
    """How an autoencoder is trained: the optimiser, what keeps latents few, and what becomes of dead ones.

    ```python
    ip.train_sae(store, ip.StandardSAE(192, 1024), recipe=ip.SAERecipe(l0=20))
    ```

    Shares are of all steps. Sizes are in units in which the vectors of a site are the root of their width away from
    their mean, on average (``scale``).

    Attributes:
        learning_rate: of Adam; by default 2e-4 for 16,384 latents, and more for fewer, as the root of their number.
        betas: of Adam.
        warm_up: the share of steps in which the learning rate rises to that, in a straight line.
        decay: the share of steps, at the end, in which it falls to zero.
        clip: the norm that all gradients together may have; None for any.
        sparsity: what firing costs: the sum of codes (L1, with the norms of decoder rows) of standard and gated
            autoencoders, the number of latents (L0) of JumpReLU; nothing where k says how many fire. None for 0.08
            times the root of the width of L1, and 0.001 times the width of L0.
        l0: how many latents should fire at each vector; what firing costs is then moved until they do.
        sparsity_warm_up: the share of steps in which that cost rises from zero.
        dead_after: without firing for so many vectors a latent is dead; None for a tenth of the training, at most
            10,000,000.
        aux: what the auxiliary loss counts, where k says how many latents fire: dead latents explain the error.
        aux_k: how many dead latents do so at each vector; None for half the width.
        resample: after how many steps, again and again in the first half, dead latents begin anew, in the direction
            of vectors that are explained badly; None for never.
        scale: whether vectors are multiplied by a number while it trains (it is folded into the weights in the end).
        centre: where ``b_dec`` begins, of the first batch: ``geometric_median``, ``mean`` or ``zero``.
        keep_norms: whether decoder rows keep the norms that they begin with, and gradients along them are taken off;
            None for yes, unless latents count with the norms (``by_norm``), or it is a crosscoder.
    """

    learning_rate: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    warm_up: float = 0.02
    decay: float = 0.2
    clip: float | None = 1.0
    sparsity: float | None = None
    l0: float | None = None
    sparsity_warm_up: float = 0.05
    dead_after: int | None = None
    aux: float = 1.0
    aux_k: int | None = None
    resample: int | None = None
    scale: bool = True
    centre: str = "geometric_median"
    keep_norms: bool | None = None

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if self.centre not in CENTRES:
            raise ValueError(f"centre is one of {', '.join(CENTRES)}; got {self.centre!r}.")
        shares = (self.warm_up, self.decay, self.sparsity_warm_up)
        if min(shares) < 0 or max(self.sparsity_warm_up, self.warm_up + self.decay) > 1:
            raise ValueError(
                "warm_up, decay and sparsity_warm_up are shares of all steps, between 0 and 1, the first two together "
                f"too; got {', '.join(map(str, shares))}."
            )
        for name in ("learning_rate", "clip", "l0", "dead_after", "aux_k", "resample"):
            if (given := getattr(self, name)) is not None and not given > 0:
                raise ValueError(f"{name} is above zero, or None; got {given}.")
        if self.aux < 0 or (self.sparsity or 0) < 0:
            raise ValueError(
                f"aux and sparsity are costs, zero or more; got {self.aux}, {self.sparsity}."
            )

    def rate(self, step: int, whole: int, latents: int) -> float:
        """The learning rate of a step.

        Args:
            step: which, counted from zero.
            whole: how many there are.
            latents: how many the autoencoder has.
        """
        most = self.learning_rate
        most = 2e-4 * (16384 / latents) ** 0.5 if most is None else most
        rising = (step + 1) / max(1.0, self.warm_up * whole)
        falling = (whole - step) / max(1.0, self.decay * whole)
        return most * min(1.0, rising, falling)

    def risen(self, step: int, whole: int) -> float:
        """Which share of its cost firing has at a step."""
        return min(1.0, (step + 1) / max(1.0, self.sparsity_warm_up * whole))

    def counts_dead_after(self, vectors: int) -> int:
        """Without firing for how many vectors a latent is dead, in a training on so many."""
        return self.dead_after or max(1, min(10_000_000, vectors // 10))

    @property
    def data(self) -> dict[str, Any]:
        """Itself as JSON has it."""
        return {**asdict(self), "betas": list(self.betas)}
