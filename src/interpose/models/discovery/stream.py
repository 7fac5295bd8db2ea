"""The residual stream of one block, found by arithmetic: which values are sums of which others.

From the block's input on, look for values that are the stream so far plus something a module
returned, until the block's output is reached. Multipliers come out of the fit; a norm may stand in
the stream (post-norm blocks); two branches may be added at once (parallel blocks).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from interpose.models.discovery.anatomy import Endpoint
from interpose.models.discovery.record import Array, Event, Value
from interpose.sites.grammar import OUTPUT, Tail
from interpose.sites.lens import Lens


@dataclass(frozen=True, slots=True)
class Spot:
    """A value at a module's input or output, and when it was there."""

    event: Event
    port: str
    value: Value

    @property
    def time(self) -> int:
        """When it was seen."""
        return self.event.start if self.port == "input" else self.event.end


def endpoint_of(event: Event, port: str, value: Value, lens: Lens | None = None) -> Endpoint:
    """Where to find a value of the record in the live model."""
    call = event.call if event.call_counts else None
    tail = Tail(call=call, port=port, leaf=value.leaf)
    return Endpoint(
        path=event.path,
        module=event.module,
        tail=OUTPUT if tail == OUTPUT else tail,
        lens=lens,
        shape=value.shape,
    )


@dataclass(frozen=True, slots=True)
class Addend:
    """What a module returned, and the factor with which the stream took it."""

    spot: Spot
    factor: float


@dataclass(frozen=True, slots=True)
class Step:
    """The stream after something was added: ``total = keep * before + sum(addends)``, then maybe a norm."""

    keep: float
    addends: tuple[Addend, ...]
    total: Spot
    norm: Spot | None

    @property
    def after(self) -> Spot:
        """Where the stream goes on."""
        return self.norm or self.total


def is_norm(event: Event) -> bool:
    """Whether a module normalises, by the name of its class."""
    kind = type(event.module).__name__.lower()
    return ("norm" in kind or kind.endswith("ln")) and len(list(event.module.children())) == 0


def same(a: Value, b: Value) -> bool:
    """Whether two values are the same numbers, in whatever shape."""
    if a.numel != b.numel or not len(a.sketch):
        return False
    return bool(np.array_equal(a.sketch, b.sketch, equal_nan=True))


class StreamSearch:
    """The search through one block's record."""

    def __init__(self, block: Event, inner: list[Event], *, precision: float) -> None:
        self.precision = precision
        self.spots = [
            Spot(event, port, value)
            for event in inner
            for port, found in (("input", event.given), ("output", event.made))
            for value in found
            if value.is_float and len(value.sketch) and np.isfinite(value.sketch).all()
        ]
        self.block = block

    def steps(self, start: Value, end: Value) -> list[Step] | None:
        """The additions that lead from the block's input to its output; None if they do not."""
        spots = [spot for spot in self.spots if spot.value.numel == start.numel]
        last = Spot(self.block, "output", end)
        spots.append(last)
        found = self._from(start, self.block.start, spots, last, 0)
        if found is not None:
            return found
        # Some blocks normalise first and let the stream go on from there.
        before = Spot(self.block, "input", start)
        for norm in self._norms_of(before, spots):
            found = self._from(norm.value, norm.time, spots, last, 0)
            if found is not None:
                return [Step(1.0, (), before, norm), *found]
        return None

    def _from(
        self, now: Value, time: int, spots: list[Spot], last: Spot, depth: int
    ) -> list[Step] | None:
        if depth > 5:
            return None
        for count in (1, 2, 3):
            for spot in _unique(spots, time, now):
                step = self._sum(now, time, spots, spot, count)
                if step is None:
                    continue
                for norm in (None, *self._norms_of(spot, spots)):
                    found = Step(step.keep, step.addends, step.total, norm)
                    if same(found.after.value, last.value):
                        return [found]
                    rest = self._from(found.after.value, found.after.time, spots, last, depth + 1)
                    if rest is not None:
                        return [found, *rest]
        return None

    def _norms_of(self, total: Spot, spots: list[Spot]) -> list[Spot]:
        """Outputs of norms that take this value."""
        events = [
            spot.event
            for spot in spots
            if spot.port == "input" and is_norm(spot.event) and same(spot.value, total.value)
        ]
        return [
            spot
            for spot in spots
            if spot.port == "output" and any(spot.event is event for event in events)
        ]

    def _sum(
        self, now: Value, time: int, spots: list[Spot], total: Spot, count: int
    ) -> Step | None:
        """Explain a value as the stream plus this many outputs."""
        outputs = [
            spot
            for spot in spots
            if spot.port == "output"
            and time < spot.time < total.time + (total.port == "output")
            and spot.event is not self.block
            and not same(spot.value, total.value)
            and not same(spot.value, now)
        ]
        distinct: dict[bytes, Spot] = {}
        for spot in sorted(outputs, key=lambda spot: spot.time):
            distinct[spot.value.sketch.tobytes()] = spot  # the last one is nearest to the sum
        for chosen in itertools.combinations(distinct.values(), count):
            parts = [now.sketch, *(spot.value.sketch for spot in chosen)]
            factors = _fit(parts, total.value.sketch, self.precision)
            if factors is not None:
                addends = tuple(Addend(s, f) for s, f in zip(chosen, factors[1:]))
                return Step(factors[0], addends, total, None)
        return None


def _unique(spots: list[Spot], time: int, now: Value) -> list[Spot]:
    """Later values other than the stream itself, each where it is first seen."""
    found: dict[bytes, Spot] = {}
    for spot in sorted(spots, key=lambda spot: spot.time):
        if spot.time > time and not same(spot.value, now):
            found.setdefault(spot.value.sketch.tobytes(), spot)
    return list(found.values())


def _fit(parts: list[Array], total: Array, precision: float) -> list[float] | None:
    """The factors with which some values add up to another; None if they do not."""
    scale = np.abs(np.stack([*parts, total])).max(axis=0) + 1e-12
    size = np.sqrt((scale**2).mean())
    for part in parts:
        if np.abs(part).max() < 1e-6 * size:
            return None
    ones = [1.0] * len(parts)
    if np.all(np.abs(sum(parts) - total) <= 4 * precision * (scale + 0.1 * size)):
        return ones
    matrix = np.stack(parts, axis=1)
    factors, *_ = np.linalg.lstsq(matrix, total, rcond=None)
    error = np.abs(matrix @ factors - total)
    if np.any(np.abs(factors) < 1e-3) or np.any(error > 16 * precision * (scale + 0.1 * size)):
        return None
    return [float(round(f, 7)) for f in factors]
