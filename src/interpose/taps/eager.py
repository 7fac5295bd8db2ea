"""Hooks and `torch.compile`: compiled code does not look at hooks added later, so hooked runs go the eager way.

Measured on torch 2.13: a hook added after compilation is ignored without a word
(`skip_nnmodule_hook_guards`). The stance that makes compiled modules run eagerly is one setting for
the whole process, so entries are counted.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

_LOCK = threading.RLock()  # a model may be collected, and let go, while this is held
_holders = 0
_stance: Any = None


def hold() -> None:
    """Make compiled modules run eagerly until `release`."""
    global _holders, _stance
    with _LOCK:
        _holders += 1
        # Asking whether anything was compiled costs nothing; setting a stance does. `cached_backends`
        # fills with the first compile (torch 2.6 to 2.13); without it, assume the worst.
        frames = sys.modules.get("torch._dynamo.eval_frame")
        compiled = frames is not None and bool(getattr(frames, "cached_backends", True))
        if _stance is None and compiled:
            _stance = torch.compiler.set_stance("force_eager")
            _stance.__enter__()


def release() -> None:
    """Undo one `hold`; the last one lets compiled code run again."""
    global _holders, _stance
    with _LOCK:
        _holders -= 1
        if _holders == 0 and _stance is not None:
            _stance.__exit__(None, None, None)
            _stance = None
