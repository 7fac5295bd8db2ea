"""One torch hook of ours per module and phase, and what happens when it is called.

A tap hangs in the module's own hook dictionary, so module and tap live and die together. It hands each call to its
listeners in their order; a listener belongs to a scope (heard only inside it) or to the model (heard always).

Four phases per module call: the edit phases are prepended, so edits see what the module was given or made; the read
phases are appended, so reads see what the rest of the model will see, after foreign hooks too.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from interpose.errors import GradientError, Unsupported
from interpose.taps import values
from interpose.taps.context import current, frame_of, in_autograd_thread, recomputing


class Phase(enum.IntEnum):
    """When, around a module's forward, a tap is called."""

    BEFORE_EDIT = 0
    BEFORE_READ = 1
    AFTER_EDIT = 2
    AFTER_READ = 3

    @property
    def before(self) -> bool:
        """Whether the values are the module's arguments rather than what it returned."""
        return self < Phase.AFTER_EDIT


class Call:
    """One call of a module as its listeners see it: the values, which they may replace."""

    __slots__ = ("changed", "index", "inputs", "lent", "module", "recomputed", "shared", "value")

    def __init__(self, module: nn.Module, value: Any, inputs: Any, recomputed: bool) -> None:
        self.module = module
        self.value = value
        self.inputs = inputs
        self.recomputed = recomputed
        self.index: int | None = None
        self.changed = False
        self.lent: list[tuple[Tensor, Tensor, int]] = []
        self.shared: dict[Any, Any] = {}

    def replace(self, leaf: values.Leaf, old: Tensor, new: Tensor) -> None:
        """Put a tensor in the place of another; the model goes on with it."""
        self.value = values.swap(self.value, leaf, new)
        self.changed = True
        if self.inputs is None:
            self.lent.append((old, new, new._version))

    def shares_memory_with_inputs(self, value: Tensor) -> bool:
        """Whether a module returned (a view of) what it was given, as Identity does."""
        if self.inputs is None:
            return True
        pointer = value.untyped_storage().data_ptr()
        return any(
            given.untyped_storage().data_ptr() == pointer for _, given in values.leaves(self.inputs)
        )


class Listener(Protocol):
    """What hears the calls of a module."""

    scope: object | None
    root: nn.Module
    call: int | None
    most_calls: int
    missed: int

    def on(self, call: Call) -> None:
        """Look at a call, or change its values."""


class Tap:
    """A torch hook that hands calls to listeners. Copies and pickles of the module get an inert one."""

    __slots__ = ("handle", "listeners", "phase")

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.listeners: tuple[Listener, ...] = ()
        self.handle: RemovableHandle | None = None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Takes any arguments and returns None, and needs no interpose to be unpickled.
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        if len(rest) != (1 if self.phase.before else 2):
            # Another thread is registering this very hook: torch writes it before its with_kwargs flag.
            return None
        again = recomputing()
        heard = self._heard(again)
        if not heard:
            for listener in self.listeners:
                listener.missed += 1
            return None
        if getattr(module, "_is_replica", False):
            raise Unsupported(
                "hooks do not work inside nn.DataParallel, whose replicas run in threads of their own. "
                "Use DistributedDataParallel, or wrap the module before replicating it."
            )
        if self.phase.before:
            call = Call(module, named_arguments(module, args, rest[0]), None, again)
        else:
            call = Call(module, rest[1], (args, rest[0]), again)
        if self.phase is Phase.AFTER_EDIT:
            _give_back(call, frame_of(heard[0].root).lent.pop(id(module), ()))
        for listener in heard:
            if self._concerns(listener, call):
                listener.on(call)
        if call.lent:
            frame_of(heard[0].root).lent.setdefault(id(module), []).extend(call.lent)
        if not call.changed:
            return None
        return given_arguments(module, args, rest[0], call.value) if self.phase.before else call.value

    def _heard(self, again: bool) -> Sequence[Listener]:
        """The listeners that this call is for."""
        if again and in_autograd_thread():
            return self._live()
        here = current()
        scopes, silent = here.scopes, here.standing_down
        return [x for x in self.listeners if (x.scope in scopes if x.scope is not None else not silent)]

    def _live(self) -> Sequence[Listener]:
        """All listeners, if their scopes are nested in one another: autograd's threads cannot tell whose call it is."""
        scopes = {id(x.scope): x.scope for x in self.listeners if x.scope is not None}
        if len(scopes) > 1:
            innermost = max(scopes.values(), key=lambda scope: len(scope.around))  # type: ignore[union-attr]
            around = {id(scope) for scope in innermost.around} | {id(innermost)}  # type: ignore[union-attr]
            if not around.issuperset(scopes):
                raise GradientError(
                    "a checkpointed part of the model is recomputed in an autograd thread while several threads have "
                    "hooks on it: whose call this is cannot be known. Let one thread train at a time, or turn "
                    "activation checkpointing off."
                )
        return self.listeners

    def _concerns(self, listener: Listener, call: Call) -> bool:
        """Count the call, and decide whether it is the one a listener asked for (`cell#2`)."""
        if call.recomputed:
            call.index = 0 if listener.most_calls <= 1 else None
            if listener.call is not None and call.index is None:
                raise GradientError(
                    f"{type(call.module).__name__} is called {listener.most_calls} times under activation "
                    f"checkpointing; which call is being recomputed cannot be known, so call #{listener.call} cannot "
                    "be hooked. Hook all its calls, or turn checkpointing off."
                )
        else:
            counts = frame_of(listener.root).counts
            call.index = counts.get(id(listener), 0)
            counts[id(listener)] = call.index + 1
            listener.most_calls = max(listener.most_calls, call.index + 1)
        return listener.call is None or call.index in (listener.call, None)


