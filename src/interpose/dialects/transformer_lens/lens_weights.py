"""Weights in TransformerLens's combinations: circuits, composition scores, biases, directions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.cache import decomposition
from interpose.dialects.transformer_lens.factored_matrix import FactoredMatrix
from interpose.dialects.transformer_lens.utilities.tensors import composition_scores
from interpose.errors import Unsupported
from interpose.models.transformer import TransformerModel


class LensWeights(TransformerModel):
    """The part of a `HookedTransformer` that combines weights."""

    @property
    def OV(self) -> FactoredMatrix:
        """What each head reads and writes, [layer, head, d_model, d_model]: ``W_V @ W_O``."""
        return FactoredMatrix(self._for_heads(self.W_V), torch.as_tensor(self.W_O))

    @property
    def QK(self) -> FactoredMatrix:
        """Which pairs each head looks for, [layer, head, d_model, d_model]: ``W_Q @ W_K^T``."""
        return FactoredMatrix(
            torch.as_tensor(self.W_Q), self._for_heads(self.W_K).transpose(-2, -1)
        )

    def _for_heads(self, weight: Tensor) -> Tensor:
        """A weight of keys or values, repeated for every query head that shares it."""
        heads = int(self.W_Q.shape[1])
        return torch.as_tensor(weight).repeat_interleave(heads // weight.shape[1], dim=1)

    @property
    def W_E_pos(self) -> Tensor:
        """Token and position embeddings as one matrix, [d_vocab + n_ctx, d_model]."""
        return torch.cat([torch.as_tensor(self.W_E), torch.as_tensor(self.W_pos)])

    def tokens_to_residual_directions(self, tokens: Any) -> Tensor:
        """The direction of the normed stream that each token's logit is read from, [..., d_model].

        Args:
            tokens: a string, a number, or a tensor of tokens.
        """
        return decomposition.directions(self, tokens)

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Tensor:
        """The sum of the biases that attention and MLPs before a layer add to the stream, [d_model].

        Args:
            layer: before which; ``n_layers`` for all.
            mlp_input: with the bias of this layer's attention.
            include_mlp_biases: with those of MLPs.
        """
        total = torch.zeros(int(self.W_E.shape[1]), device=self.device)
        for number in range(layer + mlp_input):
            for kind in ("attn", "mlp"):
                if kind == "mlp" and (
                    number == layer
                    or not include_mlp_biases
                    or f"blocks.{number}.hook_mlp_out" not in self.tree.table.sites
                ):
                    continue
                branch = self.stream.branch(number, kind)
                if branch.norm is not None:
                    raise Unsupported(
                        f"the bias of blocks.{number} goes through {branch.norm}, so it is another one at every "
                        "position: cache.get_full_resid_decomposition has it as its last part."
                    )
                total = total + branch.writes.through(branch.bias)
        return total

    def all_composition_scores(self, mode: str) -> Tensor:
        """How much each head reads what each earlier head writes: [layer, head, later layer, later head].

        Args:
            mode: ``Q``, ``K`` or ``V``: by which of its inputs the later head reads.
        """
        if mode not in ("Q", "K", "V"):
            raise ValueError(f"mode is 'Q', 'K' or 'V'; got {mode!r}")
        left = self.OV
        right = {"Q": self.QK, "K": self.QK.T, "V": self.OV}[mode]
        scores = composition_scores(left, right)
        layers = torch.arange(scores.shape[0], device=scores.device)
        earlier = layers[:, None, None, None] < layers[None, None, :, None]
        return scores.where(earlier, 0.0)

    def all_head_labels(self) -> list[str]:
        """A label for every head, in order: ``L0H0``, ..."""
        layers, heads = self.W_Q.shape[:2]
        return [f"L{layer}H{head}" for layer in range(layers) for head in range(heads)]

    @property
    def attn_head_labels(self) -> list[str]:
        """A label for every head of the layers that have attention."""
        return self.all_head_labels()

    @property
    def QK_for_attn_layers(self) -> tuple[list[int], FactoredMatrix]:
        """The layers that have attention, and their QK circuits."""
        return list(range(len(self.blocks))), self.QK

    @property
    def OV_for_attn_layers(self) -> tuple[list[int], FactoredMatrix]:
        """The layers that have attention, and their OV circuits."""
        return list(range(len(self.blocks))), self.OV

    @property
    def n_params_total(self) -> int:
        """How many parameters there are, shared ones counted once."""
        return sum(parameter.numel() for parameter in self.module.parameters())
