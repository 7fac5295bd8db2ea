"""Tensors of edits: their bytes, and the names under which a script finds those that are saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from interpose.edits.edit import Edit
from interpose.edits.expressions import written


def raw(tensor: Tensor) -> Tensor:
    """A tensor's bytes."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def expressions(edits: Iterable[Edit], tensors: dict[str, Tensor]) -> list[str]:
    """Edits as expressions whose tensors go by the names of those that are saved.

    Args:
        edits: in their order.
        tensors: those that are saved; gets what else the expressions need.
    """
    return [_expression(edit, tensors) for edit in edits]


def _expression(edit: Edit, tensors: dict[str, Tensor]) -> str:
    if not type(edit).__module__.startswith("interpose."):
        raise ValueError(
            f"{edit!r} is defined in {type(edit).__module__}, which a script would not know."
        )

    def name(tensor: Tensor, field: str) -> str:  # noqa: ARG001
        there = _name(tensor, tensors)
        if there is None:
            there = f"script.{len(tensors)}"
            tensors[there] = tensor.detach().cpu()
        return there

    return written(edit, short=False, name=name)


def _name(tensor: Tensor, known: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor with the same bytes."""
    for name, other in known.items():
        if (tensor.dtype, tensor.shape) == (other.dtype, other.shape):
            if bool((raw(tensor) == raw(other)).all()):
                return name
    return None
