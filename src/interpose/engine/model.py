"""`Model`: any module with its sites, hooks and runs. The module itself is not changed."""

from __future__ import annotations

import difflib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from interpose.engine.cache import Cache
from interpose.engine.capture import CaptureRun, Cut, Index
from interpose.engine.catalog import Sites
from interpose.engine.hooks import Hook, TorchHook, all_hooks, as_hook, checked_direction
from interpose.engine.points import Handle, HookDict
from interpose.engine.probe import scan
from interpose.engine.scope import Binding, Scope, bind, frames
from interpose.errors import Unsupported
from interpose.sites.tree import Filter, ModuleTree
from interpose.taps import eager

HookItem = Hook | tuple[Any, Callable[..., Any]] | tuple[Any, TorchHook]
"""What a list of hooks holds: hook objects, and pairs of a site filter and a function."""


def wrap(module: nn.Module) -> Model:
    """Look inside a module: its sites by name, hooks, runs, caches. The module itself stays as it is.

    ```python
    model = ip.wrap(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()))
    output, cache = model.run_with_cache(torch.randn(2, 4))
    cache["1"]                                    # what the ReLU returned
    ```
    """
    return Model(module)


def as_model(model: Model | nn.Module) -> Model:
    """A model, wrapped if it is not yet."""
    return model if isinstance(model, Model) else Model(model)


