"""`ip.import_activations`: activations that others cached, as a store."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import interpose
from interpose.errors import FileError, SiteNotFound
from interpose.models.loading import load
from interpose.models.transformer import TransformerModel
from interpose.progress import Progress, ShowProgress
from interpose.sites.tree import Site
from interpose.store import fingerprint
from interpose.store.filling import fill_segment
from interpose.store.foreign.layouts import ForeignRow, Layout, layout_of
from interpose.store.harvest import SEGMENT, WINDOW, _about_there, _begin
from interpose.store.records import UNKNOWN, About, ModelAbout, Plan, StoredSite, TextsAbout
from interpose.store.remote import local_folder
from interpose.store.rows import Row, rows_of, texts_of
from interpose.store.sources import Shard, digest
from interpose.store.store import Store, open_store
from interpose.store.vectors import Positions, Vectors

_NEAR = 0.05
"""How far, relative to their norm, values may be from those that the model computes: they may have few bits."""


def import_activations(
    path: str | Path,
    *,
    store: str | Path,
    model: TransformerModel | str | None = None,
    texts: Any = None,
    column: str = "text",
    keep_padding: bool = False,
    progress: ShowProgress = True,
) -> Store:
    """A store of activations that another tool has cached: a run of mi-crow, or a data set that SAELens saved.

    ```python
    ip.import_activations("mi_crow_store/runs/first", store="activations", model=model, texts=texts)
    ip.import_activations("cached_by_saelens", store="activations", model=model)
    ```

    Padding is left out: where nobody has kept which values are padding, the texts tell. Ended, it goes on when the
    same call is made again.

    Args:
        path: the folder of the run or of the data set.
        store: the folder of the new store.
        model: the model that made them, or what `load` takes: sites get their names, and the values of a text are
            compared with what it computes. Without it names stay as they are.
        texts: those that were run, as in `harvest`, in that order: what their tokens are. Needs the model.
        column: as in `harvest`.
        keep_padding: whether values may stay of which it is not known that they are no padding.
        progress: as in `harvest`; it counts texts.
    """
    model = load(model) if isinstance(model, str) else model
    if texts is not None and model is None:
        raise ValueError("texts= needs model=, whose tokenizer says what their tokens are.")
    layout = layout_of(Path(path))
    read = _Reading(layout, _tokens(model, texts, column), model, keep_padding=keep_padding)
    first = next(layout.rows(), None)
    if first is None:
        raise FileError(f"{str(path)!r} has no texts.")
    names = {theirs: _site(model, theirs) for theirs in first.values}
    folder = local_folder(store)
    about = _about(layout, read.fingerprint(), first, names, model)
    commits: Mapping[int, Any] = {}
    rows = iter(layout.rows())
    number = at = 0
    with Progress(progress, None, "text") as bar:
        while some := list(islice(rows, about.plan.texts)):
            found = [read.row(row, at + n) for n, row in enumerate(some)]
            if number == 0:
                if model is not None:
                    _must_be_of(model, names, found)
                about = _begin(folder, about, _about_there(folder), [])
                commits = open_store(folder).commits
            rows, last = _peeked(rows)
            if number not in commits:
                tokens = tuple(row for row, _ in found)
                shard = Shard(number=number, first=at, items=tokens, last=last)
                values = {
                    _name(one, theirs): torch.cat([values[theirs] for _, values in found])
                    for theirs, one in names.items()
                }
                placed = [Row(list(row), at + n, 0) for n, row in enumerate(tokens)]
                fill_segment(folder, about, shard, placed, [values])
            at += len(some)
            number += 1
            bar.step(len(some))
    return open_store(folder)


class _Reading:
    """What is kept of each row: its tokens, and its values without padding."""

    def __init__(
        self,
        layout: Layout,
        tokens: list[list[int]] | None,
        model: TransformerModel | None,
        *,
        keep_padding: bool,
    ) -> None:
        self.layout = layout
        self.tokens = tokens
        self.keep_padding = keep_padding
        tokenizer = None if model is None else model._tokenizer_or_none()
        self.left = getattr(tokenizer, "padding_side", "right") == "left"

    def fingerprint(self) -> str:
        """A hash of what is read, and how."""
        how = digest([*(self.tokens or []), f"{self.left} {self.keep_padding}"])
        return digest([self.layout.fingerprint(), how])

    def row(self, row: ForeignRow, number: int) -> tuple[list[int], Mapping[str, Tensor]]:
        """A row, without padding."""
        count = len(next(iter(row.values.values())))
        known = self._known(number, count)
        real = row.real
        if real is None and self.layout.padded and not self.keep_padding:
            if known is None:
                raise FileError(
                    "it was not kept which of these values are padding. Give texts= and model=, which tell; or say "
                    "keep_padding=True, if there is none or it does no harm."
                )
            place = torch.arange(count)
            real = place >= count - len(known) if self.left else place < len(known)
        values = row.values
        tokens = row.tokens
        if real is not None:
            values = {name: one[real] for name, one in values.items()}
            tokens = None if tokens is None else tokens[real]
            count = int(real.sum())
        if known is not None and len(known) != count:
            raise FileError(
                f"text {number} has {len(known)} tokens, and {count} were cached: these are other texts, or were "
                "tokenised otherwise."
            )
        if known is None:
            known = [UNKNOWN] * count if tokens is None else tokens.tolist()
        return known, values

    def _known(self, number: int, count: int) -> list[int] | None:
        if self.tokens is None:
            return None
        if number >= len(self.tokens):
            raise FileError(
                f"there are {len(self.tokens)} texts, and more were cached: these are others."
            )
        return self.tokens[number][:count]  # longer ones were cut off


def _tokens(model: TransformerModel | None, texts: Any, column: str) -> list[list[int]] | None:
    """The tokens of each text."""
    if texts is None or model is None:
        return None
    source = texts_of(model, texts, column)
    items = source.peek(10**9)
    return [row.tokens for row in rows_of(model, items, 0, prepend_bos=None, length=10**9)]


def _site(model: TransformerModel | None, name: str) -> Site | None:
    """The site that a name of theirs means: a name of ours, a module's path, or a path as mi-crow writes it."""
    if model is None:
        return None
    kind = type(model.root).__name__.lower()
    flat = {f"{kind}_{path}".replace(".", "_"): path for path, _ in model.root.named_modules()}
    path = flat.get(name, name)
    for site in model.sites.values():
        if path in site.aliases and site.axes[:2] == ("batch", "pos"):
            return site
    try:
        ((site, _),) = model.select(path)
    except SiteNotFound as error:
        raise FileError(f"{name!r} is not in this model: {error}") from None
    return site


