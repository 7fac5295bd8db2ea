"""Gradients at sites, by hooks on the tensors themselves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from interpose.engine.hook_calls import changed_by, look
from interpose.engine.hooks import Detector, Hook
from interpose.engine.listeners import ORDINARY, Beside, Listener
from interpose.engine.points import HookPoint
from interpose.errors import AmbiguousSite, GradientError, SiteNotFound
from interpose.taps import values
from interpose.taps.context import current
from interpose.taps.tap import AFTER_EDIT, AFTER_READ, BEFORE_READ, Call


class Watching(Listener):
    """Hands the gradients at a site to a hook or a cache.

    The gradient is that of the value the rest of the model sees, over all its paths: a tensor hook,
    never a module backward hook. A copy takes the value's place, so that uses of the same tensor
    elsewhere (inside the module, as its input, as the caller's variable) do not count; where the
    value does not require grad (a frozen model) the copy is that of a fresh leaf.
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
        self.phase, self.rank = self.place_of(BEFORE_READ, AFTER_READ, 1)
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
            group = call.shared.get((Watching, leaf, self.site.lens))
            if group is None:
                group = call.shared[(Watching, leaf, self.site.lens)] = Watchers()
                watched.register_hook(group.deliver)
            group.members.append((self, self.point(call, name)))
            self.groups.add(group)
            self.attached = True
            for scope in current().scopes:
                if scope.targets is not None:  # type: ignore[attr-defined]
                    scope.targets.append(get_gradient_edge(watched))  # type: ignore[attr-defined]

    def beside(self) -> list[Beside]:
        """At a whole output: what puts the copy in, before hooks of others."""
        if self.phase != AFTER_READ or self.site.lens is not None:
            return super().beside()
        return [StandIn(self)]

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
            self.attached_in_forward = False  # reentrant checkpointing: the recomputation has it
            return None
        done = call.shared.get((Watching, leaf, self.site.lens, "shown"))
        if done is not None:
            return done  # type: ignore[no-any-return]
        if not call.before and getattr(value, "_stands_in_at", None) == id(call.module):
            return value  # put in by a `StandIn`, and nobody has changed it since
        shown = _stand_in(value)
        self.put(call, leaf, value, shown, watched=name)
        call.shared[(Watching, leaf, self.site.lens, "shown")] = shown
        return shown

    def remove(self) -> None:
        """Leave the graphs that outlast the scope too: through their hooks they keep the model alive."""
        super().remove()
        if not self.outlives_scope:
            for group in self.groups:
                group.members = [member for member in group.members if member[0] is not self]

    def deliver(self, grad: Tensor, point: HookPoint) -> Tensor | None:
        """Pass a gradient on."""
        if not self.hook.enabled:
            return None
        self.fired += 1
        return self.receive(grad, point)


class StandIn(Beside):
    """Puts the copy whose gradient is watched in the place of an output, before hooks of others.

    What they keep of it (transformers records hidden states so) then has its part in the gradient.
    If they change the value, the watcher puts in a copy of that.
    """

    phase, rank = AFTER_EDIT, ORDINARY + 1

    def __init__(self, watcher: Watching) -> None:
        super().__init__(watcher.model, watcher.site, watcher.scope, outright=watcher.outright)
        self.hook = watcher.hook
        self.shape_noted = True  # the watcher notes it, after hooks of others

    def on(self, call: Call) -> None:
        """Replace each tensor that can have a gradient, once for all watchers."""
        if not self.hook.enabled or not torch.is_grad_enabled():
            return
        try:
            found = self.tensors(call)
        except (SiteNotFound, AmbiguousSite):
            return  # the watcher says so, unless hooks of others make it what it should be
        for leaf, value, name in found:
            if (StandIn, leaf) not in call.shared and (
                value.is_floating_point() or value.is_complex()
            ):
                shown = call.shared[(StandIn, leaf)] = _stand_in(value)
                shown._stands_in_at = id(call.module)  # type: ignore[attr-defined]
                call.replace(leaf, value, shown, watched=name)


def _stand_in(value: Tensor) -> Tensor:
    """A copy that gradients flow through, to the value or (where that has none) to a fresh leaf."""
    if value.requires_grad:
        return values.stand_in(value)
    return values.stand_in(values.stand_in(value.detach()).requires_grad_())


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


def farthest(loss: Tensor, targets: Sequence[GradientEdge]) -> list[GradientEdge]:
    """Of some places that a backward pass may reach, those behind which there is no other of them."""
    wanted = {target.node for target in targets}
    passes: dict[Any, bool] = {}  # by node: whether it or one behind it is wanted
    ends: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack[-1]
        behind = [] if node is None else [other for other, _ in node.next_functions if other]
        waiting = [other for other in behind if other not in passes]
        if waiting and node not in passes:
            stack += waiting
            continue
        stack.pop()
        if node is not None and node not in passes:
            beyond = any(passes[other] for other in behind)
            passes[node] = beyond or node in wanted
            if node in wanted and not beyond:
                ends.add(node)
    return [target for target in targets if target.node in ends]


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
