"""A run that keeps values: what is cut from each, when the run may stop, and how the cache is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.engine.cache import Cache
from interpose.engine.hooks import Hook
from interpose.engine.listeners import Capturing, GiveBack, Listener, Watching
from interpose.engine.points import HookPoint
from interpose.engine.scope import Binding, Scope
from interpose.errors import GradientError
from interpose.sites.tree import Filter, Site
from interpose.taps import values
from interpose.taps.tap import Call

if TYPE_CHECKING:
    from interpose.engine.model import Model

Index = int | slice | Sequence[int] | Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Which part of a value is kept, and how."""

    device: str | torch.device | None = None
    remove_batch_dim: bool = False
    pos_slice: Index | None = None
    keep: Mapping[int, Index] | Callable[[Tensor], Tensor] | None = None
    clone: bool = True
    detach: bool = True

    def __call__(self, value: Tensor, name: str) -> Tensor:
        """The part of a value that is kept: sliced first, so that nothing else is copied."""
        part = value.detach() if self.detach else value
        if self.pos_slice is not None:
            if part.ndim != 3:
                raise ValueError(
                    f"pos_slice needs values of shape [batch, pos, features]; {name!r} is {tuple(part.shape)}. "
                    "Say which axis with keep={axis: index}."
                )
            whole = self.pos_slice
            part = _pick(part, 1, [whole] if isinstance(whole, int) else whole)
        if callable(self.keep):
            part = self.keep(part)
        elif self.keep is not None:
            # From the last axis on, so that an axis dropped by an integer does not shift the others.
            for axis, index in sorted(self.keep.items(), key=lambda item: -(item[0] % part.ndim)):
                part = _pick(part, axis, index)
        if self.remove_batch_dim:
            if part.shape[0] != 1:
                raise ValueError(f"remove_batch_dim needs a batch of one; {name!r} is {tuple(part.shape)}.")
            part = part[0]
        moved = part if self.device is None else part.to(self.device)
        if self.clone and moved.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
            moved = values.twin(moved)
        return moved


def _pick(value: Tensor, axis: int, index: Index) -> Tensor:
    if isinstance(index, int):
        return value.select(axis, index)
    if isinstance(index, slice):
        return value[(slice(None),) * (axis % value.ndim) + (index,)]
    return value.index_select(axis, torch.as_tensor(index, device=value.device) % value.shape[axis])


class Stop(BaseException):
    """Ends a run whose output nobody wants. Caught by the run that raised it, and by nothing that catches Exception."""

    def __init__(self, run: CaptureRun) -> None:
        self.run = run


@dataclass(frozen=True, slots=True)
class Kept:
    """One captured tensor."""

    site: Site
    name: str
    call: int | None
    leaf: values.Leaf
    tensor: Tensor


