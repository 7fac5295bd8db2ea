"""`HookPoint`: an identity module that people put into their own modules, hooked by the engine.

A hook point keeps the list of its hooks, as TransformerLens shows it; what puts them on the module
is an engine `Model`, that of the root which was set up around it, or one of its own. So hooks get
copies, in-place and returned edits are the same, and a wrong shape raises.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from interpose.engine import points
from interpose.engine.gradients import Watching
from interpose.engine.hooks import FunctionHook, checked_direction
from interpose.engine.model import Model
from interpose.engine.scope import Binding, Scope

if TYPE_CHECKING:
    from interpose.dialects.transformer_lens.hooks.hooked_root_module import HookedRootModule

__all__ = ["HookFunction", "HookPoint", "HookedRootModule", "LensHandle", "NamesFilter"]

NamesFilter = Callable[[str], bool] | Sequence[str] | str | None
"""Which hook points: None for all, a name, a list of names, or a callable on names."""

HookFunction = Callable[..., Any]
"""``fn(value, hook)``: called with the hook point as keyword ``hook``."""

Direction = Literal["fwd", "bwd"]
Both = Literal["fwd", "bwd", "both"]


def __getattr__(name: str) -> Any:
    if name == "HookedRootModule":  # which imports this file
        from interpose.dialects.transformer_lens.hooks.hooked_root_module import HookedRootModule

        return HookedRootModule
    raise AttributeError(f"{__name__} has no {name!r}")


class Removable:
    """What takes one hook off its hook point; doing so twice is no error."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release

    def remove(self) -> None:
        """Take the hook off, and out of the hook point's list."""
        self._release()


@dataclass(eq=False)
class LensHandle:
    """A hook on a hook point. ``handle.hook.remove()`` takes it off."""

    hook: Removable = field(default_factory=lambda: Removable(lambda: None))
    is_permanent: bool = False
    context_level: int | None = None
    user_hook: HookFunction | None = None

    block: Block | None = None
    """The ``with`` block it ends with."""

    only_there: bool = False
    """Whether only the thread that opened the block has it."""

    def __repr__(self) -> str:
        function = getattr(self.user_hook, "func", self.user_hook)  # of a partial: its repr is slow
        name = getattr(function, "__name__", type(function).__name__)
        kind = ", permanent" if self.is_permanent else ""
        return f"LensHandle({name}{kind}, level {self.context_level})"

    def matches(self, including_permanent: bool, level: int | None) -> bool:
        """Whether a question or a removal with these arguments means this one."""
        return (including_permanent or not self.is_permanent) and (
            level is None or level == self.context_level
        )


class LensHook(FunctionHook):
    """A function at one hook point, which it gets as keyword ``hook``.

    ``together`` are the hooks made from one callable on names: one of them must run, not all.
    """

    def __init__(
        self,
        function: HookFunction,
        site: str,
        direction: str,
        *,
        point: HookPoint,
        alias_names: Sequence[str] | None = None,
        together: Sequence[LensHook] = (),
    ) -> None:
        super().__init__(site, function, direction)
        self.point = point
        self.shown: list[Any] = (
            [point] if alias_names is None else [Alias(point, name) for name in alias_names]
        )
        self.together = together
        self.ran = False

    def must_fire(self, direction: str) -> bool:
        """A hook asked for by its name, or one of those that a callable selected."""
        if len(self.together) > 1:
            return direction == "fwd" and not any(other.ran for other in self.together)
        return not getattr(self.function, "is_optional", False)

    def on_value(self, value: Tensor, hook: points.HookPoint) -> Tensor | None:  # noqa: ARG002
        """Call the function with the hook point that the user wrote into the module."""
        return self._run(value)

    def on_grad(self, grad: Tensor, hook: points.HookPoint) -> Tensor | None:  # noqa: ARG002
        """The same with a gradient."""
        return self._run(grad)

    def _run(self, value: Tensor) -> Tensor | None:
        self.ran = True
        conversion = self.point.hook_conversion
        shown: Any = value if conversion is None else conversion.convert(value)
        version, changed = _version(shown), False
        for point in self.shown:
            made = self._call(shown, point)
            if self.direction == "bwd" and isinstance(made, tuple) and len(made) == 1:
                made = made[0]
            if made is not None:
                shown, changed = made, True
        if conversion is None:
            return shown if changed else None  # the engine sees what was written in place
        changed = changed or _version(shown) != version
        return conversion.revert(shown) if changed else None


