"""`HookedRootModule`: a module with hook points in it. The engine does the work, in a `Model` of the module."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from interpose.dialects.transformer_lens.hook_points import (
    Block,
    Direction,
    HookFunction,
    HookPoint,
    LensHandle,
    LensHook,
    NamesFilter,
    blocks_of,
)
from interpose.engine.cache import Cache
from interpose.engine.capture_run import CaptureRun, Cut
from interpose.engine.model import Model
from interpose.errors import NothingMatched, SiteNotFound

Where = str | Callable[[str], bool]
Pairs = Iterable[tuple[Where, HookFunction]]
Both = Literal["fwd", "bwd", "both"]
Device = str | torch.device | None
Store = MutableMapping[str, Tensor]


class HookedRootModule(nn.Module):
    """The root of modules with a `HookPoint` here and there: inherit, and call ``setup()`` at the end of ``__init__``.

    ```python
    model = MLP()   # see HookPoint
    out, cache = model.run_with_cache(x)
    out = model.run_with_hooks(x, fwd_hooks=[("hook_mid", lambda value, hook: value * 0)])
    ```

    Where it differs from TransformerLens, on purpose: hooks get copies and caches hold copies; a
    returned value must have the shape of what it replaces; a name or callable that matches no hook
    point raises, and so does a named hook of a ``with`` block or run that never ran;
    `check_hooks_to_add` is asked about every hook; ``with`` blocks belong to their thread;
    `add_hook` inside a ``with`` block ends with it; a copy or pickle of the model has no hooks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_caching = False
        self.mod_dict: dict[str, nn.Module] = {}
        self.hook_dict: dict[str, HookPoint] = {}
        self._view: Model | None = None

    def setup(self) -> None:
        """Give all modules below their names, and find the hook points. Call it again after adding some."""
        self.mod_dict = {name: module for name, module in self.named_modules() if name}
        self.hook_dict = {n: m for n, m in self.mod_dict.items() if isinstance(m, HookPoint)}
        if self._view is None:
            self._view = Model(self)
        for name, module in self.mod_dict.items():
            module.name = name  # type: ignore[assignment]
            if isinstance(module, HookPoint):
                module._home = self._view, name

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_view": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.mod_dict:
            self.setup()

    def _model(self) -> Model:
        if self._view is None:
            raise RuntimeError(
                f"{type(self).__name__} does not know its hook points yet: call self.setup() at "
                "the end of its __init__."
            )
        return self._view

    @property
    def context_level(self) -> int:
        """How many ``with model.hooks(...)`` blocks are around this line."""
        return 0 if self._view is None else blocks_of(self._view)

    def hook_points(self) -> Iterable[HookPoint]:
        """All hook points, in the order of the modules."""
        return self.hook_dict.values()

    def _points(self, asked: NamesFilter) -> dict[str, HookPoint]:
        """The hook points a filter selects; raises if there is none where some were meant."""
        self._model()
        if asked is None:
            return dict(self.hook_dict)
        if isinstance(asked, str):
            return {asked: self._point(asked)}
        if not callable(asked):
            return {name: self._point(name) for name in asked}
        found = {name: point for name, point in self.hook_dict.items() if asked(name)}
        if not found:
            named = getattr(asked, "__name__", type(asked).__name__)
            raise NothingMatched(f"the filter {named!r} matches no hook point in {self._there()}")
        return found

    def _point(self, name: str) -> HookPoint:
        found = self.mod_dict.get(name)
        if isinstance(found, HookPoint):
            return found
        if found is not None:
            kind = f"{name!r} is a {type(found).__name__}, not a HookPoint."
            raise TypeError(
                f"{kind} Put one behind it, or use ip.wrap(model), which hooks any module."
            )
        near = difflib.get_close_matches(name, self.hook_dict, n=1)
        hint = f"\n  did you mean {near[0]!r}?" if near else ""
        raise SiteNotFound(f"no hook point {name!r} in {self._there()}{hint}")

    def _there(self) -> str:
        shown = ", ".join(list(self.hook_dict)[:8]) or "none; were they added after setup()?"
        shown += f", ... ({len(self.hook_dict)} in all)" if len(self.hook_dict) > 8 else ""
        return f"{type(self).__name__}.\n  there are: {shown}   (list them: model.hook_dict)"

    def add_hook(
        self,
        name: Where,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Add a function to the hook points a name or a callable selects; see `HookPoint.add_hook`."""
        for found, point in self._points(name).items():
            self.check_and_add_hook(point, found, hook, dir, is_permanent, level, prepend)

    def add_perma_hook(self, name: Where, hook: HookFunction, dir: Direction = "fwd") -> None:
        """Add a function that `reset_hooks` leaves in place."""
        self.add_hook(name, hook, dir=dir, is_permanent=True)

    def check_and_add_hook(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Add a function to one hook point, unless `check_hooks_to_add` objects."""
        self.check_hooks_to_add(
            hook_point, hook_point_name, hook, dir=dir, is_permanent=is_permanent, prepend=prepend
        )
        hook_point.add_hook(hook, dir=dir, is_permanent=is_permanent, level=level, prepend=prepend)

    def check_hooks_to_add(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        prepend: bool = False,
    ) -> None:
        """Override it to refuse a hook: raise. It is asked before every hook, also those of runs."""

    def remove_all_hook_fns(
        self, direction: Both = "both", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """Remove hooks from all hook points."""
        for point in self.hook_points():
            point.remove_hooks(direction, including_permanent, level)

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Both = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Remove hooks, and by default empty the scratch space of all hook points."""
        if clear_contexts:
            self.clear_contexts()
        self.remove_all_hook_fns(direction, including_permanent, level)
        self.is_caching = False

    def clear_contexts(self) -> None:
        """Empty the scratch space (``hook.ctx``) of all hook points."""
        for point in self.hook_points():
            point.clear_context()

    def list_hooks(
        self, name_filter: NamesFilter = None, dir: Both = "both", including_permanent: bool = True
    ) -> dict[str, list[LensHandle]]:
        """The hooks that are on, by the name of their hook point."""
        listed = {
            name: [h for h in point._handles(dir) if h.matches(including_permanent, None)]
            for name, point in self._points(name_filter).items()
        }
        return {name: handles for name, handles in listed.items() if handles}

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Pairs = (),
        bwd_hooks: Pairs = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Self]:
        """A ``with`` block in which hooks are on, for this thread; blocks nest.

        Args:
            fwd_hooks: pairs (name or callable on names, function); the function gets a value.
            bwd_hooks: the same with gradients, also in a later backward pass of what was computed
                in the block.
            reset_hooks_end: False leaves the hooks on the model, for all threads.
            clear_contexts: empty the scratch space at the end.
        """
        asked: list[tuple[Any, HookFunction, Direction]] = [(n, f, "fwd") for n, f in fwd_hooks]
        asked += [(name, function, "bwd") for name, function in bwd_hooks]
        made: list[LensHook] = []
        for name, function, direction in asked:
            together: list[LensHook] = []
            for found, point in self._points(name).items():
                self.check_hooks_to_add(point, found, function, dir=direction)
                together += [LensHook(function, found, direction, point=point, together=together)]
            made += together
        with Block(self._model(), self.hook_dict, made if reset_hooks_end else []) as block:
            try:
                for hook in [] if reset_hooks_end else made:
                    left = LensHandle(context_level=block.level, user_hook=hook.function)
                    hook.point.stand(left, hook.direction)
                yield self
            finally:
                if reset_hooks_end:
                    block.remove_added()
                    if clear_contexts:
                        self.clear_contexts()

    def run_with_hooks(
        self,
        *model_args: Any,
        fwd_hooks: Pairs = (),
        bwd_hooks: Pairs = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Run the model once with hooks, as in `hooks`, and return its output."""
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self(*model_args, **model_kwargs)

    def run_with_cache(
        self,
        *model_args: Any,
        names_filter: NamesFilter = None,
        device: Device = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool | Callable[[Any], Tensor] = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: Any = None,
        **model_kwargs: Any,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Run the model once and return its output with copies of the values at its hook points.

        A hook point that is called several times is kept as its last call left it.

        Args:
            *model_args: what the model takes.
            names_filter: which hook points; None for all.
            device: where the values go; by default they stay where they are.
            remove_batch_dim: drop the first axis, which must be 1.
            incl_bwd: also keep gradients, as ``name + "_grad"``. True if the model returns one
                number, else a function from the output to one. Only these gradients are computed:
                the parameters' ``.grad`` stay as they are (with ``reset_hooks_end=False``, when
                the hooks stay, it is an ordinary backward pass).
            reset_hooks_end: False leaves the caching hooks on the model.
            clear_contexts: empty the scratch space at the end.
            pos_slice: which positions to keep: an integer, a list, a slice, or a tuple of its
                bounds. Positions are axis -2, and -3 at ``hook_q``, ``k``, ``v``, ``z``,
                ``result``; a hook point's ``pos_dim`` overrides that.
            **model_kwargs: what the model takes.
        """
        if not reset_hooks_end:
            kept, fwd, bwd = self.get_caching_hooks(
                names_filter, bool(incl_bwd), device, remove_batch_dim, None, pos_slice
            )
            with self.hooks(fwd, bwd, reset_hooks_end=False):
                out = self(*model_args, **model_kwargs)
                if incl_bwd:
                    (incl_bwd(out) if callable(incl_bwd) else out).backward()
            return out, kept
        model, points = self._model(), self._points(names_filter)
        if not points:
            return self(*model_args, **model_kwargs), {}
        name_at = {model.tree.site(name).canonical: name for name in points}
        pattern = names_filter is None or callable(names_filter)
        wanted = name_at.__contains__ if pattern else list(name_at)
        cut = LensCut(device=device, remove_batch_dim=remove_batch_dim, pos_slice=pos_slice)
        cut = replace(cut, axis_at={site: points[name].pos_axis for site, name in name_at.items()})
        run = CaptureRun(model, wanted, cut=cut, gradients=bool(incl_bwd))
        try:
            out = run.run(lambda: model(*model_args, **model_kwargs), incl_bwd)
        finally:
            if clear_contexts:
                self.clear_contexts()
        return out, _as_dict(run.cache(), name_at)

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: Device = None,
        remove_batch_dim: bool = False,
        cache: Store | None = None,
        pos_slice: Any = None,
    ) -> tuple[Any, list[Any], list[Any]]:
        """A cache and the hooks that fill it: (cache, fwd_hooks, bwd_hooks), to give to `hooks` with others."""
        kept: Store = {} if cache is None else cache
        points = self._points(names_filter)
        # The engine hands a hook a copy, which nobody else has.
        cut = LensCut(device=device, remove_batch_dim=remove_batch_dim, clone=False)
        cut = replace(cut, pos_slice=pos_slice, axis_at={n: p.pos_axis for n, p in points.items()})
        optional = names_filter is None or callable(names_filter)
        fwd = [(name, _keeper(kept, name, "", cut, optional)) for name in points]
        bwd = [(name, _keeper(kept, name, "_grad", cut, optional)) for name in points]
        return kept, fwd, bwd if incl_bwd else []

    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: Device = None,
        remove_batch_dim: bool = False,
        cache: Store | None = None,
    ) -> Any:
        """Let every run fill a cache, until `reset_hooks`; returns the cache."""
        made = self.get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, cache)
        for name, keep in made[1]:
            self.add_hook(name, keep)
        for name, keep in made[2]:
            self.add_hook(name, keep, "bwd")
        self.is_caching = True
        return made[0]

    def cache_all(self, cache: Store | None, incl_bwd: bool = False, **options: Any) -> None:
        """The old name of `add_caching_hooks` for all hook points, with its options."""
        self.add_caching_hooks(None, incl_bwd, cache=cache, **options)

    def cache_some(
        self, cache: Store | None, names: Where, incl_bwd: bool = False, **options: Any
    ) -> None:
        """The old name of `add_caching_hooks` for some hook points, with its options."""
        self.add_caching_hooks(names, incl_bwd, cache=cache, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class LensCut(Cut):
    """What is kept of a value, with positions where TransformerLens has them: ``axis_at`` says where, by site."""

    axis_at: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, value: Tensor, name: str, axes: tuple[str, ...] = ()) -> Tensor:
        """The part that is kept."""
        chosen: Any = getattr(self.pos_slice, "slice", self.pos_slice)  # of a Slice
        axis = self.axis_at.get(name.partition("#")[0].removesuffix("_grad"), -2)
        if chosen is None or not -value.ndim <= axis < value.ndim:
            return Cut.__call__(replace(self, pos_slice=None), value, name, axes)
        chosen = slice(*chosen) if isinstance(chosen, tuple) else chosen
        if not isinstance(chosen, slice):
            chosen = torch.as_tensor(chosen, device=value.device).reshape(-1)
        part = value.detach()[(slice(None),) * (axis % value.ndim) + (chosen,)]
        # Not a twin, which has the strides of the whole and so its gaps.
        part = part.clone(memory_format=torch.contiguous_format)
        return Cut.__call__(replace(self, pos_slice=None, clone=False), part, name, axes)


def _keeper(cache: Store, name: str, ending: str, cut: LensCut, optional: bool) -> HookFunction:
    """A hook function that puts what it is given into a cache."""

    def keep(value: Tensor, hook: object) -> None:  # noqa: ARG001
        cache[name + ending] = cut(value, name)

    vars(keep)["is_optional"] = optional
    return keep


def _as_dict(cache: Cache, name_at: Mapping[str, str]) -> dict[str, Tensor]:
    """The cache as TransformerLens has it, in the order the model made the values; gradients come last."""
    grads = cache.grad
    made = dict.fromkeys(key.partition("#")[0] for key in cache)
    found = {name_at[key]: cache.calls(key)[-1] for key in made if key in name_at}
    return found | {f"{n}_grad": grads.calls(s)[-1] for s, n in name_at.items() if s in grads}
