"""`Detector`: looks at a layer and keeps what it finds."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn

from interpose.dialects.mi_crow.hooks.hook import Hook, HookType
from interpose.taps import values


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
    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002
        """Look at a call of the layer.

        Args:
            module: the layer.
            input: what it was given: a tuple, of which ``by_name`` has the names.
            output: what it returned; None before it ran.
        """

    def look(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002
        """Show it copies: what it does to them reaches nobody."""
        if self._spoils and output is None:
            input = input.twin()  # noqa: A001
        elif self._spoils:  # the inputs are copies already
            output = values.mapped(output, values.twin)
        self.process_activations(module, input, output)

    def _hook_fn(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002
        self.look(module, input, output)
