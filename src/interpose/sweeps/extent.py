"""The extent of a sweep: what its axes range over, and the cells that their entries make."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from interpose import names
from interpose.errors import Unsupported
from interpose.models import selection
from interpose.sweeps.cells import Cell

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

AXES = ("site", "layer", "head", "neuron", "pos")
_OF_KEYS = ("k", "v", "rot_k", "k_input", "v_input")  # as many heads as keys and values have


@dataclass(slots=True, kw_only=True)
class Extent:
    """How far a sweep goes.

    Attributes:
        model: a model of transformers.
        sites: kinds of sites, or names of single ones; one of them may come by itself.
        over: the axes.
        chosen: the entries that were asked for, by axis. Of an axis that is not gone through there may be one, which
            all places then have.
    """

    model: TransformerModel
    sites: Any
    over: tuple[str, ...]
    chosen: dict[str, Any]

    def __post_init__(self) -> None:
        if not hasattr(self.model, "anatomy"):
            raise Unsupported(
                "a sweep needs a model of transformers, whose layers and heads are known: ip.load(name), or "
                f"ip.wrap(module, tokenizer); got {type(self.model).__name__}. Of other modules, run the edits one by "
                "one: model.run_with_hooks(x, hooks=[...])."
            )
        if not self.over or set(self.over) - set(AXES) or len(set(self.over)) < len(self.over):
            raise ValueError(f"over names some of {', '.join(AXES)}, each once; got {self.over}")
        one = isinstance(self.sites, str) or _is_pair(self.sites)
        listed = [self.sites] if one else list(self.sites)
        self.sites = [names.of_kind(*each) if _is_pair(each) else each for each in listed]
        if "site" not in self.over and len(self.sites) > 1:
            raise ValueError("several sites need over=('site', ...).")
        for axis, given in self.chosen.items():
            self.chosen[axis] = made = _listed(axis, given)
            if (
                axis not in self.over
                and made is not None
                and (isinstance(made, slice) or len(made) != 1)
            ):
                raise ValueError(
                    f"{axis}={given!r}: the sweep does not go over {axis!r}, so that all its places "
                    f"would change these together. Add {axis!r} to over={self.over}, give one, or make an edit that "
                    f"changes several: edit=lambda site, **part: ip.zero(site, {axis}={given!r}, **part)."
                )

    @property
    def by_position(self) -> bool:
        """Whether it matters where a position is."""
        return "pos" in self.over or self.chosen["pos"] is not None

    def axes(self, length: int) -> dict[str, list[Any]]:
        """The entries of each axis, by its name."""
        return {
            axis: list(self.sites) if axis == "site" else self._entries(axis, length)
            for axis in self.over
        }

    def fixed(self, length: int) -> dict[str, int]:
        """What all places have, by axes that are not gone through."""
        return {
            axis: self._entries(axis, length)[0]
            for axis, given in self.chosen.items()
            if given is not None and axis not in self.over
        }

    def cells(self, axes: Mapping[str, Sequence[Any]], fixed: Mapping[str, int]) -> list[Cell]:
        """All combinations of the axes' entries, each with what all places have."""
        resolve = functools.cache(self._resolved)
        found = []
        for entries in itertools.product(*axes.values()):
            at = {**fixed, **dict(zip(axes, entries))}
            site, layer = resolve(at.pop("site", self.sites[0]), at.pop("layer", None))
            found.append(Cell(site=site, layer=layer, **at))
        return found

    def _entries(self, axis: str, length: int) -> list[int]:
        if axis == "layer":
            return self._layers()
        count = length if axis == "pos" else self._heads() if axis == "head" else self._neurons()
        return self._picked(axis, range(count), count)

    def _layers(self) -> list[int]:
        """The layers that have all the sites."""
        known = self.model.tree.table.sites
        count = self.model.tree.blocks()
        there = [n for n in range(count) if all(names.of_kind(s, n) in known for s in self.sites)]
        if self.chosen["layer"] is not None or not there:
            there = self._picked("layer", there or range(1), count)
        for layer in there:
            for site in self.sites:
                self.model.tree.site(names.of_kind(site, layer))  # an error that says why not
        return there

    def _heads(self) -> int:
        kinds = self._kinds()
        without = next((site.canonical for site in kinds if "head" not in site.axes), None)
        if without is not None:
            raise ValueError(f"{without!r} has no axis of heads.")
        cfg = self.model.cfg
        shared = any(site.kind in _OF_KEYS for site in kinds)
        found = (cfg.n_key_value_heads if shared else None) or cfg.n_heads
        if found is None:
            raise Unsupported(f"{self.model.tree.label} has no attention heads.")
        return int(found)

    def _neurons(self) -> int:
        last = {site.axes[-1] if site.axes else "" for site in self._kinds()}
        found = [getattr(self.model.cfg, axis, None) for axis in last]
        if self.chosen["neuron"] and (len(found) != 1 or found[0] is None):
            return (
                int(max(map(abs, self.chosen["neuron"]))) + 1
            )  # whether they are there is seen later
        if len(found) != 1 or found[0] is None:
            raise ValueError(
                f"it is not known how many features {self.sites} have: give neuron=[...]."
            )
        return int(found[0])

    def _kinds(self) -> list[Any]:
        """The sites of one layer."""
        at = "layer" in self.over or self.chosen["layer"] is not None
        layer = self._layers()[0] if at else None
        return [self.model.tree.site(self._resolved(site, layer)[0]) for site in self.sites]

    def _picked(self, axis: str, there: Sequence[int], count: int) -> list[int]:
        """The chosen entries of an axis; those that are there, if nothing was said."""
        wanted = self.chosen[axis]
        if wanted is None:
            return list(there)
        return selection.entries(wanted, count, axis, "a text" if axis == "pos" else "the model")

    def _resolved(self, site: str, layer: int | None) -> tuple[str, int]:
        """The canonical name of a site, and its block; -1 outside."""
        name = site if layer is None else names.of_kind(site, layer)
        found = self.model.tree.site(name)
        return found.canonical, -1 if found.layer is None else found.layer


def _is_pair(site: Any) -> bool:
    """Whether this is one site, as ``("z", 5)``."""
    return (
        isinstance(site, tuple)
        and len(site) == 2
        and isinstance(site[0], str)
        and not isinstance(site[1], str)
    )


def _listed(axis: str, given: Any) -> Any:
    """Entries as a list of numbers, or a slice."""
    if given is None or isinstance(given, slice):
        return given
    if isinstance(given, torch.Tensor) or hasattr(given, "tolist"):
        given = given.tolist()
    made = [given] if isinstance(given, (int, str)) else list(given)
    wrong = next((one for one in made if not isinstance(one, int)), None)
    if wrong is not None:
        hint = "; model.to_str_tokens(text) shows which token is where" if axis == "pos" else ""
        raise TypeError(f"{selection.PLURAL[axis]} are numbers; got {wrong!r}{hint}.")
    return made
