"""From a selector to the part of one value that it means: blocks that can be taken out of it and put back.

Most selections are one block: some indices along some axes. Where positions differ by row (a text, a
mask), rows with the same number of them are a block together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from interpose.edits.positions import Chosen, along, choose, pos_axis, wanted_positions
from interpose.engine.points import HookPoint, Window
from interpose.errors import NothingSelected, Unsupported
from interpose.models.batching import packed
from interpose.sites.axes import position_axis

_IMAGE = (4, 5)
"""How many axes an image has, if its axes have no names: the second is its channels."""


def unit_axis(axes: tuple[str, ...], ndim: int) -> int:
    """The axis that counts units: the last, or the channels of an image."""
    return 1 if not axes and ndim in _IMAGE else ndim - 1


def batch_axis(axes: tuple[str, ...]) -> int | None:
    """The axis of rows: by its name, or the first."""
    if axes:
        return axes.index("batch") if "batch" in axes else None
    return 0


def check_axes(where: Any, name: str, axes: tuple[str, ...]) -> None:
    """Refuse words that a site cannot mean, where its axes are known."""
    there = {"head": "head" in axes, "rows": "batch" in axes}
    there["pos"] = there["phase"] = position_axis(axes) is not None
    words = {"head": "heads", "rows": "rows", "pos": "positions", "phase": "positions"}
    for word, known in there.items():
        if axes and getattr(where, word) is not None and not known:
            raise ValueError(f"{where.label}: {name!r} has no axis of {words[word]}: it is {axes}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Indices along some axes of a value of a given shape.

    ``index`` has them by axis. ``by_row`` [rows, n] are indices along the axis ``pos`` that differ by
    row; then ``among`` are all rows of the selection, of which other blocks may have some. ``ordinal`` and
    ``rank`` say which of the ``total`` selected positions each one here is.
    """

    shape: torch.Size
    index: Mapping[int, Tensor] = field(default_factory=dict)
    by_row: Tensor | None = None
    among: Tensor | None = None
    batch: int | None = None
    pos: int | None = None
    ordinal: Tensor | None = None
    rank: Tensor | None = None
    total: int | None = None

    @property
    def count(self) -> int:
        """How many positions each row has."""
        found = self.by_row if self.by_row is not None else self.index.get(self.pos)  # type: ignore[arg-type]
        return 0 if found is None else found.shape[-1]

    @property
    def rows(self) -> Tensor | None:
        """The rows it is of; None for all."""
        return None if self.batch is None else self.index.get(self.batch)

    def sizes(self) -> torch.Size:
        """The shape of what `take` gives."""
        sizes = list(self.shape)
        for axis, found in self.index.items():
            sizes[axis] = len(found)
        if self.by_row is not None and self.pos is not None:
            sizes[self.pos] = self.by_row.shape[1]
        return torch.Size(sizes)

    def take(self, value: Tensor) -> Tensor:
        """This part of a tensor; an axis of another size than the value's is left as it is."""
        for axis, found in self.index.items():
            if axis == self.batch:
                value = self.own_rows(value, axis)
            elif value.shape[axis] == self.shape[axis]:
                value = value.index_select(axis, found.to(value.device))
        if self.by_row is not None and value.shape[self.pos] == self.shape[self.pos]:  # type: ignore[index]
            value = self._gathered(value, self.by_row)
        return value

    def own_rows(self, value: Tensor, axis: int) -> Tensor:
        """Its rows of a tensor that has all of the value's, or all of the selection's, along an axis."""
        found = self.rows
        if found is not None and value.shape[axis] == self.shape[self.batch]:  # type: ignore[index]
            return value.index_select(axis, found.to(value.device))
        if found is not None and self.among is not None and value.shape[axis] == len(self.among):
            places = torch.searchsorted(self.among, found)
            return value.index_select(axis, places.to(value.device))
        return value

    def has_place_for_rows(self, count: int) -> bool:
        """Whether a tensor of so many rows can be told to belong to it: not by their number in this block alone."""
        assert self.batch is not None
        own = self.sizes()[self.batch] if self.among is None else len(self.among)
        return count in (1, own, self.shape[self.batch])

    def _gathered(self, value: Tensor, places: Tensor) -> Tensor:
        """Of each row of a tensor its own places [rows, n] along the axis of positions."""
        assert self.batch is not None
        assert self.pos is not None
        places = places.to(value.device)
        rows = torch.arange(len(places), device=value.device)
        if value.shape[self.batch] == 1:
            rows = torch.zeros_like(rows)
        front = value.movedim((self.batch, self.pos), (0, 1))
        return front[rows[:, None], places].movedim((0, 1), (self.batch, self.pos))

    def at_positions(self, value: Tensor, found: Tensor) -> Tensor:
        """Of a tensor with positions of its own: those given, [n] or [rows, n]."""
        assert self.pos is not None
        if found.ndim == 1:
            return value.index_select(self.pos, found.to(value.device))
        assert self.batch is not None
        return self._gathered(self.own_rows(value, self.batch), found)

    def put(self, value: Tensor, part: Tensor) -> Tensor:
        """A value with this part replaced."""
        index = {axis: found.to(value.device) for axis, found in self.index.items()}
        if self.by_row is None:
            return _copied(value, part, index)
        assert self.batch is not None
        assert self.pos is not None
        rows, own = index.pop(self.batch), self.by_row.to(value.device)
        inner = self._gathered(value.index_select(self.batch, rows), own)
        inner = _copied(inner, part, index).movedim((self.batch, self.pos), (0, 1))
        front = value.movedim((self.batch, self.pos), (0, 1))
        return front.index_put((rows[:, None], own), inner).movedim((0, 1), (self.batch, self.pos))


