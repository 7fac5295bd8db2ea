"""``model.pos_embed(tokens)``: the embedded positions of some tokens, as TransformerLens's module gives them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.utilities.tensors import get_offset_position_ids
from interpose.models.weights.attributes import Part


class PositionPart(Part):
    """The position embeddings of a loaded model."""

    __slots__ = ()

    def __call__(
        self,
        tokens: Tensor,
        past_kv_pos_offset: int = 0,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Embedded positions [batch, pos, d_model], zero at padding.

        Args:
            tokens: [batch, pos].
            past_kv_pos_offset: how many positions were read before.
            attention_mask: of those and the tokens, [batch, past + pos].
        """
        whole = (len(tokens), past_kv_pos_offset + tokens.shape[1])
        mask = torch.ones(whole, device=tokens.device, dtype=torch.long)
        mask = mask if attention_mask is None else attention_mask.to(tokens.device)
        table = torch.as_tensor(self.W_pos)
        found = table[get_offset_position_ids(past_kv_pos_offset, mask).to(table.device)]
        return found * mask[:, past_kv_pos_offset:, None].to(found)
