"""What a run keeps, before it becomes a cache."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from interpose.sites.tree import Site
from interpose.taps import values


class Kept(NamedTuple):
    """One captured tensor."""

    site: Site
    name: str
    call: int | None
    leaf: values.Leaf
    tensor: Tensor
    version: int | None = None