def _copied(value: Tensor, part: Tensor, index: Mapping[int, Tensor]) -> Tensor:
    if not index:
        return part
    (axis, found), *rest = index.items()
    if (
        len(found) == value.shape[axis]
    ):  # each once and in order: all of them, as in a step of one token
        return _copied(value, part, dict(rest))
    inner = _copied(value.index_select(axis, found), part, dict(rest))
    return value.index_copy(axis, found, inner)


@dataclass(frozen=True, slots=True)
class Selected:
    """What a selector means of one value: blocks, and a mask of what is spared all the same."""

    blocks: list[Block]
    spared: Tensor | None = None


def find(where: Any, value: Tensor, hook: HookPoint) -> Selected | None:
    """The part of a value that a selector means; None (and ``hook.idle``) if this pass has none."""
    return _Search(where, value, hook).selected()


class _Search:
    def __init__(self, where: Any, value: Tensor, hook: HookPoint) -> None:
        self.where = where
        self.value = value
        self.hook = hook
        self.batch = batch_axis(hook.axes)
        self.count = value.shape[self.batch] if self.batch is not None and value.ndim else 1
        excluded = where.exclude or ()
        excluded = [ex for ex in excluded if ex.covers(hook.canonical, hook.model.tree)]
        self.simple = [ex for ex in excluded if len(_words(ex)) == 1]
        self.corners = [ex for ex in excluded if len(_words(ex)) > 1]

    def selected(self) -> Selected | None:
        """Everything at once."""
        self._refuse_packed()
        check_axes(self.where, self.hook.name, self.hook.axes)
        index = {
            axis: found for word in ("rows", "head", "neuron") for axis, found in self._by(word)
        }
        blocks = self._with_positions(index)
        if blocks is None:
            return None
        spared = self._spared() if self.corners else None
        if spared is not None:
            whole = spared.expand(self.value.shape)
            if all(bool(block.take(whole).all()) for block in blocks):
                raise self._nothing("all of it is excluded")
        return Selected(blocks, spared)

    def _refuse_packed(self) -> None:
        """Rows and positions of packed texts are other numbers, unless each text comes by itself."""
        here = packed._HERE.get()
        words = _words(self.where).union(*(_words(ex) for ex in self.where.exclude or ()))
        if here is None or words.isdisjoint({"rows", "pos"}):
            return
        alone = len(here.spans) == 1 and here.spans[0].first == self.hook.offset
        if "rows" in words or not alone:
            raise Unsupported(
                f"{self.where.label}: generate_batch packs texts behind one another, so rows and positions "
                "mean nothing there. Edits with pos or phase, given to it as hooks, count in each text; so "
                "do others with per_request=True."
            )

    def _axis(self, word: str) -> int:
        axes, value = self.hook.axes, self.value
        if word == "head" and "head" in axes:
            return axes.index("head")
        if word == "neuron" and value.ndim:
            return unit_axis(axes, value.ndim)
        if word == "rows" and self.batch is not None and value.ndim:
            return self.batch
        what = {"head": "heads", "rows": "rows"}.get(word, "units")
        raise ValueError(
            f"{self.where.label}: {self.hook.name!r} has no axis of {what}: it is "
            f"{axes or tuple(value.shape)}."
        )

    def _some(self, where: Any, word: str) -> Tensor:
        axis = self._axis(word)
        given = getattr(where, word)
        return along(given, self.value.shape[axis], word, self.where.label, self.hook.name)

    def _by(self, word: str) -> list[tuple[int, Tensor]]:
        """The axis of a word and the places along it, if that is less than all."""
        gone = [ex for ex in self.simple if word in _words(ex)]
        if getattr(self.where, word) is None and not gone:
            return []
        axis = self._axis(word)
        found = torch.arange(self.value.shape[axis], device="cpu")
        if getattr(self.where, word) is not None:
            found = self._some(self.where, word)
        for ex in gone:
            found = found[~torch.isin(found, self._some(ex, word))]
        if not len(found):
            raise self._nothing(f"no {word} is left")
        return [(axis, found)]

    def _nothing(self, why: str) -> NothingSelected:
        named = f" {self.hook.axes}" if self.hook.axes else ""
        return NothingSelected(
            f"{self.where.label} selects nothing of {self.hook.name!r}, which is "
            f"{tuple(self.value.shape)}{named}: {why}."
        )

    # Positions.

    def _window(self, axis: int) -> Window:
        return self.hook.window(self.value.shape, axis)

    def _with_positions(self, index: dict[int, Tensor]) -> list[Block] | None:
        where, shape = self.where, self.value.shape
        gone = [ex for ex in self.simple if "pos" in _words(ex)]
        if "pos" not in _words(where) and not gone:
            axis = _known_pos_axis(self.hook, self.value)
            return [Block(shape=shape, index=index, batch=self.batch, pos=axis)]
        axis = pos_axis(self.value, self.hook)
        chosen = self._chosen(where, axis, gone)
        rows = index.get(self.batch) if self.batch is not None else None
        about: dict[str, Any] = {"shape": shape, "batch": self.batch, "pos": axis}
        blocks = []
        if isinstance(chosen, Chosen):
            if len(chosen.places):
                index = {axis: chosen.places, **index}
                about |= {"ordinal": chosen.ordinal, "rank": chosen.rank, "total": chosen.total}
                blocks = [Block(index=index, **about)]
        else:
            rows = torch.arange(self.count, device="cpu") if rows is None else rows
            about["among"] = rows
            groups: dict[tuple[int, int | None], list[int]] = {}
            for row in rows.tolist():
                groups.setdefault((len(chosen[row].places), chosen[row].total), []).append(row)
            for (count, total), some in groups.items():
                if count:
                    kept = [torch.stack(same) for same in zip(*(chosen[row][:3] for row in some))]
                    by_row = dict(zip(("by_row", "ordinal", "rank"), kept))
                    inner = {**index, self.batch or 0: torch.tensor(some, device="cpu")}
                    blocks.append(Block(index=inner, total=total, **by_row, **about))  # type: ignore[arg-type]
        if not blocks:
            self._note_idleness(axis)
        return blocks or None

    def _note_idleness(self, axis: int) -> None:
        """Nothing of it in this pass: an error if that was the whole text."""
        window = self._window(axis)
        if window.is_all:
            raise self._nothing("no position is left")
        self.hook.idle = (
            f"no position that it selects came by. The last forward pass had positions "
            f"{window.first} to {window.end - 1}"
            + ("." if window.prompt is None else f", of a prompt of {window.prompt}.")
        )

    def _chosen(self, where: Any, axis: int, gone: list[Any]) -> Chosen | list[Chosen]:
        """The positions of a selector that are here, for all rows or for each."""
        window, hook = self._window(axis), self.hook
        wanted = wanted_positions(where, where.pos, window, hook, self.value, self.count)
        out = [self._excluded(ex, axis) for ex in gone]
        counted = where.pos is not None
        if isinstance(wanted, Tensor) and all(isinstance(one, Tensor) for one in out):
            flat = torch.cat(out) if out else None  # type: ignore[arg-type]
            return choose(wanted, flat, window, where, counted=counted)
        if self.batch is None:
            raise ValueError(
                f"{where.label}: {hook.name!r} has no axis of rows, so positions by row mean nothing."
            )
        found = []
        for row in range(self.count):
            mine = wanted if isinstance(wanted, Tensor) else wanted[row]
            away = [one if isinstance(one, Tensor) else one[row] for one in out]
            flat = torch.cat(away) if away else None
            found.append(choose(mine, flat, window, where, counted=counted))
        return found

    def _excluded(self, ex: Any, axis: int) -> Tensor | list[Tensor]:
        """Positions in the text that an exclusion means."""
        window = self._window(axis)
        found = wanted_positions(ex, ex.pos, window, self.hook, self.value, self.count)
        if isinstance(found, Tensor):
            return choose(found, None, window, ex, counted=False).places + window.first
        return [choose(one, None, window, ex, counted=False).places + window.first for one in found]

    def _spared(self) -> Tensor:
        """A mask, as far as axes matter, of what exclusions of several words mean."""
        ndim, device = self.value.ndim, self.value.device
        spared = torch.zeros([1] * ndim, dtype=torch.bool, device=device)
        for ex in self.corners:
            corner = torch.ones([1] * ndim, dtype=torch.bool, device=device)
            for word in _words(ex):
                if word != "pos":
                    axis = self._axis(word)
                    corner = corner & self._mask({axis: self._some(ex, word)})
                    continue
                axis = pos_axis(self.value, self.hook)
                found, first = self._excluded(ex, axis), self._window(axis).first
                if isinstance(found, Tensor):
                    corner = corner & self._mask({axis: found - first})
                    continue
                own = torch.zeros(self.value.shape, dtype=torch.bool, device=device)
                for row, places_ in enumerate(found):
                    picked = {self.batch: torch.tensor([row]), axis: places_ - first}
                    own = own | self._mask(picked)  # type: ignore[arg-type]
                corner = corner & own
            spared = spared | corner
        return spared

    def _mask(self, index: Mapping[int, Tensor]) -> Tensor:
        mask = torch.ones([1] * self.value.ndim, dtype=torch.bool, device=self.value.device)
        for axis, found in index.items():
            line = torch.zeros(self.value.shape[axis], dtype=torch.bool, device=self.value.device)
            line[found.to(line.device)] = True
            mask = mask & line.reshape([-1 if i == axis else 1 for i in range(self.value.ndim)])
        return mask


def _known_pos_axis(hook: HookPoint, value: Tensor) -> int | None:
    try:
        return pos_axis(value, hook)
    except ValueError:
        return None


def _words(where: Any) -> set[str]:
    """The axes that a selector speaks of; position and phase are one."""
    found = {word for word in ("rows", "head", "neuron") if getattr(where, word) is not None}
    return found | ({"pos"} if where.pos is not None or where.phase is not None else set())
