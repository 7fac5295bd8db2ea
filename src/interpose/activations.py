"""What a store and a live model have in common for whoever trains on activations: vectors, batch by batch.

A vector is a value of a site at one position of one row of text. Methods and trainers take anything of this form and
know nothing of where it is from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActivationBatch:
    """Some vectors, and where each is from.

    Attributes:
        values: by site, each [vector, ...]: ``batch["blocks.3.hook_resid_post"]``.
        tokens: the token that stands there, [vector].
        row: which row of text, [vector].
        pos: which position of its row, [vector].
    """

    values: Mapping[str, Tensor]
    tokens: Tensor
    row: Tensor
    pos: Tensor

    def __getitem__(self, site: str) -> Tensor:
        return self.values[site]

    def __len__(self) -> int:
        return len(self.tokens)


class ActivationBatches(Protocol):
    """Goes through vectors, in an order that its seed decides; it can go on where another one was."""

    left_out: int
    """How many vectors were left out so far, since their norm is far from the others'."""

    def __iter__(self) -> Iterator[ActivationBatch]:
        """Itself."""

    def __next__(self) -> ActivationBatch:
        """The next batch."""

    def state_dict(self) -> dict[str, Any]:
        """Where it is, as data that JSON can hold."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another one was that was made with the same arguments."""


@runtime_checkable
class Activations(Protocol):
    """Vectors that can be gone through again and again, such as a store."""

    @property
    def sites(self) -> Mapping[str, Any]:
        """What there is, by canonical name."""

    def batches(
        self,
        site: Any = None,
        *,
        batch_size: int = 4096,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = 1,
    ) -> ActivationBatches:
        """Batches of vectors.

        Args:
            site: which sites; None for all.
            batch_size: how many vectors a batch has; the last of a pool may have fewer.
            shuffle: False goes through rows in their order.
            seed: of the order.
            epochs: how often all of them come; None for ever.
        """
