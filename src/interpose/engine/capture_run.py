"""A run that keeps values: what is cut from each, when the run may stop, and how the cache is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interpose.engine.cache import Cache, Kept
from interpose.engine.gradients import Watching, farthest
from interpose.engine.hooks import Engine, Hook
from interpose.engine.listeners import Capturing, Listener
from interpose.engine.points import HookPoint
from interpose.engine.scope import Binding, Scope
from interpose.engine.whole_reads import Read, Reads
from interpose.errors import GradientError
from interpose.sites.axes import position_axis
from interpose.sites.grammar import Tail
from interpose.sites.tree import Filter, ModuleTree, Site
from interpose.taps import values

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

    @property
    def slices(self) -> bool:
        """Whether less than the value is kept, or elsewhere."""
        given = (self.device, self.pos_slice, self.keep)
        return self.remove_batch_dim or any(option is not None for option in given)

    @property
    def whole(self) -> bool:
        """Whether all of a value is kept, as a detached copy."""
        return self.clone and self.detach and not self.slices

    def __call__(self, value: Tensor, name: str, axes: tuple[str, ...] = ()) -> Tensor:
        """The part of a value that is kept: sliced first, so that nothing else is copied."""
        part = value.detach() if self.detach else value
        if not self.slices:
            return values.twin(part) if self.clone else part
        if self.pos_slice is not None:
            axis = position_axis(axes)
            if axis is None and part.ndim != 3:
                raise ValueError(
                    f"pos_slice needs values of shape [batch, pos, features]; {name!r} is "
                    f"{tuple(part.shape)}. Say which axis with keep={{axis: index}}."
                )
            whole = self.pos_slice
            whole = [whole] if isinstance(whole, int) else whole
            part = _pick(part, 1 if axis is None else axis, whole)
        if callable(self.keep):
            part = self.keep(part)
        elif self.keep is not None:
            # From the last axis on, so that an axis dropped by an integer does not shift the
            # others.
            for axis, index in sorted(self.keep.items(), key=lambda item: -(item[0] % part.ndim)):
                part = _pick(part, axis, index)
        if self.remove_batch_dim:
            if part.shape[0] != 1:
                raise ValueError(
                    f"remove_batch_dim needs a batch of one; {name!r} is {tuple(part.shape)}."
                )
            part = part[0]
        moved = part if self.device is None else part.to(self.device)
        if self.clone and moved.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
            moved = values.twin(moved)
        return moved


def _pick(value: Tensor, axis: int, index: Index) -> Tensor:
    if isinstance(index, int):
        return value.select(axis, index)
    if not isinstance(index, slice):
        # Indexing, not index_select: it takes masks and negative numbers, and checks the range.
        index = torch.as_tensor(index, device=value.device)
    return value[(slice(None),) * (axis % value.ndim) + (index,)]


class Stop(BaseException):
    """Ends a run whose output nobody wants. Caught by the run that raised it, and by nothing that catches Exception."""

    def __init__(self, run: CaptureRun) -> None:
        self.run = run


_CACHE, _GRADIENT_CACHE = Engine("the cache"), Engine("the gradient cache")


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
        super().__init__(model, hooks, check_finite=check_finite, single_run=True)
        self.cut = cut
        self.targets = [] if gradients else None
        self.kept: list[Kept] = []
        self.grads: list[Kept] = []
        sites = model.select(wanted)
        hurry = cut.whole and not (stop or gradients or torch.is_inference_mode_enabled())
        hurry = hurry and all(site.part is None for site, _ in sites)
        reads = Reads(_CACHE, self) if hurry else Binding(_CACHE, "fwd")
        found: list[Any] = [
            Read(self, site, outright)
            if hurry
            else Capturing(model, site, self, outright=outright, sink=self)
            for site, outright in sites
        ]
        reads.listeners = found
        self.bindings.append(reads)
        self.reads = reads
        if gradients:
            self.bindings.append(self._watch(sites))
        self.waiting = self._stop_after(reads.listeners) if stop else None
        self.learns = stop and self.waiting is None

    def _watch(self, sites: list[tuple[Site, bool]]) -> Binding:
        watch = Binding(_GRADIENT_CACHE, "bwd")
        for site, outright in sites:
            listener = Watching(
                self.model,
                site,
                self,
                outright=outright,
                hook=_GRADIENT_CACHE,
                receive=self._keep_grad(site),
                reads_last=True,
                outlives_scope=False,
            )
            watch.listeners += [listener, *listener.beside()]
        return watch

    def _stop_after(self, listeners: Sequence[Listener]) -> set[Listener] | None:
        """Whom to wait for before stopping; None if it is not known yet which call of a module is the last."""
        known = self.model._calls_of
        waiting = set()
        for listener in listeners:
            module = listener.site.module
            calls = 1 if listener.call is not None else known.get(module)
            if calls == 0 and not listener.outright and not _can_be_called(module):
                continue
            if calls != 1:
                return None
            waiting.add(listener)
        return waiting

    def keep(
        self, site: Site, name: str, leaf: values.Leaf, part: Tensor, point: HookPoint, *_: Any
    ) -> None:
        """Take one value."""
        version = None if self.cut.clone or part.is_inference() else part._version
        self.kept.append(Kept(site, name, point.call, leaf, part, version))

    def done(self, listener: Capturing) -> None:
        """Stop the run, if this was the last site asked for."""
        if self.waiting is not None:
            self.waiting.discard(listener)
            if not self.waiting:
                for scope in (self, *self.around):
                    scope.stopped = True  # what the stop cuts off is nobody's error
                raise Stop(self)

    def _keep_grad(self, site: Site) -> Callable[[Tensor, HookPoint], None]:
        def keep(grad: Tensor, point: HookPoint) -> None:
            part = point.selected(grad)
            if part is not None:
                part = self.cut(part, f"{point.name}_grad", site.axes)
                self.grads.append(Kept(site, point.name, point.call, (), part))

        return keep

    def run(self, call: Callable[[], Any], backward: Callable[[Any], Any] | bool = False) -> Any:
        """Call the model inside the scope; None if it stopped early."""
        output = None
        try:
            with self:
                output = self.forward(call)
                if backward is True:
                    self._backward(output, "the model")
                elif backward is not False:
                    self._backward(backward(output), "incl_bwd")
        except Stop as stop:
            if stop.run is not self:
                raise
        if self.learns:
            for listener in self.reads.listeners:
                self.model._calls_of[listener.site.module] = listener.most_calls
        self.targets = None
        self.bindings.clear()  # they point back here, and only the garbage collector could free what was kept
        return output

    def _backward(self, loss: Any, whose: str) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, Tensor)
                else f"a {type(loss).__name__}"
            )
            example = "out.loss" if hasattr(loss, "loss") else "out.sum()"
            raise GradientError(
                f"gradients need one number to start from; {whose} returned {what}. Pass a "
                f"function that makes a loss of the output: incl_bwd=lambda out: {example}"
            )
        if self.targets and loss.requires_grad:
            # To these tensors only: the parameters' own .grad stay as they are, and nothing is
            # computed for them. What is asked for torch holds to the end: as few as lead past all.
            ends = farthest(loss, self.targets)
            if ends:
                torch.autograd.grad(loss, ends, allow_unused=True)

    def cache(self) -> Cache:
        """What was kept, as a mapping."""
        found: dict[str, Tensor] = {}
        calls: dict[str, list[str]] = {}
        versions: dict[str, int] = {}
        several = {one.name for one in self.kept if one.call and one.site.tail.call is None}
        seen = self.model._seen
        for one in self.kept:
            place = (one.site.path, one.site.tail.port, one.leaf)
            if place not in seen and self.cut.whole and values.is_plain(one.tensor):
                seen[place] = (one.tensor.shape, one.tensor.dtype)
            key = one.name
            if key in several:
                leaf = one.site.tail.leaf if key == one.site.name else one.leaf
                key = one.site.element(leaf, one.call)
                calls.setdefault(one.name, []).append(key)
            found[key] = one.tensor
            if one.version is not None:
                versions[key] = one.version
        for one in self.grads:
            keys = calls.get(one.name)
            key = one.name if keys is None or one.call is None else keys[one.call]
            found[key + "_grad"] = one.tensor
        tree = self.model.tree
        aliases: dict[str, str] = {}
        for one in self.kept:
            for other in other_names(tree, one.site, one.name, one.leaf):
                aliases.setdefault(other, one.name)
        self.kept, self.grads = [], []
        return Cache(
            found, aliases=aliases, calls=calls, versions=versions, spelling=tree.speller()
        )


def _can_be_called(module: nn.Module) -> bool:
    """Whether a module has a forward at all; ModuleList and ModuleDict have none."""
    return type(module).forward is not nn.Module.forward


def other_names(tree: ModuleTree, site: Site, name: str, leaf: values.Leaf) -> set[str]:
    """The other spellings of a kept tensor's name."""
    tail = site.tail
    if site.kind is not None:
        return {site.canonical, *site.aliases} - {name}
    others = tree.other_names(site.path) if tree.shares_modules else []
    names = {site.canonical}
    if leaf != tail.leaf or others:
        # The bare name of a site means its only tensor; where there are several it means none.
        tails = {Tail(tail.call, tail.port, leaf)} | ({tail} if name == site.name else set())
        names = {tree.spell(path, t) for path in (site.path, *others) for t in tails}
        names.add(site.element(leaf))
    meaning = tree.meaning(site.canonical)
    return (names if meaning is None else names | {meaning}) - {name}
