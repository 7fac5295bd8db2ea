"""Weights by TransformerLens's names and shapes, as attributes of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interpose.errors import Unsupported
from interpose.models.discovery.anatomy import Anatomy, Block, Tower
from interpose.models.weights.readonly import ReadOnly
from interpose.models.weights.views import block_weights, end_weights, why_missing

if TYPE_CHECKING:
    from interpose.models.weights.config import ModelConfig

__all__ = [
    "STACKED",
    "ReadOnly",
    "Weights",
    "block_weights",
    "end_weights",
    "main_tower",
    "stacked",
]

_ATTENTION = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
_MLP = ("W_in", "W_gate", "W_out", "b_in", "b_gate", "b_out")
STACKED = {name: f"attn.{name}" for name in _ATTENTION} | {name: f"mlp.{name}" for name in _MLP}
"""Weights that every block has: what a model calls the stack of them, and a block its own."""


def main_tower(anatomy: Anatomy) -> Tower | None:
    """The tower that ``model.blocks`` means: the only one, the language model's, or the decoder."""
    for prefix in ("", "decoder."):
        for tower in anatomy.towers:
            if tower.prefix == prefix:
                return tower
    return None


def stacked(tower: Tower, name: str, *, at: str) -> Tensor:
    """One weight of every block, ``[layer, ...]``: a copy, through which gradients flow to parameters.

    Args:
        tower: whose blocks.
        name: what a block calls it: ``attn.W_Q``.
        at: how a user writes the blocks, for errors: ``model.blocks``.
    """
    views: dict[int, Tensor] = {}
    refused: dict[str, list[int]] = {}
    for block in tower.blocks:
        try:
            views[block.index] = _weight(block, name)
        except Unsupported as error:
            refused.setdefault(str(error), []).append(block.index)
    shapes: dict[tuple[int, ...], list[int]] = {}
    for index, view in views.items():
        shapes.setdefault(tuple(view.shape), []).append(index)
    if refused or len(shapes) != 1:
        raise Unsupported(_unstackable(f"{at}[{{}}].{name}", refused, shapes))
    first = next(iter(views.values()))
    whole = torch.stack([view.to(first.device) for view in views.values()])
    if not isinstance(first, ReadOnly):
        return whole
    shown = [view for view in views.values() if isinstance(view, ReadOnly)]
    return ReadOnly.of(whole, *(source for view in shown for source in view.sources))


def _weight(block: Block, name: str) -> Tensor:
    getter = block_weights(block).get(name)
    if getter is None:
        raise Unsupported(why_missing(block, name))
    return getter()


def _unstackable(
    each: str, refused: dict[str, list[int]], shapes: dict[tuple[int, ...], list[int]]
) -> str:
    lines = [f"{each.rpartition('.')[2]} cannot be stacked:"]
    lines += [f"{_layers(where)}: {reason}" for reason, where in refused.items()]
    lines += [f"{_layers(where)}: {list(shape)}" for shape, where in shapes.items()]
    if shapes:
        some = next(iter(shapes.values()))[0]
        lines.append(f"Ask a layer for its own: {each.format(some)}")
    return "\n  ".join(lines)


def _layers(where: list[int]) -> str:
    shown = ", ".join(map(str, where[:8])) + (", ..." if len(where) > 8 else "")
    return f"layer {shown}" if len(where) == 1 else f"layers {shown}"


class Weights:
    """Weights of a model, read-only. To change a parameter, go to ``model.module``.

    A layer's own (``model.blocks[5].attn.W_Q``) is a view; those of all layers are copied together
    each time they are asked for.
    """

    if TYPE_CHECKING:

        @property
        def anatomy(self) -> Anatomy:
            """What discovery found."""

        @property
        def cfg(self) -> ModelConfig:
            """What the model is like."""

    def _stacked(self, name: str) -> Tensor:
        tower = main_tower(self.anatomy)
        if tower is None:
            towers = ", ".join(f"model.{t.prefix}blocks" for t in self.anatomy.towers)
            raise Unsupported(
                f"no one stack of blocks is the model's own, so {name} could be that of any. "
                + (f"There are: {towers}." if towers else "None was found at all.")
            )
        return stacked(tower, STACKED[name], at="model.blocks")

    def _end(self, name: str, reason: str) -> Tensor:
        getter = end_weights(self.anatomy, lambda: self.cfg.n_ctx).get(name)
        if getter is None:
            raise Unsupported(f"no {name.rpartition('.')[2]}: {reason}.")
        return getter()

    @property
    def W_E(self) -> Tensor:
        """Token embeddings as the model looks them up, ``[d_vocab, d_model]``."""
        return self._end("embed.W_E", "no module that embeds tokens was found")

    @property
    def W_pos(self) -> Tensor:
        """Position embeddings from the first position on, ``[n_ctx, d_model]``."""
        return self._end("pos_embed.W_pos", "positions are not embedded by a module of their own")

    @property
    def W_U(self) -> Tensor:
        """The unembedding, ``[d_model, d_vocab]``."""
        return self._end("unembed.W_U", "the model has no unembedding")

    @property
    def b_U(self) -> Tensor:
        """The unembedding's bias, ``[d_vocab]``."""
        return self._end("unembed.b_U", "the model has no unembedding")

    @property
    def W_Q(self) -> Tensor:
        """From the stream to queries, ``[layer, head, d_model, d_head]``."""
        return self._stacked("W_Q")

    @property
    def W_K(self) -> Tensor:
        """From the stream to keys, ``[layer, key_value_head, d_model, d_head]``."""
        return self._stacked("W_K")

    @property
    def W_V(self) -> Tensor:
        """From the stream to values, ``[layer, key_value_head, d_model, d_head]``."""
        return self._stacked("W_V")

    @property
    def W_O(self) -> Tensor:
        """From each head back to the stream, ``[layer, head, d_head, d_model]``."""
        return self._stacked("W_O")

    @property
    def b_Q(self) -> Tensor:
        """Added to queries, ``[layer, head, d_head]``."""
        return self._stacked("b_Q")

    @property
    def b_K(self) -> Tensor:
        """Added to keys, ``[layer, key_value_head, d_head]``."""
        return self._stacked("b_K")

    @property
    def b_V(self) -> Tensor:
        """Added to values, ``[layer, key_value_head, d_head]``."""
        return self._stacked("b_V")

    @property
    def b_O(self) -> Tensor:
        """Added by the output projection, ``[layer, d_model]``."""
        return self._stacked("b_O")

    @property
    def W_in(self) -> Tensor:
        """Into the MLP, ``[layer, d_model, d_mlp]``; in a gated one what the gate is multiplied with."""
        return self._stacked("W_in")

    @property
    def W_gate(self) -> Tensor:
        """Into a gated MLP's activation, ``[layer, d_model, d_mlp]``."""
        return self._stacked("W_gate")

    @property
    def W_out(self) -> Tensor:
        """From the MLP's neurons back to the stream, ``[layer, d_mlp, d_model]``."""
        return self._stacked("W_out")

    @property
    def b_in(self) -> Tensor:
        """Added with ``W_in``, ``[layer, d_mlp]``."""
        return self._stacked("b_in")

    @property
    def b_gate(self) -> Tensor:
        """Added with ``W_gate``, ``[layer, d_mlp]``."""
        return self._stacked("b_gate")

    @property
    def b_out(self) -> Tensor:
        """Added with ``W_out``, ``[layer, d_model]``."""
        return self._stacked("b_out")
