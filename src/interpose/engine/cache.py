"""The values kept from a run: a mapping from names to tensors, in the order the model made them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from interpose.errors import AmbiguousSite, SiteNotFound, StaleValue
from interpose.explain.missing import explain_not_kept
from interpose.explain.words import some
from interpose.files.reading import read_shared
from interpose.files.schema import ListOf, MapOf, Record, Text, record_of
from interpose.files.writing import replacing
from interpose.names import Speller
from interpose.render.text import human_bytes, table
from interpose.sites.tree import Site
from interpose.taps import values

_GRAD = "_grad"


_CALLS = MapOf(ListOf(Text()))
_SAME = {"same": MapOf(Text()), "aliases": MapOf(Text()), "calls": _CALLS}
_ABOUT = Record({**_SAME, "names": record_of(Speller)}, ["names"])


class Kept(NamedTuple):
    """One captured tensor, before it is in a cache."""

    site: Site
    name: str
    call: int | None
    leaf: values.Leaf
    tensor: Tensor
    version: int | None = None


class Cache(Mapping[str, Tensor]):
    """Values by site name, in execution order.

    ``cache["fc1"]`` takes any name of the site, also one other than it was asked by. A module
    called several times has one entry per call, ``cache["cell#0"]``; ``cache.calls("cell")`` is the
    list of them. Gradients, where they were asked for, are ``cache.grad["fc1"]`` and
    ``cache["fc1_grad"]``.
    """

    _of_gradients = False

    def __init__(
        self,
        values: Mapping[str, Tensor] | None = None,
        *,
        aliases: Mapping[str, str] | None = None,
        calls: Mapping[str, list[str]] | None = None,
        versions: Mapping[str, int] | None = None,
        spelling: Callable[[Any], str] | None = None,
    ) -> None:
        self._values = dict(values or {})
        self._aliases = dict(aliases or {})
        self._calls = dict(calls or {})
        self._versions = dict(versions or {})
        self._spelling = spelling

    def __getitem__(self, name: str | tuple[Any, ...]) -> Tensor:
        key = self._key(name)
        if key is None:
            raise self._missing(name if isinstance(name, str) else self._spelled(name))
        value = self._values[key]
        if key in self._versions and value._version != self._versions[key]:
            raise StaleValue(
                f"{name!r} was kept with clone=False, and the model has changed it in place since. "
                "Run again with clone=True."
            )
        return value

    def __contains__(self, name: object) -> bool:
        if self._spelling is not None and isinstance(name, tuple):
            name = self._spelling(name)
        return isinstance(name, str) and (self._key(name) is not None or bool(self._several(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _key(self, name: Any) -> str | None:
        found = self._kept_as(name) if isinstance(name, str) or self._spelling is None else None
        return self._kept_as(self._spelling(name)) if found is None and self._spelling else found

    def _spelled(self, name: Any) -> str:
        return name if self._spelling is None else self._spelling(name)

    def _kept_as(self, name: str) -> str | None:
        if not isinstance(name, str):
            raise TypeError(
                f"a cache is indexed by site names such as 'fc1'; got {type(name).__name__}: "
                f"{name!r}"
            )
        if name in self._values:
            return name
        stem = name.removesuffix(_GRAD)
        suffix = name[len(stem) :]
        for spelling in (stem, stem.removesuffix(".output")):
            for key in (spelling, self._aliases.get(spelling, spelling)):
                if key + suffix in self._values:
                    return key + suffix
        call = re.search(r"#\d+", stem)
        if call is not None:
            # `same#1`, where `same` is another name of `cell` and `cell` was asked for.
            for key in self._several(stem[: call.start()] + stem[call.end() :]):
                if call.group() in key:
                    return key + suffix
        return None

    def _several(self, name: str) -> list[str]:
        stem = name.removesuffix(_GRAD)
        keys = self._calls.get(stem) or self._calls.get(self._aliases.get(stem, ""), [])
        keys = [key + name[len(stem) :] for key in keys]
        return [key for key in keys if key in self._values]

    def _missing(self, name: str) -> Exception:
        several = self._several(name)
        if several:
            shown = ", ".join(map(repr, several[:6])) + (", ..." if len(several) > 6 else "")
            return AmbiguousSite(
                f"{name!r} was called {len(several)} times; say which call: {shown}, or take them "
                f"all with cache.calls({name!r})."
            )
        inside = [key for key in self._values if key.startswith((f"{name}.output", f"{name}["))]
        if inside:
            choices = ", ".join(map(repr, inside[:6])) + (", ..." if len(inside) > 6 else "")
            return AmbiguousSite(f"{name!r} holds several tensors; say which one: {choices}.")
        block = name.split(".")[:2]
        beside = [key for key in self._values if key.split(".")[:2] == block]
        shown = some(map(repr, beside or self._values)) or "nothing"
        why = explain_not_kept(self._spelling, name, list(self._values))
        if self._of_gradients or name.endswith(_GRAD):
            why = "Gradients are kept with incl_bwd=True, or incl_bwd=lambda out: a loss."
        return SiteNotFound(f"{name!r} is not in this cache. {why}\n  It has: {shown}.")

    def calls(self, name: Any) -> list[Tensor]:
        """All values of a site, one per call of its module; a list of one for most."""
        if self._spelling is not None and not isinstance(name, str):
            name = self._spelling(name)
        several = self._several(name)
        return [self[key] for key in several] if several else [self[name]]

    @property
    def grad(self) -> Cache:
        """The gradients, under the names of the values they belong to."""
        found = {
            key.removesuffix(_GRAD): v for key, v in self._values.items() if key.endswith(_GRAD)
        }
        made = Cache(found, aliases=self._aliases, calls=self._calls, spelling=self._spelling)
        made._of_gradients = True
        return made

    def __getstate__(self) -> dict[str, Any]:
        # A copy has tensors of its own, whose versions say nothing of the model's changes.
        return {**vars(self), "_values": {name: self[name] for name in self}, "_versions": {}}

    @property
    def nbytes(self) -> int:
        """Memory held, counting shared tensors once."""
        unique = {tensor.data_ptr(): tensor for tensor in self._values.values()}
        return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())

    def _with(self, values: Mapping[str, Tensor]) -> Cache:
        return Cache(values, aliases=self._aliases, calls=self._calls, spelling=self._spelling)

    def to(self, device: str | torch.device) -> Cache:
        """A cache with every tensor on a device."""
        return self._with({name: self[name].to(device) for name in self})

    def detach(self) -> Cache:
        """A cache whose tensors are cut off from the graph."""
        return self._with({name: self[name].detach() for name in self})

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; `Cache.load` reads it back, names and order included."""
        from safetensors.torch import save_file

        first: dict[Any, str] = {}
        same = {}
        for name, tensor in self._values.items():
            same[name] = first.setdefault(
                (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), name
            )
        tensors = {name: self[name].detach().contiguous().clone() for name in set(same.values())}
        about: dict[str, Any] = {"same": same, "aliases": self._aliases, "calls": self._calls}
        if isinstance(self._spelling, Speller):
            about["names"] = {"sites": self._spelling.sites, "absent": self._spelling.absent}
        with replacing(path) as unfinished:
            save_file(tensors, unfinished, metadata={"interpose.cache": json.dumps(about)})

    @staticmethod
    def load(path: str | Path, device: str | torch.device = "cpu") -> Cache:
        """Read what `save` wrote."""
        values, about = read_shared(path, "interpose.cache", _ABOUT, "Cache.save", device)
        spelling = Speller(**about["names"]) if "names" in about else None
        return Cache(values, aliases=about["aliases"], calls=about["calls"], spelling=spelling)

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                name,
                str(tuple(t.shape)),
                str(t.dtype).removeprefix("torch."),
                human_bytes(t.numel() * t.element_size()),
            )
            for name, t in self._values.items()
        ]

    def _headline(self) -> str:
        devices = sorted({str(tensor.device) for tensor in self._values.values()})
        count = "1 value" if len(self) == 1 else f"{len(self)} values"
        return (
            f"Cache of {count}, {human_bytes(self.nbytes)} on {', '.join(devices) or 'no device'}"
        )

    def __repr__(self) -> str:
        return table(("site", "shape", "dtype", "size"), self._rows(), title=self._headline())

    def _repr_html_(self) -> str:
        from interpose.render.html import html_table

        return html_table(("site", "shape", "dtype", "size"), self._rows(), title=self._headline())


# So that torch.load reads one as it reads tensors: they are nothing but data.
torch.serialization.add_safe_globals([Cache, Speller])