class CaptureRun(Scope):
    """A scope that also keeps the values (and gradients) of some sites."""

    def __init__(
        self,
        model: Model,
        wanted: Filter,
        hooks: Sequence[Hook] = (),
        *,
        cut: Cut,
        gradients: bool = False,
        stop: bool = False,
        check_finite: bool = False,
    ) -> None:
        super().__init__(model, hooks, check_finite=check_finite, outlives_scope=True)
        self.cut = cut
        self.targets = [] if gradients else None
        self.kept: list[Kept] = []
        self.grads: list[Kept] = []
        sites = model.tree.select(wanted)
        reads = Binding("the cache", "fwd", _always)
        reads.asked = sites
        reads.listeners = [Capturing(model, s, self, outright=o, keep=self._keep) for s, o in sites]
        self.bindings.append(reads)
        if gradients:
            self.bindings.append(self._watch(sites))
        self.waiting = self._stop_after(reads.listeners) if stop else None

    def _watch(self, sites: list[tuple[Site, bool]]) -> Binding:
        watch = Binding("the gradient cache", "bwd", _always)
        watch.asked = sites
        for site, outright in sites:
            listener = Watching(
                self.model,
                site,
                self,
                outright=outright,
                receive=self._keep_grad(site),
                enabled=_always,
                reads_last=True,
                outlives_scope=False,
            )
            watch.listeners.append(listener)
            if listener.phase.before:
                watch.listeners.append(GiveBack(self.model, site, self, outright=outright))
        return watch

    def _stop_after(self, listeners: Sequence[Listener]) -> set[Listener] | None:
        """Whom to wait for before stopping; None if it is not known yet which call of a module is the last."""
        known = self.model._calls_of
        waiting = set()
        for listener in listeners:
            calls = 1 if listener.call is not None else known.get(listener.site.module)
            if calls is None or calls > 1:
                return None
            if calls == 1 or listener.outright:
                waiting.add(listener)
        return waiting

    def _keep(self, listener: Capturing, call: Call, value: Tensor, leaf: values.Leaf, name: str) -> None:
        part = call.shared.get((self, leaf))
        if part is None:
            part = call.shared[(self, leaf)] = self.cut(value, name)
        self.kept.append(Kept(listener.site, name, call.index, leaf, part))
        if self.waiting is not None:
            self.waiting.discard(listener)
            if not self.waiting:
                self.stopped = True
                raise Stop(self)

    def _keep_grad(self, site: Site) -> Callable[[Tensor, HookPoint], None]:
        def keep(grad: Tensor, point: HookPoint) -> None:
            self.grads.append(Kept(site, point.name, point.call, (), self.cut(grad, f"{point.name}_grad")))

        return keep

    def run(self, call: Callable[[], Any], backward: Callable[[Any], Any] | bool = False) -> Any:
        """Call the model inside the scope; None if it stopped early."""
        output = None
        try:
            with self:
                output = call()
                if backward is not False:
                    self._backward(output if backward is True else backward(output))  # type: ignore[operator]
        except Stop as stop:
            if stop.run is not self:
                raise
        if not self.stopped:
            for binding in self.bindings:
                for listener in binding.listeners:
                    if isinstance(listener, Capturing):
                        self.model._calls_of[listener.site.module] = listener.most_calls
        self.targets = None
        return output

    def _backward(self, loss: Any) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise GradientError(
                f"gradients need one number to start from; the model returned {what}. "
                "Pass a function that makes a loss of the output: incl_bwd=lambda out: out.sum()"
            )
        if self.targets and loss.requires_grad:
            # To these tensors only: the parameters' own .grad stay as they are, and nothing is computed for them.
            torch.autograd.grad(loss, self.targets, allow_unused=True)

    def cache(self) -> Cache:
        """What was kept, as a mapping."""
        tree = self.model.tree
        found: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        calls: dict[str, list[str]] = {}
        several = _called_more_than_once(self.kept)
        for suffix, records in (("", self.kept), ("_grad", self.grads)):
            for one in records:
                key = one.name
                if one.name in several:
                    key = one.site.element(one.leaf, one.call) if not suffix else _with_call(one, calls[one.name])
                    if not suffix:
                        calls.setdefault(one.name, []).append(key)
                found[key + suffix] = one.tensor
                if not suffix:
                    for other in _other_names(tree, one):
                        aliases.setdefault(other, one.name)
        versions = {k: v._version for k, v in found.items() if not self.cut.clone and not v.is_inference()}
        return Cache(found, aliases=aliases, calls=calls, versions=versions)


def _always() -> bool:
    return True


def _called_more_than_once(records: list[Kept]) -> set[str]:
    seen: set[str] = set()
    several: set[str] = set()
    for one in records:
        (several if one.name in seen else seen).add(one.name)
    return several


def _with_call(one: Kept, keys: list[str]) -> str:
    return keys[one.call] if one.call is not None else one.name


def _other_names(tree: Any, one: Kept) -> list[str]:
    """Every other spelling of a kept tensor's name."""
    site = one.site
    tail = site.tail
    names = [site.canonical, site.element(one.leaf)]
    for path in (site.path, *tree.other_names(site.path)):
        names.append(tree.spell(path, tail))
        if one.leaf != tail.leaf:
            names.append(tree.spell(path, type(tail)(tail.call, tail.port, one.leaf)))
    return [name for name in names if name != one.name]
