"""`Slice`: a choice of positions along one dimension, as arguments such as ``pos_slice`` take it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from interpose.dialects.transformer_lens.utilities.tensors import to_numpy

SliceInput = Any
"""None, an integer, a tuple such as ``(start, stop)``, a slice, or a list, array or tensor of indices."""


class Slice:
    """Chooses along one dimension of a tensor.

    | given | chosen | ``mode`` |
    |---|---|---|
    | ``None`` | all | ``identity`` |
    | ``3`` | one; the dimension goes away | ``int`` |
    | ``(5,)``, ``(1, 5)``, ``(1, 5, 2)`` or a slice | as a slice of these | ``slice`` |
    | a list, array or tensor | those, or those where a mask is True | ``array`` |

    ```python
    Slice((1, 5)).apply(value, dim=1)    # value[:, 1:5]
    ```
    """

    def __init__(self, input_slice: SliceInput = None) -> None:
        self.slice: Any
        number = _integer(input_slice)
        if input_slice is None:
            self.mode, self.slice = "identity", slice(None)
        elif number is not None:
            self.mode, self.slice = "int", number
        elif isinstance(input_slice, slice):
            self.mode, self.slice = "slice", input_slice
        elif isinstance(input_slice, tuple) and 1 <= len(input_slice) <= 3:
            self.mode, self.slice = "slice", slice(*input_slice)
        elif isinstance(input_slice, list) or getattr(input_slice, "ndim", 0) > 0:
            self.mode, self.slice = "array", to_numpy(input_slice)
        else:
            raise ValueError(
                f"no choice of positions: {input_slice!r}. Give None, an integer, (start, stop), "
                "(start, stop, step), or a list of indices."
            )

    def __repr__(self) -> str:
        return f"Slice({self.slice}, mode={self.mode!r})"

    def apply(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """What is chosen of a tensor along ``dim``."""
        index: list[Any] = [slice(None)] * tensor.ndim
        index[dim] = self.slice
        return tensor[tuple(index)]

    def indices(self, max_ctx: int | None = None) -> Any:
        """The chosen indices of a dimension of length ``max_ctx``, as a numpy array of one dimension."""
        import numpy as np

        if self.mode == "int":
            return np.array([self.slice], dtype=np.int64)
        if max_ctx is None:
            raise ValueError(f"which indices {self} chooses depends on the length: give max_ctx.")
        return np.arange(max_ctx, dtype=np.int64)[self.slice]

    @classmethod
    def unwrap(cls, slice_input: Slice | SliceInput) -> Slice:
        """A `Slice` of what may be one already. One integer keeps its dimension here, with length 1."""
        if isinstance(slice_input, Slice):
            return slice_input
        number = _integer(slice_input)
        return cls(slice_input if number is None else [number])


def _integer(value: Any) -> int | None:
    """A whole number, be it Python's, numpy's or a tensor without dimensions; None if it is none."""
    if getattr(value, "ndim", 0) or isinstance(value, (bool, str, float, list, tuple, slice)):
        return None
    if isinstance(value, Tensor):
        whole = not (value.is_floating_point() or value.is_complex()) and "bool" not in str(
            value.dtype
        )
        return int(value) if whole else None
    if getattr(getattr(value, "dtype", None), "kind", "i") not in "iu":
        return None
    return int(value) if hasattr(value, "__index__") or hasattr(value, "dtype") else None
