"""One torch hook of ours per module and phase, and what happens when it is called.

A tap hangs in the module's own hook dictionary, so module and tap live and die together. It hands
each call to its listeners in their order; a listener belongs to a scope (heard only inside it) or
to the model (heard always).

Four phases per module call: the edit phases are prepended, so edits see what the module was given
or made; the read phases are appended, so reads see what the rest of the model will see, after
foreign hooks too.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from interpose.errors import GradientError, Unsupported
from interpose.sites.tree import Site
from interpose.taps import values
from interpose.taps.context import current, frame_of, graph_task, in_autograd_thread, is_heard

BEFORE_EDIT, BEFORE_READ, AFTER_EDIT, AFTER_READ = range(4)
"""The phases of a module call, in order; the values of the first two are its arguments, of the others its output."""


Lent = tuple[Tensor, Tensor, int, str]
"""An argument, what took its place, the version of that, and the site if its gradient is watched."""


class Call:
    """One call of a module as its listeners see it: the values, which they may replace.

    ``given`` are the arguments as torch has them; ``value`` is what the module returned, or before
    the forward, the arguments by name. ``lent`` are arguments that were replaced, ``replaced`` all
    values, each with what took its place. ``shared`` is for listeners that do one thing together,
    such as keeping one copy of a value.
    """

    __slots__ = (
        "before", "changed", "given", "index", "lent", "module", "recomputed", "replaced", "root",
        "shared", "value",
    )  # fmt: skip

    def __init__(
        self,
        module: nn.Module,
        value: Any,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        *,
        before: bool,
        recomputed: bool,
        root: nn.Module,
    ) -> None:
        self.module = module
        self.value = value
        self.given = given
        self.before = before
        self.recomputed = recomputed
        self.root = root
        self.index: int | None = None
        self.changed = False
        self.lent: list[Lent] = []
        self.replaced: list[tuple[Tensor, Tensor]] = []
        self.shared: dict[Any, Any] = {}

    def replace(self, leaf: values.Leaf, old: Tensor, new: Tensor, watched: str = "") -> None:
        """Put a tensor in the place of another; the model goes on with it.

        A tensor that stands in several places stays one tensor if the same takes its place in them:
        modules look for that (``nn.MultiheadAttention``: is the query also the key?).

        ``watched`` names the site if the gradient of the new tensor is to be that of the old one, in
        this place alone. Then neither may be written to later where the other is meant too.
        """
        if not watched:
            twins = (there for was, there in self.replaced if was is old)
            new = next((there for there in twins if values.are_one(there, new)), new)
            self.replaced.append((old, new))
        self.value = values.swap(self.value, leaf, new)
        self.changed = True
        if self.before:
            self.lent.append((old, new, new._version, watched))
        elif watched:
            fixed = frame_of(self.root).must_not_change
            fixed.append((old, old._version, watched))
            if self.shares_memory_with_inputs(old):
                fixed.append((new, new._version, watched))

    def shares_memory_with_inputs(self, value: Tensor) -> bool:
        """Whether a module returned (a view of) what it was given, as Identity does."""
        pointer = value.untyped_storage().data_ptr()
        return any(
            given.untyped_storage().data_ptr() == pointer for _, given in values.leaves(self.given)
        )


class Listener(Protocol):
    """What hears the calls of a module."""

    scope: object | None
    root: nn.Module
    call: int | None
    single_run: bool
    most_calls: int
    missed: int
    rank: int
    tap: Tap | None

    def on(self, call: Call) -> None:
        """Look at a call, or change its values."""


class Tap:
    """A torch hook that hands calls to listeners. Copies and pickles of the module get an inert one."""

    __slots__ = ("before", "handle", "listeners", "phase")

    def __init__(self, phase: int) -> None:
        self.phase = phase
        self.before = phase < AFTER_EDIT
        self.listeners: tuple[Listener, ...] = ()
        self.handle: RemovableHandle | None = None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Takes any arguments and returns None, and needs no interpose to be unpickled.
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """What torch calls. The arity is open: see the first line."""
        if len(rest) != (1 if self.before else 2):
            # Another thread is registering this very hook: torch writes it before its with_kwargs
            # flag.
            return None
        if torch.compiler.is_compiling():
            # Dynamo then runs this part of the model eagerly, and the hooks with it.
            raise Unsupported(
                "a model with hooks on it cannot be compiled whole or exported. Do that first: "
                "compiled modules run eagerly while hooks are on."
            )
        again = graph_task() != -1  # inside a backward pass: a checkpoint repeats its forward
        here = current()
        anyone = again and in_autograd_thread() and self._has_one_owner()
        call = None
        for listener in self.listeners:
            if not (anyone or is_heard(listener.scope, here)):
                listener.missed += 1
                continue
            if call is None:
                call = self._call(module, args, rest, again, listener.root)
            if again:
                call.index = _recomputed_index(listener, module)
            elif listener.single_run:
                call.index = listener.most_calls
                listener.most_calls += 1
            else:
                counts = frame_of(listener.root).counts
                call.index = index = counts.get(id(listener), 0)
                counts[id(listener)] = index + 1
                listener.most_calls = max(listener.most_calls, index + 1)
            if listener.call is None or listener.call == call.index:
                listener.on(call)
        if call is None:
            return None
        if call.lent:
            vars(_LENT).setdefault(str(id(module)), []).extend(call.lent)
        if not call.changed:
            return None
        return given_arguments(module, args, rest[0], call.value) if self.before else call.value

    def _call(self, module: nn.Module, args: Any, rest: Any, again: bool, root: nn.Module) -> Call:
        if "_is_replica" in module.__dict__:
            raise Unsupported(
                "hooks do not work inside nn.DataParallel, whose replicas run in threads of their "
                "own. Use DistributedDataParallel, or wrap the module before replicating it."
            )
        given = (args, rest[0])
        if self.before:
            _forget_stale(module, given)
        value = named_arguments(module, *given) if self.before else rest[1]
        call = Call(module, value, given, before=self.before, recomputed=again, root=root)
        if self.phase == AFTER_EDIT:
            lent = vars(_LENT).pop(str(id(module)), None)
            if lent is not None:
                _give_back(call, lent)
        return call

    def _has_one_owner(self) -> bool:
        """Autograd's threads cannot tell whose call it is: fine if all scopes here are nested in one another."""
        scopes: dict[int, Any] = {
            id(x.scope): x.scope for x in self.listeners if x.scope is not None
        }
        if len(scopes) > 1:
            innermost = max(scopes.values(), key=lambda scope: len(scope.around))
            if not {id(scope) for scope in (*innermost.around, innermost)}.issuperset(scopes):
                raise GradientError(
                    "a checkpointed part of the model is recomputed in an autograd thread while "
                    "several threads have hooks on it: whose call this is cannot be known. Let "
                    "one thread train at a time, or turn activation checkpointing off."
                )
        return True


