"""Vectors of rows of tokens: the model runs them, and what is kept comes packed, without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from interpose.engine.hooks import Hook
from interpose.errors import NonFinite, Unsupported
from interpose.models.running.padding import accepts
from interpose.models.running.text import encodes
from interpose.models.selection import entries, spans_of
from interpose.models.transformer import TransformerModel
from interpose.sites.axes import sequence_of
from interpose.sites.tree import Filter, Site
from interpose.store.records import DTYPES, StoredSite


@dataclass(frozen=True, slots=True)
class Positions:
    """Which positions of each row are kept: numbers (negative from its end), slices, texts; None for all."""

    wanted: Any = None

    def of(self, model: TransformerModel, row: Sequence[int]) -> list[int]:
        """Those of one row, ascending. What it does not have is left out."""
        if self.wanted is None:
            return list(range(len(row)))
        several = isinstance(self.wanted, (list, tuple, range))
        found: set[int] = set()
        for one in self.wanted if several else [self.wanted]:
            if isinstance(one, str):
                pieces = [model.to_single_str_token(token) for token in row]
                for span in spans_of(one, pieces, list(row), model._ids([one], special=False)[0]):
                    found |= set(span)
            elif isinstance(one, slice):
                found |= set(range(len(row))[one])
            elif isinstance(one, int) and not -len(row) <= one < len(row):
                continue
            else:
                found |= set(entries(one, len(row), "pos", "a row"))
        return sorted(found)

    @property
    def data(self) -> Any:
        """Itself as JSON has it."""
        several = isinstance(self.wanted, (list, tuple, range))
        made = [
            {"slice": [one.start, one.stop, one.step]} if isinstance(one, slice) else one
            for one in (self.wanted if several else [self.wanted])
        ]
        return made if several else made[0]

    @classmethod
    def of_data(cls, data: Any) -> Self:
        """What `data` gave."""

        def one_of(one: Any) -> Any:
            return slice(*one["slice"]) if isinstance(one, Mapping) else one

        several = isinstance(data, (list, tuple))
        return cls([one_of(one) for one in data] if several else one_of(data))


class Vectors:
    """Runs rows, and keeps the vectors of some sites.

    Args:
        model: a model of transformers.
        site: which sites.
        dtype: of the vectors, or the words for one of each site; ``int8`` is made later, of what this gives.
        hooks: what is live meanwhile.
    """

    def __init__(
        self,
        model: TransformerModel,
        site: Filter,
        *,
        dtype: str | torch.dtype | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.model = model
        self.given = {"site": site, "dtype": dtype, "hooks": list(hooks)}
        self.hooks = list(hooks)
        self.sites = _checked(model, site)
        self._names = [one.name for one in self.sites]
        self.dtype = None if dtype is None else _dtype(dtype)
        self._casts = None if self.dtype in (None, torch.int8) else self.dtype
        self._lost: dict[str, Tensor] = {}
        self._options = {"use_cache": False} if accepts(model, "use_cache") else {}

    def described(self) -> dict[str, StoredSite]:
        """The sites by canonical name, with the shapes and dtypes that a run of one token shows."""
        token = self.model._filler()
        found = {}
        values = self._run([[token, token]], None)
        for site in self.sites:
            value = values[site.canonical]
            found[site.canonical] = StoredSite(
                shape=tuple(value.shape[1:]),
                dtype=str(self.dtype or value.dtype).removeprefix("torch."),
                made=str(value.dtype).removeprefix("torch."),
                axes=site.axes[2:],
                kind=site.kind,
                layer=site.layer,
                aliases=tuple(site.aliases),
            )
        return found

    def read(self, rows: Sequence[Sequence[int]], positions: Positions) -> dict[str, Tensor]:
        """The vectors of some rows that run together, by canonical name, each [vector, ...], on the model's device.

        They are copies: first those of the first row, each row's in the order of its positions.
        """
        longest = max(map(len, rows))
        if positions.wanted is None and min(map(len, rows)) == longest:
            return self._cast(self._run(rows, None))
        index = [
            number * longest + place
            for number, row in enumerate(rows)
            for place in positions.of(self.model, row)
        ]
        return self._cast(self._run(rows, torch.tensor(index, dtype=torch.long)))

    def must_have_fitted(self) -> None:
        """Refuse what a dtype of few bits turned into infinities, in anything that was read so far."""
        for site, lost in self._lost.items():
            if bool(lost):
                raise NonFinite(
                    f"{site!r} has values that {self.dtype} cannot hold: they would be infinite. Choose "
                    "dtype='bfloat16' or 'float32'."
                )

    def _cast(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._casts is None:
            return values
        made = {}
        for site, value in values.items():
            made[site] = value.to(self._casts)
            if torch.finfo(self._casts).max < torch.finfo(value.dtype).max:
                lost = (
                    made[site].isinf() & value.isfinite()
                ).any()  # asked of the device at the end
                self._lost[site] = lost | self._lost.get(site, lost)
        return made

    def _run(self, rows: Sequence[Sequence[int]], index: Tensor | None) -> dict[str, Tensor]:
        tokens, mask = self._as_batch(rows)
        given = {"input_ids": tokens} if mask is None else self.model._with_mask(tokens, mask)
        index = None if index is None else index.to(tokens.device)
        shape = tokens.shape

        def pack(value: Tensor) -> Tensor:
            if value.shape[:2] != shape:
                raise Unsupported(
                    f"a store has a vector for each token; a value of shape {tuple(value.shape)} has none for the "
                    f"{tuple(shape)} tokens. Choose sites with axes batch, pos, ...: model.sites shows them."
                )
            flat = value.detach().flatten(0, 1)
            if index is None:
                return flat.clone()
            return flat.index_select(0, index.to(flat.device, non_blocking=True))

        with torch.inference_mode():
            _, cache = self.model.run_with_cache(
                **given,
                **self._options,
                names_filter=self._names,
                keep=pack,
                stop=True,
                hooks=self.hooks,
            )
        for site in self.sites:
            if len(cache.calls(site.name)) > 1:
                raise Unsupported(
                    f"{site.name!r} is computed several times in a run. Say which: {site.name + '#0'!r}."
                )
        return {site.canonical: cache[site.name] for site in self.sites}

    def _as_batch(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Rows as one tensor, shorter ones padded at the right, where causal attention never looks."""
        longest = max(map(len, rows))
        filler = self.model._filler()
        tokens = torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(longest)[None] < lengths[:, None]).long()
        device = self.model.device
        return tokens.to(device), None if bool(mask.all()) else mask.to(device)


