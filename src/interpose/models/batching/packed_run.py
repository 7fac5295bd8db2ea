"""A scope around forward passes over packed tokens, and the labelled rows it keeps of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from interpose.engine.cache import Cache
from interpose.engine.capture_run import other_names
from interpose.engine.hooks import Engine, Hook
from interpose.engine.listeners import Capturing
from interpose.engine.scope import Binding, Scope
from interpose.errors import Unsupported
from interpose.models.batching.labelled_rows import Labels
from interpose.models.batching.packed import (
    Apart,
    ApartDetector,
    Packed,
    apart,
    here_and_now,
    looks_at_positions,
)
from interpose.sites.axes import TEXT, key_axis, position_axis, sequence_of
from interpose.sites.tree import Filter, Site
from interpose.taps.context import current

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

_DRAWN = ("unembed_in", "unembed_out")
"""Kinds of sites after transformers' cut to the rows that a token is drawn from."""


class Choice(NamedTuple):
    """Which rows of a pass are kept, where in the value they are, and whose they are."""

    places: list[int]
    labels: Labels


class Ledger:
    """Chooses what is kept of each pass, for all sites alike: real rows, and each position of a request once."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._here: Packed | None = None
        self._made: dict[bool, Choice] = {}

    def choice(self, here: Packed, drawn: bool) -> Choice:
        """Of the rows under way; ``drawn``: only those that a token is drawn from."""
        if here is not self._here:
            self._here, self._made = here, {}
        if drawn not in self._made:
            chosen = [span.start + span.length - 1 for span in here.drawing]
            places = list(range(len(chosen))) if here.cut else chosen
            if not drawn:
                places = chosen = self._fresh(here)
            self._made[drawn] = Choice(places, here.labels(chosen))
        return self._made[drawn]

    def _fresh(self, here: Packed) -> list[int]:
        chosen: list[int] = []
        for span in here.spans:
            # An evicted request starts over: what it repeats is known already.
            known = self._known.get(span.request, 0)
            chosen += range(span.start + max(0, known - span.first), span.start + span.length)
            self._known[span.request] = max(known, span.first + span.length)
        return chosen


class Column:
    """Keeps the rows of one site."""

    def __init__(self, site: Site, ledger: Ledger, device: str | torch.device | None) -> None:
        self.site = site
        self.ledger = ledger
        self.device = device
        self.drawn = site.kind in _DRAWN
        self.parts: list[Tensor] = []
        self.labels: list[Labels] = []
        self._last: Packed | None = None

    def cut(self, value: Tensor, name: str, axes: tuple[str, ...] = ()) -> Tensor:  # noqa: ARG002
        """The rows of a value that are kept, as a copy: [row, ...]."""
        here, site = here_and_now(), self.site
        if here is self._last:
            raise Unsupported(
                f"{name!r} has several values in one forward pass; say which: '{site.stem}#0'."
            )
        self._last = here
        words, shape = list(site.axes), tuple(value.shape)
        pos = position_axis(site.axes)
        assert pos is not None  # `_checked` has seen to it
        length = len(here.spans) if here.cut and self.drawn else here.length
        sizes = dict(zip(words, shape))
        if len(shape) != len(words) or shape[pos] < length or sizes.get("batch", 1) != 1:
            raise Unsupported(
                f"{name!r} is {shape} [{', '.join(words)}] in a pass over {here.length} packed tokens: "
                "its rows cannot be told apart. Capture it with run_with_cache instead."
            )
        rows, words[pos] = value.detach(), "row"
        if "batch" in words:
            rows = rows.select(words.index("batch"), 0)
            words.remove("batch")
        rows = rows.movedim(words.index("row"), 0)
        places, labels = self.ledger.choice(here, self.drawn)
        self.labels.append(labels)
        if places == list(range(len(places))):
            rows = rows[: len(places)]
        else:
            rows = rows[torch.tensor(places, dtype=torch.long, device=rows.device)]
        moved = rows if self.device is None else rows.to(self.device)
        return moved.clone(memory_format=torch.contiguous_format) if moved is rows else moved

    def keep(self, site: Site, name: str, leaf: Any, part: Tensor, *_: Any) -> None:  # noqa: ARG002
        """Take what was cut."""
        self.parts.append(part)

    def done(self, listener: Capturing) -> None:
        """Nothing: the next pass comes."""

    def label(self) -> Labels:
        """The labels of all rows kept."""
        names = ("request", "position", "token")
        return Labels(**{n: torch.cat([getattr(one, n) for one in self.labels]) for n in names})


class PackedRun(Scope):
    """A scope around forward passes over packed tokens, that also keeps the rows of some sites."""

    def __init__(
        self,
        model: TransformerModel,
        wanted: Filter,
        hooks: Sequence[Hook] = (),
        *,
        per_request: bool = False,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(model, [apart(hook, always=per_request) for hook in hooks])
        self.columns: list[Column] = []
        ledger = Ledger()
        if wanted is not None:
            reads = Binding(Engine("the cache"), "fwd")
            for site, outright in model.select(wanted):
                column = Column(_checked(site, "capture"), ledger, device)
                self.columns.append(column)
                reads.listeners.append(Capturing(model, site, self, outright=outright, sink=column))
            self.bindings.append(reads)
        self._refuse()

    def _refuse(self) -> None:
        """Refuse hooks that packed rows would mislead, also those of scopes around and of the model itself."""
        for hook, site in self.heard():
            if key_axis(site.axes) is not None:
                _checked(site, hook.label)
            if not isinstance(hook, (Apart, ApartDetector)) and looks_at_positions(hook):
                raise Unsupported(
                    f"{hook.label} means positions in a text, and rows of packed texts are called by "
                    "other numbers. Give it to generate_batch itself (hooks=[...]), which tells the "
                    "texts apart for it."
                )

    def heard(self) -> Iterator[tuple[Hook, Site]]:
        """Every hook that will run, with its sites."""
        for scope in (*current().scopes, self):
            if isinstance(scope, Scope) and scope.model.root is self.model.root:
                for binding in scope.bindings:
                    for listener in binding.listeners:
                        yield binding.hook, listener.site
        for handle in self.model.list_hooks():
            for name in handle.canonicals:
                yield handle.hook, self.model.tree.site(name)

    def cache(
        self, prompts: Mapping[int, list[int]], generated: Mapping[int, list[int]]
    ) -> tuple[Cache, dict[str, Labels], dict[str, tuple[str, ...]]]:
        """What was kept, by name, and the labels and axes of it; proven against the texts."""
        kept = {column.site.name: column for column in self.columns if column.parts}
        self.columns = []
        labels: dict[str, Labels] = {}
        known: dict[Any, Labels] = {}
        for name, column in kept.items():
            same = (column.drawn, *map(id, column.labels))
            if same not in known:
                known[same] = column.label()
                _prove(column, known[same], prompts, generated)
            labels[name] = known[same]
        found: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        for name, column in kept.items():
            found[name] = torch.cat(column.parts)
            column.parts = []
            for other in other_names(self.model.tree, column.site, name, column.site.tail.leaf):
                aliases.setdefault(other, name)
        axes = {
            name: tuple(
                axis for axis in column.site.axes if axis != "batch" and sequence_of(axis) is None
            )
            for name, column in kept.items()
        }
        cache = Cache(found, aliases=aliases, spelling=self.model.tree.speller())
        return cache, labels, axes


def _prove(
    column: Column,
    rows: Labels,
    prompts: Mapping[int, list[int]],
    generated: Mapping[int, list[int]],
) -> None:
    """Every token that was fed has its row, once, and the row has that token."""
    found = dict(zip(zip(rows.request.tolist(), rows.position.tolist()), rows.token.tolist()))
    wanted = {}
    for number, prompt in prompts.items():
        fed = (prompt + generated[number])[:-1]
        first = len(prompt) - 1 if column.drawn else 0
        wanted.update({(number, first + i): token for i, token in enumerate(fed[first:])})
    if found != wanted or len(rows.request) != len(wanted):
        raise RuntimeError(
            f"the rows of {column.site.name!r} do not add up to the texts: {len(rows.request)} for "
            f"{len(wanted)} tokens. This is a bug of interpose, or of it with this version of "
            "transformers; please report it."
        )


def _checked(site: Site, who: str) -> Site:
    """A site whose values have a row per token, or an error."""
    if key_axis(site.axes) is not None:
        raise Unsupported(
            f"{who}: {site.name!r} is [{', '.join(site.axes)}]. Packed queries and keys are of many "
            "texts at once, so that is no text's pattern. Run the texts by themselves: "
            "model.run_with_cache(text) or model.generate(text)."
        )
    at = position_axis(site.axes)
    if at is None or sequence_of(site.axes[at], site.canonical) not in TEXT:
        raise Unsupported(
            f"{who}: {site.name!r} has no axis of positions that is known "
            f"({', '.join(site.axes) or 'a module of which only the path is known'}), so its rows belong "
            "to no request. Use the name of what it means, such as 'blocks.0.hook_resid_post' "
            "(list them: model.sites)."
        )
    return site
