"""`ip.features`: what each unit of a site responds to in a dataset, how often and how strongly, and what it does.

The data pass by once. Kept are counts, the strongest places of each unit, a random sample of all its places (of which
groups by value are made), and a random sample of tokens. All of these follow from the data alone, not from the order in
which they come, and parts of the data merge into the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.concepts.counts import Counts
from interpose.concepts.effects import Effects, effects_of
from interpose.concepts.firings import Firings, Tokens, drawn
from interpose.concepts.places import Places
from interpose.concepts.report import Features
from interpose.concepts.samples import Sample
from interpose.detectors.texts import special_ids
from interpose.methods.best_places import words_of
from interpose.methods.max_activating import in_turn
from interpose.models.selection import entries
from interpose.progress import ShowProgress
from interpose.sae.attaching import Attached
from interpose.sae.matching import check_width, site_of
from interpose.sae.sae import SAE
from interpose.sites.tree import Filter

EVIDENCE = (
    "Evidence for what these units respond to in these texts, and for what they add to logits by themselves; not for "
    "what they do in a run, through later layers: edit one to see that."
)
_SEED = 0xFEED


def features(
    model: ip.TransformerModel,
    texts: Any,
    *,
    sae: SAE | Attached | None = None,
    site: Filter = None,
    layer: int | None = None,
    head: int | None = None,
    neuron: int | Sequence[int] | None = None,
    k: int = 20,
    sample: int = 50,
    context: int = 8,
    tokens_sampled: int = 16384,
    skip_first: bool = False,
    skip_special: bool = True,
    batch_size: int = 16,
    part: tuple[int, int] = (0, 1),
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> Features:
    """What units respond to: their strongest tokens, a sample of all, density, histogram, logits, which go together.

    ```python
    found = ip.features(model, store, sae=sae)     # or texts; latents of an autoencoder
    found = ip.features(model, texts, site="post", layer=3)      # or neurons
    found.examples(17)                             # value, row, pos, token, context
    found.save_pages("pages")                      # an index, and a page for each unit
    ```

    The model runs as it is, or not at all where a store has the values.

    Args:
        model: a model of transformers, in eval mode.
        texts: texts, tokens, what a tokenizer returns, or an iterable of them; or a store.
        sae: the autoencoder whose latents are the units; without one the elements of the site's value are.
        site: the site; by default the one that the autoencoder says it is of.
        layer: of the site.
        head: of a site with heads, which; of an autoencoder that takes all of them side by side, leave it out.
        neuron: which units; by default all.
        k: how many of the strongest places to keep of each.
        sample: how many places to keep of each that are drawn at random from all.
        context: how many tokens to keep on each side.
        tokens_sampled: of how many random tokens to keep which units are active together.
        skip_first: leave out the first token of each text (on which many units are far off).
        skip_special: leave out special tokens, such as BOS.
        batch_size: how many texts run together.
        part: which of how many parts of the data, such as (0, 4); the parts' results `merge`.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    if min(k, sample, tokens_sampled) < 1 or context < 0:
        raise ValueError(
            f"k, sample and tokens_sampled are at least 1, context at least 0; got {k}, {sample}, {tokens_sampled}, "
            f"{context}."
        )
    if not 0 <= part[0] < part[1]:
        raise ValueError(f"part is a number and how many there are, such as (0, 4); got {part}.")
    units = _Units(model, sae, site, layer, head, neuron)
    special = torch.tensor(sorted(special_ids(model)) if skip_special else [], dtype=torch.long)
    found: _Found | None = None
    texts_seen = 0
    with units.still():
        for batch, before in in_turn(model, texts, batch_size, prepend_bos, progress, part):
            tokens = _tokens(batch, before, skip_first, special)
            up, down = units.of(batch)
            if found is None:
                found = _Found(len(units.numbers), k, sample, context, tokens_sampled)
            found.add(tokens, up, down)
            texts_seen += len(batch)
    if found is None:
        raise ValueError("there are no texts.")
    protocol: dict[str, Any] = {
        "head": head,
        "k": k,
        "sample": sample,
        "context": context,
        "skip_first": skip_first,
        "skip_special": skip_special,
    }
    return _reported(model, units, found, texts_seen, protocol)


def _reported(
    model: ip.TransformerModel,
    units: _Units,
    found: _Found,
    texts: int,
    protocol: dict[str, Any],
) -> Features:
    """All of it, with what follows from the weights."""
    effects, why = _effects(model, units.rows())
    said = {"site": units.site, "sae": units.sae and repr(units.sae), "no_logits": why, **protocol}
    parts = (found.top, found.drawn, found.bottom, found.sample)
    ids = [part.windows for part in parts]
    if effects is not None:
        ids += [effects.up, effects.down]
    return Features(
        title=f"What {'latents' if units.sae is not None else 'units'} at {units.site} respond to",
        units=units.numbers,
        protocol={name: value for name, value in said.items() if value is not None},
        evidence=EVIDENCE,
        token_count=found.tokens,
        text_count=texts,
        words=words_of(model, torch.cat([one.flatten().long() for one in ids])),
        counts=found.counts,
        strongest=found.top,
        lowest=found.bottom if found.has_bottom else None,
        drawn=found.drawn,
        sample=found.sample,
        effects=effects,
    )


