"""Reading whole values by the shortest way: most runs only keep what flows, at many sites.

A `Capturing` listener can do anything; this does one thing. All sites of one module share one torch
hook, put into the module's own dictionary and taken out again without a handle. Where another tap
of ours is on the module, or a value is none of the plain kind, `Capturing` does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interpose.engine.cache import Kept
from interpose.engine.hooks import Hook
from interpose.engine.listeners import Capturing
from interpose.engine.scope import Binding
from interpose.sites.tree import Site
from interpose.taps.context import current, graph_task
from interpose.taps.tap import _LOCK, AFTER_READ, BEFORE_READ, Call, Tap, getter

if TYPE_CHECKING:
    from interpose.engine.capture_run import CaptureRun


class Read:
    """One site to be kept, and how often it was."""

    __slots__ = (
        "fired", "full", "get", "last", "leaf", "lens", "missed", "most_calls", "name", "outright",
        "run", "same", "site",
    )  # fmt: skip

    def __init__(self, run: CaptureRun, site: Site, outright: bool) -> None:
        self.run = run
        self.site = site
        self.name, self.lens, self.leaf = site.name, site.lens, site.tail.leaf
        self.outright = outright
        self.get = getter(site)
        self.most_calls = self.fired = self.missed = 0
        self.full: Capturing | None = None
        self.same: Read | None = None
        self.last: Tensor | None = None

    def listener(self) -> Capturing:
        """The listener that can do anything, for this site."""
        if self.full is None:
            run = self.run
            self.full = Capturing(run.model, self.site, run, outright=self.outright, sink=run)
        return self.full

    def take_over(self) -> None:
        """Count what the listener heard as one's own."""
        self.last = None
        self.fired = self.most_calls
        if self.full is not None:
            self.fired += self.full.fired
            self.missed += self.full.missed
            self.most_calls = max(self.most_calls, self.full.most_calls)


class ReadTap(Tap):
    """One torch hook for all the sites of a module, before or after its forward."""

    __slots__ = ("reads", "scope")

    def __init__(self, phase: int, scope: CaptureRun) -> None:
        super().__init__(phase)
        self.scope = scope
        self.listeners = (self,)  # type: ignore[assignment]
        self.reads: list[Read] = []

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None, output: Any = None
    ) -> None:
        """Keep a copy of each site's value. The arity is open: another thread may see half a removal."""
        if graph_task() != -1:
            return  # a checkpoint repeats what was kept already
        scope = self.scope
        if scope not in current().scopes:
            for read in self.reads:
                read.missed += 1
            return
        for read in self.reads:
            value = read.get(args, kwargs, output)  # type: ignore[misc]
            if type(value) is not Tensor or value.layout is not torch.strided or value.is_nested:
                self._at_length(read, module, args, kwargs, output)
                continue
            lens = read.lens
            if lens is not None:
                needs_call = lens.needs_call
                call = self._as_call(module, args, kwargs, output) if needs_call else None
                value = lens.read(value, call)
            index = read.most_calls
            read.most_calls = index + 1
            if read.same is not None and read.same.last is not None:
                copy = read.same.last  # names of one site share one copy
            else:
                copy = value.detach().clone() if value.requires_grad else value.clone()
            read.last = copy
            scope.kept.append(Kept(read.site, read.name, index, read.leaf, copy, None))

    def _as_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Call:
        root = self.scope.model.root
        return Call(module, output, (args, kwargs), before=self.before, recomputed=False, root=root)

    def _at_length(
        self, read: Read, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """A container, or a tensor of another kind: what a full listener makes of it."""
        full = Tap(self.phase)
        full.listeners = (read.listener(),)
        rest = (kwargs,) if self.before else (kwargs, output)
        full(module, args, *rest)


class Reads(Binding):
    """The sites a run keeps, by module."""

    def __init__(self, hook: Hook, run: CaptureRun) -> None:
        super().__init__(hook, "fwd")
        self.run = run
        self.listeners: list[Any] = []
        self._taps: list[tuple[dict[Any, Any], dict[Any, Any], ReadTap]] = []
        self._full: list[Capturing] = []
        self._on: list[Callable[[], None]] = []

    def install(self, *, first: bool = False) -> None:  # noqa: ARG002
        """Listen from now on."""
        taps: dict[tuple[int, bool], ReadTap] = {}
        for read in self.listeners:
            site = read.site
            place = (id(site.module), site.tail.port == "input")
            tap = None
            if read.get is not None and site.tail.call is None:
                tap = taps.get(place) or self._tap(site.module, before=place[1])
            if tap is None:
                self._full.append(read.listener())
                read.listener().install()
                continue
            taps[place] = tap
            for other in tap.reads:
                if other.leaf == read.leaf and other.lens == read.lens:
                    read.same = other
                    break
            tap.reads.append(read)
            if site.switch is not None:
                site.switch.on()
                self._on.append(site.switch.off)

    def _tap(self, module: nn.Module, *, before: bool) -> ReadTap | None:
        """A new tap on a module; None where one of ours is on it already, or none can be."""
        hooks: Any = module._forward_pre_hooks if before else module._forward_hooks
        if (
            torch.compiler.is_compiling()
            or isinstance(module, torch.jit.ScriptModule)
            or any(isinstance(hook, Tap) for hook in list(hooks.values()))
        ):
            return None
        flags: Any = (
            module._forward_pre_hooks_with_kwargs if before else module._forward_hooks_with_kwargs
        )
        tap = ReadTap(BEFORE_READ if before else AFTER_READ, self.run)
        with _LOCK:
            flags[tap] = True  # first: torch looks at both, in this order
            hooks[tap] = tap
        self._taps.append((hooks, flags, tap))
        return tap

    def remove(self) -> None:
        """Undo `install`, also one that failed half way."""
        for hooks, flags, tap in self._taps:
            with _LOCK:
                hooks.pop(tap, None)
                flags.pop(tap, None)
            tap.listeners, tap.reads = (), []  # it points to itself, and would keep values alive
        for listener in self._full:
            listener.remove()
        for off in self._on:
            off()
        self._taps, self._full, self._on = [], [], []
        for read in self.listeners:
            read.take_over()
