"""Which tokens the singular vectors of a weight matrix write, after Millidge and Black's method.

A right singular vector of a head's OV circuit, or of an MLP's matrix, is a direction in the residual
stream. Unembedded, it says which tokens that direction stands for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.factored_matrix import FactoredMatrix
from interpose.models.stream.formula import formula_at, norm_at
from interpose.precision import wide

_KINDS = ("OV", "w_in", "w_out")


class SVDInterpreter:
    """Reads the singular vectors of a model's weights as tokens.

    ```python
    vectors = SVDInterpreter(model).get_singular_vectors("OV", layer_index=5, head_index=3)
    model.to_str_tokens(vectors[:, 0, 0].topk(10).indices)   # the first vector's tokens
    ```

    Args:
        model: the model; with grouped queries, heads that share values have OV circuits of their own.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cfg = model.cfg

    @torch.no_grad()
    def get_singular_vectors(
        self,
        vector_type: str,
        layer_index: int,
        num_vectors: int = 10,
        head_index: int | None = None,
    ) -> Tensor:
        """How much each token gets from each singular vector, [d_vocab, 1, num_vectors].

        Vectors come in the order of their singular values. The sign of each is arbitrary, as in any
        singular value decomposition: tokens at the bottom mean as much as those at the top.

        Args:
            vector_type: ``OV`` for what a head writes, ``w_in`` for what an MLP's neurons read,
                ``w_out`` for what they write. What neurons read comes through a norm, so its weight
                is multiplied in; a model whose norms are folded has it there already.
            layer_index: which block.
            num_vectors: how many vectors.
            head_index: which head, for ``OV``.
        """
        if vector_type not in _KINDS:
            raise ValueError(f"vector_type is one of {', '.join(_KINDS)}; got {vector_type!r}")
        _check("layer", layer_index, self.cfg.n_layers)
        if vector_type == "OV":
            directions = self._ov(layer_index, head_index).V.mT
        else:
            mlp = self.model.blocks[layer_index].mlp
            matrix = mlp.W_out if vector_type == "w_out" else self._read_by_neurons(layer_index)
            directions = torch.linalg.svd(wide(matrix), full_matrices=False).Vh
        if not 1 <= num_vectors <= len(directions):
            raise ValueError(
                f"{vector_type} of layer {layer_index} has {len(directions)} singular vectors; got "
                f"num_vectors={num_vectors}"
            )
        W_U: Tensor = self.model.W_U.to(directions.dtype)
        return (W_U.mT @ directions[:num_vectors].to(W_U.device).mT)[:, None]

    def _ov(self, layer: int, head: int | None) -> FactoredMatrix:
        if head is None:
            raise ValueError("OV is a head's: give head_index=0, or another head.")
        attention = self.model.blocks[layer].attn
        W_V, W_O = attention.W_V, attention.W_O
        _check("head", head, len(W_O))
        return FactoredMatrix(W_V[head * len(W_V) // len(W_O)], W_O[head])

    def _read_by_neurons(self, layer: int) -> Tensor:
        """[d_mlp, d_model]: what each neuron reads of the normed stream, before the norm's own weight."""
        read: Tensor = self.model.blocks[layer].mlp.W_in.mT
        path = f"blocks.{layer}.ln2"
        norm, formula = norm_at(self.model, path), formula_at(self.model, path)
        if (
            norm is None or formula is None or norm.reads_sum
        ):  # one in the stream is not the MLP's own
            return read
        return formula.scaled(read)


def _check(what: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise IndexError(f"there is no {what} {index}: the model has {what}s 0 to {count - 1}.")