def _dtype(given: str | torch.dtype) -> torch.dtype:
    word = str(given).removeprefix("torch.")
    there = ("float32", "bfloat16", "float16", "float64", "int8")
    if word not in there:
        raise ValueError(f"dtype is one of {', '.join(there)}; got {word!r}.")
    return DTYPES[word]


def _checked(model: TransformerModel, wanted: Filter) -> list[Site]:
    """The sites that a filter means, each of which has a vector for each token."""
    if wanted is None:
        raise TypeError("say which sites: site='blocks.3.hook_resid_post', or several in a list.")
    counted = "encoder" if encodes(model) else "queries"
    found: dict[str, Site] = {}
    for site, _ in model.select(wanted):
        found.setdefault(site.canonical, site)
        if not site.axes:
            continue  # a module's own path: its shape tells, when it runs
        counts = [sequence_of(axis, site.canonical, encodes=encodes(model)) for axis in site.axes]
        if site.axes[0] != "batch" or counts[1:2] != [counted] or any(counts[2:]):
            raise Unsupported(
                f"a store has a vector for each token of a text, and {site.name!r} has axes {', '.join(site.axes)}. "
                "Choose sites with axes batch, pos and others: resid_post, mlp_out, z, ...; model.sites shows them."
            )
    return list(found.values())
