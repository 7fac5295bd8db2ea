"""What hears a module's calls on behalf of a hook or a cache: one small class per job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from interpose.engine.hooks import Hook
from interpose.engine.points import HookPoint
from interpose.errors import GradientError, SiteNotFound
from interpose.sites.tree import Site, several_tensors
from interpose.taps import values
from interpose.taps.context import (
    Frame,
    calls_under_way,
    current,
    frame_of,
    in_autograd_thread,
    is_heard,
    set_frame,
)
from interpose.taps.tap import (
    AFTER_EDIT,
    AFTER_READ,
    BEFORE_EDIT,
    BEFORE_READ,
    Call,
    Tap,
    forget_lent,
    listen,
    unlisten,
)

if TYPE_CHECKING:
    from interpose.engine.model import Model


ORDINARY = 3
"""The rank of what needs no place before others in its phase."""

is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class Listener:
    """Hears the calls of one site's module, for a scope or (scope None) for the model."""

    hook: Hook
    phase: int = AFTER_READ
    tap: Tap | None = None
    rank: int = ORDINARY

    def __init__(self, model: Model, site: Site, scope: Any, *, outright: bool) -> None:
        self.model = model
        self.site = site
        self.scope = scope
        self.single_run = scope is not None and scope.single_run
        self.root = model.root
        self.call = site.tail.call
        self.outright = outright
        self.most_calls = 0
        self.missed = 0
        self.fired = 0
        self.idle = ""
        self.removed = False
        self.switched_on = False
        self.shape_noted = False

    def install(self, *, first: bool = False) -> None:
        """Hear calls from now on."""
        listen(self.site.module, self.phase, self, first=first)
        if self.site.switch is not None:
            self.site.switch.on()
            self.switched_on = True

    def remove(self) -> None:
        """Hear no more, also if it never did."""
        unlisten(self)
        self.removed = True
        if self.site.switch is not None and self.switched_on:
            self.switched_on = False
            self.site.switch.off()

    def place_of(self, before: int, after: int, rank: int) -> tuple[int, int]:
        """The phase and rank at which it hears its site.

        What is written in place goes to all who hold the tensor, so its edits, watchers and reads
        come, in this order, before anything that replaces an argument for one module alone.
        """
        if self.site.lens is not None and self.site.lens.in_place:
            return (BEFORE_EDIT, rank)
        return (before if self.site.tail.port == "input" else after), ORDINARY

    def put(
        self, call: Call, leaf: values.Leaf, value: Tensor, new: Tensor, watched: str = ""
    ) -> None:
        """Let the model go on with a new value at this site."""
        lens = self.site.lens
        if lens is None:
            call.replace(leaf, value, new, watched)
            return
        raw = values.element(call.value, leaf)
        whole = lens.write(raw, new, call)
        if whole is not None:
            call.replace(leaf, raw, whole, watched)

    def on(self, call: Call) -> None:
        """Look at a call, or change its values."""
        raise NotImplementedError

    def will_run_again(self) -> bool:
        """Whether it would hear a call that is recomputed here and now."""
        heard = in_autograd_thread() or is_heard(self.scope, current())
        return heard and not self.removed and self.hook.enabled

    def beside(self) -> list[Beside]:
        """What must be on the module with it: here, for one that may replace an argument."""
        if self.phase >= AFTER_EDIT:
            return []
        return [GiveBack(self.model, self.site, self.scope, outright=self.outright)]

    def tensors(self, call: Call) -> list[tuple[values.Leaf, Tensor, str]]:
        """The tensors of a call that this site means, each with its path and name."""
        value = call.value
        if type(value) is Tensor and not self.site.tail.leaf:
            found: list[tuple[values.Leaf, Tensor, str]] = [((), value, self.site.name)]
        else:
            found = self._inside(value)
        lens = self.site.lens
        if lens is not None:
            found = [(leaf, lens.read(tensor, call), name) for leaf, tensor, name in found]
        for leaf, tensor, name in found:
            if type(tensor) is not Tensor or is_functorch_wrapped(tensor):
                values.check_supported(tensor, name)
            if not self.shape_noted and values.is_plain(tensor):
                place = (self.site.path, self.site.tail.port, leaf)
                self.model._seen.setdefault(place, (tensor.shape, tensor.dtype))
        self.shape_noted = True
        return found

    def _inside(self, value: Any) -> list[tuple[values.Leaf, Tensor, str]]:
        site = self.site
        try:
            part = values.element(value, site.tail.leaf)
        except SiteNotFound as error:
            raise SiteNotFound(
                f"{site.name!r} is not in what {type(site.module).__name__} gives: {error}"
            ) from None
        leaves = [(*site.tail.leaf, *leaf) for leaf, _ in values.leaves(part)]
        if self.outright and len(leaves) > 1:
            raise several_tensors(site, leaves)
        if self.outright and not leaves:
            raise SiteNotFound(f"{site.name!r} holds no tensor: it is {brief(part)}.")
        names = [site.name] if len(leaves) == 1 else [site.element(leaf) for leaf in leaves]
        return [(leaf, values.element(value, leaf), name) for leaf, name in zip(leaves, names)]

    def point(self, call: Call, name: str) -> HookPoint:
        """The second argument of a hook function."""
        site, frame = self.site, frame_of(self.root)
        # The frame itself would keep every graph alive: gradient hooks hold points, it holds tensors.
        here = (call.module, call.index, site.axes, frame.where, frame.given)
        return HookPoint(self.model, name, site.canonical, *here, site.part)


