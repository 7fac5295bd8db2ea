"""A scope: hooks that are on the model between two lines of a program, for the thread or task that opened it.

Everything is resolved and checked before the model is touched; everything put on it is taken off
again, whatever happens in between; and at the end a hook that never ran is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import GradientEdge

from interpose.engine.gradients import Watching, grad_receiver
from interpose.engine.hook_calls import Editing, Skipping, TorchEditing
from interpose.engine.hooks import Engine, Hook, TorchHook, skip
from interpose.engine.listeners import Beside, FrameEnd, FrameStart, Listener, guard_output
from interpose.errors import InterposeError, NeverFired
from interpose.explain.silence import explain_silence
from interpose.sites.grammar import OUTPUT
from interpose.taps import context, eager

if TYPE_CHECKING:
    from interpose.engine.model import Model


class Binding:
    """One hook (or cache) in one direction, and the listeners that serve it at its sites.

    ``make`` makes the listeners, and makes them anew when the module has changed.
    """

    def __init__(
        self, hook: Hook, direction: str, make: Callable[[], list[Any]] = list, changes: int = 0
    ) -> None:
        self.hook = hook
        self.direction = direction
        self.make = make
        self.listeners: list[Any] = make()
        self.changes = changes
        self._fired_before = 0

    @property
    def fired(self) -> int:
        """How often it ran, at all its sites together."""
        now: int = sum(listener.fired for listener in self.listeners)
        return self._fired_before + now

    def renew(self, changes: int) -> None:
        """Listen where the sites are now, if the module has changed since."""
        if self.changes == changes or self.make is list:
            return
        self._fired_before, self.changes = self.fired, changes
        self.remove()
        try:
            self.listeners = self.make()
        except InterposeError as error:
            error.add_note(f"the model has changed since {self.hook.label} was put on it.")
            raise
        self.install()

    def silent(self) -> list[Listener]:
        """What should have run and did not: each site named outright, or all of a pattern."""
        silent = [x for x in self.listeners if not x.fired and not isinstance(x, Beside)]
        if not silent or not self.hook.enabled or not self.hook.must_fire(self.direction):
            return []
        named = [x for x in silent if x.outright]
        return named if named or self.fired else silent[:1]

    def install(self, *, first: bool = False) -> None:
        """Listen from now on."""
        for listener in reversed(self.listeners) if first else self.listeners:
            listener.install(first=first)

    def remove(self) -> None:
        """Undo `install`, also one that failed half way."""
        for listener in self.listeners:
            listener.remove()


def bind(
    model: Model,
    hook: Hook,
    scope: Scope | None,
    *,
    check_finite: bool = False,
    outlives_scope: bool = False,
) -> list[Binding]:
    """Resolve a hook's sites and make its listeners, one binding per direction."""

    def listeners(direction: str) -> list[Listener]:
        found: list[Listener] = []
        for site, outright in model.select(hook.site):  # type: ignore[attr-defined]
            if site.part is not None and isinstance(hook, (skip, TorchHook)):
                raise TypeError(f"{hook.label} takes whole values; got {site.part!r}.")
            about: dict[str, Any] = {"model": model, "site": site, "scope": scope}
            about["outright"] = outright
            listener: Listener
            if isinstance(hook, skip):
                if site.tail != OUTPUT:
                    raise ValueError(
                        f"ip.skip takes modules, at all their calls; got {site.name!r}."
                    )
                listener = Skipping(**about, hook=hook)
            elif direction == "bwd":
                listener = Watching(
                    **about,
                    hook=hook,
                    receive=grad_receiver(hook),
                    reads_last=False,
                    outlives_scope=outlives_scope,
                )
            else:
                kind = TorchEditing if isinstance(hook, TorchHook) else Editing
                listener = kind(**about, hook=hook, check_finite=check_finite)
            found += [listener, *listener.beside()]
        return found

    return [
        Binding(hook, direction, functools.partial(listeners, direction), model.changes)
        for direction in hook.directions()
    ]


def frames(model: Model, scope: Scope | None) -> Binding:
    """Notices where forward passes of the root begin and end."""
    binding = Binding(Engine("the engine"), "fwd")
    binding.listeners = [
        kind(model, site, scope, outright=True)
        for site in model.beginnings()
        for kind in (FrameStart, FrameEnd)
    ]
    return binding


class Scope:
    """Hooks on a model, from ``__enter__`` to ``__exit__``, for the context that entered.

    With ``single_run`` it lasts for one call of the model, made through `forward`: the beginning
    and end of that need no hooks on the root, and gradient hooks stay live for the backward pass of
    what it returned.
    """

    def __init__(
        self,
        model: Model,
        hooks: Sequence[Hook] = (),
        *,
        check_finite: bool = False,
        single_run: bool = False,
    ) -> None:
        model.refresh()
        self.model = model
        self.single_run = single_run
        self.around: tuple[Any, ...] = ()
        self.stopped = False
        self.targets: list[GradientEdge] | None = None
        self.bindings: list[Binding] = []
        self._forwards = 0
        self._before: context.Context | None = None
        self._frames = None if single_run else frames(model, self)
        for hook in hooks:
            self.bindings += bind(
                model, hook, self, check_finite=check_finite, outlives_scope=single_run
            )

    def __enter__(self) -> Scope:
        if self._before is not None:
            raise RuntimeError("a scope is entered once; call model.hooks(...) again for another.")
        self._before = context.current()
        self.around = self._before.scopes
        eager.hold()
        try:
            if self._frames is not None:
                self._frames.install(first=True)
            # Gradient watchers go first, so that a cache of live values keeps the value they put in.
            for direction in ("bwd", "fwd"):
                for binding in self.bindings:
                    if binding.direction == direction:
                        binding.install()
            frame = context.Frame() if self.single_run else None
            context.enter(self, self.model.root, frame=frame)
        except BaseException:
            self._remove()
            raise
        return self

    def _remove(self) -> None:
        """Take everything off, also after an entry that failed half way."""
        if self._before is not None:
            context.leave(self, self.model.root, self._before)
        for binding in self.bindings:
            binding.remove()
        if self._frames is not None:
            self._frames.remove()
        eager.release()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()
        if kind is None and not self.stopped:
            self.verify()

    def forward(self, call: Callable[[], Any]) -> Any:
        """Make the one call of a single run."""
        self._forwards += 1
        output = call()
        guard_output(self.model.root, output)
        return output

    @property
    def forwards(self) -> int:
        """How many forward passes of the model began inside."""
        return self._forwards if self._frames is None else self._frames.fired

    def verify(self) -> None:
        """Raise if a hook never ran."""
        for binding in self.bindings:
            for silent in binding.silent():
                if isinstance(silent, Watching) and silent.outlives_scope and silent.attached:
                    continue  # its backward pass is still to come
                raise NeverFired(explain_silence(self, binding.hook.label, silent))
