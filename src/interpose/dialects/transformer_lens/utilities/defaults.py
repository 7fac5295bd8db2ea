"""Defaults of a model that hold for a while, and a parameter that does."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from interpose.errors import Unsupported

USE_DEFAULT_VALUE = None
"""For arguments such as ``prepend_bos``: do what the model does by itself."""

_PLACES = {
    "prepend_bos": ("cfg.default_prepend_bos", "default_prepend_bos"),
    "padding_side": ("tokenizer.padding_side", "default_padding_side"),
}
"""Where models keep each default: TransformerLens's in the first place, ours in the second, or in both."""

_VALUES = {"prepend_bos": (True, False), "padding_side": ("left", "right")}


def get_nested_attr(obj: Any, attr_str: str) -> Any:
    """What ``obj.a.b`` is, for ``"a.b"``."""
    return operator.attrgetter(attr_str)(obj)


def set_nested_attr(obj: Any, attr_str: str, value: Any) -> None:
    """Set ``obj.a.b``, for ``"a.b"``."""
    owner, _, name = attr_str.rpartition(".")
    setattr(get_nested_attr(obj, owner) if owner else obj, name, value)


def override_or_use_default_value(default_flag: Any, override: Any = None) -> Any:
    """The override, unless it is None: then the default."""
    return default_flag if override is None else override


class LocallyOverridenDefaults:
    """Other defaults for a model inside a ``with`` block; afterwards its own are back, whatever happens.

    ```python
    with LocallyOverridenDefaults(model, padding_side="left"):
        model.to_tokens(["a text", "and a longer one"])
    ```

    Args:
        model: the model.
        **overrides: ``prepend_bos`` (True or False) and ``padding_side`` (``left`` or ``right``); None
            changes nothing.
    """

    def __init__(self, model: Any, **overrides: Any) -> None:
        for name, value in overrides.items():
            if name not in _PLACES:
                raise ValueError(f"no such default: {name!r}. There are: {', '.join(_PLACES)}.")
            if value is not None and value not in _VALUES[name]:
                first, second = _VALUES[name]
                raise ValueError(f"{name} is {first!r}, {second!r} or None; got {value!r}")
        self.model = model
        self.overrides = overrides
        self._undo = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as undo:
            for name, value in self.overrides.items():
                if value is None or (name == "padding_side" and self.model.tokenizer is None):
                    continue
                for place, before in self._before(name).items():
                    set_nested_attr(self.model, place, value)
                    undo.callback(set_nested_attr, self.model, place, before)
            self._undo = undo.pop_all()

    def _before(self, name: str) -> dict[str, Any]:
        """What the default is, in each place that the model has for it."""
        found = {}
        for place in _PLACES[name]:
            with suppress(AttributeError):
                found[place] = get_nested_attr(self.model, place)
        if not found:
            raise Unsupported(
                f"this model has no {_PLACES[name][0]}, so its default for {name} cannot be changed. "
                f"Give {name}= to to_tokens and the like."
            )
        return found

    def __exit__(self, *_: object) -> None:
        self._undo.close()


@contextmanager
def temporarily_swap_parameter(parameter: Any, new_value: Any) -> Iterator[nn.Parameter]:
    """Other numbers in a parameter inside a ``with`` block; afterwards its own are back, whatever happens.

    The parameter stays the same object, so optimizers, tied weights and hooks do not notice.

    ```python
    with temporarily_swap_parameter(model.module.get_parameter("lm_head.weight"), other):
        model(tokens)
    ```

    Args:
        parameter: the parameter.
        new_value: a tensor of its shape and dtype, on any device.
    """
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"a parameter is needed; got {type(parameter).__name__}. Weights such as model.W_Q are "
            "views: take the parameter itself, model.module.get_parameter(name)."
        )
    if not isinstance(new_value, Tensor):
        raise TypeError(f"the new value is a tensor; got {type(new_value).__name__}")
    if new_value.shape != parameter.shape or new_value.dtype != parameter.dtype:
        raise ValueError(
            f"the parameter is {list(parameter.shape)} of {parameter.dtype}; the new value is "
            f"{list(new_value.shape)} of {new_value.dtype}."
        )
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter.copy_(new_value)
    try:
        yield parameter
    finally:
        with torch.no_grad():
            parameter.copy_(before)
