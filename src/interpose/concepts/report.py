"""`Features`: what `ip.features` returns, unit by unit; it merges, and shows itself on pages."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import interpose as ip
from interpose.concepts.counts import Counts
from interpose.concepts.effects import Effects
from interpose.concepts.places import NOWHERE, Places
from interpose.concepts.samples import Sample
from interpose.render.labels import token_label
from interpose.render.text import table
from interpose.results.result import number

if TYPE_CHECKING:
    from interpose.concepts.naming import Concepts

_SHOWN = 200  # units in a table of all


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Features(ip.Result):
    """What units of a site respond to in a dataset, and what they do.

    ```python
    found.examples(17)                # its strongest places: value, row, pos, token, context
    found.groups(17, 5)               # a random sample of its places, in five groups by value, the highest first
    found.density(17)                 # at which share of tokens it is active
    found.logits(17)                  # the tokens that it raises and lowers
    found.together(17)                # units that are active at the same tokens
    found.save_pages("pages")
    ```

    Attributes:
        title: what was looked at.
        units: their numbers, ascending: latents of an autoencoder, or elements of a site's value.
        token_count: how many tokens counted.
        text_count: how many texts, or rows of a store, there were.
        words: tokens as text, by their number as text.
        counts: of each unit over all tokens, in the order of ``units``.
        strongest: the strongest places of each.
        lowest: those where it is farthest below zero, as positive values; None where no unit can be.
        drawn: a random sample of all places where it is active.
        sample: a random sample of tokens, with the units that are active there.
        effects: the logits that each raises and lowers; None where that is not known.
        protocol: how it was made.
        evidence: what it is evidence for, and what not.
    """

    title: str
    units: list[int]
    token_count: int
    text_count: int
    words: dict[str, str]
    counts: Counts
    strongest: Places
    lowest: Places | None
    drawn: Places
    sample: Sample
    effects: Effects | None
    protocol: dict[str, Any]
    evidence: str = ""

    # Unit by unit.

    def row(self, unit: int) -> int:
        """The place of a unit among all that there are."""
        at = bisect.bisect_left(self.units, unit)
        if at == len(self.units) or self.units[at] != unit:
            near = f"{self.units[0]} to {self.units[-1]}"
            raise KeyError(f"no unit {unit!r}: there are {len(self.units)}, of {near}.")
        return at

    def density(self, unit: int) -> float:
        """At which share of the tokens it is active."""
        return int(self.counts.fired[self.row(unit)]) / max(1, self.token_count)

    def examples(self, unit: int, *, bottom: bool = False) -> list[dict[str, Any]]:
        """Its strongest places, the strongest first: value, row, pos, token, and the tokens around it.

        Args:
            unit: which.
            bottom: where it is farthest below zero instead.
        """
        if bottom and self.lowest is None:
            return []
        places = self.lowest if bottom and self.lowest is not None else self.strongest
        row = self.row(unit)
        there = torch.arange(places.values.shape[1])
        return self._examples(places, row, there, -1.0 if bottom else 1.0)

    def groups(self, unit: int, count: int = 5, each: int | None = None) -> list[dict[str, Any]]:
        """A random sample of the places where it is active, in groups of as many, by value, the highest first.

        Args:
            unit: which.
            count: how many groups.
            each: how many examples of each group to give; by default all.

        Returns:
            For each group its lowest and highest value, and its examples.
        """
        row = self.row(unit)
        values = self.drawn.values[row]
        order = values.nan_to_num(-1).argsort(descending=True, stable=True)
        order = order[: int(values.isfinite().sum())]
        parts = [one for one in order.tensor_split(count) if len(one)]
        return [
            {
                "low": float(values[part].min()),
                "high": float(values[part].max()),
                "examples": self._examples(self.drawn, row, part[:each]),
            }
            for part in parts
        ]

    def _examples(
        self, places: Places, row: int, which: Tensor, sign: float = 1.0
    ) -> list[dict[str, Any]]:
        found = []
        for at in which.tolist():
            if int(places.order[row, at]) == NOWHERE:
                continue
            window = places.windows[row, at].tolist()
            words = [self.word(token) for token in window]
            found.append(
                {
                    "value": sign * float(places.values[row, at]),
                    "row": int(places.rows[row, at]),
                    "pos": int(places.positions[row, at]),
                    "token": words[len(words) // 2],
                    "context": "".join(words),
                    "words": words,
                    "activations": (sign * places.activations[row, at]).tolist(),
                }
            )
        return found

    def word(self, token: int) -> str:
        """A token as text; empty outside of a text."""
        return self.words.get(str(token), "")

    def logits(self, unit: int) -> dict[str, list[tuple[str, float]]]:
        """The tokens whose logits it raises most (``up``) and lowers most (``down``), with by how much."""
        if self.effects is None:
            return {"up": [], "down": []}
        row, e = self.row(unit), self.effects
        return {
            "up": [(self.word(t), v) for t, v in zip(e.up[row].tolist(), e.up_by[row].tolist())],
            "down": [
                (self.word(t), v) for t, v in zip(e.down[row].tolist(), e.down_by[row].tolist())
            ],
        }

    def alike(self, unit: int) -> list[tuple[int, float]]:
        """The units that write in the most similar directions, with the cosines."""
        if self.effects is None:
            return []
        row, e = self.row(unit), self.effects
        return [(self.units[u], c) for u, c in zip(e.alike[row].tolist(), e.cosines[row].tolist())]

    def together(self, unit: int, k: int = 10) -> list[tuple[int, float]]:
        """The units that are active at the same tokens: of the sampled tokens at which one of both is, the share."""
        which, shares = self.sample.beside(self.row(unit), len(self.units), k)
        return [(self.units[u], share) for u, share in zip(which.tolist(), shares.tolist())]

    # Parts of the data.

    def merge(self, other: Features) -> Features:
        """Of both parts of the data, such as ``ip.features(..., part=(0, 2))`` and ``part=(1, 2)``."""
        if self.units != other.units or self.protocol != other.protocol:
            changed = [
                name
                for name in {*self.protocol, *other.protocol}
                if self.protocol.get(name) != other.protocol.get(name)
            ]
            raise ValueError(
                f"features of different searches do not merge: {', '.join(sorted(changed)) or 'units'} differ."
            )
        if (self.lowest is None) != (other.lowest is None):
            raise ValueError("one of them has values below zero, and the other has none.")
        both = None
        if self.lowest is not None and other.lowest is not None:
            both = self.lowest.merged(other.lowest)
        return replace(
            self,
            token_count=self.token_count + other.token_count,
            text_count=self.text_count + other.text_count,
            words={**self.words, **other.words},
            counts=self.counts.joined(other.counts),
            strongest=self.strongest.merged(other.strongest),
            lowest=both,
            drawn=self.drawn.merged(other.drawn),
            sample=self.sample.merged(other.sample),
        )

    # As a result.

    def records(self) -> Iterator[dict[str, Any]]:
        """A record for each unit: its largest value, density, mean, its strongest tokens, those that it raises."""
        yield from map(self.record, self.units)

    def record(self, unit: int) -> dict[str, Any]:
        """The record of a unit."""
        row = self.row(unit)
        fired = int(self.counts.fired[row])
        middle = self.strongest.windows.shape[2] // 2
        tokens = dict.fromkeys(
            self.word(t) for t in self.strongest.windows[row, :, middle].tolist() if t >= 0
        )
        up = [] if self.effects is None else self.effects.up[row, :3].tolist()
        return {
            "unit": unit,
            "value": float(self.counts.most[row]),
            "density": fired / max(1, self.token_count),
            "mean": float(self.counts.sums[row]) / max(1, fired),
            "tokens": list(tokens)[:3],
            "raises": [self.word(t) for t in up],
        }

    def lines(self) -> list[str]:
        """How many tokens, and how many units are dead."""
        dead = int((self.counts.fired == 0).sum())
        said = (
            f"{self.token_count:,} tokens of {self.text_count:,} texts; {len(self.units):,} units"
        )
        return [said + (f", of which {dead:,} are never active" if dead else "")]

    def names(self) -> Sequence[str]:
        """The columns of the table of units."""
        return ["unit", "density", "max", "mean", "strongest at", "raises"]

    def cells(self) -> list[Sequence[str]]:
        """A line for each of the first units that are ever active."""
        made: list[Sequence[str]] = []
        for row in self.counts.fired.nonzero()[:_SHOWN, 0].tolist():
            one = self.record(self.units[row])
            made.append(
                [
                    str(one["unit"]),
                    f"{one['density']:.3%}",
                    number(one["value"]),
                    number(one["mean"]),
                    " ".join(map(token_label, one["tokens"])),
                    " ".join(map(token_label, one["raises"])),
                ]
            )
        return made

    def text_body(self, high: int) -> str:
        """The first of them, and how many more there are."""
        shown = self.cells()[: max(1, high - 3)]
        left = int((self.counts.fired > 0).sum()) - len(shown)
        grid = table(self.names(), shown)
        return f"{grid}\n... and {left:,} more" if left else grid

    def save_pages(
        self,
        folder: str | Path,
        *,
        neuron: Sequence[int] | None = None,
        concepts: Concepts | None = None,
        groups: int = 5,
    ) -> Path:
        """An index with search, and a page for each unit; returns the index. Nothing in them is loaded from elsewhere.

        Args:
            folder: where to; it is made.
            neuron: which units have pages; by default all that are active.
            concepts: names for them.
            groups: in how many groups by value the random sample is shown.
        """
        from interpose.concepts.pages import save_pages

        return save_pages(self, Path(folder), neuron=neuron, concepts=concepts, groups=groups)

    def neuronpedia(self, unit: int) -> dict[str, Any]:
        """A unit with the fields of Neuronpedia's JSON."""
        from interpose.concepts.neuronpedia import feature

        return feature(self, unit)
