"""The precision in which numbers are added up: 32 bits at least."""

from torch import Tensor, float64


def wide(value: Tensor) -> Tensor:
    """In float32 at least: what has 64 bits keeps them."""
    return value if value.dtype == float64 else value.float()
