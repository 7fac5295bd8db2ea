"""Runs that were harvested: a store of interpose, shown as batches of padded tensors, as mi-crow has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interpose.explain.words import some
from interpose.files.reading import read_json
from interpose.files.schema import ANYTHING, Field, MapOf, Text, Whole, shown
from interpose.store.records import ABOUT
from interpose.store.store import Store, open_store

ACTIVATIONS = "activations"
"""The folder of a run that has the store, and what its tensors are called."""
INPUTS = "input"
"""What stands beside the layers: the tokens, and which of them are text."""


class HarvestedRun:
    """A run whose activations are in a store of interpose.

    Args:
        store: the store.
        sites: for each layer as it was asked for, its site in the store.
        batch_size: how many texts a batch has.
    """

    def __init__(self, store: Store, sites: dict[str, str], batch_size: int) -> None:
        self.store = store
        self.sites = sites
        self.batch_size = batch_size

    @classmethod
    def of(cls, run: Path) -> HarvestedRun | None:
        """What a run's folder has; None if it was not harvested."""
        if not (run / ACTIVATIONS / ABOUT).is_file() or not (run / "meta.json").is_file():
            return None
        field = Field(repr(str(run / "meta.json")))
        meta = read_json(run / "meta.json", MapOf(ANYTHING))
        options = MapOf(ANYTHING)(meta.get("options"), field.of("options"))
        size = Whole(1, 2**31)(options.get("batch_size"), field.of("options").of("batch_size"))
        sites = MapOf(Text(1000), Text(1000), 100_000)(meta.get("sites"), field.of("sites"))
        store = open_store(run / ACTIVATIONS)
        if missing := set(sites.values()) - set(store.sites):
            raise field.of("sites").says(f"names {shown(min(missing))}, which the store has not.")
        return cls(store, sites, size)

    @property
    def count(self) -> int:
        """How many batches there are."""
        return -(-len(self.store) // self.batch_size)

    def site_of(self, layer: str) -> str:
        """The site of a layer, by the name it was asked for or by its path."""
        if layer in self.sites:
            return self.sites[layer]
        if layer in self.sites.values():
            return layer
        raise FileNotFoundError(
            f"no layer {layer!r} in {str(self.store.path)!r}; it has {some(map(repr, self.sites))}."
        )

    def tensor(self, batch_index: int, layer: str, key: str) -> Tensor:
        """What a layer returned for the texts of a batch, [text, pos, ...], with zeros behind shorter texts."""
        rows = self._rows(batch_index)
        if layer == INPUTS and key in ("input_ids", "attention_mask"):
            return self._inputs(rows)[key]
        if key != ACTIVATIONS:
            raise FileNotFoundError(
                f"no {key!r} of layer {layer!r}: what was harvested is {ACTIVATIONS!r}."
            )
        site = self.site_of(layer)
        return torch.nn.utils.rnn.pad_sequence(
            [self._values(site, row) for row in rows], batch_first=True
        )

    def detected(
        self, batch_index: int
    ) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Tensor]]]:
        """As if detectors had kept it, by layer: facts, and tensors."""
        tensors = {
            layer: {ACTIVATIONS: self.tensor(batch_index, layer, ACTIVATIONS)}
            for layer in self.sites
        }
        facts: dict[str, dict[str, Any]] = {
            layer: {f"{ACTIVATIONS}_shape": list(of_layer[ACTIVATIONS].shape)}
            for layer, of_layer in tensors.items()
        }
        tensors[INPUTS] = self._inputs(self._rows(batch_index))
        return facts, tensors

    def batch(self, batch_index: int) -> dict[str, Tensor]:
        """What the layers returned for the texts of a batch, by layer, with the tokens and which of them are text."""
        _, tensors = self.detected(batch_index)
        inputs = tensors.pop(INPUTS)
        return {layer: of_layer[ACTIVATIONS] for layer, of_layer in tensors.items()} | inputs

    def _rows(self, batch_index: int) -> range:
        if not 0 <= batch_index < self.count:
            raise FileNotFoundError(
                f"no batch {batch_index} in {str(self.store.path)!r}: it has batches 0 to {self.count - 1}."
            )
        first = batch_index * self.batch_size
        return range(first, min(first + self.batch_size, len(self.store)))

    def _values(self, site: str, row: int) -> Tensor:
        count = len(self.store.tokens_of(row))
        return self.store.gather(site, row, torch.arange(count))

    def _inputs(self, rows: range) -> dict[str, Tensor]:
        tokens = [self.store.tokens_of(row) for row in rows]
        masks = [torch.ones_like(one) for one in tokens]
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "input_ids": pad(tokens, batch_first=True),
            "attention_mask": pad(masks, batch_first=True),
        }