class Model:
    """A module, and everything one can do with it by name.

    It is not an ``nn.Module``: it owns no parameters and adds no prefix to anybody's
    ``state_dict``. What it does not have itself it takes from the module: ``model.parameters()``,
    ``model.state_dict()``, ``model.config``, ``model.fc1``.
    """

    def __init__(self, module: nn.Module) -> None:
        if isinstance(module, Model):
            raise TypeError(
                "this is wrapped already; wrap(model.module) would make a second view of it."
            )
        if not isinstance(module, nn.Module):
            raise TypeError(f"wrap takes an nn.Module; got {type(module).__name__}.")
        if isinstance(module, torch.jit.ScriptModule):
            raise Unsupported(
                f"{type(module).__name__} is TorchScript: its inside runs outside Python, where no "
                "hook can see it. Wrap the module before torch.jit.script or trace."
            )
        if any(isinstance(part, nn.DataParallel) for part in module.modules()):
            raise Unsupported(
                "nn.DataParallel runs copies of the module in threads of its own, where hooks do "
                "not reach. Wrap the module inside it (data_parallel.module), or use "
                "DistributedDataParallel."
            )
        self.module = module
        self.tree = ModuleTree(module)
        self.root = self.tree.site("").module
        self._handles: list[Handle] = []
        self._frames = frames(self, None)
        self._contexts: dict[str, dict[Any, Any]] = {}
        self._seen: dict[Any, tuple[torch.Size, torch.dtype]] = {}
        self._calls_of: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    # The module, passed through.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with whatever hooks are in scope."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # not set yet: being copied or unpickled
            raise AttributeError(name)
        try:
            found = getattr(self.module, name)
        except AttributeError:
            raise AttributeError(
                f"neither Model nor {type(self.module).__name__} has {name!r}"
            ) from None
        if not inspect.ismethod(found) or not hasattr(nn.Module, name):
            return found

        @functools.wraps(found)
        def method(*args: Any, **kwargs: Any) -> Any:
            # half(), cuda(), requires_grad_() return the module: here they return the model.
            result = found(*args, **kwargs)
            return self if result is self.module else result

        return method

    def __reduce__(self) -> tuple[type[Model], tuple[nn.Module]]:
        return type(self), (self.module,)

    @property
    def device(self) -> torch.device:
        """Where the module's first parameter or buffer is."""
        tensors: Iterator[Tensor] = (
            t for group in (self.module.parameters(), self.module.buffers()) for t in group
        )
        return next(tensors, torch.empty(0)).device

    # What there is.

    @property
    def sites(self) -> Sites:
        """What can be hooked, as a mapping from names to sites that prints as a folded tree."""
        return Sites(self.tree, self._seen, self._calls_of)

    def scan(self, *args: Any, **kwargs: Any) -> Sites:
        """Find out every site's shape and dtype from one set of inputs, without running the model where that works."""
        scan(self, args, kwargs)
        return self.sites

    @property
    def hook_dict(self) -> HookDict:
        """Hook points by name; takes every name a site has."""
        return HookDict(self)

    # Runs.

    def hooks(
        self,
        hooks: Iterable[HookItem] = (),
        *,
        fwd_hooks: Iterable[tuple[Any, Any]] = (),
        bwd_hooks: Iterable[tuple[Any, Any]] = (),
        check_finite: bool = False,
    ) -> Scope:
        """A ``with`` block in which hooks are live, for this thread: also when other code calls ``model.module``.

        ```python
        with model.hooks(fwd_hooks=[("fc1", lambda value, hook: value * 0)]):
            model(x)
        ```

        Args:
            hooks: Detectors, Controllers, edits, or pairs (site, function).
            fwd_hooks: pairs (site, function); the function gets a value.
            bwd_hooks: pairs (site, function); the function gets the gradient at that value.
            check_finite: raise `NonFinite` when an edit makes NaN or Inf (this waits for the
                device at each edit).
        """
        return Scope(self, all_hooks(hooks, fwd_hooks, bwd_hooks), check_finite=check_finite)

    def run_with_hooks(
        self,
        *args: Any,
        fwd_hooks: Iterable[tuple[Any, Any]] = (),
        bwd_hooks: Iterable[tuple[Any, Any]] = (),
        hooks: Iterable[HookItem] = (),
        check_finite: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the model once with hooks and return its output. Backward hooks fire in any later backward pass of it."""
        self._beware_of_typos(kwargs, ("fwd_hooks", "bwd_hooks", "hooks", "check_finite"))
        everything = all_hooks(hooks, fwd_hooks, bwd_hooks)
        with Scope(self, everything, check_finite=check_finite, single_run=True) as scope:
            return scope.forward(lambda: self(*args, **kwargs))

    def run_with_cache(
        self,
        *args: Any,
        names_filter: Filter = None,
        device: str | torch.device | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool | Callable[[Any], Tensor] = False,
        pos_slice: Index | None = None,
        keep: Mapping[int, Index] | Callable[[Tensor], Tensor] | None = None,
        stop: bool = False,
        detach: bool = True,
        clone: bool | None = None,
        hooks: Iterable[HookItem] = (),
        fwd_hooks: Iterable[tuple[Any, Any]] = (),
        bwd_hooks: Iterable[tuple[Any, Any]] = (),
        check_finite: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Cache]:
        """Run the model once and return its output with the values of some sites.

        Args:
            *args: what the model takes.
            names_filter: which sites; None keeps the output of every module.
            device: where the cache goes; by default the values stay where they are.
            remove_batch_dim: drop the first axis, which must be 1.
            incl_bwd: also keep gradients. True if the model returns one number, else a function
                from the output to one.
            pos_slice: which positions of [batch, pos, features] values to keep.
            keep: what to cut before keeping: ``{axis: index}``, or a function of the value.
            stop: end the run after the last site asked for; the output is then None. (A module's
                first run is complete, to learn whether it is called once.)
            detach: False keeps live values, through which gradients flow.
            clone: False keeps values without copying; one that the model changes in place later
                raises when it is read.
            hooks: as in `hooks`, for this run; the cache shows values after them.
            fwd_hooks: as in `hooks`.
            bwd_hooks: as in `hooks`.
            check_finite: as in `hooks`.
            **kwargs: what the model takes.
        """
        self._beware_of_typos(kwargs, _RUN_WITH_CACHE)
        if stop and incl_bwd:
            raise ValueError("gradients need the whole run: use stop=True or incl_bwd, not both.")
        cut = Cut(
            device=device,
            remove_batch_dim=remove_batch_dim,
            pos_slice=pos_slice,
            keep=keep,
            detach=detach,
            clone=detach if clone is None else clone,
        )
        run = CaptureRun(
            self,
            names_filter,
            all_hooks(hooks, fwd_hooks, bwd_hooks),
            cut=cut,
            gradients=bool(incl_bwd),
            stop=stop,
            check_finite=check_finite,
        )
        output = run.run(lambda: self(*args, **kwargs), incl_bwd)
        return (None if stop else output), run.cache()

    def _beware_of_typos(self, kwargs: Mapping[str, Any], ours: Sequence[str]) -> None:
        """Refuse a misspelt argument of ours, which a forward with ``**kwargs`` would swallow."""
        for name in kwargs:
            near = difflib.get_close_matches(name, ours, n=1, cutoff=0.8)
            if near and name not in inspect.signature(self.root.forward).parameters:
                raise TypeError(f"no argument {name!r}; did you mean {near[0]!r}?")

    # Hooks that belong to the model: for all threads, until removed.

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
        bindings = bind(self, hook, None)

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
        directions = [binding.direction for binding in bindings]
        handle = Handle(
            hook,
            directions[0] if len(directions) == 1 else "both",
            frozenset(listener.site.canonical for listener in bindings[0].listeners),
            release,
            lambda: _fired(bindings),
            is_permanent=is_permanent,
            level=level,
        )
        self._handles.insert(0, handle) if prepend else self._handles.append(handle)
        return handle

    def remove_all_hook_fns(
        self, direction: str = "both", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """Remove hooks that were added with `add_hook` or `register`."""
        for handle in list(self._handles):
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

    def __repr__(self) -> str:
        count = sum(1 for _ in self.tree.modules())
        own = f", {len(self._handles)} hooks" if self._handles else ""
        return f"Model({self.tree.label}, {count} modules{own}; see model.sites)"


_RUN_WITH_CACHE = [
    parameter.name
    for parameter in inspect.signature(Model.run_with_cache).parameters.values()
    if parameter.kind is parameter.KEYWORD_ONLY
]


def _fired(bindings: list[Binding]) -> int:
    return sum(binding.fired for binding in bindings)
