"""`LayerActivationDetector`: what a layer returned in the last batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from interpose.dialects.mi_crow.hooks.detector import Detector
from interpose.dialects.mi_crow.hooks.hook import HookType
from interpose.dialects.mi_crow.hooks.tensors import main_tensor


class LayerActivationDetector(Detector):
    """Keeps what a layer returned in the last batch, on the CPU: ``tensor_metadata["activations"]``.

    Args:
        layer_signature: of the layer.
        hook_id: how it is known; made up unless given.
        target_dtype: what to keep it in; by default its own.
    """

    _spoils = False

    def __init__(
        self,
        layer_signature: str | int | None,
        hook_id: str | None = None,
        target_dtype: torch.dtype | None = None,
    ) -> None:
        if layer_signature is None:
            raise ValueError("layer_signature cannot be None for LayerActivationDetector.")
        super().__init__(HookType.FORWARD, hook_id, layer_signature=layer_signature)
        self.target_dtype = target_dtype

    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: ARG002
        """Keep a copy, which is there when this returns: a GPU has been waited for."""
        tensor = main_tensor(output)
        if tensor is None:
            raise TypeError(
                f"{type(module).__name__} returned no tensor, but a {type(output).__name__}."
            )
        self.tensor_metadata["activations"] = kept(tensor, self.target_dtype)
        self.metadata["activations_shape"] = tuple(tensor.shape)

    def get_captured(self) -> Tensor | None:
        """What the layer returned in the last batch; None if there was none."""
        return self.tensor_metadata.get("activations")

    def clear_captured(self) -> None:
        """Forget it."""
        self.tensor_metadata.pop("activations", None)
        self.metadata.pop("activations_shape", None)


def kept(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy on the CPU that nothing changes any more."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().to("cpu", dtype or tensor.dtype, copy=True)