def _recomputed_index(listener: Listener, module: nn.Module) -> int | None:
    """Which call of a module a checkpoint repeats: known only if there was one."""
    if listener.most_calls <= 1:
        return 0
    if listener.call is not None:
        raise GradientError(
            f"{type(module).__name__} is called {listener.most_calls} times under activation "
            "checkpointing; which call is being recomputed cannot be known, so call "
            f"#{listener.call} cannot be hooked. Hook all its calls, or turn checkpointing off."
        )
    return None


_LOCK = threading.RLock()
_LENT = threading.local()
"""Arguments replaced in the calls under way in this thread, by module."""


def listen(module: nn.Module, phase: int, listener: Listener, *, first: bool = False) -> None:
    """Let a listener hear a module's calls."""
    if isinstance(module, torch.jit.ScriptModule):
        raise Unsupported(
            f"{type(module).__name__} is TorchScript: its inside runs outside Python, where no "
            "hook can see it. Hook the module that calls it, or use the module before "
            "torch.jit.script or trace."
        )
    with _LOCK:
        hooks: Any = module._forward_pre_hooks if phase < AFTER_EDIT else module._forward_hooks
        for tap in hooks.values():
            if type(tap) is Tap and tap.phase == phase:
                joined = (listener, *tap.listeners) if first else (*tap.listeners, listener)
                tap.listeners = tuple(sorted(joined, key=lambda each: each.rank))
                if phase in (BEFORE_READ, AFTER_READ) and tap.handle is not None:
                    hooks.move_to_end(tap.handle.id)  # foreign hooks may have come since
                break
        else:
            tap = Tap(phase)
            tap.listeners = (listener,)
            register = (
                module.register_forward_pre_hook if tap.before else module.register_forward_hook
            )
            prepend = phase in (BEFORE_EDIT, AFTER_EDIT)
            tap.handle = register(tap, prepend=prepend, with_kwargs=True)
        listener.tap = tap


