"""`Hook`: what can be registered on a layer, and the error that tells which of them failed."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from torch import nn

from interpose.dialects.mi_crow.hooks.tensors import Inputs, with_tensor
from interpose.errors import InterposeError
from interpose.taps import values

if TYPE_CHECKING:
    from interpose.dialects.mi_crow.language_model.context import LanguageModelContext


class HookType(StrEnum):
    """When a hook runs: after its module, or before it."""

    FORWARD = "forward"
    PRE_FORWARD = "pre_forward"


def as_hook_type(given: HookType | str) -> HookType:
    """A type of hooks by its name."""
    try:
        return HookType(given)
    except ValueError:
        there = ", ".join(repr(one.value) for one in HookType)
        raise ValueError(f"Invalid hook_type {given!r}. Valid values: {there}.") from None


class HookError(InterposeError, RuntimeError):
    """A hook raised: ``hook_id`` says which, ``original_error`` what. The forward pass ends with it."""

    def __init__(
        self, hook_id: str, hook_type: HookType | str, original_error: BaseException
    ) -> None:
        shown = hook_type.value if isinstance(hook_type, HookType) else hook_type
        super().__init__(f"Hook {hook_id} (type={shown}) raised exception: {original_error}")
        self.hook_id = hook_id
        self.hook_type = hook_type
        self.original_error = original_error


class Hook(ABC):
    """Something that runs when a layer does, and can be switched off and on.

    Args:
        layer_signature: of the layer that it is meant for: a name, a path, an index.
        hook_type: ``forward`` or ``pre_forward``.
        hook_id: how it is known; made up unless given.
    """

    _spoils = True  # whether it may write to what it is shown, so that it gets copies

    def __init__(
        self,
        layer_signature: str | int | None = None,
        hook_type: HookType | str = HookType.FORWARD,
        hook_id: str | None = None,
    ) -> None:
        self.layer_signature = layer_signature
        self.hook_type = as_hook_type(hook_type)
        self.id = str(uuid.uuid4()) if hook_id is None else hook_id
        self._enabled = True
        self._context: LanguageModelContext | None = None

    @property
    def context(self) -> LanguageModelContext | None:
        """That of the language model it is registered with."""
        return self._context

    def set_context(self, context: LanguageModelContext | None) -> None:
        """Tell it the language model it belongs to."""
        self._context = context

    @property
    def enabled(self) -> bool:
        """Whether it runs."""
        return self._enabled

    def is_enabled(self) -> bool:
        """Whether it runs."""
        return self._enabled

    def enable(self) -> None:
        """Run again from the next call on."""
        self._enabled = True

    def disable(self) -> None:
        """Stay where it is, but do not run."""
        self._enabled = False

    def get_torch_hook(self) -> Callable[..., Any]:
        """Itself as torch takes it: for ``register_forward_hook``, or ``register_forward_pre_hook``.

        What it makes of the value is returned, not written into it.
        """
        if self.hook_type is HookType.PRE_FORWARD:
            return lambda module, args: (self.before(module, args, {}, self.hook_type) or [None])[0]
        return lambda module, args, output: self.after(module, args, {}, output, self.hook_type)

    @abstractmethod
    def _hook_fn(self, module: nn.Module, input: Any, output: Any) -> Any:
        """Do something with a call of the layer; what it returns, or writes to the value, the model goes on with."""

    # What a registration calls.

    def before(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hook_type: HookType,
    ) -> Any:
        """Run before a module: the arguments by place and by name that it goes on with, or None for those it has."""
        inputs = Inputs.of(module, args, kwargs)
        made = self._guarded(hook_type, module, inputs, None)
        if made is None:
            return None
        with self._named(hook_type):
            return _put_back(inputs, made, args, kwargs)

    def after(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        hook_type: HookType,
    ) -> Any:
        """Run after a module: what it is to have returned, or None for what it has."""
        if self._spoils:  # what the module was given may be in use further on
            args, kwargs = values.mapped((args, kwargs), values.twin)
        return self._guarded(hook_type, module, Inputs.of(module, args, kwargs), output)

    def _guarded(self, hook_type: HookType, module: nn.Module, inputs: Inputs, output: Any) -> Any:
        if not self._enabled:
            return None
        with self._named(hook_type):
            return self._hook_fn(module, inputs, output)

    def _named(self, hook_type: HookType) -> _Named:
        return _Named(self.id, hook_type)

    def __repr__(self) -> str:
        state = "" if self._enabled else ", disabled"
        return f"{type(self).__name__}({self.layer_signature!r}, id={self.id!r}{state})"


class _Named:
    """What raises inside becomes a `HookError` once."""

    def __init__(self, hook_id: str, hook_type: HookType) -> None:
        self.hook_id = hook_id
        self.hook_type = hook_type

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, HookError):
            raise HookError(self.hook_id, self.hook_type, error) from error


def _put_back(inputs: Inputs, made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments with what a hook made of them."""
    if not isinstance(made, (tuple, list)):
        made = with_tensor(tuple(inputs), made)
    if len(made) != len(inputs):
        raise ValueError(f"it returned {len(made)} inputs; the layer was given {len(inputs)}.")
    return (tuple(made), kwargs) if args else (args, dict(zip(kwargs, made)))
