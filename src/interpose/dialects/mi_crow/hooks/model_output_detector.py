"""`ModelOutputDetector`: what a model returned."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from interpose.dialects.mi_crow.hooks.detector import Detector
from interpose.dialects.mi_crow.hooks.hook import HookType
from interpose.dialects.mi_crow.hooks.layer_activation_detector import kept


class ModelOutputDetector(Detector):
    """Keeps what the model returned in the last batch; registered on the model itself (``"output"``).

    Args:
        layer_signature: None for the model itself.
        hook_id: how it is known; made up unless given.
        save_output_logits: keep ``tensor_metadata["output_logits"]``.
        save_output_hidden_state: keep ``tensor_metadata["output_hidden_state"]``, where the model returns one.
    """

    _spoils = False

    def __init__(
        self,
        layer_signature: str | int | None = None,
        hook_id: str | None = None,
        save_output_logits: bool = True,
        save_output_hidden_state: bool = False,
    ) -> None:
        super().__init__(HookType.FORWARD, hook_id, layer_signature=layer_signature)
        self.save_output_logits = save_output_logits
        self.save_output_hidden_state = save_output_hidden_state

    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: ARG002
        """Keep what is asked for and there."""
        for wanted, name, own in (
            (self.save_output_logits, "output_logits", "logits"),
            (self.save_output_hidden_state, "output_hidden_state", "last_hidden_state"),
        ):
            found = getattr(output, own, None)
            if found is None and own == "logits":
                found = output[0] if isinstance(output, (tuple, list)) and output else output
            if wanted and isinstance(found, Tensor):
                self.tensor_metadata[name] = kept(found)
                self.metadata[f"{name}_shape"] = tuple(found.shape)

    def get_captured_output_logits(self) -> Tensor | None:
        """The logits of the last batch; None if there were none."""
        return self.tensor_metadata.get("output_logits")

    def get_captured_hidden_state(self) -> Tensor | None:
        """The hidden state of the last batch; None if there was none."""
        return self.tensor_metadata.get("output_hidden_state")

    get_captured_output_hidden_state = get_captured_hidden_state

    def clear_captured(self) -> None:
        """Forget both."""
        self.tensor_metadata.clear()
        self.metadata.clear()