def _effects(model: ip.TransformerModel, rows: Tensor | None) -> tuple[Effects | None, str | None]:
    """What the units do, or why that is not known."""
    if rows is None:
        return None, "what these units write is not a direction of the stream"
    try:
        return effects_of(model, rows), None
    except (ip.Unsupported, AttributeError) as error:
        return None, str(error)


class _Found:
    """What is found so far."""

    def __init__(self, units: int, k: int, sample: int, context: int, tokens: int) -> None:
        self.counts = Counts.none(units)
        self.top = Places.none(units, k, context)
        self.bottom = Places.none(units, k, context)
        self.drawn = Places.none(units, sample, context)
        self.sample = Sample.none(tokens, context)
        self.tokens = 0
        self.has_bottom = False

    def add(self, tokens: Tokens, up: Firings, down: Firings | None) -> None:
        """A batch."""
        counted = up.where(tokens.counted[up.token])
        self.counts.add(counted)
        self.top.offer(counted, counted.value.double(), tokens, up)
        draw = drawn(_SEED, tokens.order[counted.token], counted.unit)
        self.drawn.offer(counted, -draw.double(), tokens, up)
        self.sample = self.sample.merged(self.sample.of_batch(tokens, counted))
        self.tokens += int(tokens.counted.sum())
        if down is not None:
            self.has_bottom = True
            low = down.where(tokens.counted[down.token])
            self.bottom.offer(low, low.value.double(), tokens, down)


class _Units:
    """Which units there are, and how active they are in a batch."""

    def __init__(
        self,
        model: ip.TransformerModel,
        sae: SAE | Attached | None,
        site: Filter,
        layer: int | None,
        head: int | None,
        neuron: int | Sequence[int] | None,
    ) -> None:
        self.model, self.head = model, head
        self.asked = [neuron] if isinstance(neuron, int) else neuron
        if self.asked is not None and not list(self.asked):
            raise ValueError("neuron is empty: give some, or None for all.")
        if isinstance(sae, Attached):
            if site is not None or layer is not None:
                raise ValueError(f"{sae!r}: leave site and layer out.")
            sae, site = sae.sae, sae.given
        self.sae = sae
        self.numbers: list[int] = []
        if sae is not None:
            asked = (site, layer) if layer is not None else site
            there = site_of(model, sae, asked, "hook_name", "site")
            check_width(model, there, sae.d_in, sae)
            self.site = there.name
            self.where = ip.at(self.site, head=head)
            self._count(sae.d_sae)
        else:
            if site is None:
                raise ValueError("say which site: site='post', layer=3; or give sae=.")
            self.where = ip.at(site, layer=layer, head=head)
            self.site = ""

    def _count(self, size: int) -> None:
        every = range(size) if self.asked is None else self.asked
        self.numbers = sorted(entries(list(every), size, "neuron", repr(self.site)))

    @contextmanager
    def still(self) -> Iterator[None]:
        """The autoencoder as it is after training, meanwhile."""
        if self.sae is None or not self.sae.training:
            yield
            return
        self.sae.eval()
        try:
            yield
        finally:
            self.sae.train()

    def of(self, batch: ip.Batch) -> tuple[Firings, Firings | None]:
        """Where they are above zero, and where below, each by how much."""
        cache = batch.read(self.where)
        ((name, value),) = cache.items()
        axes = self.model.hook_dict[name].axes
        if self.model.hook_dict[name].pos_axis != 1 or value.ndim < 3:
            raise ValueError(
                f"features are of a vector at each position; {name!r} is {list(axes)}. Choose another site."
            )
        if self.sae is None and value.ndim > 3 and self.head is None and value.shape[2] > 1:
            raise ValueError(f"{name!r} has heads: say which, head=0.")
        flat = value.flatten(2).flatten(0, 1)
        if not bool(flat.isfinite().all()):
            raise ip.NonFinite(f"{name!r} has values that are not finite.")
        self.site = self.site or name
        if self.sae is not None:
            neuron = None if self.asked is None else torch.tensor(self.numbers)
            with torch.no_grad():
                return Firings.of_codes(self.sae.codes(flat), neuron), None
        if not self.numbers:
            self._count(flat.shape[1])
        flat = flat.float()[:, self.numbers]
        return Firings.of_dense(flat), Firings.of_dense(-flat)

    def rows(self) -> Tensor | None:
        """What each writes into the stream when its value is one, [unit, d_model]."""
        if self.sae is not None:
            kind = self.model.select(self.site)[0][0].axes[-1:]
            written = kind == ("d_model",) and not self.sae.is_transcoder
            return self.sae.rows[self.numbers] if written else None
        block, _, point = self.site.rpartition(".")
        if point == "hook_post" and block.endswith(".mlp"):
            layer = int(block.split(".")[-2])
            out = self.model.W_out
            return out[layer][self.numbers] if out.ndim == 3 else None
        return None


def _tokens(batch: ip.Batch, before: int, skip_first: bool, special: Tensor) -> Tokens:
    """The tokens of a batch, which has no padding."""
    ids = batch.clean.cpu()
    rows, length = ids.shape
    row = torch.tensor(batch.numbers)[:, None].expand(rows, length) + before
    pos = torch.arange(length).expand(rows, length)
    counted = ~torch.isin(ids, special)
    counted[:, : int(skip_first)] = False
    return Tokens(
        ids=ids.flatten(),
        row=row.flatten(),
        pos=pos.flatten(),
        length=length,
        counted=counted.flatten(),
    )
