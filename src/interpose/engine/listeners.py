"""What hears a module's calls on behalf of a hook or a cache: one small class per job."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from interpose.engine.hooks import Detector, Hook, TorchHook
from interpose.engine.points import HookPoint
from interpose.errors import EditShapeError, GradientError, NonFinite, SiteNotFound
from interpose.sites.grammar import Tail
from interpose.sites.tree import Site, several_tensors
from interpose.taps import values
from interpose.taps.context import (
    current,
    frame_of,
    new_frame,
    stand_down,
    stand_up,
    under_checkpoint,
)
from interpose.taps.tap import AFTER_EDIT, AFTER_READ, BEFORE_EDIT, BEFORE_READ, Call

if TYPE_CHECKING:
    from interpose.engine.model import Model


is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class Listener:
    """Hears the calls of one site's module, for a scope or (scope None) for the model."""

    phase: int
    quick: Callable[[Any], bool] | None = None

    def __init__(self, model: Model, site: Site, scope: Any, *, outright: bool) -> None:
        self.model = model
        self.site = site
        self.scope = scope
        self.root = model.root
        self.call = site.tail.call
        self.outright = outright
        self.most_calls = 0
        self.missed = 0
        self.fired = 0
        self.gone = False
        self.noted = False

    def on(self, call: Call) -> None:
        """Look at a call, or change its values."""
        raise NotImplementedError

    def removed(self) -> None:
        """The scope has ended, or the hook was taken off the model."""
        self.gone = True

    def tensors(self, call: Call) -> list[tuple[values.Leaf, Tensor, str]]:
        """The tensors of a call that this site means, each with its path and name."""
        value = call.value
        if type(value) is Tensor and not self.site.tail.leaf:
            found: list[tuple[values.Leaf, Tensor, str]] = [((), value, self.site.name)]
        else:
            found = self._inside(value)
        for leaf, tensor, name in found:
            if type(tensor) is not Tensor or is_functorch_wrapped(tensor):
                values.check_supported(tensor, name)
            if not self.noted:
                place = (self.site.path, self.site.tail.port, leaf)
                self.model._seen.setdefault(place, (tensor.shape, tensor.dtype))
        self.noted = True
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
            raise SiteNotFound(f"{site.name!r} holds no tensor: it is {_brief(part)}.")
        names = [site.name] if len(leaves) == 1 else [site.element(leaf) for leaf in leaves]
        return [(leaf, values.element(value, leaf), name) for leaf, name in zip(leaves, names)]

    def point(self, call: Call, name: str) -> HookPoint:
        """The second argument of a hook function."""
        return HookPoint(self.model, name, self.site.canonical, call.module, call.index)


class FrameStart(Listener):
    """On the root: a forward pass begins."""

    phase = BEFORE_EDIT

    def on(self, call: Call) -> None:
        """Count calls from zero again."""
        if not call.recomputed:
            self.fired += 1
            new_frame(self.root)


class FrameEnd(Listener):
    """On the root: a forward pass is complete."""

    phase = AFTER_READ

    def on(self, call: Call) -> None:
        """Guard a later backward pass."""
        if not call.recomputed:
            guard_output(self.root, call.value)


class GiveBack(Listener):
    """Beside every listener that may replace an argument: gives the tap an occasion to mend in-place changes."""

    phase = AFTER_EDIT

    def on(self, call: Call) -> None:
        """Nothing: `Tap` does it."""


