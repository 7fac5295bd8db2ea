"""Hooks that belong to the model: heard in all threads, until they are removed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from interpose.engine.hooks import Hook, TorchHook, as_hook, checked_direction
from interpose.engine.points import Handle
from interpose.engine.scope import Binding, bind
from interpose.sites.tree import Filter
from interpose.taps import eager

if TYPE_CHECKING:
    from interpose.engine.model import Model

HookItem = Hook | tuple[Any, Callable[..., Any]] | tuple[Any, TorchHook]
"""What a list of hooks holds: hook objects, and pairs of a site filter and a function."""


class StandingHooks:
    """The part of a `Model` that keeps hooks for good."""

    root: nn.Module
    _handles: list[Handle]
    _frames: Binding
    _contexts: dict[str, dict[Any, Any]]

    def register(self, hook: HookItem, *, dir: str = "fwd") -> Handle:  # noqa: A002 - TransformerLens's word
        """Put a hook on the model for good; the handle switches it off, on, or removes it."""
        return self._add(as_hook(hook, checked_direction(dir)))

    def add_hook(
        self,
        name: Filter,
        hook: Callable[..., Any],
        dir: str = "fwd",  # noqa: A002
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> Handle:
        """Add a function to the sites a filter selects, for all threads, until it is removed.

        Args:
            name: which sites.
            hook: ``fn(value, hook)``.
            dir: ``fwd`` for values, ``bwd`` for gradients.
            is_permanent: `reset_hooks` and `remove_all_hook_fns` leave it unless told otherwise.
            level: a number to remove it by.
            prepend: run before the hooks that are there already.
        """
        made = as_hook((name, hook), checked_direction(dir))
        return self._add(made, is_permanent=is_permanent, level=level, prepend=prepend)

    def add_perma_hook(self, name: Filter, hook: Callable[..., Any], dir: str = "fwd") -> Handle:  # noqa: A002
        """Add a function that `reset_hooks` leaves in place."""
        return self.add_hook(name, hook, dir=dir, is_permanent=True)

    def _add(
        self,
        hook: Hook,
        *,
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> Handle:
        if any(handle.hook is hook for handle in self._handles):
            raise ValueError(f"{hook.label} is on this model already; remove it first.")
        model = cast("Model", self)
        model.refresh()
        bindings = bind(model, hook, None)

        def take_off() -> None:
            for binding in bindings:
                binding.remove()
            if not self._handles:
                self._frames.remove()
            let_go()

        def release(handle: Handle) -> None:
            if handle in self._handles:
                self._handles.remove(handle)
                take_off()

        eager.hold()
        # A model that is dropped with hooks on it lets go too.
        let_go = weakref.finalize(self.root, eager.release)
        try:
            if not self._handles:
                self._frames.install(first=True)
            for binding in bindings:
                binding.install(first=prepend)
        except BaseException:
            take_off()
            raise
        handle = Handle(hook, bindings, release, is_permanent=is_permanent, level=level)
        self._handles.insert(0, handle) if prepend else self._handles.append(handle)
        return handle

    def remove_all_hook_fns(
        self, direction: str = "both", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """Remove hooks that were added with `add_hook` or `register`."""
        for handle in list(self.handles_here()):
            if handle.matches(direction, including_permanent, level):
                handle.remove()

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: str = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Remove hooks, and by default empty the scratch space of all sites."""
        if not isinstance(clear_contexts, bool):
            raise TypeError(
                f"reset_hooks takes no names; got {clear_contexts!r}. To remove the hooks of one "
                "site: model.hook_dict[name].remove_hooks(dir='both')"
            )
        if clear_contexts:
            self.clear_contexts()
        self.remove_all_hook_fns(direction, including_permanent, level)

    def handles_here(self) -> list[Handle]:
        """The hooks that a hook point lists: the model's own."""
        return self._handles

    def clear_contexts(self) -> None:
        """Empty the scratch space (``hook.ctx``) of all sites."""
        self._contexts.clear()

    def list_hooks(self) -> list[Handle]:
        """The model's own hooks in order, each with how often it fired."""
        return list(self._handles)

    def _handle(self, id: str) -> Handle:  # noqa: A002
        for handle in self._handles:
            if handle.id == id:
                return handle
        there = ", ".join(repr(handle.id) for handle in self._handles) or "none"
        raise KeyError(f"no hook {id!r} on this model; there are: {there}")

    def enable(self, id: str) -> None:  # noqa: A002
        """Let a hook run again, by id."""
        self._handle(id).enable()

    def disable(self, id: str) -> None:  # noqa: A002
        """Keep a hook but do not run it, by id."""
        self._handle(id).disable()

    def unregister(self, id: str) -> None:  # noqa: A002
        """Take a hook off the model, by id."""
        self._handle(id).remove()

    def standing_bindings(self) -> list[Binding]:
        """What serves the model's own hooks."""
        return [binding for handle in self._handles for binding in handle.bindings]
