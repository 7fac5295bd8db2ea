"""Hooks and runs with TransformerLens's arguments: levels, contexts, caching hooks, vetoes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from interpose.dialects.transformer_lens import masked_scores
from interpose.dialects.transformer_lens.activation_cache import ActivationCache
from interpose.dialects.transformer_lens.config import HookedTransformerConfig
from interpose.dialects.transformer_lens.lent_hooks import Block, LentHook
from interpose.dialects.transformer_lens.utilities.slices import Slice
from interpose.engine.hooks import as_hook, caller_of, checked_direction
from interpose.engine.points import Handle, HookPoint
from interpose.models.transformer import TransformerModel

HookPair = tuple[Any, Callable[..., Any]]


class LensHooks(TransformerModel):
    """The part of a `HookedTransformer` that deals in hooks."""

    is_caching = False
    _masked_is_infinite = True
    """Whether masked scores are shown as minus infinity."""
    _lens_cfg: HookedTransformerConfig

    @property
    def context_level(self) -> int:
        """How many ``with model.hooks(...)`` blocks are around this line, in this thread."""
        return len(self._blocks)

    @property
    def _blocks(self) -> list[Block]:
        """The blocks around this line."""
        here = vars(self).setdefault("_here", threading.local())
        if not hasattr(here, "blocks"):
            here.blocks = []
        found: list[Block] = here.blocks
        return found

    def handles_here(self) -> list[Handle]:
        """The hooks that a hook point lists: the model's own, and those of the blocks around this line."""
        return [*self._handles, *(each for block in self._blocks for each in block.heard())]

    # Hooks that stay.

    def add_hook(
        self,
        name: Any,
        hook: Callable[..., Any] | None = None,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        *,
        hook_fn: Callable[..., Any] | None = None,
    ) -> Handle:
        """Add a function to the sites that a name or a filter means, until it is removed.

        Args:
            name: a name in any spelling, a list, a callable on names.
            hook: ``fn(value, hook)``.
            dir: ``fwd`` for values, ``bwd`` for gradients.
            is_permanent: `reset_hooks` leaves it unless told otherwise.
            level: removes with others of the level; by default that of the ``with model.hooks()`` around it.
            prepend: run before the hooks that are there.
            hook_fn: the bridge's word for ``hook``.
        """
        function = hook if hook is not None else hook_fn
        if function is None:
            raise TypeError("add_hook takes a function: model.add_hook(name, fn).")
        self._ask(name, function, dir, is_permanent, prepend)
        ends_here = level is None and not is_permanent
        level = self.context_level if level is None else level
        chosen = self._filter(name)
        function = self._as_heard(chosen, function, dir)
        handle = super().add_hook(chosen, function, dir, is_permanent, level, prepend)
        if ends_here and self._blocks:
            self._blocks[-1].added.append(handle)
        return handle

    def _ask(
        self,
        name: Any,
        function: Callable[..., Any],
        dir: str,
        is_permanent: bool = False,
        prepend: bool = False,
    ) -> None:
        """Let `check_hooks_to_add` see every hook point that a filter means, if somebody has overridden it."""
        if type(self).check_hooks_to_add is LensHooks.check_hooks_to_add:
            return
        for site, _ in self.tree.select(self._filter(name)):
            point = self.hook_dict[site.name]
            self.check_hooks_to_add(point, site.name, function, dir, is_permanent, prepend)

    def check_hooks_to_add(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: Callable[..., Any],
        dir: str = "fwd",
        is_permanent: bool = False,
        prepend: bool = False,
    ) -> None:
        """Called for each hook that is to be added. Override it to raise where a hook must not be."""

    def check_and_add_hook(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: Callable[..., Any],
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> Handle:
        """Add a function to one hook point, by the name it is known by."""
        del hook_point  # a view of the site that the name means
        return self.add_hook(hook_point_name, hook, dir, is_permanent, level, prepend)

    def list_hooks(  # type: ignore[override]
        self,
        name_filter: Any = None,
        dir: str = "both",
        including_permanent: bool = True,
    ) -> dict[str, list[Handle]]:
        """The hooks that are on the model, by the canonical names of their sites."""
        wanted = None
        if name_filter is not None:
            chosen = self._ranging(name_filter, lambda _: True)
            wanted = {site.canonical for site, _ in self.tree.select(chosen)}
        found: dict[str, list[Handle]] = {}
        for handle in self._handles:
            if handle.matches(dir, including_permanent, None):
                for name in sorted(handle.canonicals):
                    if wanted is None or name in wanted:
                        found.setdefault(name, []).append(handle)
        return found

    def hook_points(self) -> list[HookPoint]:
        """Every hook point."""
        return list(self.hook_dict.values())

    @property
    def mod_dict(self) -> dict[str, nn.Module | HookPoint]:
        """Modules by their own paths, and hook points by theirs."""
        modules = {name: part for name, part in self.module.named_modules() if name}
        return {**modules, **dict(self.hook_dict.items())}

    # Runs.

    @contextmanager
    def hooks(  # type: ignore[override]
        self,
        fwd_hooks: Iterable[HookPair] = (),
        bwd_hooks: Iterable[HookPair] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        *,
        hooks: Iterable[Any] = (),
    ) -> Iterator[LensHooks]:
        """A ``with`` block in which hooks are live. Hooks that `add_hook` adds inside it go with it.

        Args:
            fwd_hooks: pairs of a site (name or filter) and a function.
            bwd_hooks: the same, for gradients.
            reset_hooks_end: False leaves them all on the model.
            clear_contexts: also empty ``hook.ctx`` of all sites at the end.
            hooks: edits and other hooks of interpose.
        """
        fwd_hooks, bwd_hooks = list(fwd_hooks), list(bwd_hooks)
        forward, backward = self._pairs(fwd_hooks, "fwd"), self._pairs(bwd_hooks, "bwd")
        block = Block()
        self._blocks.append(block)
        try:
            if reset_hooks_end:
                block.lent += self._lent("fwd", fwd_hooks, forward)
                block.lent += self._lent("bwd", bwd_hooks, backward)
                with super().hooks([*hooks, *(each.hook for each in block.lent)]):
                    yield self
            else:
                self._stay(forward, backward)
                block.added.clear()
                yield self
        finally:
            self._blocks.pop()
            if reset_hooks_end:
                for handle in block.added:
                    handle.remove()
            if clear_contexts:
                self.clear_contexts()

    def run_with_hooks(
        self,
        *args: Any,
        fwd_hooks: Iterable[HookPair] = (),
        bwd_hooks: Iterable[HookPair] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        remove_batch_dim: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the model once with hooks.

        Args:
            *args: what the model takes: text or tokens.
            fwd_hooks: pairs of a site (name or filter) and a function.
            bwd_hooks: the same, for gradients; they fire in any later backward pass of this run.
            reset_hooks_end: False leaves the hooks on the model.
            clear_contexts: also empty ``hook.ctx`` of all sites at the end.
            remove_batch_dim: functions get values without the batch axis, which must be 1.
            **kwargs: what the model takes: ``return_type``, ``stop_at_layer``, ...
        """
        forward, backward = self._pairs(fwd_hooks, "fwd"), self._pairs(bwd_hooks, "bwd")
        if remove_batch_dim:
            forward, backward = ([(n, _unbatched(f)) for n, f in x] for x in (forward, backward))
        try:
            if not reset_hooks_end:
                self._stay(forward, backward)
                return self(*args, **kwargs)
            return super().run_with_hooks(*args, fwd_hooks=forward, bwd_hooks=backward, **kwargs)
        finally:
            if clear_contexts:
                self.clear_contexts()

    def run_with_cache(
        self,
        *args: Any,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        names_filter: Any = None,
        pos_slice: Any = None,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Run the model once, and keep the values of some sites: the output, and an `ActivationCache`.

        Args:
            *args: what the model takes: text or tokens.
            return_cache_object: False gives a plain dict.
            remove_batch_dim: drop the batch axis, which must be 1.
            names_filter: a name, a list of names, or a callable on names; None keeps everything.
            pos_slice: which positions to keep; an int keeps the axis.
            reset_hooks_end: has no meaning here, since nothing stays on the model; accepted.
            clear_contexts: also empty ``hook.ctx`` of all sites at the end.
            **kwargs: ``incl_bwd``, ``device``, ``stop_at_layer``, ``return_type``, ``prepend_bos``, ...
        """
        del reset_hooks_end
        if names_filter is None:
            wanted: Any = self._everything()
        else:
            wanted = self._filter(names_filter)
        if callable(wanted) and kwargs.get("stop_at_layer") is not None:
            wanted = self._before(kwargs["stop_at_layer"], wanted)
        if kwargs.get("past_kv_cache") is not None:
            kwargs.setdefault("stop", False)  # every layer adds to it
        output, cache = super().run_with_cache(
            *args,
            names_filter=wanted,
            remove_batch_dim=remove_batch_dim,
            pos_slice=_positions(pos_slice),
            **kwargs,
        )
        if clear_contexts:
            self.clear_contexts()
        kept = ActivationCache(cache, self, has_batch_dim=not remove_batch_dim)
        for name, value in kept.cache_dict.items():
            if self._masked_is_infinite and name.partition("#")[0].endswith("hook_attn_scores"):
                kept.cache_dict[name] = masked_scores.shown(value)
        return output, kept if return_cache_object else kept.cache_dict

    # Hooks that cache.

    def get_caching_hooks(
        self,
        names_filter: Any = None,
        incl_bwd: bool = False,
        device: str | torch.device | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Any = None,
    ) -> tuple[dict[str, Tensor], list[HookPair], list[HookPair]]:
        """A dict, and the forward and backward hooks that fill it, by the names they are asked by."""
        cache = {} if cache is None else cache
        chosen = None if pos_slice is None else Slice.unwrap(pos_slice)

        def keep(value: Tensor, hook: HookPoint, suffix: str = "") -> None:
            kept = value.detach().clone()
            if device is not None:
                kept = kept.to(device)
            kept = kept[0] if remove_batch_dim else kept
            if chosen is not None and hook.pos_axis is not None and "query" not in hook.axes:
                kept = chosen.apply(kept, dim=hook.pos_axis - len(hook.axes))
            cache[hook.name + suffix] = kept

        wanted = self._everything() if names_filter is None else names_filter
        backward: list[HookPair] = []
        if incl_bwd:
            backward = [(wanted, functools.partial(keep, suffix="_grad"))]
        return cache, [(wanted, keep)], backward

    def add_caching_hooks(
        self,
        names_filter: Any = None,
        incl_bwd: bool = False,
        device: str | torch.device | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Put hooks on the model that fill a dict in every run, until `reset_hooks`."""
        made, forward, backward = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim, cache
        )
        self._stay(forward, backward)
        return made

    def cache_all(self, cache: dict[str, Tensor], **kwargs: Any) -> None:
        """Fill a dict with everything in every run; `add_caching_hooks` is the newer name."""
        self.add_caching_hooks(cache=cache, **kwargs)

    def cache_some(self, cache: dict[str, Tensor], names: Any, **kwargs: Any) -> None:
        """Fill a dict with some sites in every run; `add_caching_hooks` is the newer name."""
        self.add_caching_hooks(names, cache=cache, **kwargs)

    # Shared steps.

    def _everything(self) -> Callable[[str], bool]:
        """What None means: every primary site, and those that a flag asks for."""
        ends, sites = self.cfg.flagged, self.tree.table.sites
        return lambda name: sites[name].primary or name.endswith(ends or ("\0",))

    def _before(self, layer: int, wanted: Callable[[str], bool]) -> Callable[[str], bool]:
        """A filter without the stream with which a run ends that stops at a layer."""
        last = f"blocks.{layer % len(self.blocks) if layer < 0 else layer}.hook_resid_pre"
        return lambda name: name != last and wanted(name)

    def _filter(self, wanted: Any) -> Any:
        """A filter of a user's, in a form that names resolve from.

        A callable ranges over what None means. Only if it accepts none of that, it ranges over everything.
        """
        return self._ranging(wanted, self._everything())

    def _ranging(self, wanted: Any, over: Callable[[str], bool]) -> Any:
        """A callable on names, among those only that another accepts, if there are any."""
        if not callable(wanted) or isinstance(wanted, nn.Module):
            return wanted
        found = {name for name in self.tree.table.sites if over(name) and wanted(name)}
        return found.__contains__ if found else wanted

    def _pairs(self, pairs: Iterable[HookPair], dir: str) -> list[HookPair]:
        listed = list(pairs)
        for name, function in listed:
            self._ask(name, function, dir)
        chosen = [(self._filter(name), function) for name, function in listed]
        return [(name, self._as_heard(name, function, dir)) for name, function in chosen]

    def _lent(
        self, dir: str, given: Sequence[HookPair], heard: Sequence[HookPair]
    ) -> list[LentHook]:
        """Pairs as hooks of a block."""
        found = []
        for (_, function), (name, called) in zip(given, heard):
            at = frozenset(site.canonical for site, _ in self.tree.select(name))
            hook = as_hook((name, called), checked_direction(dir))
            found.append(LentHook(hook, function, dir, at, self.context_level))
        return found

    def _as_heard(self, wanted: Any, function: Any, dir: str) -> Any:
        """A function as it is called: with masked scores as TransformerLens shows them, gradients out of tuples."""
        if not callable(function):
            return function
        if dir == "bwd":
            return _bare(function)
        if not self._masked_is_infinite:
            return function
        found = (site.kind for site, _ in self.tree.select(wanted))
        return masked_scores.showing(function) if "attn_scores" in found else function

    def _stay(self, forward: Sequence[HookPair], backward: Sequence[HookPair]) -> None:
        for name, _ in (*forward, *backward):
            self.tree.select(name)  # a wrong name ends here, before anything is on the model
        for dir, pairs in (("fwd", forward), ("bwd", backward)):
            for name, function in pairs:
                self.add_hook(name, function, dir)

    @property
    def cfg(self) -> HookedTransformerConfig:  # type: ignore[override]
        """What the model is like, and its flags."""
        raise NotImplementedError


def _bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """A backward hook may return its gradient in a tuple, as torch's own do."""
    call = caller_of(function, forward=False)

    @functools.wraps(function)
    def unwrapped(value: Tensor, hook: HookPoint) -> Any:
        made = call(value, hook)
        return made[0] if isinstance(made, tuple) else made

    return unwrapped


def _unbatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function with the value of the only text, and put the batch axis back."""
    call = caller_of(function)

    @functools.wraps(function)
    def without_batch(value: Tensor, hook: HookPoint) -> Any:
        if value.shape[0] != 1:
            raise ValueError(
                f"remove_batch_dim needs a batch of 1; {hook.name!r} is {tuple(value.shape)}."
            )
        made = call(value[0], hook)
        return made if made is None else made[None]

    return without_batch


def _positions(pos_slice: Any) -> Any:
    """A `Slice`, or what it takes, as an index; an int keeps the axis."""
    if pos_slice is None:
        return None
    found = Slice.unwrap(pos_slice)
    if found.mode == "identity":
        return None
    return (
        found.slice if found.mode == "slice" else torch.as_tensor(found.slice).reshape(-1).tolist()
    )