class Editing(Listener):
    """Runs a hook on the values of a site and writes back what it leaves."""

    def __init__(self, *args: Any, hook: Hook, check_finite: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hook = hook
        self.check_finite = check_finite
        self.phase = BEFORE_EDIT if self.site.tail.port == "input" else AFTER_EDIT

    def on(self, call: Call) -> None:
        """Run the hook on each tensor of the site."""
        if not self.hook.enabled:
            return
        for leaf, value, name in self.tensors(call):
            self.fired += 1
            new = self._run(value, self.point(call, name))
            if new is not value:
                call.replace(leaf, value, new)
                self._beware_of_checkpoint(call, new)

    def _run(self, value: Tensor, point: HookPoint) -> Tensor:
        if isinstance(self.hook, Detector):
            look(self.hook, self.hook.on_value, value, point)
            return value
        copy = values.twin(value)
        new = changed_by(self.hook, self.hook.on_value, copy, point)
        if new is None:
            return value
        values.check_replacement(new, value, self.hook, point.name)
        new = values.settled(new, value)
        if self.check_finite and not torch.isfinite(new).all() and torch.isfinite(value).all():
            raise NonFinite(
                f"{self.hook.label} made NaN or Inf at {point.name!r}; the value it was given was "
                "finite."
            )
        return new

    def _beware_of_checkpoint(self, call: Call, new: Tensor) -> None:
        if not call.recomputed and under_checkpoint():
            frame_of(self.root).fragile.append(self)
            _guard(new, [self])


class TorchEditing(Editing):
    """Runs a hook that was written for PyTorch, on the whole output or all arguments."""

    hook: TorchHook

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.phase = BEFORE_EDIT if self.hook.before else AFTER_EDIT

    def on(self, call: Call) -> None:
        """Call it as PyTorch would, with copies."""
        if not self.hook.enabled:
            return
        self.fired += 1
        copies = values.mapped(call.value, values.twin)
        originals = dict(values.leaves(call.value))
        marks = {leaf: _mark(tensor) for leaf, tensor in values.leaves(copies)}
        point = self.point(call, self.site.name)
        returned = call_hook(self.hook, self._as_torch(call, copies), point)
        if returned is None:
            changed = {leaf: t for leaf, t in values.leaves(copies) if _mark(t) != marks[leaf]}
        else:
            changed = self._taken_apart(returned, originals, call)
        for leaf, new in changed.items():
            old = originals[leaf]
            if new is old:
                continue
            values.check_replacement(new, old, self.hook, self.site.name)
            new = values.settled(new, old)
            call.replace(leaf, old, new)
            self._beware_of_checkpoint(call, new)

    def _as_torch(self, call: Call, copies: Any) -> Callable[[HookPoint], Any]:
        args, kwargs = ((), copies) if self.hook.before else call.inputs
        if self.hook.before and not self.hook.with_kwargs:
            args, kwargs = tuple(copies.values()), {}
        given = (args, kwargs) if self.hook.with_kwargs else (args,)
        rest = () if self.hook.before else (copies,)
        return lambda _: self.hook.function(call.module, *given, *rest)

    def _taken_apart(
        self, returned: Any, originals: dict[values.Leaf, Tensor], call: Call
    ) -> dict[values.Leaf, Tensor]:
        if self.hook.before:
            if self.hook.with_kwargs:
                args, kwargs = returned
                returned = dict(zip(call.value, args)) | kwargs
            else:
                returned = dict(
                    zip(call.value, returned if isinstance(returned, tuple) else (returned,))
                )
        found = dict(values.leaves(returned))
        if type(returned) is not type(call.value) or found.keys() != originals.keys():
            raise EditShapeError(
                f"{self.hook.label} at {self.site.name!r} returned {_brief(returned)}; "
                f"the module gives {_brief(call.value)}. Return the same container with the same "
                "tensors in it."
            )
        return found


class Sink(Protocol):
    """What takes captured values."""

    def keep(
        self, site: Site, name: str, call: int | None, leaf: values.Leaf, part: Tensor
    ) -> None:
        """Take one value."""

    def done(self, listener: Capturing) -> None:
        """All values of one call have been taken."""

    def cut(self, value: Tensor, name: str) -> Tensor:
        """The part of a value to keep, as a copy."""


class Capturing(Listener):
    """Hands the values of a site to a sink, after all edits."""

    def __init__(self, *args: Any, sink: Sink, in_a_hurry: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sink = sink
        self.phase = BEFORE_READ if self.site.tail.port == "input" else AFTER_READ
        plain = self.site.tail == Tail()
        self.quick = self._take if in_a_hurry and plain else None

    def _take(self, value: Any) -> bool:
        """Keep a whole output without ceremony: most calls of most runs are of this kind."""
        if type(value) is not Tensor or is_functorch_wrapped(value):
            return False
        index = self.most_calls
        self.most_calls = self.fired = index + 1
        if not self.noted:
            self.model._seen.setdefault((self.site.path, "output", ()), (value.shape, value.dtype))
            self.noted = True
        self.sink.keep(self.site, self.site.name, index, (), values.twin(value.detach()))
        return True

    def on(self, call: Call) -> None:
        """Keep each tensor of the site; a recomputed call repeats what was kept already."""
        if call.recomputed:
            return
        for leaf, value, name in self.tensors(call):
            self.fired += 1
            part = call.shared.get((self.sink, leaf))
            if part is None:
                # Names of one site share one copy.
                part = call.shared[(self.sink, leaf)] = self.sink.cut(value, name)
            self.sink.keep(self.site, name, call.index, leaf, part)
        self.sink.done(self)


class Watching(Listener):
    """Hands the gradients at a site to a hook or a cache.

    The gradient is that of the value the rest of the model sees, over all paths: a tensor hook,
    never a module backward hook. Where the value does not require grad (a frozen model) a fresh
    leaf takes its place; where it is also somebody else's value (an argument, an output that is the
    input or an inner output) a copy does, so that only this site counts.
    """

    def __init__(
        self,
        *args: Any,
        hook: Hook,
        receive: Callable[[Tensor, HookPoint], Tensor | None],
        reads_last: bool,
        outlives_scope: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.receive = receive
        self.hook = hook
        self.reads_last = reads_last
        self.outlives_scope = outlives_scope
        self.phase = BEFORE_READ if self.site.tail.port == "input" else AFTER_READ
        self.groups: weakref.WeakSet[Watchers] = weakref.WeakSet()
        self.attached = False
        self.attached_in_forward = False
        self.without_grad = False

    def on(self, call: Call) -> None:
        """Hang a hook on each tensor of the site."""
        if not self.hook.enabled:
            return
        for leaf, value, name in self.tensors(call):
            watched = self._watchable(call, leaf, value, name)
            if watched is None or (call.recomputed and self.attached_in_forward):
                # The graph of a non-reentrant recomputation is thrown away; the first one has the
                # hook.
                continue
            self.attached_in_forward = not call.recomputed
            group = call.shared.get((Watching, leaf))
            if group is None:
                group = call.shared[(Watching, leaf)] = Watchers()
                watched.register_hook(group.deliver)  # type: ignore[no-untyped-call]
            group.members.append((self, self.point(call, name)))
            self.groups.add(group)
            self.attached = True
            for scope in current().scopes:
                if scope.targets is not None:  # type: ignore[attr-defined]
                    scope.targets.append(get_gradient_edge(watched))  # type: ignore[attr-defined]

    def _watchable(self, call: Call, leaf: values.Leaf, value: Tensor, name: str) -> Tensor | None:
        """The tensor whose gradient is that of this site; replaces the value where it must."""
        if not (value.is_floating_point() or value.is_complex()):
            if self.outright:
                raise GradientError(
                    f"{name!r} is {value.dtype}: only floating point values have gradients."
                )
            return None
        if not torch.is_grad_enabled():
            self.without_grad = True
            return None
        done = call.shared.get((Watching, leaf, "shown"))
        if done is not None:
            return done  # type: ignore[no-any-return]
        shown, watched = value, frame_of(self.root).watched
        if not value.requires_grad:
            shown = values.twin(values.twin(value.detach()).requires_grad_())
        elif value.is_leaf or id(value) in watched or call.shares_memory_with_inputs(value):
            shown = values.twin(value)
        if shown is not value:
            call.replace(leaf, value, shown)
        watched.add(id(shown))
        call.shared[(Watching, leaf, "shown")] = shown
        return shown

    def removed(self) -> None:
        """Leave the graphs that outlast the scope: through their hooks they would keep the model alive."""
        super().removed()
        if not self.outlives_scope:
            for group in self.groups:
                group.members = [member for member in group.members if member[0] is not self]

    def deliver(self, grad: Tensor, point: HookPoint) -> Tensor | None:
        """Pass a gradient on."""
        if not self.hook.enabled:
            return None
        self.fired += 1
        return self.receive(grad, point)


class Watchers:
    """All who watch one tensor's gradient: hooks first, in their order, then caches."""

    def __init__(self) -> None:
        self.members: list[tuple[Watching, HookPoint]] = []

    def deliver(self, grad: Tensor) -> Tensor:
        """What torch calls with the gradient."""
        for listener, point in sorted(self.members, key=lambda member: member[0].reads_last):
            new = listener.deliver(grad, point)
            grad = grad if new is None else new
        return grad


def grad_receiver(hook: Hook) -> Callable[[Tensor, HookPoint], Tensor | None]:
    """How a hook takes gradients: a copy, with the same rules as values."""

    def receive(grad: Tensor, point: HookPoint) -> Tensor | None:
        if isinstance(hook, Detector):
            look(hook, hook.on_grad, grad, point)
            return None
        new = changed_by(hook, hook.on_grad, values.twin(grad), point)
        if new is None:
            return None
        return values.settled(values.check_replacement(new, grad, hook, f"{point.name}_grad"), grad)

    return receive


def look(hook: Detector, function: Callable[..., Any], value: Tensor, point: HookPoint) -> None:
    """Show a value to a detector, which must not write to it."""
    shown = values.twin(value.detach()) if hook.copies else value.detach()
    mark = _mark(shown)
    call_hook(hook, function, shown, point)
    if _mark(shown) != mark:
        raise TypeError(
            f"{hook.label} is a Detector and wrote to the value at {point.name!r}. "
            "Detectors change nothing; use a Controller to change a value."
        )


def changed_by(hook: Hook, function: Callable[..., Any], copy: Tensor, point: HookPoint) -> Any:
    """What a function made of its copy; None if it left it alone."""
    mark = _mark(copy)
    returned = call_hook(hook, function, copy, point)
    if returned is None or returned is copy:
        return copy if _mark(copy) != mark else None
    return returned


def call_hook(hook: Hook, function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function with the model's hooks silent; an error of its own says at which site it was."""
    token = stand_down()
    try:
        return function(*args)
    except BaseException as error:
        point: HookPoint = args[-1]
        call = "" if point.call in (0, None) else f", call {point.call}"
        error.add_note(f"raised by {hook.label} at site {point.name!r}{call}")
        raise
    finally:
        stand_up(token)


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Changes when a tensor is written to, or given other data."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


def guard_output(root: nn.Module, output: Any) -> None:
    """Refuse a backward pass from this output that would recompute the forward pass without its edits."""
    frame = current().frames.get(id(root))
    if frame is not None and frame.fragile:
        for _, tensor in values.leaves(output):
            _guard(tensor, list(frame.fragile))


def _guard(tensor: Tensor, fragile: list[Any]) -> None:
    """Raise in a backward pass that starts after edits under activation checkpointing are gone."""
    if not tensor.requires_grad or tensor.is_leaf:
        return

    def check(grad: Tensor) -> None:  # noqa: ARG001 - torch's signature
        gone = [listener for listener in fragile if listener.gone]
        if gone:
            raise GradientError(
                f"{gone[0].hook.label} edited {gone[0].site.name!r} under activation "
                "checkpointing, and its scope ended "
                "before this backward pass, which would recompute the model without the edit. "
                "Call backward() inside the with block."
            )

    tensor.register_hook(check)  # type: ignore[no-untyped-call]


def _brief(value: Any) -> str:
    inside = [f"{key}: {type(part).__name__}" for key, part in values.parts(value)]
    return f"a {type(value).__name__}" + (f" of ({', '.join(inside)})" if inside else "")
