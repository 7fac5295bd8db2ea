"""What hears a module's calls on behalf of a hook or a cache: one small class per job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from interpose.engine.hooks import Detector, Hook, TorchHook
from interpose.engine.points import HookPoint
from interpose.errors import EditShapeError, GradientError, NonFinite, SiteNotFound
from interpose.sites.tree import Site, several_tensors
from interpose.taps import values
from interpose.taps.context import call_out, current, frame_of, new_frame, under_checkpoint
from interpose.taps.tap import Call, Phase

if TYPE_CHECKING:
    from interpose.engine.model import Model


class Listener:
    """Hears the calls of one site's module, for a scope or (scope None) for the model."""

    phase: Phase

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

    def on(self, call: Call) -> None:
        """Look at a call, or change its values."""
        raise NotImplementedError

    def tensors(self, call: Call) -> list[tuple[values.Leaf, Tensor, str]]:
        """The tensors of a call that this site means, each with its path and name."""
        site = self.site
        if isinstance(call.value, Tensor) and not site.tail.leaf:
            found = [((), call.value, site.name)]
        else:
            found = self._inside(call.value)
        for leaf, tensor, name in found:
            values.check_supported(tensor, name)
            self.model._seen.setdefault((site.path, site.tail.port, leaf), (tensor.shape, tensor.dtype))
        return found

    def _inside(self, value: Any) -> list[tuple[values.Leaf, Tensor, str]]:
        site = self.site
        try:
            part = values.element(value, site.tail.leaf)
        except SiteNotFound as error:
            raise SiteNotFound(f"{site.name!r} is not in what {type(site.module).__name__} gives: {error}") from None
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

    phase = Phase.BEFORE_EDIT

    def on(self, call: Call) -> None:
        """Count calls from zero again."""
        if not call.recomputed:
            self.fired += 1
            new_frame(self.root)


class FrameEnd(Listener):
    """On the root: a forward pass is complete."""

    phase = Phase.AFTER_READ

    def on(self, call: Call) -> None:
        """Refuse a later backward pass that would recompute this one without its edits."""
        fragile = [] if call.recomputed else list(frame_of(self.root).fragile)
        if fragile:
            for _, tensor in values.leaves(call.value):
                _guard(tensor, fragile)


class GiveBack(Listener):
    """Beside every listener that may replace an argument: gives the tap an occasion to mend in-place changes."""

    phase = Phase.AFTER_EDIT

    def on(self, call: Call) -> None:
        """Nothing: `Tap` does it."""