class HookPoint(nn.Module):
    """An identity module: what flows through it can be read and changed by name.

    ```python
    class MLP(HookedRootModule):
        def __init__(self):
            super().__init__()
            self.fc, self.hook_mid = nn.Linear(4, 4), HookPoint()
            self.setup()

        def forward(self, x):
            return self.hook_mid(self.fc(x))
    ```

    ``name`` is its place in the root, set by the root's ``setup()``; ``ctx`` is scratch space for
    hooks. It also works outside a root, and before ``setup()``. Copies and pickles of it have its
    name and ``ctx``, but no hooks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name: str | None = None
        self.ctx: dict[Any, Any] = {}
        self.hook_conversion: Any = None
        self.pos_dim: int | None = None
        self._listed: dict[str, list[LensHandle]] = {"fwd": [], "bwd": []}
        self._home: tuple[Model, str] | None = None

    def forward(self, x: Any) -> Any:
        """What it was given."""
        return x

    @property
    def fwd_hooks(self) -> list[LensHandle]:
        """The hooks on values, in order; those of a ``with`` block only inside it."""
        return self._handles("fwd")

    @property
    def bwd_hooks(self) -> list[LensHandle]:
        """The hooks on gradients, in order."""
        return self._handles("bwd")

    def _handles(self, direction: str) -> list[LensHandle]:
        if direction == "both":
            return self._handles("fwd") + self._handles("bwd")
        listed = self._listed[checked_direction(direction)]
        return [h for h in listed if not h.only_there or h.block in _BLOCKS.get()]

    def add_hook(
        self,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        alias_names: Sequence[str] | None = None,
    ) -> LensHandle:
        """Add a function for all threads, until it is removed or the ``with`` block around it ends.

        Args:
            hook: ``fn(value, hook)``. It gets a copy; what it returns, or leaves in the copy if it
                returns None, takes the value's place.
            dir: ``fwd`` for values, ``bwd`` for gradients.
            is_permanent: `remove_hooks` leaves it, and the end of a ``with`` block too.
            level: a number to remove it by; by default that of the ``with`` block around it.
            prepend: run before the hooks that are there already.
            alias_names: call it once for each of these names, as ``hook.name``.
        """
        around = [block for block in _BLOCKS.get() if block.has(self)]
        if level is None and around and not is_permanent:
            level = around[-1].level
        block = next((b for b in around if b.level == level and not is_permanent), None)
        handle = LensHandle(
            is_permanent=is_permanent, context_level=level, user_hook=hook, block=block
        )
        return self.stand(handle, dir, prepend=prepend, alias_names=alias_names)

    def stand(
        self,
        handle: LensHandle,
        direction: str,
        *,
        prepend: bool = False,
        alias_names: Sequence[str] | None = None,
    ) -> LensHandle:
        """Put what a handle describes on the module, for all threads."""
        checked_direction(direction)
        if self._home is None:
            self._home = Model(self), "output"
        model, site = self._home
        function: Any = handle.user_hook
        made = LensHook(function, site, direction, point=self, alias_names=alias_names)
        standing = model._add(
            made, is_permanent=handle.is_permanent, level=handle.context_level, prepend=prepend
        )
        return self.enlist(handle, direction, standing.remove, prepend=prepend)

    def enlist(
        self,
        handle: LensHandle,
        direction: str,
        take_off: Callable[[], None],
        *,
        prepend: bool = False,
    ) -> LensHandle:
        """Show a hook in the list of its direction, until it is taken off."""
        listed = self._listed[direction]

        def release() -> None:
            if handle in listed:
                listed.remove(handle)
                take_off()

        handle.hook = Removable(release)
        listed.insert(0 if prepend else len(listed), handle)
        return handle

    def add_perma_hook(self, hook: HookFunction, dir: Direction = "fwd") -> LensHandle:
        """Add a function that `remove_hooks` leaves in place."""
        return self.add_hook(hook, dir=dir, is_permanent=True)

    def has_hooks(
        self, dir: Both = "both", including_permanent: bool = True, level: int | None = None
    ) -> bool:
        """Whether there are hooks here."""
        return any(h.matches(including_permanent, level) for h in self._handles(dir))

    def remove_hooks(
        self, dir: Both = "fwd", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """Remove hooks, also those of a ``with`` block around this line."""
        for handle in self._handles(dir):
            if handle.matches(including_permanent, level):
                handle.hook.remove()

    def clear_context(self) -> None:
        """Start with an empty ``ctx``."""
        self.ctx = {}

    def enable_reshape(self, hook_conversion: Any = None) -> None:
        """Show hooks ``hook_conversion.convert(value)``, and put ``revert`` of what they make of it in its place."""
        self.hook_conversion = hook_conversion

    def layer(self) -> int:
        """The first number in the name: 5 for ``blocks.5.hook_out``."""
        if self.name is None:
            raise ValueError("this HookPoint has no name yet; the root's setup() gives it one.")
        for segment in self.name.split("."):
            if segment.isdigit():
                return int(segment)
        raise ValueError(f"{self.name!r} has no layer number in it.")

    @property
    def pos_axis(self) -> int:
        """Where the positions of its values are: ``pos_dim`` if that is set, else as TransformerLens has them."""
        by_head = ("hook_q", "hook_k", "hook_v", "hook_z", "hook_result")
        usual = -3 if (self.name or "").rpartition(".")[2] in by_head else -2
        return usual if self.pos_dim is None else self.pos_dim

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_listed": {"fwd": [], "bwd": []}, "_home": None}

    def __repr__(self) -> str:
        counts = [f"{len(self._handles(d))} {d}" for d in ("fwd", "bwd") if self._handles(d)]
        name = [] if self.name is None else [repr(self.name)]
        return f"HookPoint({', '.join(name + counts)})"


class Alias:
    """A hook point under another name, as a function added with ``alias_names`` gets it."""

    def __init__(self, point: HookPoint, name: str) -> None:
        self._point = point
        self.name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._point, name)

    layer = HookPoint.layer


class Block(Scope):
    """One ``with root.hooks(...)``: an engine scope whose hooks are also in the lists of their hook points.

    Its gradient hooks also run in a backward pass after the block, if the forward pass was inside.
    """

    def __init__(self, model: Model, members: Mapping[str, HookPoint], hooks: Sequence[LensHook]):
        super().__init__(model, hooks)
        self.level = 1 + blocks_of(model)
        self._members = members
        self._hooks = hooks
        for binding in self.bindings:
            for listener in binding.listeners:
                if isinstance(listener, Watching):
                    listener.outlives_scope = True

    def has(self, point: HookPoint) -> bool:
        """Whether a hook point is one of its root's."""
        return any(member is point for member in self._members.values())

    def __enter__(self) -> Block:
        super().__enter__()
        for hook, binding in zip(self._hooks, list(self.bindings)):
            handle = LensHandle(context_level=self.level, user_hook=hook.function)
            handle.block, handle.only_there = self, True
            hook.point.enlist(handle, hook.direction, self._remover(binding))
        _BLOCKS.set((*_BLOCKS.get(), self))
        return self

    def _remover(self, binding: Binding) -> Callable[[], None]:
        def take_off() -> None:
            binding.remove()
            self.bindings = [other for other in self.bindings if other is not binding]

        return take_off

    def remove_added(self) -> None:
        """Remove what `add_hook` put on inside, and hooks of this level that no block owns."""
        for point in self._members.values():
            for handle in point._handles("both"):
                own = handle.block is self and not handle.only_there
                if own or (handle.block is None and handle.matches(False, self.level)):
                    handle.hook.remove()

    def __exit__(self, *failure: Any) -> None:
        _BLOCKS.set(tuple(block for block in _BLOCKS.get() if block is not self))
        for hook in self._hooks:
            listed = hook.point._listed[hook.direction]
            listed[:] = [h for h in listed if not (h.only_there and h.block is self)]
        super().__exit__(*failure)


_BLOCKS: contextvars.ContextVar[tuple[Block, ...]] = contextvars.ContextVar("blocks", default=())
"""The blocks around this line, outermost first. Unlike the engine's own, also seen inside a hook."""


def blocks_of(model: Model) -> int:
    """How many blocks of a root are around this line."""
    return sum(block.model is model for block in _BLOCKS.get())


def _version(tensor: Any) -> int:
    return tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else 0
