"""What autoencoders compute, written down once more, dense and slow: what the package is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import interpose as ip

KINDS: dict[str, dict[str, Any]] = {
    "StandardSAE": {},
    "JumpReLUSAE": {"threshold": 0.3},
    "GatedSAE": {},
    "TopKSAE": {"k": 4},
    "AbsTopKSAE": {"k": 4},
    "BatchTopKSAE": {"k": 3},
    "MatryoshkaSAE": {"k": 3, "widths": [5, 11]},
    "MatchingPursuitSAE": {"steps": 3},
}


def made(kind: str, d_in: int = 6, d_sae: int = 20, seed: int = 0, **options: Any) -> Any:
    """An autoencoder whose every number is random, so that none is without an effect."""
    sae = getattr(ip, kind)(d_in, d_sae, **{**KINDS[kind], **options})
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sae.named_parameters():
            numbers = torch.randn(parameter.shape, generator=drawn) * 0.5
            parameter.copy_(numbers.abs() if name == "threshold" else numbers)
        if isinstance(sae, ip.BatchTopKSAE):
            sae.threshold.fill_(0.4)
    return sae.eval()


def codes_of(sae: Any, x: Tensor) -> Tensor:
    """Codes by the formulas of the papers, vector by vector."""
    if isinstance(sae, ip.MatchingPursuitSAE):
        return torch.stack([_pursued(sae, one - sae.b_dec * sae.subtract_bias) for one in x])
    centred = x - sae.b_dec if sae.subtract_bias else x
    dots = torch.einsum("nd,dl->nl", centred, sae.W_enc)
    norms = sae.W_dec.pow(2).sum(-1).sqrt() if sae.by_norm else torch.ones(sae.d_sae)
    if isinstance(sae, ip.GatedSAE):
        gate = dots + sae.b_gate
        strength = torch.einsum("nd,dl->nl", centred, sae.W_enc * sae.r_mag.exp()) + sae.b_mag
        return torch.where(gate > 0, strength.clamp(min=0), 0.0) * norms
    pre = (dots + sae.b_enc) * norms
    if isinstance(sae, ip.TopKSAE):
        size = pre.abs() if isinstance(sae, ip.AbsTopKSAE) else pre
        kth = size.sort(-1, descending=True).values[:, sae.k - 1 : sae.k]
        kept = torch.where(size >= kth, pre, 0.0)
        return kept if isinstance(sae, ip.AbsTopKSAE) else kept.clamp(min=0)
    if isinstance(sae, (ip.JumpReLUSAE, ip.BatchTopKSAE)):
        return torch.where(pre > sae.threshold.float(), pre.clamp(min=0), 0.0)
    return pre.clamp(min=0)


def _pursued(sae: Any, rest: Tensor) -> Tensor:
    found = torch.zeros(sae.d_sae)
    for _ in range(sae.steps):
        fits = sae.W_dec @ rest
        best = int(fits.argmax())
        strength = fits[best].clamp(min=0)
        repeated = bool(found[best] != 0) or not bool(strength > 0)
        found[best] += strength
        rest = rest - strength * sae.W_dec[best]
        if (sae.once and repeated) or rest.norm() < sae.least:
            break
    return found


def output_of(sae: Any, codes: Tensor, x: Tensor) -> Tensor:
    """The output of codes."""
    rows = sae.W_dec / sae.W_dec.norm(dim=-1, keepdim=True) if sae.by_norm else sae.W_dec
    out = torch.einsum("nl,ld->nd", codes, rows) + sae.b_dec
    return out if sae.W_skip is None else out + torch.einsum("od,nd->no", sae.W_skip, x)
