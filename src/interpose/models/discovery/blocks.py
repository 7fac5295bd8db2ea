"""One block of a stack: its attention, its residual stream, and what the branches of it are called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from interpose.models.discovery import feedforward, heads
from interpose.models.discovery.anatomy import Attention, Block, Endpoint, Shape
from interpose.models.discovery.norm_kind import describe as describe_norm
from interpose.models.discovery.record import Event, KernelCall, Recorder, Value, in_and_out, inside
from interpose.models.discovery.stream import (
    Addend,
    Spot,
    Step,
    StreamSearch,
    endpoint_of,
    is_norm,
    same,
)
from interpose.models.reach.lenses import InPlace, Times
from interpose.sites.lens import Lens

_MIXERS = re.compile(
    r"mamba|mixer|ssm|conv|linear_attn|recurrent|delta|rwkv|lstm|retention|attn|attention"
)

_NOT_FINITE = (
    "the probe's values are not finite here (NaN or Inf), though every weight it used was: the parts "
    "of this block cannot be told. model.probe(inputs) with inputs that stay finite finds them"
)


class BlockReader:
    """Reads one block's record."""

    def __init__(self, index: int, event: Event, recorder: Recorder, precision: float) -> None:
        self.event = event
        self.inner = inside(event.path, recorder.events)
        # A block called several times is read by its first call.
        self.inner = [e for e in self.inner if event.start < e.start < event.end]
        self.softmaxes = recorder.softmaxes
        self.kernels = [k for k in recorder.kernels if event.start < k.time < event.end]
        self.stream = StreamSearch(event, self.inner, precision=precision)
        pair = in_and_out(event)
        assert pair is not None, "a block of a stack takes and gives values of one shape"
        self.pre, self.post = pair
        self.block = Block(index=index, path=event.path, module=event.module, shape=self.pre.shape)

    def read(self) -> Block:
        """All of it."""
        block, event = self.block, self.event
        block.sites["resid_pre"] = self._endpoint(Spot(event, "input", self.pre))
        block.sites["resid_post"] = self._endpoint(Spot(event, "output", self.post))
        if not (self.pre.is_finite and self.post.is_finite):
            block.undecided = _NOT_FINITE
            return block
        block.flat_in_order = self._flat_in_order()
        self._read_attention()
        steps = self.stream.steps(self.pre, self.post)
        if steps is None:
            self._without_stream()
        else:
            # Numbers at the same places of the one axis and of the two add up: they lie alike.
            spots = [s for step in steps for s in (step.total, *(a.spot for a in step.addends))]
            block.flat_in_order |= any(len(spot.value.shape) == 2 for spot in spots)
            self._name_steps(steps)
        self._find_direct()
        return block

    def _flat_in_order(self) -> bool:
        """Whether a value with batch and positions in one axis is one with two, row after row."""
        lead = self.pre.shape[:2]
        seen = [value for event in self.inner for value in event.given if value.is_float]
        flat = [v for v in seen if len(v.shape) == 2 and v.shape[0] == lead[0] * lead[1]]
        apart = [v for v in (self.pre, *seen) if len(v.shape) == 3 and v.shape[:2] == lead]
        return any(same(value, other) for value in flat for other in apart)

    def _given(self, events: Sequence[Event], before: int) -> Endpoint | None:
        """What the outermost of some calls is given that does not normalise it first."""
        for event in sorted(events, key=lambda e: e.start):
            width = self.pre.shape[-1]
            found = (v for v in event.given if v.is_float and v.shape[-1:] == (width,))
            value = next(found, None)
            if value is None or is_norm(event):
                continue
            norms = (e for e in inside(event.path, self.inner) if is_norm(e) and e.given)
            if not any(e.start < before and same(e.given[0], value) for e in norms):
                return self._endpoint(Spot(event, "input", value))
        return None

    def _find_direct(self) -> None:
        """Which projections read the stream, or what the branch's norm made of it."""
        called = {event.path: event for event in reversed(self.inner)}
        norm = self.block.norms.get("ln1")
        source = self.pre
        if norm is not None and not norm.reads_sum:
            source = called[norm.endpoint.path].made[0]
        for found in self.block.attentions:
            for role, endpoint in found.projections.items():
                event = called.get(endpoint.path)
                if event is not None and event.given and same(event.given[0], source):
                    found.direct.add(role)

    @staticmethod
    def _endpoint(spot: Spot, lens: Lens | None = None) -> Endpoint:
        return endpoint_of(spot.event, spot.port, spot.value, lens)

    def _top(self, path: str) -> str:
        """The part of the block that a path lies in."""
        rest = path.removeprefix(f"{self.event.path}.").split(".")
        top = rest[:1] if len(rest) == 1 or not rest[1].isdigit() else rest[:2]
        return ".".join([self.event.path, *top])

    # Attention.

    def _read_attention(self) -> None:
        seen: dict[str, int] = {}
        for kernel in self.kernels:
            if kernel.path in seen or kernel.path == self.event.path:
                continue
            seen[kernel.path] = kernel.time
            around = inside(self._top(kernel.path), self.inner)
            core = next(e.module for e in self.inner if e.path == kernel.path)
            found = heads.describe(kernel, around, core)
            if self._is_cross(found, around, kernel):
                found.name = "cross_attn"
            names = [other.name for other in self.block.attentions]
            if found.name in names:
                found.name = f"{found.name}_{len(names) + 1}"
            holders = [e for e in self.inner if e.start < kernel.time < e.end]
            found.given = self._given(holders, kernel.time)
            found.other_softmax = self._other_softmax(kernel)
            self.block.attentions.append(found)

    def _other_softmax(self, kernel: KernelCall) -> Shape | None:
        """The shape of a softmax in a kernel's module that is not of its scores."""
        if kernel.by == "interface":
            return None
        for path, time, shape in self.softmaxes:
            within = f"{path}.".startswith(f"{kernel.path}.")
            if within and self.event.start < time < self.event.end:
                if shape != kernel.shapes.get("scores", shape):
                    return shape
        return None

    def _is_cross(self, found: Attention, around: Sequence[Event], kernel: KernelCall) -> bool:
        """Whether keys are made of something else than queries are."""
        q, k = found.projections.get("q"), found.projections.get("k")
        if q is None or k is None or q.path == k.path:
            return False
        given = {e.path: e.given[0] for e in around if e.given and e.start < kernel.time}
        a, b = given.get(q.path), given.get(k.path)
        if a is None or b is None:
            return False
        hidden = [v for v in self.event.given if v.is_float and not same(v, self.pre)]
        return any(same(b, other) for other in hidden)

    # The stream.

    def _without_stream(self) -> None:
        reason = (
            "the block's output is not a sum of its input and what its parts return (streams that are "
            "mixed, or scaled channel by channel)"
        )
        self.block.absent["resid_mid"] = reason
        tops: dict[str, Event] = {}
        for event in self.inner:
            if event.path == self._top(event.path) and event.made and not is_norm(event):
                tops.setdefault(event.path, event)
        attention = {self._top(found.path) for found in self.block.attentions}
        for path, event in tops.items():
            value = next((v for v in event.made if v.is_float), None)
            if value is None or not heads.linears(inside(path, self.inner)):
                continue
            if path in attention:
                self.block.sites.setdefault(
                    "attn_out", self._endpoint(Spot(event, "output", value))
                )
            elif re.search(r"mlp|ffn|feed_forward|moe", path.rsplit(".", 1)[-1]):
                self.block.sites.setdefault("mlp_out", self._endpoint(Spot(event, "output", value)))
                self._read_mlp(path, inside(path, self.inner))

    def _name_steps(self, steps: list[Step]) -> None:
        block = self.block
        before, time = "hook_resid_pre", self.event.start
        now = self.pre
        if not steps[0].addends:
            # The stream goes on from a norm of the block's input.
            start = steps.pop(0).after
            endpoint = self._endpoint(start)
            before, time, now = f"{endpoint.path}{endpoint.tail}", start.time, start.value
        for number, step in enumerate(steps):
            last = number == len(steps) - 1
            added = []
            for addend in step.addends:
                kind = self._kind(addend, time, first=number == 0, last=last, step=step)
                name = _numbered(f"{kind}_out", block.sites)
                times = None if addend.factor == 1 else Times(addend.factor)
                block.sites[name] = self._endpoint(addend.spot, times)
                added.append(f"hook_{name}")
                self._norms_around(kind, addend, now, time)
            after = "resid_post" if last else self._mid_name(added)
            if not last:
                spot = step.after
                written = InPlace() if spot.port == "input" else None
                block.sites[after] = self._endpoint(spot, written)
            if step.norm is not None and added:
                norm = describe_norm(step.norm.event)
                block.norms[_norm_of(added[-1])] = replace(norm, reads_sum=True)
            total = f"hook_{after}" if step.norm is None else self._sum_before(step.norm)
            if added and step.keep == 1:
                block.sums.append((before, added, total))
            block.kept |= {} if step.keep == 1 else dict.fromkeys(added, step.keep)
            before, time, now = f"hook_{after}", step.after.time, step.after.value
        if len(steps) == 1 and "resid_mid" not in block.sites:
            block.absent["resid_mid"] = (
                "attention and MLP are added to the stream at once (a parallel block)"
                if len(steps[0].addends) > 1
                else "this block adds only one thing to the stream"
            )

    def _mid_name(self, added: list[str]) -> str:
        if any("cross_attn" in name for name in added):
            return _numbered("resid_mid_cross", self.block.sites)
        return _numbered("resid_mid", self.block.sites)

    @staticmethod
    def _sum_before(norm: Spot) -> str:
        """The sum that a norm takes has no name of its own: it is the norm's input."""
        endpoint = endpoint_of(norm.event, "input", norm.event.given[0])
        return f"{endpoint.path}{endpoint.tail}"

    def _kind(self, addend: Addend, time: int, *, first: bool, last: bool, step: Step) -> str:
        """What an addend is: attention, another mixer of positions, or an MLP."""
        origin = self._origin(addend.spot, time)
        alone = len(step.addends) == 1
        for found in self.block.attentions:
            kernel = next(k for k in self.kernels if k.path == found.path)
            is_part = any(self._top(found.path) == self._top(event.path) for event in origin)
            within = alone and time < kernel.time < addend.spot.time
            if is_part or within:
                return "attn" if found.name == "attn" else found.name
        path = self._top(origin[-1].path)
        events = [e for e in self.inner if time < e.start <= addend.spot.time]
        within_it = [e for e in events if e.path == path or e.path.startswith(f"{path}.")]
        if (
            any(type(e.module) is nn.Conv1d for e in within_it)
            or (not last and alone and first)
            or (_MIXERS.search(path.rsplit(".", 1)[-1].lower()) and not alone)
        ):
            return self._mixer(path, within_it)
        if last and first and alone and _own_parameters(within_it):
            return self._mixer(path, within_it)
        whole = events if alone else within_it
        self._read_mlp(path, [e for e in whole if not self._in_attention(e)])
        return "mlp"

    def _mixer(self, path: str, calls: Sequence[Event]) -> str:
        event = next((e for e in calls if e.path == path), None)
        given = next((v for v in event.given if v.is_float), None) if event is not None else None
        if event is not None and given is not None:
            self.block.mixer = path
            self.block.absent["mixer_state"] = "it lives inside the mixer, not between modules"
            self.block.sites["mixer_in"] = self._endpoint(Spot(event, "input", given))
        return "mixer"

    def _in_attention(self, event: Event) -> bool:
        tops = {self._top(found.path) for found in self.block.attentions}
        return self._top(event.path) in tops

    def _origin(self, spot: Spot, time: int) -> list[Event]:
        """The modules whose value an addend is, back through norms and dropouts."""
        events = [spot.event]
        value = spot.value
        for event in sorted(self.inner, key=lambda e: -e.end):
            if time < event.start and event.end <= spot.time:
                if any(same(made, value) for made in event.made if made.is_float):
                    events.append(event)
                    passes = is_norm(event) or not list(event.module.parameters())
                    if passes and event.given:
                        value = event.given[0]
        return events

    def _norms_around(self, kind: str, addend: Addend, now: Value, time: int) -> None:
        """The norm that reads the stream for a branch, and the one its result goes through."""
        name = _norm_of(f"hook_{kind}_out")
        readers = [
            e
            for e in self.inner
            if is_norm(e) and e.given and same(e.given[0], now) and e.start < addend.spot.time
        ]
        taken = {norm.endpoint.path for norm in self.block.norms.values()}
        free = [e for e in readers if e.path not in taken]
        if free:
            self.block.norms[name] = describe_norm(free[0])
        elif not readers:
            user = next(
                (e for e in self.inner if e.start >= time and any(same(v, now) for v in e.given)),
                None,
            )
            if user is not None and user is not self.event:
                value = next(v for v in user.given if same(v, now))
                self.block.sites[f"{kind}_in"] = self._endpoint(Spot(user, "input", value))
        last = addend.spot.event
        if is_norm(last):
            self.block.norms[f"{name}_post"] = replace(describe_norm(last), reads_sum=True)

    def _read_mlp(self, path: str, events: Sequence[Event]) -> None:
        if self.block.mlp is None:
            self.block.mlp = feedforward.describe(path, events)
            self.block.mlp.given = self._given(events, self.event.end)


def _own_parameters(events: Sequence[Event]) -> bool:
    """Whether a module has parameters that are no linear map, norm or expert: a state, a decay."""
    top = min(events, key=lambda e: len(e.path), default=None)
    return top is not None and any(True for _ in top.module.parameters(recurse=False))


def _norm_of(added: str) -> str:
    if "cross" in added:
        return "ln_cross"
    return "ln2" if "mlp" in added else "ln1"


def _numbered(name: str, taken: dict[str, Endpoint]) -> str:
    if name not in taken:
        return name
    number = 2
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"
