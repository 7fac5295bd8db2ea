"""Which latents are dead: those that have not fired for long. Some autoencoders let them begin anew."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from interpose.sae.sae import SAE
from interpose.store.pools import generator

LOOK_EVERY = 10
"""After how many steps it is counted anew which latents are dead: counting waits for the device."""


class Dead:
    """For how many vectors each latent has not fired.

    Args:
        sae: whose latents.
        after: without firing for how many vectors a latent is dead.
    """

    def __init__(self, sae: SAE, after: int) -> None:
        self.after = after
        self.since = torch.zeros(sae.d_sae, dtype=torch.long, device=sae.W_dec.device)
        self.known: Tensor | None = None

    def step(self, fired: Tensor, vectors: int, step: int) -> None:
        """After a batch in which latents fired so often."""
        self.since = torch.where(fired > 0, 0, self.since + vectors)
        if step % LOOK_EVERY == 0:
            self.look()

    def look(self) -> None:
        """See which are dead now."""
        found = (self.since >= self.after).nonzero()[:, 0]
        self.known = found if len(found) else None

    @property
    def share(self) -> Tensor:
        """Which share of all latents is dead."""
        return (self.since >= self.after).float().mean()


@torch.no_grad()
def resample(
    sae: SAE,
    optimizer: Optimizer,
    dead: Dead,
    x: Tensor,
    errors: Tensor,
    residual: Tensor,
    *,
    seed: int,
    step: int,
) -> int:
    """Let dead latents begin anew in the directions of vectors that are explained badly; how many did.

    As in Bricken et al. (2023): vectors are drawn with chances as the squares of their errors; a latent's encoder gets
    a fifth of the mean norm of those alive.

    Args:
        sae: whose latents.
        optimizer: what it remembers of them is forgotten.
        dead: which latents.
        x: vectors as they are encoded, without the bias that is taken off, [vector, d_in].
        errors: the squared error of each, [vector].
        residual: what is left of each, [vector, d_out].
        seed: of the draw.
        step: of the training, for the draw.
    """
    dead.look()
    which = dead.known
    if which is None or sae.TIED:
        return 0
    chances = errors.double().cpu().square()
    if not bool(chances.sum() > 0):
        return 0
    draw = generator(seed, step)
    chosen = chances.multinomial(len(which), replacement=True, generator=draw).to(x.device)
    alive = torch.ones(sae.d_sae, dtype=torch.bool, device=x.device)
    alive[which] = False
    norms = sae.W_enc.norm(dim=0)
    size = 0.2 * (norms[alive].mean() if bool(alive.any()) else norms.mean())
    out = residual[chosen].to(sae.W_dec)
    into = x[chosen].to(sae.W_dec) if sae.is_transcoder else out
    sae.W_enc[:, which] = (into * (size / into.norm(dim=-1, keepdim=True).clamp(min=1e-12))).T
    kept = sae.W_dec[which].norm(dim=-1, keepdim=True)
    sae.W_dec[which] = out * (kept / out.norm(dim=-1, keepdim=True).clamp(min=1e-12))
    for name in sae.BIASES:
        sae.get_parameter(name)[which] = 0
    for name in ("W_enc", "W_dec", *sae.BIASES):
        for kept in optimizer.state[sae.get_parameter(name)].values():
            if isinstance(kept, Tensor) and kept.ndim:
                (kept.T if name == "W_enc" else kept)[which] = 0
    dead.since[which] = 0
    dead.look()
    return len(which)
