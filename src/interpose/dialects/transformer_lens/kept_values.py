"""The values of a run as TransformerLens's cache holds them: a mapping, with or without a batch axis."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.utilities.names import get_act_name
from interpose.dialects.transformer_lens.utilities.slices import Slice
from interpose.engine.cache import Cache

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel


class KeptValues(Mapping[str, Tensor]):
    """Values by name, by any name of their site, or by kind and layer."""

    def __init__(
        self, cache_dict: Mapping[str, Tensor], model: TransformerModel, has_batch_dim: bool = True
    ) -> None:
        if isinstance(cache_dict, Cache):
            self._cache = cache_dict
        else:
            self._cache = Cache({}, spelling=model.tree.spelling)
            self._cache._values = cache_dict if isinstance(cache_dict, dict) else dict(cache_dict)
        self.model = model
        self.has_batch_dim = has_batch_dim

    @property
    def cache_dict(self) -> dict[str, Tensor]:
        """The values themselves, by the names they were asked by."""
        return self._cache._values

    @property
    def has_embed(self) -> bool:
        """Whether token embeddings were kept."""
        return "hook_embed" in self

    @property
    def has_pos_embed(self) -> bool:
        """Whether position embeddings were kept."""
        return "hook_pos_embed" in self

    def __getitem__(self, key: Any) -> Tensor:
        if isinstance(key, tuple) and key[2:] == (None,):
            key = key[:2]
        if isinstance(key, str) and key not in self._cache:
            named = get_act_name(key)  # "k6" is layer 6's keys
            key = named if named in self._cache else key
        return self._cache[key]

    def calls(self, name: Any) -> list[Tensor]:
        """All values of a site, one per call of its module; a list of one for most."""
        return self._cache.calls(name)

    @property
    def grad(self) -> Cache:
        """The gradients, under the names of the values they belong to."""
        return self._cache.grad

    def __contains__(self, key: object) -> bool:
        return key in self._cache

    def __iter__(self) -> Iterator[str]:
        return iter(self._cache)

    def __len__(self) -> int:
        return len(self._cache)

    def __repr__(self) -> str:
        return f"{type(self).__name__} with keys {list(self._cache)}"

    def _made(self, values: Mapping[str, Tensor], has_batch_dim: bool | None = None) -> Self:
        batch = self.has_batch_dim if has_batch_dim is None else has_batch_dim
        return type(self)(self._cache._with(values), self.model, batch)

    def to(self, device: str | torch.device, move_model: bool = False) -> Self:
        """Move the values to a device; ``move_model`` moves the model too."""
        if move_model:
            self.model.to(device)
        self._cache = self._cache.to(device)
        return self

    def remove_batch_dim(self, batch_size: int | None = None) -> Self:
        """Drop the batch axis, which must be 1; values that have none stay. Changes this cache and returns it."""
        if not self.has_batch_dim:
            logging.warning("the cache has no batch axis already.")
            return self
        for name, value in self.cache_dict.items():
            size = value.shape[0] if batch_size is None else batch_size
            if size != 1:
                raise AssertionError(
                    f"a batch axis can be dropped if it is 1; {name!r} is {tuple(value.shape)}."
                )
            if value.shape[0] == 1:
                self.cache_dict[name] = value[0]
        self.has_batch_dim = False
        return self

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> Self:
        """A cache of some texts of the batch; one text, given as an int, has no batch axis."""
        if not self.has_batch_dim:
            raise AssertionError("the cache has no batch axis to slice.")
        chosen = batch_slice if isinstance(batch_slice, Slice) else Slice(batch_slice)
        batch = max((value.shape[0] for value in self.cache_dict.values()), default=1)
        values = {
            name: chosen.apply(
                value.expand(batch, *value.shape[1:]), dim=0
            )  # positions are one for all texts
            for name, value in self.cache_dict.items()
        }
        return self._made(values, has_batch_dim=chosen.mode != "int")

    def toggle_autodiff(self, mode: bool = False) -> None:
        """Switch gradients off, or with True on, for the whole process: torch's own switch."""
        torch.set_grad_enabled(mode)

    def keep(self, name: str, value: Tensor) -> None:
        """Add a value under a canonical name."""
        self.cache_dict[name] = value
