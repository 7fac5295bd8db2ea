"""`ModelInputDetector`: the tokens that a model was given, and which of them are text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from interpose.dialects.mi_crow.hooks.detector import Detector
from interpose.dialects.mi_crow.hooks.hook import HookType
from interpose.dialects.mi_crow.hooks.layer_activation_detector import kept
from interpose.dialects.mi_crow.hooks.tensors import main_tensor


class ModelInputDetector(Detector):
    """Keeps what the model was given in the last batch; registered on the model itself (``"input"``).

    Args:
        layer_signature: None for the model itself.
        hook_id: how it is known; made up unless given.
        save_input_ids: keep the tokens, ``tensor_metadata["input_ids"]``.
        save_attention_mask: keep which of them are text and not special, ``tensor_metadata["attention_mask"]``.
        special_token_ids: which are special; by default those of the tokenizer.
    """

    _spoils = False

    def __init__(
        self,
        layer_signature: str | int | None = None,
        hook_id: str | None = None,
        save_input_ids: bool = True,
        save_attention_mask: bool = False,
        special_token_ids: Iterable[int] | None = None,
    ) -> None:
        super().__init__(HookType.PRE_FORWARD, hook_id, layer_signature=layer_signature)
        self.save_input_ids = save_input_ids
        self.save_attention_mask = save_attention_mask
        self.special_token_ids = None if special_token_ids is None else set(special_token_ids)

    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: ARG002
        """Keep what the model was given, by place or by name."""
        given = dict(getattr(input, "by_name", {}))
        if len(input) == 1 and isinstance(input[0], Mapping):
            given = dict(input[0])
        if given.get("input_ids") is None and isinstance(tokens := main_tensor(input), Tensor):
            given["input_ids"] = tokens
        self.set_inputs_from_encodings(given, module)

    def set_inputs_from_encodings(
        self,
        encodings: Mapping[str, Any],
        module: nn.Module | None = None,  # noqa: ARG002
    ) -> None:
        """Keep what a tokenizer returned, as if the model had been given it."""
        tokens = encodings.get("input_ids")
        if not isinstance(tokens, Tensor) or tokens.is_floating_point():
            raise ValueError(
                f"there are no tokens (input_ids) among what the model was given: {', '.join(encodings) or 'nothing'}."
            )
        if self.save_input_ids:
            self.tensor_metadata["input_ids"] = kept(tokens)
            self.metadata["input_ids_shape"] = tuple(tokens.shape)
        if self.save_attention_mask:
            mask = encodings.get("attention_mask")
            real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask != 0
            special = sorted(self._special())
            real = real.to(tokens.device) & ~torch.isin(
                tokens, torch.tensor(special, dtype=tokens.dtype, device=tokens.device)
            )
            self.tensor_metadata["attention_mask"] = kept(real)
            self.metadata["attention_mask_shape"] = tuple(real.shape)

    def _special(self) -> set[int]:
        if self.special_token_ids is not None:
            return self.special_token_ids
        known = None if self.context is None else self.context.special_token_ids
        return set(known or ())

    def get_captured_input_ids(self) -> Tensor | None:
        """The tokens of the last batch; None if there was none."""
        return self.tensor_metadata.get("input_ids")

    def get_captured_attention_mask(self) -> Tensor | None:
        """Which of them are text and not special; None if that was not asked for."""
        return self.tensor_metadata.get("attention_mask")

    def clear_captured(self) -> None:
        """Forget both."""
        self.tensor_metadata.clear()
        self.metadata.clear()
