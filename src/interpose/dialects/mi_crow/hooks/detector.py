"""`Detector`: looks at a layer and keeps what it finds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from interpose.dialects.mi_crow.hooks.hook import Hook, HookType
from interpose.taps import values

_OFF: ContextVar[bool] = ContextVar("detectors are off", default=False)


@contextmanager
def detectors_off() -> Iterator[None]:
    """A block in which detectors, of this thread, look at nothing."""
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)


class Detector(Hook):
    """Looks at what a layer is given and returns, and changes nothing: it gets copies.

    Args:
        hook_type: ``forward`` or ``pre_forward``.
        hook_id: how it is known; made up unless given.
        store: where it may put things.
        layer_signature: of the layer that it is meant for.

    Attributes:
        metadata: what it keeps that JSON can hold.
        tensor_metadata: what it keeps of tensors, by name.
    """

    def __init__(
        self,
        hook_type: HookType | str = HookType.FORWARD,
        hook_id: str | None = None,
        store: Any = None,
        layer_signature: str | int | None = None,
    ) -> None:
        super().__init__(layer_signature=layer_signature, hook_type=hook_type, hook_id=hook_id)
        self.store = store
        self.metadata: dict[str, Any] = {}
        self.tensor_metadata: dict[str, Tensor] = {}

    @abstractmethod
    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:
        """Look at a call of the layer.

        Args:
            module: the layer.
            input: what it was given: a tuple, of which ``by_name`` has the names.
            output: what it returned; None before it ran.
        """

    def look(self, module: nn.Module, input: Any, output: Any) -> None:
        """Show it copies: what it does to them reaches nobody."""
        if _OFF.get():
            return
        if self._spoils and output is None:
            input = input.twin()
        elif self._spoils:  # the inputs are copies already
            output = values.mapped(output, values.twin)
        self.process_activations(module, input, output)

    def _hook_fn(self, module: nn.Module, input: Any, output: Any) -> Any:
        if hasattr(self, "modify_activations"):  # a controller too, which looks before it changes
            return super()._hook_fn(module, input, output)  # type: ignore[safe-super]
        self.look(module, input, output)
        return None