def is_listened_to(module: nn.Module) -> bool:
    """Whether someone here and now hears what a module returns."""
    hooks = module._forward_hooks
    return bool(hooks) and any(
        isinstance(tap, Tap) and is_anyone_heard(tap.listeners) for tap in list(hooks.values())
    )


def is_anyone_heard(listeners: Iterable[Any]) -> bool:
    """Whether one of some listeners hears calls made here and now."""
    if graph_task() != -1 and in_autograd_thread():
        return True  # no context there: a recomputation is everybody's
    here = current()
    return any(is_heard(listener.scope, here) for listener in listeners)


def unlisten(listener: Listener) -> None:
    """Undo `listen`; the last listener takes the torch hook with it."""
    with _LOCK:
        tap, listener.tap = listener.tap, None
        if tap is None:
            return
        if len(tap.listeners) > 1:
            tap.listeners = tuple(other for other in tap.listeners if other is not listener)
        else:
            tap.listeners = ()
            if tap.handle is not None:
                tap.handle.remove()


def forget_lent(module: nn.Module) -> None:
    """Drop what a call that never came to its end has left in this thread."""
    vars(_LENT).pop(str(id(module)), None)


def _forget_stale(module: nn.Module, given: Any) -> None:
    """At a new call: what an earlier phase of it lent is among its arguments, anything else is old."""
    lent = vars(_LENT).get(str(id(module)))
    if lent is not None:
        tensors = [tensor for _, tensor in values.leaves(given)]
        if not any(new is tensor for _, new, _, _ in lent for tensor in tensors):
            forget_lent(module)


def _give_back(call: Call, lent: Sequence[Lent]) -> None:
    """If a module changed a replaced argument in place (ReLU(inplace=True)), change the original the same way."""
    for old, new, version, watched in reversed(lent):
        if watched:
            frame_of(call.root).must_not_change.append((new, new._version, watched))
        if new._version == version:
            continue
        old.copy_(new)
        for leaf, tensor in list(values.leaves(call.value)):
            if tensor is new:
                call.value = values.swap(call.value, leaf, old)
                call.changed = True


def named_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
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


def getter(site: Site) -> Callable[[tuple[Any, ...], dict[str, Any], Any], Any] | None:
    """A short way to a site's value from a call's arguments and output; None if there is none."""
    leaf = site.tail.leaf
    if site.tail.port == "output":
        if not leaf:
            return lambda args, kwargs, output: output  # noqa: ARG005
        if len(leaf) == 1 and isinstance(leaf[0], int):
            at = leaf[0]
            return lambda args, kwargs, output: (  # noqa: ARG005
                output[at] if type(output) is tuple and 0 <= at < len(output) else None
            )
        return None
    if len(leaf) != 1:
        return None
    key = leaf[0]
    names = _parameters(site.module)[0]
    if not isinstance(key, str) or key not in names:
        return None
    place = names.index(key)

    def argument(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:  # noqa: ARG001
        return args[place] if place < len(args) else kwargs.get(key)

    return argument


def _parameters(module: nn.Module) -> tuple[tuple[str, ...], str]:
    kind = type(module)
    of_class = _names_in_class(kind.forward, isinstance(kind.__dict__.get("forward"), staticmethod))
    if "forward" not in vars(module):
        return of_class[:2]
    own = _names_of(module.forward)
    # What another library puts there takes anything, or shows the class's function with its receiver.
    return of_class[:2] if own[0][:1] in ((), of_class[2]) else own


@lru_cache(maxsize=1024)
def _names_in_class(
    forward: Callable[..., Any], static: bool
) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """The names of positional parameters, of what takes the rest, and of the receiver."""
    names, star = _names_of(forward)
    return (names, star, ()) if static else (names[1:], star, names[:1])


def _names_of(forward: Callable[..., Any]) -> tuple[tuple[str, ...], str]:
    """The names of positional parameters, and of what takes the rest."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return (), "args"
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = tuple(p.name for p in parameters if p.kind in kinds)
    star = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return positional, star
