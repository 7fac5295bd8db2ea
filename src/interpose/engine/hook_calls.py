"""Running hooks on values: the copy they get, what they leave, and how it is written back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from interpose.engine.hooks import Detector, Hook, TorchHook, skip
from interpose.engine.listeners import Listener, brief, guard
from interpose.engine.points import HookPoint
from interpose.errors import EditShapeError, NonFinite, Unsupported
from interpose.sites.grammar import spell
from interpose.taps import bypass, values
from interpose.taps.context import frame_of, graph_task, stand_down, stand_up, under_checkpoint
from interpose.taps.tap import AFTER_EDIT, BEFORE_EDIT, Call, is_anyone_heard, named_arguments


class Editing(Listener):
    """Runs a hook on the values of a site and writes back what it leaves."""

    def __init__(self, *args: Any, hook: Hook, check_finite: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hook = hook
        self.check_finite = check_finite
        self.phase, self.rank = self.place_of(BEFORE_EDIT, AFTER_EDIT, 0)

    def on(self, call: Call) -> None:
        """Run the hook on each tensor of the site."""
        if not self.hook.enabled:
            return
        for leaf, value, name in self.tensors(call):
            if not values.is_plain(value):
                raise Unsupported(
                    f"{name!r} is a sparse or nested tensor: it can be cached, not hooked."
                )
            point = self.point(call, name)
            self.fired += 1
            new = self._run(value, point)
            self.idle = point.idle
            self.fired -= bool(point.idle)
            if new is not value:
                self.put(call, leaf, value, new)
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
        if not call.recomputed:
            beware_of_checkpoint(self, new)


class Skipping(Listener):
    """Returns a replacement instead of running a module's forward."""

    hook: skip

    def __init__(self, *args: Any, hook: skip, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hook = hook

    def install(self, *, first: bool = False) -> None:  # noqa: ARG002
        """Stand before the module's forward; the last one to come decides."""
        bypass.bypass(self.site.module, self)

    def remove(self) -> None:
        """Step aside."""
        bypass.unbypass(self.site.module, self)
        self.removed = True

    def is_wanted(self) -> bool:
        """In its scope, unless it is switched off."""
        return self.hook.enabled and is_anyone_heard([self])

    def output(
        self,
        forward: Callable[..., Any],  # noqa: ARG002 - skipped
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The replacement; tensors are copied, since the model may change them in place."""
        self.fired += 1
        made = self.hook.replacement
        if callable(made) and not isinstance(made, Tensor):
            point = HookPoint(self.model, self.site.name, self.site.canonical, self.site.module)
            function = made
            made = call_hook(self.hook, lambda _: function(*args, **kwargs), point)
        places = [place for place in self.model._seen if place[:2] == (self.site.path, "output")]
        if isinstance(made, Tensor) and places and () not in [leaf for _, _, leaf in places]:
            there = ", ".join(spell(leaf) for _, _, leaf in places)
            raise EditShapeError(
                f"{self.hook.label} at {self.site.name!r} gives a tensor; the module returns a "
                f"container with tensors at {there}. Give the same container."
            )
        made = values.mapped(made, Tensor.clone)
        if graph_task() == -1:
            beware_of_checkpoint(self, made)
        return made


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
        originals = dict(values.leaves(call.value))
        copies, returned = self._call(call)
        made = copies if returned is None else returned
        found = dict(values.leaves(made))
        if type(made) is not type(call.value) or found.keys() != originals.keys():
            raise EditShapeError(
                f"{self.hook.label} at {self.site.name!r} returned {brief(made)}; the module "
                f"{'takes' if call.before else 'gives'} {brief(call.value)}. Return the same "
                "container with the same tensors in it."
            )
        if returned is not None:
            call.value, call.changed = made, True  # also for what is no tensor
        for leaf, new in found.items():
            old = originals[leaf]
            if getattr(new, "_untouched", None) == _mark(new):
                new = old
            if new is not old:
                values.check_replacement(new, old, self.hook, self.site.name)
                new = values.settled(new, old)
                self._beware_of_checkpoint(call, new)
                call.replace(leaf, old, new)
            else:
                call.value = values.swap(call.value, leaf, old)

    def _call(self, call: Call) -> tuple[Any, Any]:
        """The copies it was given and what it returned, both in the form of ``call.value``."""
        hook, module = self.hook, call.module
        if not hook.before:
            copies = values.mapped(call.value, _marked_twin)
            given = call.given if hook.with_kwargs else call.given[:1]
            point = self.point(call, self.site.name)
            return copies, call_hook(hook, lambda _: hook.function(module, *given, copies), point)
        args, kwargs = values.mapped(call.given, _marked_twin)
        given = (args, kwargs) if hook.with_kwargs else (args,)
        point = self.point(call, self.site.name)
        returned = call_hook(hook, lambda _: hook.function(module, *given), point)
        copies = named_arguments(module, args, kwargs)
        if returned is None:
            return copies, None
        if not hook.with_kwargs:
            returned = (returned if isinstance(returned, tuple) else (returned,), kwargs)
        return copies, named_arguments(module, *returned)


def _marked_twin(value: Tensor) -> Tensor:
    """A copy that knows how it was when it was made."""
    copy = values.twin(value)
    copy._untouched = _mark(copy)  # type: ignore[attr-defined]
    return copy


def beware_of_checkpoint(listener: Listener, new: Any) -> None:
    """After an edit: if a checkpoint will have to repeat it, see to it that it can."""
    if under_checkpoint():
        frame_of(listener.root).edited_under_checkpoint.append(listener)
        for _, tensor in values.leaves(new):
            guard(tensor, [listener])


def look(hook: Detector, function: Callable[..., Any], value: Tensor, point: HookPoint) -> None:
    """Show a value to a detector, which must not write to it."""
    shown = values.twin(value.detach()) if hook.copies else value.detach()
    mark = _mark(shown)
    call_hook(hook, function, shown, point)
    if _mark(shown) != mark:
        raise TypeError(
            f"{hook.label} is a Detector and wrote to the value at {point.name!r}. Detectors "
            "change nothing; use a Controller to change a value."
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
