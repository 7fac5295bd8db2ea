"""`Model`: any module with its sites, hooks and runs. The module itself is not changed."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from interpose.engine.cache import Cache
from interpose.engine.capture_run import CaptureRun, Cut, Index
from interpose.engine.catalog import Sites
from interpose.engine.hooks import all_hooks
from interpose.engine.points import Handle, HookDict
from interpose.engine.record import Recording
from interpose.engine.scope import Scope, frames
from interpose.engine.shape_scan import scan
from interpose.engine.stamp import Stamp
from interpose.engine.standing_hooks import HookItem, StandingHooks
from interpose.errors import Unsupported
from interpose.explain.missing import explain_attribute
from interpose.explain.raised import say_where
from interpose.explain.words import nearest
from interpose.sites.tree import Filter, ModuleTree, Site
from interpose.taps.context import Whereabouts, frame_of


class Model(StandingHooks):
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
            raise TypeError(f"wrap takes an nn.Module; got {type(module).__name__}: {module!r:.60}")
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
        self.tree = self._make_tree(module)
        self.root = self.tree.site("").module
        self._handles: list[Handle] = []
        self._frames = frames(self, None)
        self._contexts: dict[str, dict[Any, Any]] = {}
        self._seen: dict[Any, tuple[torch.Size, torch.dtype]] = {}
        self._calls_of: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._stamp: Stamp | None = None
        self.changes = 0

    def _make_tree(self, module: nn.Module) -> ModuleTree:
        """The names of this kind of model."""
        return ModuleTree(module)

    def refresh(self, *, thoroughly: bool = False) -> None:
        """Forget what was found out about the module if it has changed since: see `Stamp`. Every hooked run does.

        Args:
            thoroughly: look at every parameter too, as whoever reads weights must.
        """
        stamp = self._stamp
        if stamp is None or not stamp.holds() or (thoroughly and not stamp.holds_for()):
            if stamp is not None:
                self.forget()
            self._stamp = Stamp(self.module)

    def select(self, wanted: Any) -> list[tuple[Site, bool]]:
        """The sites that a filter means in the module as it is, each with whether it was named outright."""
        found = self.tree.select(wanted)
        if self._stamp is not None and not self._stamp.holds_for(site.module for site, _ in found):
            self.forget()
            self._stamp = Stamp(self.module)
            found = self.tree.select(wanted)
        return found

    def forget(self) -> None:
        """Find everything out anew, when it is next asked for."""
        self.changes += 1
        self._stamp = None
        self.tree.forget()
        self._seen.clear()
        self._calls_of.clear()

    def whereabouts(self, arguments: Mapping[str, Any]) -> Whereabouts:  # noqa: ARG002
        """Where in a text a forward pass with these arguments is."""
        return Whereabouts()

    def beginnings(self) -> list[Site]:
        """Where forward passes begin: at the root, and at parts of it that are run by themselves."""
        return [self.tree.site("")]

    def kept_of(self, text: Any) -> int | None:  # noqa: ARG002
        """How many positions of a text stayed, if some may have been taken back."""
        return None

    # The module, passed through.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with whatever hooks are in scope."""
        frame_of(self.root).begin(self, kwargs)  # a single run has no hooks on the root for this
        try:
            return self.module(*args, **kwargs)
        except Exception as error:
            say_where(self.tree, error)
            raise

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # not set yet: being copied or unpickled
            raise AttributeError(name)
        try:
            found = getattr(self.module, name)
        except AttributeError:
            raise AttributeError(explain_attribute(self, name)) from None
        if not inspect.ismethod(found) or not hasattr(nn.Module, name):
            return found

        @functools.wraps(found)
        def method(*args: Any, **kwargs: Any) -> Any:
            # half(), cuda(), requires_grad_() return the module: here they return the model.
            result = found(*args, **kwargs)
            return self if result is self.module else result

        return method

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module,)

    @property
    def device(self) -> torch.device:
        """Where the module's first parameter or buffer is, or where offloading brings it to when it runs."""
        return device_of(self.module)

    # What there is.

    @property
    def sites(self) -> Sites:
        """What can be hooked, as a mapping from names to sites that prints as a folded tree."""
        self.refresh(thoroughly=True)
        return Sites(self.tree, self._seen, self._calls_of)

    def scan(self, *args: Any, **kwargs: Any) -> Sites:
        """Find out every site's shape and dtype from one set of inputs, without running the model where that works."""
        scan(self, args, kwargs)
        return self.sites

    @property
    def hook_dict(self) -> HookDict:
        """Hook points by name; takes every name a site has."""
        self.refresh()
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
            return scope.forward(functools.partial(self, *args, **kwargs))

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
        output = run.run(functools.partial(self, *args, **kwargs), incl_bwd)
        return (None if stop else output), run.cache()

    def record(
        self,
        names_filter: Filter = None,
        *,
        hooks: Iterable[HookItem] = (),
        fwd_hooks: Iterable[tuple[Any, Any]] = (),
        device: str | torch.device | None = None,
        keep: Mapping[int, Index] | Callable[[Tensor], Tensor] | None = None,
    ) -> Recording:
        """A ``with`` block that keeps what its forward passes make, also those of other code.

        ```python
        with model.record("fc1") as cache:
            trainer.evaluate()
        ```

        The cache is filled at the end of the block. Forward passes that go on from a KV cache,
        as in generating text, are joined to one sequence; others are calls of their own.

        Args:
            names_filter: which sites, as in `run_with_cache`.
            hooks: as in `hooks`.
            fwd_hooks: as in `hooks`.
            device: where the values go.
            keep: what to cut from each value before keeping it.
        """
        cut = Cut(device=device, keep=keep)
        return Recording(self, names_filter, all_hooks(hooks, fwd_hooks, ()), cut=cut)

    def _beware_of_typos(self, kwargs: Mapping[str, Any], ours: Sequence[str]) -> None:
        """Refuse a misspelt argument of ours, which a forward with ``**kwargs`` would swallow."""
        for name in kwargs:
            near = _close(name, tuple(ours))
            if near and name not in inspect.signature(self.root.forward).parameters:
                raise TypeError(f"no argument {name!r}; did you mean {near!r}?")

    def __repr__(self) -> str:
        count = sum(1 for _ in self.tree.modules())
        own = f", {len(self._handles)} hooks" if self._handles else ""
        return f"{type(self).__name__}({self.tree.label}, {count} modules{own}; see model.sites)"


def device_of(module: nn.Module) -> torch.device:
    """Where a module runs. What accelerate offloads is on the meta device in between."""
    first = next(chain(module.parameters(), module.buffers()), torch.empty(0)).device
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    runs = (getattr(hook, "execution_device", None) for hook in hooks)
    there = next((one for one in runs if one is not None), first) if first.type == "meta" else first
    return torch.device(there)


_RUN_WITH_CACHE = [
    parameter.name
    for parameter in inspect.signature(Model.run_with_cache).parameters.values()
    if parameter.kind is parameter.KEYWORD_ONLY
]


@functools.lru_cache(maxsize=256)
def _close(name: str, ours: tuple[str, ...]) -> str | None:
    return nearest(name, ours, 0.8)
