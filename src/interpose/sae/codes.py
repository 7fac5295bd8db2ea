"""Codes: which latents of an autoencoder fire at each vector, and how strongly; nothing is stored of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Codes:
    """The latents that fire, vector by vector.

    ```python
    codes = sae.codes(x)             # of vectors [batch, pos, d_in]
    codes.counts                     # how many fire, [batch, pos]
    codes.dense()                    # [batch, pos, d_sae], mostly zeros
    sae.decode(codes)                # without ever making that
    ```

    Attributes:
        indices: which latents, vector after vector, [entry].
        values: how strongly, [entry].
        starts: where each vector's entries begin, and the end, [vectors + 1].
        shape: of the vectors, without their features: (batch, pos).
        width: how many latents there are.
    """

    indices: Tensor
    values: Tensor
    starts: Tensor
    shape: tuple[int, ...]
    width: int

    @classmethod
    def of_dense(cls, dense: Tensor) -> Codes:
        """What is not zero of dense codes [..., latent]."""
        flat = dense.reshape(-1, dense.shape[-1])
        rows, indices = flat.nonzero(as_tuple=True)
        return cls._of_rows(rows, indices, flat[rows, indices], dense.shape)

    @classmethod
    def of_top(cls, indices: Tensor, values: Tensor, width: int) -> Codes:
        """The same number of latents for each vector, [..., k]."""
        count, k = indices.numel() // indices.shape[-1], indices.shape[-1]
        starts = torch.arange(0, (count + 1) * k, k, device=indices.device)
        shape = tuple(indices.shape[:-1])
        return cls(indices.reshape(-1), values.reshape(-1), starts, shape, width)

    @classmethod
    def of_places(cls, places: Tensor, values: Tensor, shape: torch.Size) -> Codes:
        """Entries by their places in dense codes of a shape [..., latent], taken as one row, in any order."""
        places, order = places.sort()
        rows, indices = places // shape[-1], places % shape[-1]
        return cls._of_rows(rows, indices, values[order], shape)

    @classmethod
    def _of_rows(cls, rows: Tensor, indices: Tensor, values: Tensor, shape: torch.Size) -> Codes:
        count = shape[:-1].numel()
        counts = torch.bincount(rows, minlength=count)
        starts = functional.pad(counts.cumsum(0), (1, 0))
        return cls(indices, values, starts, tuple(shape[:-1]), shape[-1])

    @property
    def rows(self) -> Tensor:
        """The vector of each entry, [entry]: vectors are counted through."""
        numbers = torch.arange(len(self.starts) - 1, device=self.starts.device)
        return numbers.repeat_interleave(self.starts.diff(), output_size=len(self.indices))

    @property
    def counts(self) -> Tensor:
        """How many latents fire at each vector; an entry of zero is none."""
        found = torch.zeros(len(self.starts) - 1, dtype=torch.int64, device=self.starts.device)
        return found.index_add(0, self.rows, (self.values != 0).long()).reshape(self.shape)

    @property
    def fired(self) -> Tensor:
        """At how many vectors each latent fires, [latent]."""
        found = torch.zeros(self.width, dtype=torch.int64, device=self.indices.device)
        return found.index_add(0, self.indices, (self.values != 0).long())

    def dense(self) -> Tensor:
        """All latents, those that do not fire too, [..., latent]."""
        blank = self.values.new_zeros(len(self.starts) - 1, self.width)
        whole = blank.index_put((self.rows, self.indices), self.values)
        return whole.reshape(*self.shape, self.width)

    def times(self, rows: Tensor) -> Tensor:
        """The sum of one row [latent, ...] for each latent that fires, times its strength: [..., d]."""
        added = bags(rows, self.indices, self.starts, self.values)
        return added.reshape(*self.shape, rows.shape[1])

    def __repr__(self) -> str:
        each = len(self.indices) / max(1, len(self.starts) - 1)
        return f"Codes of {self.shape} vectors over {self.width} latents, {each:.1f} for each"


def bags(vectors: Tensor, indices: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of vectors [vector, d], bag by bag: [bag, d].

    Args:
        vectors: what is added up.
        indices: which of them, bag after bag, [entry].
        starts: where each bag begins, and the end, [bag + 1].
        weights: of each entry.
    """
    if not len(indices):
        return vectors.new_zeros(len(starts) - 1, vectors.shape[-1])
    weights = weights.to(vectors.dtype)
    if weights.requires_grad and vectors.is_cuda and vectors.dtype == torch.bfloat16:
        found: Tensor = Bags.apply(vectors, indices, starts, weights)  # type: ignore[no-untyped-call]
        return found
    return _sums(vectors, indices, starts, weights)


def _sums(vectors: Tensor, indices: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    return functional.embedding_bag(
        indices,
        vectors,
        starts,
        mode="sum",
        per_sample_weights=weights,
        include_last_offset=True,
    )


class Bags(torch.autograd.Function):
    """`bags` with a gradient of its own: torch (2.11 to 2.13) has none for weights in bfloat16 on CUDA."""

    PIECE: ClassVar[int] = 2**15
    """So many entries are gathered at once."""

    @staticmethod
    def forward(
        ctx: Any, vectors: Tensor, indices: Tensor, starts: Tensor, weights: Tensor
    ) -> Tensor:
        """The sums."""
        ctx.save_for_backward(vectors, indices, starts, weights)
        return _sums(vectors, indices, starts, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """For vectors the weighted sum of what their bags get, for weights the product of both."""
        vectors, indices, starts, weights = ctx.saved_tensors
        bag = torch.arange(len(starts) - 1, device=starts.device).repeat_interleave(
            starts.diff(), output_size=len(indices)
        )
        wants_vectors, _, _, wants_weights = ctx.needs_input_grad
        to_vectors = torch.zeros_like(vectors) if wants_vectors else None
        to_weights = torch.empty_like(weights) if wants_weights else None
        for first in range(0, len(indices), Bags.PIECE):
            some = slice(first, first + Bags.PIECE)
            here, mine = grad[bag[some]], indices[some]
            if to_vectors is not None:
                to_vectors.index_add_(0, mine, here * weights[some, None])
            if to_weights is not None:
                to_weights[some] = torch.linalg.vecdot(here, vectors[mine])
        return to_vectors, None, None, to_weights
