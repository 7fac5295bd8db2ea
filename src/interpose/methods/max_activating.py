"""Max-activating examples: for each unit, the tokens of a dataset at which it is largest, with what stands around.

The texts pass by once. A unit keeps its k best places so far, and each batch is merged into them, so memory does not
grow with the data. A unit is an element of a site's value, or a direction v along which values x are projected, x.v.
Of equal values the one that comes first in the data counts first.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.batches import batches_to_read, rows_of
from interpose.methods.best_places import (
    Found,
    best_of,
    merged,
    no_places,
    parts_of,
    places_of,
    units_in,
    words_of,
)
from interpose.progress import Progress, ShowProgress, count, tracked
from interpose.render import colours, escape
from interpose.render.html import Markup, html_table
from interpose.render.labels import token_label, token_text
from interpose.render.text import table

_CHUNK = 32  # so many batches are read at once, and run by length
_SHOWN = 20  # units on a page
EVIDENCE = (
    "Evidence for what a unit responds to most in these texts; not for what it responds to moderately, where most of "
    "its use is, nor for what it does: ablate or steer it to see that."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class MaxActivating(ip.Scores):
    """The largest activations, [unit, rank], and where they are. Places that the data did not fill are NaN.

    Attributes:
        texts: the number of each place's text, [unit, rank]; -1 where there is none.
        positions: the position of its token, [unit, rank].
        windows: the token and those around it, [unit, rank, 2 context + 1]; -1 outside of the text.
        activations: the unit's value at each of them; NaN outside of the text.
        words: tokens as text, by their number as text.
        count: how many texts there were.
    """

    texts: Tensor
    positions: Tensor
    windows: Tensor
    activations: Tensor
    words: dict[str, str]
    count: int

    def merge(self, other: MaxActivating) -> MaxActivating:
        """The result of both: as if the other's texts had come after these."""
        for name in (
            "site",
            "layer",
            "head",
            "directions",
            "digest",
            "sign",
            "k",
            "context",
            "skip_first",
            "skip_special",
        ):
            mine, theirs = self.protocol.get(name), other.protocol.get(name)
            if mine != theirs:
                raise ValueError(f"different searches do not merge: {name} is {mine} and {theirs}.")
        if self.axes["unit"] != other.axes["unit"]:
            raise ValueError("results of different units do not merge.")
        sign = self.protocol["sign"]
        found = merged(places_of(self, sign, 0), places_of(other, sign, self.count))
        protocol = {
            name: value + other.protocol[name] if name in ("tokens", "forwards") else value
            for name, value in self.protocol.items()
        }
        return dataclasses.replace(
            self,
            **parts_of(found, sign),
            protocol=protocol,
            words={**self.words, **other.words},
            count=self.count + other.count,
        )

    def columns(self) -> dict[str, Sequence[Any]]:
        """What there is of every place, by name: also its text, its position, its token and those around it."""
        around = [self._around(window) for window in self.windows.flatten(0, 1).tolist()]
        return {
            **ip.Scores.columns(self),
            "text": self.texts.flatten().tolist(),
            "pos": self.positions.flatten().tolist(),
            "token": [token for token, _ in around],
            "context": [context for _, context in around],
        }

    def _around(self, window: list[int]) -> tuple[str, str]:
        """The token in the middle, and all of them."""
        words = [self.words.get(str(token), "") for token in window]
        return words[len(words) // 2], "".join(words)

    def places(self) -> Iterable[int]:
        """The places that the data filled, as numbers in ``values.flatten()``."""
        return (self.texts.flatten() >= 0).nonzero().flatten().tolist()

    def examples(self, unit: int) -> list[dict[str, Any]]:
        """The best places of a unit, the best first: value, text, pos, token, and the tokens around it."""
        if unit not in self.axes["unit"]:
            raise KeyError(f"no unit {unit!r} among {self.axes['unit']}.")
        row, found = self.axes["unit"].index(unit), []
        parts = (
            part[row].tolist() for part in (self.values, self.texts, self.positions, self.windows)
        )
        for value, text, pos, window in zip(*parts):
            if text >= 0:
                token, context = self._around(window)
                place = {"value": value, "text": text, "pos": pos, "token": token}
                found.append({**place, "context": context})
        return found

    def text_body(self, high: int) -> str:
        """The best places of the first units.

        Args:
            high: how many lines there are for it.
        """
        shown, rows = max(1, min(_SHOWN, high - 4) // self.values.shape[1]), []
        for unit in self.axes["unit"][:shown]:
            for place in self.examples(unit):
                where = (str(place["text"]), str(place["pos"]), token_label(place["token"]))
                said = (f"{place['value']:.3g}", *where, token_text(place["context"]))
                rows.append((str(unit), *said))
        grid = table(("unit", "value", "text", "pos", "token", "context"), rows, most=high - 4)
        left = len(self.axes["unit"]) - shown
        return "\n" + "\n".join([grid, *([f"... and {left} more units"] if left > 0 else [])])

    def html_body(self) -> str:
        """For each unit its best places, tokens coloured by how active it is there."""
        units = "".join(map(self._unit_html, self.axes["unit"][:_SHOWN]))
        left = len(self.axes["unit"]) - _SHOWN
        return units + (f"<p>... and {left} more units</p>" if left > 0 else "")

    def _unit_html(self, unit: int) -> str:
        row, middle = self.axes["unit"].index(unit), self.windows.shape[2] // 2
        limit = float(self.activations[row].nan_to_num(0, 0, 0).abs().max())
        rows = []
        for rank, place in enumerate(self.examples(unit)):
            around = zip(self.windows[row, rank].tolist(), self.activations[row, rank].tolist())
            line = "".join(
                _coloured(self.words[str(token)], value, limit, here=at == middle)
                for at, (token, value) in enumerate(around)
                if token >= 0
            )
            where = (str(place["text"]), str(place["pos"]))
            kept = Markup(f'<span style="white-space:pre-wrap">{line}</span>')
            rows.append((f"{place['value']:.3g}", *where, kept))
        return html_table(("value", "text", "pos", "context"), rows, title=f"unit {unit}")


def max_activating(
    model: ip.TransformerModel,
    texts: Any,
    *,
    site: str = "post",
    layer: int,
    neuron: int | Sequence[int] | None = None,
    direction: Tensor | None = None,
    head: int | None = None,
    k: int = 10,
    context: int = 8,
    sign: int = 1,
    skip_first: bool = False,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> MaxActivating:
    """For each unit of a site, the tokens of a dataset at which it is largest, with the text around them.

    ```python
    found = ip.max_activating(model, texts, layer=3, neuron=[7, 12])
    found.examples(7)               # value, text, pos, token, context
    found.save("neurons.html")      # tokens coloured by activation
    ```

    Args:
        model: a model of transformers, in eval mode.
        texts: texts, tokens, or what a tokenizer returns; of an iterable each is read once, a part at a time. Or a
            store (`ip.open_store`), whose rows are read instead of running the model.
        site: a kind of site.
        layer: which layer.
        neuron: which elements of the value; by default all.
        direction: [size], or several [n, size]: projections on these are the units, numbered from 0.
        head: for sites with heads, which.
        k: how many places to keep for each.
        context: how many tokens to keep on each side.
        sign: -1 for the smallest values instead of the largest.
        skip_first: leave out the first token of each text (BOS, on which many units are far off).
        batch_size: how many texts run together.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    if sign not in (1, -1) or k < 1 or context < 0:
        raise ValueError(
            f"sign is 1 or -1, k at least 1, context at least 0; got {sign}, {k}, {context}."
        )
    units = [neuron] if isinstance(neuron, int) else None if neuron is None else list(neuron)
    if units == []:
        raise ValueError("neuron is empty: give some, or None for all.")
    if units is not None and direction is not None:
        raise ValueError("give neuron or direction, not both: directions are numbered from 0.")
    found: Found | None = None
    total = tokens = forwards = 0
    for batch, before in in_turn(model, texts, batch_size, prepend_bos, progress):
        values = sign * _values(model, batch, site, layer, head, units, direction)
        counted = torch.ones_like(batch.clean, dtype=torch.bool)
        counted[:, : int(skip_first)] = False
        found = no_places(values.shape[2], k, context) if found is None else found
        numbers = torch.tensor(batch.numbers, device=values.device) + before
        real = torch.ones_like(counted)
        best = best_of(values, batch.clean, numbers, real, counted, k, context)
        found = merged(found, best)
        total, tokens = total + len(batch), tokens + int(counted.sum())
        forwards += int(batch.rows is None)
    if found is None:
        raise ValueError("there are no texts.")
    protocol = {"site": site, "layer": layer, "head": head, "sign": sign, "k": k}
    if direction is not None:
        protocol |= {"directions": len(found["values"]), "digest": digest_of(direction)}
    protocol |= {
        "context": context,
        "skip_first": skip_first,
        "tokens": tokens,
        "forwards": forwards,
    }
    return MaxActivating(
        title=f"The {'largest' if sign > 0 else 'smallest'} activations at {site}, layer {layer}",
        axes={"unit": units or list(range(len(found["values"]))), "rank": list(range(k))},
        unit="activation" if direction is None else "projection on the direction",
        protocol={name: value for name, value in protocol.items() if value is not None},
        evidence=EVIDENCE,
        words=words_of(model, found["tokens"]),
        count=total,
        **parts_of(found, sign),
    )


def digest_of(direction: Tensor) -> str:
    """Tells directions from others, so that results of different ones are not merged."""
    numbers = direction.detach().to("cpu", torch.float32).contiguous().flatten().tolist()
    return hashlib.sha256(array("f", numbers).tobytes()).hexdigest()[:12]


def in_turn(
    model: ip.TransformerModel,
    texts: Any,
    batch_size: int,
    prepend_bos: bool | None,
    progress: ShowProgress,
    share: tuple[int, int] = (0, 1),
) -> Iterator[tuple[ip.Batch, int]]:
    """Batches of texts, or of rows of a store, a part at a time; and how many texts were before their first.

    Args:
        model: a model of transformers.
        texts: as of `max_activating`.
        batch_size: how many run together.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
        share: which of how many: ``(0, 4)`` goes through every fourth part.
    """
    size, before = batch_size * _CHUNK, 0
    if isinstance(texts, ip.ActivationRows):
        texts.must_be_of(model)
        every = _parts(len(texts), size)[share[0] :: share[1]]
        for among in tracked(every, progress, "row"):
            for batch in batches_to_read(
                model, texts, batch_size=batch_size, prepend_bos=prepend_bos, among=among
            ):
                yield batch, 0
        return
    for number, chunk in enumerate(_chunks(model, texts, size, progress)):
        if number % share[1] == share[0]:
            for batch in ip.batches(model, chunk, batch_size=batch_size, prepend_bos=prepend_bos):
                yield batch, before
        before += len(chunk)


def _parts(count: int, size: int) -> list[range]:
    return [range(at, min(at + size, count)) for at in range(0, count, size)]


def _chunks(
    model: ip.TransformerModel, texts: Any, size: int, progress: ShowProgress
) -> Iterator[list[Any]]:
    """Texts, a part at a time."""
    every: Iterable[Any] = [texts] if isinstance(texts, str) else texts
    if isinstance(texts, (Mapping, Tensor)) or _is_one_row(texts):
        every = rows_of(model, texts)
    stream = iter(every)
    with Progress(progress, count(every), "text") as bar:
        while chunk := list(islice(stream, size)):
            yield chunk
            bar.step(len(chunk))


def _is_one_row(texts: Any) -> bool:
    """Whether something is the tokens of one text, in a list."""
    return isinstance(texts, Sequence) and bool(texts) and isinstance(texts[0], int)


def _values(
    model: ip.TransformerModel,
    batch: ip.Batch,
    site: str,
    layer: int,
    head: int | None,
    units: list[int] | None,
    direction: Tensor | None,
) -> Tensor:
    """What the units are at each position, [example, pos, unit]."""
    there = ip.at(site, layer=layer, head=head)
    cache = batch.read(there)
    ((name, whole),) = cache.items()
    point = model.hook_dict[name]
    axes = point.axes
    if point.pos_axis != 1 or len(axes) != (3 if head is None else 4):
        raise ValueError(
            f"max_activating looks at a vector at each position; {site!r} is {list(axes)}. "
            f"{'Say which head: head=0.' if axes[2:3] == ('head',) else 'Choose another site.'}"
        )
    value: Tensor = whole.flatten(2).float()
    found, numbers = units_in(value, name, units, direction)
    if units is not None:
        units[:] = numbers
    return found


def _coloured(word: str, value: float, limit: float, *, here: bool) -> str:
    """A token on the colour of its activation, framed where it is the one that counts."""
    colour = colours.diverging(0.75 * value / (limit or 1.0))
    frame = ";outline:1px solid #1b1f24" if here else ""
    style = f"background:{colours.css(colour)};color:{colours.ink(colour)}{frame}"
    return f'<span style="{style}" title="{value:.3g}">{escape.html(token_text(word))}</span>'
