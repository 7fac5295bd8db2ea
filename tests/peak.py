"""How much memory tensors take on a CPU, where nobody counts it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside held at once, by their storages."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.seen:
                    self.seen.add(key)
                    self.now += size
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self.gone, key, size)
        return made

    def gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def peak_of(run: Callable[[], Any]) -> int:
    """The most bytes that the tensors a run makes hold at once."""
    gc.collect()
    with Peak() as peak:
        run()
    return peak.most
