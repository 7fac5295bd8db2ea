"""Encoding and decoding in a training step where few latents fire: neither dense codes nor their gradients are made.

What each latent is given has to be computed for all of them, once, to see which fire. All else, forward and backward,
is over the entries that fire: rows of the decoder are gathered forward, and gradients are summed latent by latent.
Sums are those of `embedding_bag`: every device has it, in every dtype, and it adds in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from interpose.sae.codes import Codes, bags
from interpose.sae.sae import SAE

_PIECE = 64
"""How many entries of one latent are added at most before sums are added: some latents fire nearly always."""


@dataclass(frozen=True, slots=True, eq=False)
class ByLatent:
    """The entries of codes in the order of their latents.

    Attributes:
        order: of entries.
        pieces: where pieces of a latent's entries begin, and the end: [latents + entries / 64].
        starts: where each latent's pieces begin, and the end, [latents + 1].
    """

    order: Tensor
    pieces: Tensor
    starts: Tensor

    @classmethod
    def of(cls, indices: Tensor, latents: int) -> ByLatent:
        """Of the latent of each entry."""
        found, order = indices.sort(stable=True)
        every = torch.arange(latents + 1, device=indices.device)
        starts = torch.searchsorted(found, every)
        cuts = torch.arange(0, len(indices), _PIECE, device=indices.device)
        pieces = torch.cat([starts, cuts]).sort().values
        return cls(order, pieces, torch.searchsorted(pieces, starts))

    def summed(self, vectors: Tensor, which: Tensor, weights: Tensor) -> Tensor:
        """Weighted sums of vectors, latent by latent: [latent, d].

        Args:
            vectors: what is added up, [vector, d].
            which: the vector of each entry.
            weights: of each entry.
        """
        parts = bags(vectors, which[self.order], self.pieces, weights[self.order])
        every = torch.arange(len(parts), device=parts.device)
        return bags(parts, every, self.starts, parts.new_ones(len(parts)))


class _Strengths(torch.autograd.Function):
    """The strengths of entries that fire, as a function of the encoder; they are known already."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        W_enc: Tensor,
        b_enc: Tensor,  # noqa: ARG004 - its gradient is asked for
        b_dec: Tensor | None,
        norms: Tensor | None,
        codes: Codes,
        by_latent: ByLatent,
    ) -> Tensor:
        ctx.save_for_backward(x, W_enc, b_dec, norms)
        ctx.codes, ctx.by_latent = codes, by_latent
        return codes.values.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, W_enc, b_dec, norms = ctx.saved_tensors
        codes, by_latent = ctx.codes, ctx.by_latent
        grad = grad * (codes.values != 0)
        grad_norms = None
        one = grad.new_ones(1, 1)
        nowhere = torch.zeros_like(codes.indices)
        if norms is not None:
            mine = norms[codes.indices]
            grad_norms = by_latent.summed(one, nowhere, grad * codes.values / mine)[:, 0]
            grad = grad * mine
        rows = codes.rows
        grad_enc = by_latent.summed(x if b_dec is None else x - b_dec, rows, grad).T
        grad_bias = by_latent.summed(one, nowhere, grad)[:, 0]
        grad_dec = None if b_dec is None else -(W_enc @ grad_bias)
        return None, grad_enc, grad_bias, grad_dec, grad_norms, None, None


class _Rows(torch.autograd.Function):
    """Sums of decoder rows, which are known already, as a function of the rows."""

    @staticmethod
    def forward(
        ctx: Any, sums: Tensor, rows: Tensor, values: Tensor, bag: Tensor, by_latent: ByLatent
    ) -> Tensor:
        ctx.save_for_backward(values, bag)
        ctx.by_latent, ctx.dtype = by_latent, rows.dtype
        return sums.view_as(sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, bag = ctx.saved_tensors
        grad = grad.contiguous()
        return grad, ctx.by_latent.summed(grad, bag, values).to(ctx.dtype), None, None, None


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """The codes of a training step: differentiable strengths, and how to add up what they stand for."""

    codes: Codes
    values: Tensor
    by_latent: ByLatent

    @classmethod
    def of(cls, sae: SAE, x: Tensor) -> tuple[Entries, Tensor]:
        """Of vectors [vector, d_in] as they are encoded (`SAE.normalised`); and what each latent was given."""
        shift = sae.b_dec if sae.subtract_bias else None
        norms = sae.W_dec.norm(dim=-1) if sae.by_norm else None
        with torch.no_grad():
            centred = x if shift is None else x - shift
            pre = torch.addmm(sae.b_enc, centred, sae.W_enc)
            if norms is not None:
                pre *= norms
            codes = sae.sparse(pre)
        by_latent = ByLatent.of(codes.indices, sae.d_sae)
        values = _Strengths.apply(x, sae.W_enc, sae.b_enc, shift, norms, codes, by_latent)  # type: ignore[no-untyped-call]
        return cls(codes, values, by_latent), pre

    def times(self, rows: Tensor) -> Tensor:
        """The sum of the rows of what fires, [vector, d]."""
        return self._summed(
            rows, self.codes.indices, self.codes.starts, self.values, self.codes.rows
        )

    def times_each(self, rows: Tensor, widths: list[int]) -> Tensor:
        """The same of the first latents only, for each of some widths: [vector, width, d]."""
        codes, parts = self.codes, len(widths)
        ends = torch.tensor(widths, device=codes.indices.device)
        bag = codes.rows * parts + torch.searchsorted(ends, codes.indices, right=True)
        bag, order = bag.sort(stable=True)
        count = (len(codes.starts) - 1) * parts
        starts = torch.searchsorted(bag, torch.arange(count + 1, device=bag.device))
        back = torch.empty_like(bag).index_copy_(0, order, bag)  # of each entry as they were
        sums = bags(rows.detach(), codes.indices[order], starts, self.values[order])
        sums = _Rows.apply(sums, rows, self.values.detach(), back, self.by_latent)  # type: ignore[no-untyped-call]
        found: Tensor = sums.unflatten(0, (-1, parts)).cumsum(1)
        return found

    def _summed(
        self, rows: Tensor, indices: Tensor, starts: Tensor, values: Tensor, bag: Tensor
    ) -> Tensor:
        sums = bags(rows.detach(), indices, starts, values)
        found: Tensor = _Rows.apply(sums, rows, values.detach(), bag, self.by_latent)  # type: ignore[no-untyped-call]
        return found
