"""`ReadOnly`: a view of weights that can be computed with, but not written to.

A view of a fused projection, or a stack over layers, looks like a weight of the model: writing to it
would change more than it says, or nothing. So it refuses, and says what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from interpose.errors import EditError

# Other operators arrive here by the name of a method that ends in an underscore.
_WRITES = {"__setitem__", *(f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift"))}
_HARMLESS = {"requires_grad_"}


class ReadOnly(Tensor):
    """A tensor that refuses changes in place. Its own views refuse too; all that is computed from it is plain.

    ``sources`` are the names of the parameters it shows; none for zeros in place of a bias.
    """

    sources: tuple[str, ...] = ()

    @classmethod
    def of(cls, tensor: Tensor, *sources: str) -> ReadOnly:
        """A tensor made read-only: the same numbers in the same memory, detached."""
        with torch._C.DisableTorchFunctionSubclass():
            made = tensor.detach().as_subclass(cls)
        made.sources = sources
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a torch function, unless it writes here."""
        kwargs = kwargs or {}
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        written = _written(func, args, kwargs)
        for target in _read_only((written,)) if written is not None else ():
            # No TypeError: torch would take `w += 1` for a wrong operand and compute `w = w + 1`.
            raise EditError(_advice(target.sources))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            return _kept(result, _read_only((*args, *kwargs.values())))

    # A copy belongs to whoever made it.

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def writable(tensor: Tensor) -> Tensor:
    """A tensor in the same memory that may be written to: for state dicts, which are the parameters themselves."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


def _advice(sources: tuple[str, ...]) -> str:
    copy = "To change a copy: .clone() it first."
    if not sources:
        return (
            f"these zeros stand for a bias that the model does not have; nothing reads them. {copy}"
        )
    more = "" if len(sources) == 1 else f" and {len(sources) - 1} more, one for each layer"
    what = "a read-only view" if len(sources) == 1 else "a read-only copy"
    return (
        f"this is {what} of {sources[0]!r}{more}. {copy}\n  To change the model: with "
        f"torch.no_grad(): model.module.get_parameter({sources[0]!r}).copy_(...)"
    )


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a torch function would write to."""
    name = getattr(func, "__name__", "")
    first = args[0] if args else kwargs
    if name in _HARMLESS:
        return None
    if name in _WRITES or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace"):
        return first
    if name == "__set__" and getattr(func.__self__, "__name__", "") == "data":
        return first
    return kwargs.get("out")


def _read_only(values: Iterable[Any]) -> list[ReadOnly]:
    """What is read-only among some values, inside lists and mappings too."""
    found: list[ReadOnly] = []
    for value in values:
        if isinstance(value, ReadOnly):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _read_only(value)
        elif isinstance(value, Mapping):
            found += _read_only(value.values())
    return found


def _kept(result: Any, given: list[ReadOnly]) -> Any:
    """A result: read-only where it lies in the memory of something read-only, else as it is."""
    if isinstance(result, ReadOnly):
        return result
    if isinstance(result, Tensor):
        for source in given:
            if _shares(result, source):
                made = result.as_subclass(ReadOnly)
                made.sources = source.sources
                return made
        return result
    if type(result) in (tuple, list):
        return type(result)(_kept(item, given) for item in result)
    if isinstance(result, Iterator):
        return iter([_kept(item, given) for item in result])
    if hasattr(result, "setflags"):
        result.setflags(write=False)  # a numpy array in the same memory
    return result


def _shares(a: Tensor, b: Tensor) -> bool:
    try:
        return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # inside torch.func, which has no storages
        return False
