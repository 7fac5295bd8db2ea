"""`ip.sweep`: one experiment at many places of a model, and how much each place matters."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interpose.errors import NothingMatched, Unsupported
from interpose.models.discovery.anatomy import Tower
from interpose.models.naming import names
from interpose.sweeps.cells import Cell
from interpose.sweeps.execution import PLANS, Task, run
from interpose.sweeps.metrics import Metric, as_metric
from interpose.sweeps.planning import Sizes, Tally
from interpose.sweeps.progress import Progress
from interpose.sweeps.prompts import Batch, batches
from interpose.sweeps.proof import prove, tower_of
from interpose.sweeps.result import SweepResult

_OF_KEYS = ("k", "v", "rot_k", "k_input", "v_input")  # as many heads as keys and values have
AXES = ("site", "layer", "head", "neuron", "pos")


@torch.no_grad()
def sweep(
    model: Any,
    clean: Any,
    corrupt: Any = None,
    *,
    site: str | Sequence[str] = "resid_pre",
    over: str | Sequence[str] = ("layer", "pos"),
    metric: Metric | Callable[[Tensor], Any] | Mapping[str, Any],
    edit: Callable[..., Any] | None = None,
    direction: str = "denoise",
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    neurons: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    plan: str = "auto",
    align: str | None = None,
    prepend_bos: bool | None = None,
    batch_size: int = 16,
    max_rows: int | None = None,
    progress: bool | Callable[[int, int], Any] = True,
) -> SweepResult:
    """Change a model at one place after another, and measure each time.

    ```python
    result = ip.sweep(
        model,
        clean="When Mary and John went to the store, John gave a drink to",
        corrupt="When Mary and John went to the store, Mary gave a drink to",
        over=("layer", "pos"),
        metric=ip.metrics.logit_difference(" Mary", " John"),
    )
    result.values            # [layer, pos]
    print(result.tally)      # what it took
    ```

    Args:
        model: a model of transformers, in eval mode.
        clean: a text, several, tokens [batch, pos], or a mapping of what the module takes.
        corrupt: the texts to compare with, token by token; None for an edit that needs none.
        site: the kind of site (``resid_pre``, ``z``, ``mlp_out``, ...), or several for ``over="site"``.
        over: which axes to go through, of ``site``, ``layer``, ``head``, ``neuron`` and ``pos``.
        metric: one of `ip.metrics`, a function of logits [batch, pos, d_vocab] that gives a number for each
            example, or several by name.
        edit: what to do at each place instead of patching: a class of edit (``ip.zero``), or a function that makes
            one, called with the site's name and ``head=``, ``neuron=``, ``pos=`` as they apply.
        direction: ``denoise`` puts clean values into corrupted runs; ``noise`` corrupted ones into clean runs.
        layers: which; by default all that have the site.
        heads: which; by default all.
        neurons: which features of the site's last axis; needed for that axis.
        positions: which; by default all.
        plan: ``wavefront``, ``batches`` or ``one per cell``, to insist; by default the cheapest that is proven.
        align: ``end`` pads the shorter text of a pair at the left; None refuses pairs of different lengths.
        prepend_bos: as in ``to_tokens``, for texts.
        batch_size: how many examples run together, at most.
        max_rows: how many rows run together, at most; by default as many as fit in memory.
        progress: True for a bar; a function that is called with how many rows are done of how many, and ends the
            sweep with `Cancelled` by returning False.
    """
    return _Sweep(
        model=model,
        sites=[site] if isinstance(site, str) else list(site),
        over=(over,) if isinstance(over, str) else tuple(over),
        metrics=dict(metric) if isinstance(metric, Mapping) else {"metric": metric},
        edit=edit,
        direction=direction,
        chosen={"layer": layers, "head": heads, "neuron": neurons, "pos": positions},
        plan=plan,
        max_rows=max_rows,
    ).run(
        batches(
            model,
            clean,
            corrupt,
            size=_together(model, batch_size),
            prepend_bos=prepend_bos,
            align=align,
        ),
        progress,
        several=isinstance(metric, Mapping),
    )


@dataclass(slots=True, kw_only=True)
class _Sweep:
    """What is to be done, whatever the examples."""

    model: Any
    sites: list[str]
    over: tuple[str, ...]
    metrics: dict[str, Any]
    edit: Callable[..., Any] | None
    direction: str
    chosen: dict[str, Sequence[int] | None]
    plan: str
    max_rows: int | None

    def __post_init__(self) -> None:
        if self.plan not in PLANS:
            raise ValueError(f"plan is one of {', '.join(PLANS)}; got {self.plan!r}")
        if self.direction not in ("denoise", "noise"):
            raise ValueError(f"direction is 'denoise' or 'noise'; got {self.direction!r}")
        if not self.over or set(self.over) - set(AXES) or len(set(self.over)) < len(self.over):
            raise ValueError(f"over names some of {', '.join(AXES)}, each once; got {self.over}")
        if self.model.training:
            raise Unsupported(
                "a sweep compares runs that differ in one place alone, but the model is in training mode. Call "
                "model.eval() first."
            )
        if not self.metrics:
            raise ValueError("metric is an empty mapping; give at least one, by its name.")
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"max_rows is at least 1; got {self.max_rows}")
        self.metrics = {name: as_metric(metric) for name, metric in self.metrics.items()}

    # Cells.

    def axes(self, batch: Batch) -> dict[str, list[Any]]:
        """The entries of each axis, by its name."""
        found: dict[str, list[Any]] = {}
        for axis in self.over:
            if axis == "site":
                found[axis] = list(self.sites)
            elif axis == "layer":
                found[axis] = self._layers()
            elif axis == "head":
                found[axis] = self._picked(axis, self._heads())
            elif axis == "pos":
                found[axis] = self._picked(axis, batch.length)
            elif self.chosen["neuron"] is None:
                raise ValueError("over='neuron' needs neurons=[...]: which features to go through.")
            else:
                found[axis] = list(self.chosen["neuron"])
        if "site" not in self.over and len(self.sites) > 1:
            raise ValueError("several sites need over=('site', ...).")
        return found

    def _layers(self) -> list[int]:
        """The layers that have all the sites."""
        known = self.model.tree.table.sites
        count = self.model.tree.blocks()
        there = [n for n in range(count) if all(names.of_kind(s, n) in known for s in self.sites)]
        wanted = self.chosen["layer"]
        if wanted is not None:
            there = [layer + count if layer < 0 else layer for layer in wanted]
            if any(not 0 <= layer < count for layer in there):
                raise IndexError(f"layers: there are {count}, counted from 0; got {list(wanted)}.")
        if not there:
            raise NothingMatched(f"no layer of {self.model.tree.label} has {self.sites}.")
        for layer in there:
            for site in self.sites:
                self.model.tree.site(names.of_kind(site, layer))  # an error that says why not
        return there

    def _heads(self) -> int:
        layer = self._layers()[0] if "layer" in self.over else None
        kinds = [self.model.tree.site(self._resolved(site, layer)[0]) for site in self.sites]
        without = next((site.canonical for site in kinds if "head" not in site.axes), None)
        if without is not None:
            raise ValueError(f"{without!r} has no axis of heads.")
        cfg = self.model.cfg
        shared = any(site.kind in _OF_KEYS for site in kinds)
        found = cfg.n_key_value_heads if shared else cfg.n_heads
        if found is None:
            raise Unsupported(f"{self.model.tree.label} has no attention heads.")
        return int(found)

    def _picked(self, axis: str, count: int) -> list[int]:
        wanted = self.chosen[axis]
        if wanted is None:
            return list(range(count))
        made = [number + count if number < 0 else number for number in wanted]
        if not made or any(not 0 <= number < count for number in made):
            raise IndexError(f"{axis}: there are {count}, counted from 0; got {list(wanted)}.")
        return made

    def cells(self, axes: Mapping[str, Sequence[Any]]) -> list[Cell]:
        """All combinations of the axes' entries."""
        resolve = functools.cache(self._resolved)
        found = []
        for entries in itertools.product(*axes.values()):
            at = dict(zip(axes, entries))
            site, layer = resolve(at.pop("site", self.sites[0]), at.pop("layer", None))
            found.append(Cell(site=site, layer=layer, **at))
        return found

    def _resolved(self, site: str, layer: int | None) -> tuple[str, int]:
        """The canonical name of a site, and its block; -1 outside."""
        name = site if layer is None else names.of_kind(site, layer)
        found = self.model.tree.site(name)
        return found.canonical, -1 if found.layer is None else found.layer

    # Runs.

    def run(
        self, parts: Sequence[Batch], progress: bool | Callable[[int, int], Any], *, several: bool
    ) -> SweepResult:
        """Run all batches of examples."""
        tower = self._tower()
        axes = self.axes(parts[0])
        if "pos" in self.over and len({part.length for part in parts}) > 1:
            lengths = sorted({part.length for part in parts})
            raise ValueError(
                f"the texts have {lengths[0]} to {lengths[-1]} tokens, so that positions are not the same places. "
                "Sweep over other axes, or give texts of one length."
            )
        cells = self.cells(axes)
        total = sum(len(part.numbers) for part in parts)
        shape = (len(self.metrics), len(cells), total)
        values, tally = torch.zeros(shape), Tally()
        ends = torch.zeros(2, len(self.metrics), total)
        task = self._task(tower, cells, total, tally)
        advance = Progress(progress, len(cells) * total)
        floor = 0.0
        with advance:
            for part in parts:
                found = run(task, part, advance.step)
                numbers = list(part.numbers)
                values[:, :, numbers] = found.values
                ends[0][:, numbers], ends[1][:, numbers] = found.clean, found.corrupt
                floor = max(floor, found.floor)
        return SweepResult(
            axes={name: list(entries) for name, entries in axes.items()},
            metrics=tuple(self.metrics),
            several=several,
            each=values.reshape(len(self.metrics), *(len(e) for e in axes.values()), total),
            clean=ends[0],
            corrupt=None if parts[0].corrupt is None else ends[1],
            direction=self.direction,
            tally=tally,
            noise_floor=floor,
            tokens=self._tokens(parts),
            sites=tuple(self.sites),
            measured=tuple(map(repr, self.metrics.values())),
            edit="" if self.edit is None else getattr(self.edit, "__name__", "an edit"),
        )

    def _tower(self) -> Tower:
        found = tower_of(self.model)
        if found is None:
            why = prove(self.model).batches
            raise Unsupported(f"no sweep can run on {self.model.tree.label}: {why}.")
        return found

    def _task(self, tower: Tower, cells: list[Cell], total: int, tally: Tally) -> Task:
        return Task(
            model=self.model,
            tower=tower,
            cells=cells,
            metrics=list(self.metrics.values()),
            edit=None if self.edit is None else functools.partial(_edit_at, self.edit),
            denoise=self.direction == "denoise",
            plan=self.plan,
            max_rows=self.max_rows,
            total=total,
            tally=tally,
            sizes=Sizes.of(self.model),
        )

    def _tokens(self, parts: Sequence[Batch]) -> list[str] | None:
        """The tokens of the clean text, if there is one alone."""
        if len(parts) > 1 or len(parts[0].numbers) > 1 or self.model._tokenizer_or_none() is None:
            return None
        row = parts[0].clean["input_ids"][0].tolist()
        return [self.model.to_single_str_token(token) for token in row]


def _together(model: Any, size: int) -> int:
    """How many examples run together: one, where rows of a batch are not independent."""
    alone = tower_of(model) is not None and bool(prove(model).batches)
    return min(size, 1) if alone else size


def _edit_at(make: Callable[..., Any], cell: Cell) -> Any:
    """The edit of a cell."""
    fields = {"head": cell.head, "neuron": cell.neuron, "pos": cell.pos}
    return make(cell.site, **{name: value for name, value in fields.items() if value is not None})