_LOCK = threading.RLock()


def listen(module: nn.Module, phase: Phase, listener: Listener, *, first: bool = False) -> None:
    """Let a listener hear a module's calls."""
    if isinstance(module, torch.jit.ScriptModule):
        raise Unsupported(
            f"{type(module).__name__} is TorchScript: its inside runs outside Python, where no hook can see it. "
            "Hook the module that calls it, or use the module before torch.jit.script or trace."
        )
    with _LOCK:
        tap = _find(module, phase)
        if tap is None:
            tap = Tap(phase)
            register = module.register_forward_pre_hook if phase.before else module.register_forward_hook
            prepend = phase in (Phase.BEFORE_EDIT, Phase.AFTER_EDIT)
            tap.handle = register(tap, prepend=prepend, with_kwargs=True)
        tap.listeners = (listener, *tap.listeners) if first else (*tap.listeners, listener)


def unlisten(module: nn.Module, phase: Phase, listener: Listener) -> None:
    """Undo `listen`; the last listener takes the torch hook with it."""
    with _LOCK:
        tap = _find(module, phase)
        if tap is None:
            return
        tap.listeners = tuple(other for other in tap.listeners if other is not listener)
        if not tap.listeners and tap.handle is not None:
            tap.handle.remove()


def _find(module: nn.Module, phase: Phase) -> Tap | None:
    hooks = module._forward_pre_hooks if phase.before else module._forward_hooks
    for hook in hooks.values():
        if type(hook) is Tap and hook.phase is phase:
            return hook
    return None


def _give_back(call: Call, lent: Sequence[tuple[Tensor, Tensor, int]]) -> None:
    """If a module changed a replaced argument in place (ReLU(inplace=True)), change the original the same way."""
    for old, new, version in lent:
        if new._version == version:
            continue
        old.copy_(new)
        for leaf, tensor in list(values.leaves(call.value)):
            if tensor is new:
                call.value = values.swap(call.value, leaf, old)
                call.changed = True


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names the forward gives them; what ``*args`` takes stays one tuple."""
    names, star = _parameters(module)
    named = dict(zip(names, args))
    if len(args) > len(names):
        named[star] = args[len(names) :]
    named.update(kwargs)
    return named


def given_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of `named_arguments`, as a torch pre-hook must return it."""
    names, star = _parameters(module)
    positional = tuple(named[name] for name in names[: len(args)])
    if len(args) > len(names):
        positional += tuple(named[star])
    return positional, {name: named[name] for name in kwargs}


def _parameters(module: nn.Module) -> tuple[tuple[str, ...], str]:
    forward = type(module).forward
    return _parameters_of(forward) if "forward" not in vars(module) else _parameters_of.__wrapped__(module.forward)


@lru_cache(maxsize=1024)
def _parameters_of(forward: Callable[..., Any]) -> tuple[tuple[str, ...], str]:
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return (), "args"
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if not inspect.ismethod(forward) and positional[:1] == ["self"]:
        positional = positional[1:]
    star = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return tuple(positional), star
