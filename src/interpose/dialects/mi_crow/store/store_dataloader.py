"""`StoreDataloader`: the vectors of a layer, batch by batch, without padding."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from interpose.dialects.mi_crow.store.harvested import ACTIVATIONS, INPUTS, HarvestedRun


class StoreDataloader:
    """Vectors [vector, d_model] of a layer in the order of the texts, padding left out; as often as it is asked for.

    Args:
        store: where the run is.
        run_id: of the run.
        layer: which layer, as it was asked for.
        key: what of it.
        batch_size: how many vectors a batch has; the last may have fewer.
        dtype: to give them in; by default as they are.
        device: where to put them; by default the CPU.
        max_batches: how many batches at most.
    """

    def __init__(
        self,
        store: Any,
        run_id: str,
        layer: str | int,
        key: str = ACTIVATIONS,
        batch_size: int = 32,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        max_batches: int | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is at least 1; got {batch_size}.")
        self.store = store
        self.run_id = run_id
        self.layer = str(layer)
        self.key = key
        self.batch_size = batch_size
        self.dtype = dtype
        self.device = device
        self.max_batches = max_batches

    def __iter__(self) -> Iterator[Tensor]:
        for batch in islice(self._batches(), self.max_batches):
            yield batch.to(device=self.device, dtype=self.dtype)

    def _batches(self) -> Iterator[Tensor]:
        run = HarvestedRun.of(self.store.run_path(self.run_id))
        if run is not None:
            if self.key != ACTIVATIONS:
                raise ValueError(f"what was harvested is {ACTIVATIONS!r}; got key={self.key!r}.")
            site = run.site_of(self.layer)
            batches = run.store.batches(site, batch_size=self.batch_size, shuffle=False)
            yield from self._cut(batch[site] for batch in batches)
            return
        yield from self._cut(self._vectors())

    def _cut(self, parts: Iterator[Tensor]) -> Iterator[Tensor]:
        """Vectors, so many at a time."""
        held: list[Tensor] = []
        for part in parts:
            held.append(part)
            if sum(map(len, held)) >= self.batch_size:
                whole = torch.cat(held)
                end = len(whole) - len(whole) % self.batch_size
                yield from whole[:end].split(self.batch_size)
                held = [whole[end:]]
        if held and len(whole := torch.cat(held)):
            yield whole

    def _vectors(self) -> Iterator[Tensor]:
        """The vectors of each batch that detectors kept."""
        for number in self.store.list_run_batches(self.run_id):
            tensor = self.store.get_detector_metadata_by_layer_by_key(
                self.run_id, number, self.layer, self.key
            )
            mask = self._mask(number)
            if mask is not None and tensor.shape[:2] == mask.shape:
                yield tensor[mask != 0]
            else:
                yield tensor.flatten(0, -2) if tensor.ndim > 1 else tensor[:, None]

    def _mask(self, number: int) -> Tensor | None:
        """Which tokens of a batch are text, where that was kept with it."""
        try:
            found: Tensor = self.store.get_detector_metadata_by_layer_by_key(
                self.run_id, number, INPUTS, "attention_mask"
            )
        except FileNotFoundError:
            return None
        return found
