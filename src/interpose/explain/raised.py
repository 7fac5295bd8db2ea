"""In which module of a model an error was raised."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from interpose.errors import InterposeError


def say_where(tree: Any, error: Exception) -> None:
    """Note on an error of a forward in which module it was raised, and what that was given."""
    inner, trace = None, error.__traceback__
    while trace is not None:
        inner = trace.tb_frame.f_locals if trace.tb_frame.f_code is _CALL else inner
        trace = trace.tb_next
    if inner is None or isinstance(error, InterposeError) or hasattr(error, "__notes__"):
        return
    module = inner["self"]
    path = next((path for path, other in tree.modules() if other is module), "")
    given = [*inner.get("args", ()), *inner.get("kwargs", {}).values()]
    tensors = [f"{list(t.shape)} {str(t.dtype)[6:]}" for t in given if isinstance(t, Tensor)]
    where = f"{path!r} ({type(module).__name__})" if path else tree.label
    error.add_note(f"raised in {where}, which was given {', '.join(tensors) or 'no tensor'}.")


_CALL = nn.Module._call_impl.__code__
