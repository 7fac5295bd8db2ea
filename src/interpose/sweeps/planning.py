"""Which rows run together, from which position on, and what that costs against one forward per cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from interpose.models.knowledge import known
from interpose.models.spread import must_not_be_spread
from interpose.sweeps.cells import Cell

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

_MOST_BOUNDS = 96  # positions at which groups may begin: more are tried together


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Cells that run together, from a position on."""

    start: int
    cells: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a sweep has computed.

    Attributes:
        plan: ``wavefront``, ``batches`` or ``one per cell``, as far as it ran.
        why: why not a faster plan, if that was asked for or refused.
        forwards: calls of the model, reference runs included.
        token_layers: positions through blocks, reference runs included.
        one_per_cell: token-layers that one forward for each cell would have taken, without reference runs.
    """

    plan: str = ""
    why: str = ""
    forwards: int = 0
    token_layers: int = 0
    one_per_cell: int = 0

    def add(self, forwards: int, token_layers: int) -> None:
        """Count some more."""
        self.forwards += forwards
        self.token_layers += token_layers

    def __add__(self, other: Tally) -> Tally:
        """Both together; of another plan, that one too is named."""
        plans = dict.fromkeys((*self.plan.split(" and "), *other.plan.split(" and ")))
        return Tally(
            plan=" and ".join(filter(None, plans)),
            why=self.why or other.why,
            forwards=self.forwards + other.forwards,
            token_layers=self.token_layers + other.token_layers,
            one_per_cell=self.one_per_cell + other.one_per_cell,
        )

    @property
    def work(self) -> str:
        """How much was computed, in words."""
        share = self.one_per_cell / max(1, self.token_layers)
        fewer = f" ({share:.1f}x fewer)" if share > 1.05 else ""
        return (
            f"{self.token_layers:,} token-layers, against {self.one_per_cell:,} of one forward per cell{fewer}"
            + (f"; {self.why}" if self.why else "")
        )

    @property
    def protocol(self) -> dict[str, Any]:
        """What the protocol of a result says of it."""
        return {"forwards": self.forwards, "plan": f"{self.plan}, {self.work}"}

    def __str__(self) -> str:
        return f"{self.plan}: {self.forwards} forwards, {self.work}"


def groups(
    cells: Sequence[Cell], *, first: int, length: int, layers: int, batch: int, least: int
) -> list[Group]:
    """Cells in groups of neighbouring positions, such that the whole costs least.

    A group is computed from its first position on, for all its cells. More groups compute fewer positions, and pay more
    often for a pass.

    Args:
        cells: by number; all with a position, or all without one.
        first: the first position at which anything can change; cells before it are left out.
        length: how many positions there are.
        layers: how many blocks.
        batch: how many examples.
        least: how many tokens a pass costs at least.
    """
    if not cells or first >= length:
        return []
    if cells[0].pos is None:
        return [Group(start=first, cells=tuple(range(len(cells))))]
    work = [0] * length
    for cell in cells:
        assert cell.pos is not None
        work[cell.pos] += (layers - cell.layer) * batch
    starts = [place for place in range(first, length) if work[place]]
    if not starts:
        return []
    bounds = _cheapest(starts, work, length, layers * least, layers * batch)
    found = []
    for start, end in zip(bounds, [*bounds[1:], length]):
        numbers = (n for n, cell in enumerate(cells) if start <= (cell.pos or 0) < end)
        found.append(Group(start=start, cells=tuple(numbers)))
    return found


def _cheapest(
    starts: Sequence[int], work: Sequence[int], length: int, per_pass: int, per_prefix: int
) -> list[int]:
    """Where groups begin, by the least sum of work: a shortest way over the positions."""
    step = -(-len(starts) // _MOST_BOUNDS)
    places = list(starts[::step])
    sums = [0]
    for amount in work:
        sums.append(sums[-1] + amount)
    ends = [*places[1:], length]
    best: list[tuple[float, list[int]]] = [(0.0, [])] * (len(places) + 1)
    for at in range(len(places) - 1, -1, -1):
        start = places[at]
        options = []
        for last in range(at, len(places)):
            inside = sums[ends[last]] - sums[start]
            cost = per_pass + inside * (length - start) + per_prefix * start
            options.append((cost + best[last + 1][0], [start, *best[last + 1][1]]))
        best[at] = min(options, key=lambda option: option[0])
    return best[0][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What decides how much memory a row takes."""

    width: int
    inner: int
    heads: int
    layers: int
    bytes: int
    device: torch.device

    @staticmethod
    def of(model: TransformerModel) -> Sizes:
        """Those of a model, looked for once."""
        must_not_be_spread(model.root, "a sweep", "each would plan by the memory it has")
        parameter = next(model.module.parameters())
        size, device = parameter.element_size(), parameter.device

        def find_out() -> Sizes:
            cfg = model.cfg
            width = cfg.d_model or 1
            inner, heads = cfg.d_mlp or 4 * width, cfg.n_heads or 1
            layers = cfg.n_layers or 1
            return Sizes(
                width=width, inner=inner, heads=heads, layers=layers, bytes=size, device=device
            )

        return known(model, ("sizes", size, device), find_out, tried=False)

    @property
    def least_tokens(self) -> int:
        """How many tokens take a block as long as a single one, roughly: below, launches and weights cost the time."""
        weights = 4 * self.width**2 + 3 * self.width * self.inner
        if self.device.type == "cuda":
            a_launch = 8e-4 if weights < 5e7 else 2e-4  # behind a large block's arithmetic it hides
            per_byte, per_product = 3e-13, 2e-15 if self.bytes < 4 else 2e-14
        else:
            a_launch, per_byte, per_product = 4e-4, 1e-10, 1e-11
        alone = max(a_launch, weights * self.bytes * per_byte)
        return round(alone / (2 * weights * per_product))

    def most_rows(self, *, positions: int, length: int, logits: int) -> int:
        """How many rows fit in memory at a time, by what a block and the logits take for each.

        Args:
            positions: how many are computed.
            length: how many there are, with those of the KV cache.
            logits: how many numbers of them.
        """
        return max(1, int(_room(self.device) // self._a_row(positions, length, logits)))

    def most_examples(self, *, length: int, logits: int) -> int:
        """How many examples fit together: with a row for each, and what their reference runs keep.

        Args:
            length: how many positions they have.
            logits: how many numbers of them a row has.
        """
        # The streams before all blocks, keys and values, of both runs, and values to patch.
        kept = 8 * self.layers * length * self.width * self.bytes + 2 * logits * (self.bytes + 4)
        each = kept + self._a_row(length, length, logits)
        return max(1, int(_memory(self.device) // each))

    def _a_row(self, positions: int, length: int, logits: int) -> int:
        """Bytes that a pass takes for each row."""
        block = 12 * self.width + 4 * self.inner + 3 * self.heads * length
        return positions * block * self.bytes + logits * (self.bytes + 4)  # and in float32


def _room(device: torch.device) -> float:
    """Bytes that a pass may take: more than so many tokens together are no faster."""
    if device.type == "cuda":
        return min(0.4 * torch.cuda.mem_get_info(device)[0], 2**34)
    return 2**27  # more leaves the caches, and the allocator hands out fresh pages for each tensor


def _memory(device: torch.device) -> float:
    """Bytes that examples which run together may take."""
    if device.type == "cuda":
        return min(0.3 * torch.cuda.mem_get_info(device)[0], 2**34)
    return 2**31
