"""`Controller`: changes what a layer is given or returns."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from interpose.dialects.mi_crow.hooks.detector import Detector
from interpose.dialects.mi_crow.hooks.hook import Hook, HookType
from interpose.dialects.mi_crow.hooks.tensors import main_tensor, with_tensor

_OFF: ContextVar[bool] = ContextVar("controllers are off", default=False)


@contextmanager
def controllers_off() -> Iterator[None]:
    """A block in which controllers, of this thread, change nothing; what else they detect goes on."""
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)


class Controller(Hook):
    """Changes what a layer returns, or before it runs what it is given. One that is a `Detector` too looks first.

    Args:
        hook_type: ``forward`` or ``pre_forward``.
        hook_id: how it is known; made up unless given.
        layer_signature: of the layer that it is meant for.
    """

    def __init__(
        self,
        hook_type: HookType | str = HookType.FORWARD,
        hook_id: str | None = None,
        layer_signature: str | int | None = None,
    ) -> None:
        super().__init__(layer_signature=layer_signature, hook_type=hook_type, hook_id=hook_id)

    @abstractmethod
    def modify_activations(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Return what takes the value's place, or None for the value as it was left.

        Args:
            module: the layer.
            inputs: what it was given: a tuple, of which ``by_name`` has the names.
            output: what it returned, a tensor or a container; None before it ran.

        Returns:
            A tensor, which takes the place of the (first) tensor of the value; or the whole container. Before the
            layer runs, the value is what it is given.
        """

    def _hook_fn(self, module: nn.Module, input: Any, output: Any) -> Any:
        if isinstance(self, Detector):
            try:
                self.look(module, input, output)
            except Exception as error:
                warnings.warn(
                    f"hook {self.id!r} detected nothing: {type(error).__name__}: {error}",
                    stacklevel=2,
                )
        if _OFF.get():
            return None
        made = self.modify_activations(module, input, output)
        if isinstance(made, Tensor) and output is not None and not isinstance(output, Tensor):
            return with_tensor(output, made)
        return made


class FunctionController(Controller):
    """A function from a tensor to a tensor as a controller.

    Args:
        layer_signature: of the layer that it is meant for.
        function: gets the (first) tensor that the layer returns, or is given, and returns the one to go on with.
        hook_type: ``forward`` or ``pre_forward``.
        hook_id: how it is known; made up unless given.
    """

    _spoils = False

    def __init__(
        self,
        layer_signature: str | int | None,
        function: Callable[[Tensor], Tensor],
        hook_type: HookType | str = HookType.FORWARD,
        hook_id: str | None = None,
    ) -> None:
        if layer_signature is None:
            raise ValueError("layer_signature cannot be None for FunctionController.")
        if not callable(function):
            raise ValueError(f"function must be callable; got {type(function).__name__}.")
        super().__init__(hook_type=hook_type, hook_id=hook_id, layer_signature=layer_signature)
        self.function = function

    def modify_activations(self, module: nn.Module, inputs: Any, output: Any) -> Tensor | None:  # noqa: ARG002
        """What the function makes of the tensor."""
        tensor = main_tensor(inputs if output is None else output)
        if tensor is None:
            raise TypeError("there is no tensor here that the function could be given.")
        made = self.function(tensor)
        if not isinstance(made, Tensor):
            raise TypeError(
                f"the function must return a tensor; it returned a {type(made).__name__}."
            )
        return made
