"""Codes: which latents of an autoencoder fire at each vector, and how strongly; nothing is stored of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
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
        if not len(self.indices):
            return rows.new_zeros(*self.shape, rows.shape[1])
        added = functional.embedding_bag(
            self.indices,
            rows,
            self.starts,
            mode="sum",
            per_sample_weights=self.values.to(rows.dtype),
            include_last_offset=True,
        )
        return added.reshape(*self.shape, rows.shape[1])

    def __repr__(self) -> str:
        each = len(self.indices) / max(1, len(self.starts) - 1)
        return f"Codes of {self.shape} vectors over {self.width} latents, {each:.1f} for each"
