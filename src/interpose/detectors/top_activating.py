"""`TopActivating`: the tokens at which units are largest, in whatever texts a model runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from interpose.detectors.collector import Collector
from interpose.detectors.texts import special_ids, tokens_at
from interpose.engine.points import HookPoint
from interpose.errors import NothingMatched, SiteNotFound
from interpose.explain.words import some
from interpose.methods.best_places import (
    Found,
    best_of,
    merged,
    no_places,
    parts_of,
    texts_in,
    units_in,
    words_of,
)
from interpose.methods.max_activating import EVIDENCE, MaxActivating, digest_of
from interpose.sites.tree import Filter


@dataclass(slots=True)
class _Seen:
    """What is known of one site."""

    found: Found
    units: list[int]
    model: Any
    rows: int = 0
    tokens: int = 0
    forwards: int = 0
    texts: dict[int, Tensor] = field(default_factory=dict)  # those that have a place


class TopActivating(Collector):
    """Keeps, for each unit of a site, the tokens at which it was largest, in whatever texts the model runs.

    ```python
    top = ip.TopActivating(("post", 3), neuron=[7, 12], k=5)
    handle = model.register(top)         # or with model.hooks([top]):
    ...                                  # your own loop
    top.result().examples(7)             # value, text, pos, token, context
    top.texts()                          # the texts that these are in, by number
    ```

    The detector behind what `ip.max_activating` does with texts of its own. Padding never counts, and special tokens
    (of which the tokenizer says that they are) do only if asked for. Texts are numbered as they come, and positions
    count from each text's first token.

    Args:
        site: a site with a vector at each position, [batch, pos, size]; of one with heads say which: ``ip.at("z",
            layer=3, head=5)``.
        neuron: which elements of the value; by default all.
        direction: [size], or several [n, size]: projections on these are the units, numbered from 0.
        k: how many places to keep for each unit.
        context: how many tokens to keep on each side.
        sign: -1 for the smallest values instead of the largest.
        skip_special: False counts special tokens, such as BOS, too.
    """

    def __init__(
        self,
        site: Filter = None,
        *,
        neuron: int | Sequence[int] | None = None,
        direction: Tensor | None = None,
        k: int = 10,
        context: int = 8,
        sign: int = 1,
        skip_special: bool = True,
        id: str | None = None,  # noqa: A002
    ) -> None:
        super().__init__(site, id=id, copies=False)
        if sign not in (1, -1) or k < 1 or context < 0:
            raise ValueError(
                f"sign is 1 or -1, k at least 1, context at least 0; got {sign}, {k}, {context}."
            )
        self.neuron = [neuron] if isinstance(neuron, int) else neuron
        if self.neuron is not None and (direction is not None or not list(self.neuron)):
            raise ValueError("give some of neuron, or direction, or neither for all elements.")
        self.direction = direction
        self.k, self.context, self.sign = k, context, sign
        self.skip_special = skip_special
        self._seen: dict[str, _Seen] = {}

    def read(self, value: Tensor, hook: HookPoint) -> None:
        """Merge a batch into the best places so far."""
        if value.ndim == 4 and value.shape[2] > 1 and hook.pos_axis == 1:
            raise ValueError(
                f"{self.id!r} looks at a vector at each position; {hook.name!r} is {list(hook.axes)}. "
                "Say which head: ip.at('z', layer=3, head=0)."
            )
        tokens, real = tokens_at(self.id, value, hook)
        counted = real.clone()
        if self.skip_special:
            counted &= ~_special(tokens, hook.model)
        with torch.inference_mode(False), torch.no_grad():
            here = value.flatten(2).float()
            units, numbers = units_in(here, hook.name, self.neuron, self.direction)
            seen = self._seen.get(hook.name)
            if seen is None:
                empty = no_places(units.shape[2], self.k, self.context)
                seen = self._seen[hook.name] = _Seen(empty, numbers, hook.model)
            rows = torch.arange(len(tokens), device=tokens.device) + seen.rows
            there = [part.to(value.device) for part in (tokens, rows, real, counted)]
            best = best_of(
                self.sign * units,
                tokens=there[0],
                numbers=there[1],
                real=there[2],
                counted=there[3],
                k=self.k,
                context=self.context,
            )
            seen.found = merged(seen.found, best)
        for number, row, text in zip(rows.tolist(), tokens, real):
            seen.texts[number] = row[text].cpu()
        seen.texts = {number: seen.texts[number] for number in texts_in(seen.found)}
        seen.rows += len(tokens)
        seen.tokens += int(counted.sum())
        seen.forwards += 1
        counts = {"texts": seen.rows, "tokens": seen.tokens, "forwards": seen.forwards}
        self.metadata[hook.name] = counts

    def _of(self, site: str | None) -> tuple[str, _Seen]:
        if not self._seen:
            raise NothingMatched(f"{self.id!r} has seen nothing yet: run the model with it.")
        if site is None and len(self._seen) > 1:
            raise ValueError(f"say which site: {some(map(repr, self._seen))}.")
        name = next(iter(self._seen)) if site is None else site
        if name not in self._seen:
            raise SiteNotFound(
                f"{self.id!r} has nothing of {site!r}; it has {some(map(repr, self._seen))}."
            )
        return name, self._seen[name]

    def result(self, site: str | None = None) -> MaxActivating:
        """The best places so far, as `ip.max_activating` returns them.

        Args:
            site: its name; may be left out if there is one.
        """
        name, seen = self._of(site)
        protocol: dict[str, Any] = {"site": name, "sign": self.sign, "k": self.k}
        if self.direction is not None:
            protocol |= {"directions": len(seen.units), "digest": digest_of(self.direction)}
        protocol |= {"context": self.context, "skip_special": self.skip_special}
        protocol |= {"tokens": seen.tokens, "forwards": seen.forwards}
        return MaxActivating(
            title=f"The {'largest' if self.sign > 0 else 'smallest'} activations at {name}",
            axes={"unit": list(seen.units), "rank": list(range(self.k))},
            unit="activation" if self.direction is None else "projection on the direction",
            protocol=protocol,
            evidence=EVIDENCE,
            words=words_of(seen.model, seen.found["tokens"]),
            count=seen.rows,
            **parts_of(seen.found, self.sign),
        )

    def texts(self, site: str | None = None) -> dict[int, str]:
        """The texts that have a place among the best, by their number, without padding and special tokens.

        Args:
            site: its name; may be left out if there is one.
        """
        _, seen = self._of(site)
        special = special_ids(seen.model)
        return {
            number: seen.model.to_string([token for token in row.tolist() if token not in special])
            for number, row in seen.texts.items()
        }

    def collected(self) -> Mapping[str, Tensor]:
        """For each site the values, texts, positions and windows of the best places."""
        return {
            f"{name}/{part}": tensor
            for name, seen in self._seen.items()
            for part, tensor in parts_of(seen.found, self.sign).items()
        }

    def clear(self) -> None:
        """Forget everything found so far; texts are numbered from 0 again."""
        super().clear()
        self._seen.clear()


def _special(tokens: Tensor, model: Any) -> Tensor:
    """Which tokens are special."""
    ids = sorted(special_ids(model))
    return torch.isin(tokens, torch.tensor(ids, dtype=tokens.dtype, device=tokens.device))