class FrameStart(Listener):
    """On the root, or on a part of it that is run by itself: a forward pass begins."""

    phase = BEFORE_EDIT

    def is_whole(self, call: Call) -> bool:
        """Whether this call is a pass by itself, not repeated and not a part of a pass of the root."""
        part = self.site.module is not self.root and calls_under_way(self.root)
        return not (call.recomputed or part)

    def on(self, call: Call) -> None:
        """Count calls from zero again, unless the root was called by itself."""
        if self.is_whole(call):
            self.fired += 1
            frame = frame_of(self.root)
            if frame.depth == 0 or calls_under_way(self.site.module) == 1:
                # Not counting on `depth` alone: a forward that raised left it as it was.
                self._renew()
                frame = Frame()
                frame.begin(self.model, call.value)
                set_frame(self.root, frame)
            frame.depth += 1

    def _renew(self) -> None:
        """If the module has changed since hooks were put on it, let them listen where their sites are now."""
        model, scope = self.model, self.scope
        model.refresh()
        for binding in model.standing_bindings() if scope is None else scope.bindings:
            binding.renew(model.changes)


class FrameEnd(FrameStart):
    """There, too: the forward pass is complete."""

    phase = AFTER_READ

    def on(self, call: Call) -> None:
        """Guard a later backward pass, and let go of what belonged to this one."""
        if self.is_whole(call):
            frame = frame_of(self.root)
            frame.depth -= 1
            if frame.depth <= 0:
                guard_output(self.root, call.value)
                set_frame(self.root, None)


class Beside(Listener):
    """Stands beside a listener and does a part of its work in another phase."""


class GiveBack(Beside):
    """Stands beside a listener that may replace an argument, so that there is a tap after the call.

    That tap sees whether the module wrote to the replacement, and writes the same to the original.
    """

    phase = AFTER_EDIT

    def on(self, call: Call) -> None:
        """Nothing: `Tap` does it."""

    def remove(self) -> None:
        """Also forget what a call that raised left behind."""
        super().remove()
        forget_lent(self.site.module)


class Sink(Protocol):
    """What takes captured values."""

    def keep(
        self,
        site: Site,
        name: str,
        leaf: values.Leaf,
        part: Tensor,
        point: HookPoint,
        value: Tensor,
    ) -> None:
        """Take a part of one value."""

    def done(self, listener: Capturing) -> None:
        """All values of one call have been taken."""

    def cut(self, value: Tensor, name: str, axes: tuple[str, ...] = ...) -> Tensor:
        """The part of a value to keep, as a copy."""


class Capturing(Listener):
    """Hands the values of a site to a sink, after all edits."""

    def __init__(self, *args: Any, sink: Sink, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sink = sink
        self.phase, self.rank = self.place_of(BEFORE_READ, AFTER_READ, 2)

    def on(self, call: Call) -> None:
        """Keep each tensor of the site; a recomputed call repeats what was kept already."""
        if call.recomputed:
            return
        for leaf, value, name in self.tensors(call):
            self.fired += 1
            shared = (self.sink, leaf, self.site.lens, self.site.part)
            kept = call.shared.get(shared)
            if kept is None:
                point = self.point(call, name)
                cut = point.selected(value)
                self.idle = point.idle
                if cut is None:
                    self.fired -= 1
                    continue
                # Names of one site share one copy.
                part = self.sink.cut(cut, name, self.site.axes)
                kept = call.shared[shared] = part, point, value
            self.sink.keep(self.site, name, leaf, *kept)
        self.sink.done(self)


def guard_output(root: nn.Module, output: Any) -> None:
    """At the end of a forward pass: refuse what would make its gradients wrong."""
    frame = current().frames.get(id(root))
    if frame is None:
        return
    for tensor, version, name in frame.must_not_change:
        if tensor._version != version:
            raise GradientError(
                f"the model writes in place to the value at {name!r}, which shares memory with "
                "another value, so it has no gradient of its own. Watch the module before it."
            )
    if frame.edited_under_checkpoint:
        for _, tensor in values.leaves(output):
            guard(tensor, list(frame.edited_under_checkpoint))


def guard(tensor: Tensor, editors: list[Any]) -> None:
    """Raise in a backward pass that starts after edits under activation checkpointing are gone."""
    if not tensor.requires_grad or tensor.is_leaf:
        return

    def check(grad: Tensor) -> None:  # noqa: ARG001 - torch's signature
        gone = [listener for listener in editors if not listener.will_run_again()]
        if gone:
            raise GradientError(
                f"{gone[0].hook.label} edited {gone[0].site.name!r} under activation "
                "checkpointing, and its scope ended before this backward pass, which would "
                "recompute the model without the edit. Call backward() inside the with block."
            )

    tensor.register_hook(check)


def brief(value: Any) -> str:
    """A value in a few words, for messages."""
    inside = [f"{key}: {type(part).__name__}" for key, part in values.parts(value)]
    return f"a {type(value).__name__}" + (f" of ({', '.join(inside)})" if inside else "")
