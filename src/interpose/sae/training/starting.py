"""How an autoencoder begins: which number its vectors are multiplied by, where its bias is, how long its rows are."""

from __future__ import annotations

import torch
from torch import Tensor

from interpose.sae.sae import SAE


@torch.no_grad()
def scale_of(vectors: Tensor) -> float:
    """What vectors are multiplied by, so that on average they are the root of their width away from their mean."""
    wide = vectors.float()
    far = float((wide - wide.mean(0)).norm(dim=-1).double().mean())
    if not 0 < far < float("inf"):
        raise ValueError(
            f"the vectors of the first batch are {far} away from their mean, on average: nothing can be learnt of "
            "them. Look at the site, and at what was stored."
        )
    return float(vectors.shape[-1] ** 0.5 / far)


@torch.no_grad()
def centre_of(vectors: Tensor, kind: str) -> Tensor:
    """Where vectors are, [d]: their mean, or the point whose distances to them add up to the least."""
    wide = vectors.float()
    found = wide.mean(0)
    if kind == "zero":
        return torch.zeros_like(found)
    if kind == "mean":
        return found
    for _ in range(100):  # Weiszfeld's steps
        near = 1 / (wide - found).norm(dim=-1, keepdim=True).clamp(min=1e-6)
        now = (wide * near).sum(0) / near.sum()
        moved = float((now - found).norm())
        found = now
        if moved <= 1e-6 * float(found.norm()) + 1e-12:
            break
    return found


@torch.no_grad()
def begun(sae: SAE) -> bool:
    """Whether an autoencoder has been trained: it is not as its class makes it."""
    fresh = [*(sae.get_parameter(name) for name in sae.BIASES), sae.b_dec]
    if sae.W_skip is not None:
        fresh.append(sae.W_skip)
    norms = sae.W_dec.float().norm(dim=-1)
    return any(bool(one.any()) for one in fresh) or not bool(((norms - 0.1).abs() < 1e-3).all())


@torch.no_grad()
def start(sae: SAE, x: Tensor, y: Tensor, centre: str) -> None:
    """Give an autoencoder that nobody has trained its first weights.

    Args:
        sae: as its class makes it.
        x: the first vectors, scaled.
        y: what its output should be.
        centre: as in `SAERecipe`.
    """
    norms = sae.W_dec.norm(dim=-1, keepdim=True)
    sae.W_dec.div_(norms)
    if not sae.TIED and not sae.is_transcoder:
        sae.W_enc.div_(norms.T)
    sae.b_dec.copy_(centre_of(sae.normalised(x)[0] if not sae.is_transcoder else y, centre))