class Editing(Listener):
    """Runs a hook on the values of a site and writes back what it leaves."""

    def __init__(self, *args: Any, hook: Hook, check_finite: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hook = hook
        self.check_finite = check_finite
        self.phase = Phase.BEFORE_EDIT if self.site.tail.port == "input" else Phase.AFTER_EDIT

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
        values.check_replacement(new, value, self.hook.label, point.name)
        new = values.settled(new, value)
        if self.check_finite and not torch.isfinite(new).all() and torch.isfinite(value).all():
            raise NonFinite(
                f"{self.hook.label} made NaN or Inf at {point.name!r}; the value it was given was finite."
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
        self.phase = Phase.BEFORE_EDIT if self.hook.before else Phase.AFTER_EDIT

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
            values.check_replacement(new, old, self.hook.label, self.site.name)
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
                returned = dict(zip(call.value, returned if isinstance(returned, tuple) else (returned,)))
        found = dict(values.leaves(returned))
        if type(returned) is not type(call.value) or found.keys() != originals.keys():
            raise EditShapeError(
                f"{self.hook.label} at {self.site.name!r} returned {_brief(returned)}; "
                f"the module gives {_brief(call.value)}. Return the same container with the same tensors in it."
            )
        return found


class Capturing(Listener):
    """Hands the values of a site to a cache, after all edits."""

    def __init__(self, *args: Any, keep: Callable[[Capturing, Call, Tensor, values.Leaf, str], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keep = keep
        self.phase = Phase.BEFORE_READ if self.site.tail.port == "input" else Phase.AFTER_READ

    def on(self, call: Call) -> None:
        """Keep each tensor of the site; a recomputed call repeats what was kept already."""
        if call.recomputed:
            return
        for leaf, value, name in self.tensors(call):
            self.fired += 1
            self.keep(self, call, value, leaf, name)


class Watching(Listener):
    """Hands the gradients at a site to a hook or a cache.

    The gradient is that of the value the rest of the model sees, over all paths: a tensor hook, never a module
    backward hook. Where the value does not require grad (a frozen model) a fresh leaf takes its place; where it is
    also somebody else's value (an argument, an output that is the input) a copy does, so that only this site counts.
    """

    def __init__(
        self,
        *args: Any,
        receive: Callable[[Tensor, HookPoint], Tensor | None],
        enabled: Callable[[], bool],
        reads_last: bool,
        outlives_scope: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.receive = receive
        self.enabled = enabled
        self.reads_last = reads_last
        self.outlives_scope = outlives_scope
        self.phase = Phase.BEFORE_READ if self.site.tail.port == "input" else Phase.AFTER_READ
        self.attached = False
        self.attached_in_forward = False
        self.without_grad = False

    def on(self, call: Call) -> None:
        """Hang a hook on each tensor of the site."""
        if not self.enabled():
            return
        for leaf, value, name in self.tensors(call):
            watched = self._watchable(call, leaf, value, name)
            if watched is None or (call.recomputed and self.attached_in_forward):
                # The graph of a non-reentrant recomputation is thrown away; the first one has the hook.
                continue
            self.attached_in_forward = not call.recomputed
            group = call.shared.setdefault((Watching, leaf), [])
            if not group:
                watched.register_hook(lambda grad, group=group: _deliver(group, grad))
            group.append((self, self.point(call, name)))
            self.attached = True
            for scope in current().scopes:
                if scope.targets is not None:  # type: ignore[attr-defined]
                    scope.targets.append(get_gradient_edge(watched))  # type: ignore[attr-defined]

    def _watchable(self, call: Call, leaf: values.Leaf, value: Tensor, name: str) -> Tensor | None:
        """The tensor whose gradient is that of this site; replaces the value where it must."""
        if not (value.is_floating_point() or value.is_complex()):
            if self.outright:
                raise GradientError(f"{name!r} is {value.dtype}: only floating point values have gradients.")
            return None
        if not torch.is_grad_enabled():
            self.without_grad = True
            return None
        done = call.shared.get((Watching, leaf, "shown"))
        if done is not None:
            return done  # type: ignore[no-any-return]
        shown = value
        if not value.requires_grad:
            shown = values.twin(values.twin(value.detach()).requires_grad_())
        elif value.is_leaf or call.shares_memory_with_inputs(value):
            shown = values.twin(value)
        if shown is not value:
            call.replace(leaf, value, shown)
        call.shared[(Watching, leaf, "shown")] = shown
        return shown

    def deliver(self, grad: Tensor, point: HookPoint) -> Tensor | None:
        """Pass a gradient on, unless the scope has ended."""
        if not self.enabled() or (self.gone and not self.outlives_scope):
            return None
        self.fired += 1
        return self.receive(grad, point)


def _deliver(group: list[tuple[Watching, HookPoint]], grad: Tensor) -> Tensor:
    for listener, point in sorted(group, key=lambda pair: pair[0].reads_last):
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
        return values.settled(values.check_replacement(new, grad, hook.label, f"{point.name}_grad"), grad)

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
    """Call a user's function; an error of its own says at which site it was."""
    try:
        return call_out(function, *args)
    except BaseException as error:
        point: HookPoint = args[-1]
        call = "" if point.call in (0, None) else f", call {point.call}"
        error.add_note(f"raised by {hook.label} at site {point.name!r}{call}")
        raise


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Changes when a tensor is written to, or given other data."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


def _guard(tensor: Tensor, fragile: list[Any]) -> None:
    """Raise in a backward pass that starts after edits under activation checkpointing are gone."""
    if not tensor.requires_grad or tensor.is_leaf:
        return

    def check(grad: Tensor) -> None:  # noqa: ARG001 - torch's signature
        gone = [listener for listener in fragile if listener.gone]
        if gone:
            raise GradientError(
                f"{gone[0].hook.label} edited {gone[0].site.name!r} under activation checkpointing, and its scope ended "
                "before this backward pass, which would recompute the model without the edit. "
                "Call backward() inside the with block."
            )

    tensor.register_hook(check)


def _brief(value: Any) -> str:
    inside = [f"{key}: {type(part).__name__}" for key, part in values.parts(value)]
    return f"a {type(value).__name__}" + (f" of ({', '.join(inside)})" if inside else "")