def _name(site: Site | None, theirs: str) -> str:
    return theirs if site is None else site.canonical


def _about(
    layout: Layout,
    hashed: str,
    first: ForeignRow,
    names: Mapping[str, Site | None],
    model: TransformerModel | None,
) -> About:
    sites = {}
    for theirs, site in names.items():
        value = first.values[theirs]
        dtype = str(value.dtype).removeprefix("torch.")
        sites[_name(site, theirs)] = StoredSite(
            shape=tuple(value.shape[1:]),
            dtype=dtype,
            made=dtype,
            axes=() if site is None else site.axes[2:],
            kind=None if site is None else site.kind,
            layer=None if site is None else site.layer,
            aliases=() if site is None else tuple(site.aliases),
        )
    unknown = ModelAbout(name=layout.model, kind="", config="", weights="", dtype="")
    speller = None if model is None else model.tree.speller()
    size = sum(one.nbytes for one in first.values.values())
    return About(
        model=unknown if model is None else fingerprint.of_model(model),
        texts=TextsAbout(
            fingerprint=f"imported:{hashed}",
            count=None,
            tokenizer=None if model is None else fingerprint.of_tokenizer(model),
            prepend_bos=None,
            length=0,
        ),
        sites=sites,
        pos=None,
        plan=Plan(texts=max(1, SEGMENT // max(1, size)), window=WINDOW, batch_tokens=0),
        versions={"interpose": interpose.__version__, "torch": torch.__version__},
        names={} if speller is None else dataclasses.asdict(speller),
    )


def _must_be_of(
    model: TransformerModel,
    names: Mapping[str, Site | None],
    found: Sequence[tuple[list[int], Mapping[str, Tensor]]],
) -> None:
    """Refuse values of another model or of another place in it, as far as one text tells."""
    tokens, values = min(found, key=lambda row: len(row[0]))  # the shortest has most padding
    if not tokens or UNKNOWN in tokens:
        return
    sites = {theirs: site for theirs, site in names.items() if site is not None}
    made = Vectors(model, [site.name for site in sites.values()]).read([tokens], Positions())
    for theirs, site in sites.items():
        here, there = made[site.canonical].float().cpu(), values[theirs].float()
        far = float((here - there).norm() / here.norm()) if here.shape == there.shape else torch.inf
        if not far < _NEAR:
            said = (
                f"shapes {tuple(there.shape)} and {tuple(here.shape)}"
                if far == torch.inf
                else f"they differ by {far:.0%}"
            )
            raise FileError(
                f"the values of {theirs!r} are not those that this model has at {site.name!r}: {said}. They are of "
                "another model, of other texts, or of a copy with processed weights (docs/weights.md "
                "makes one). Without model= names stay as they are, and nothing is compared."
            )


def _peeked(rows: Iterator[ForeignRow]) -> tuple[Iterator[ForeignRow], bool]:
    """The same rows, and whether there are none."""
    first = next(rows, None)
    if first is None:
        return iter(()), True

    def again() -> Iterator[ForeignRow]:
        yield first
        yield from rows

    return again(), False
