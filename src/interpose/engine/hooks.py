"""What runs at a site: a plain function, a Detector that looks, a Controller that changes.

All of them become a `Hook`, so that the engine knows one kind of thing: where it sits, whether it
is enabled, how to call it with a value or a gradient, and what errors call it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from interpose.sites.tree import Filter, Site

if TYPE_CHECKING:
    from interpose.engine.points import HookPoint

_IDS = itertools.count(1)


class Hook:
    """Something that runs at sites, and can be switched off and on.

    Args:
        site: where it runs: a name, a glob, a regex, a callable on names, a list of these, or
            None for every output.
        id: how the model knows it; made up from the class name unless given.
    """

    def __init__(self, site: Filter = None, *, id: str | None = None) -> None:  # noqa: A002
        vars(self).update({"site": site} if id is None else {"site": site, "_id": id})

    # A frozen dataclass may subclass this, so what can change is written to `vars(self)` directly.

    @property
    def id(self) -> str:
        """A name that is unique in the process."""
        return str(vars(self).setdefault("_id", f"{type(self).__name__}-{next(_IDS)}"))

    @property
    def enabled(self) -> bool:
        """Whether it runs."""
        return bool(vars(self).get("_enabled", True))

    def enable(self) -> None:
        """Run again from the next call on."""
        vars(self)["_enabled"] = True

    def disable(self) -> None:
        """Stay where it is, but do not run."""
        vars(self)["_enabled"] = False

    @property
    def label(self) -> str:
        """What errors call it."""
        return f"hook {self.id!r}"

    def __repr__(self) -> str:
        said = [repr(vars(self).get("site"))]
        options: list[Any] = (
            list(dataclasses.fields(self)) if dataclasses.is_dataclass(self) else []
        )
        for option in sorted(options[1:], key=lambda option: option.kw_only):
            value = getattr(self, option.name)
            if value is not option.default:
                shown = f"tensor{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                said.append(f"{option.name}={shown}" if option.kw_only else shown)
        return f"{type(self).__name__}({', '.join(said)})"

    def directions(self) -> tuple[str, ...]:
        """Which of ``fwd`` and ``bwd`` it takes part in."""
        return ("fwd",)

    def must_fire(self, direction: str) -> bool:  # noqa: ARG002
        """Whether it is an error if it never runs in a direction; a guard may say no."""
        return True

    def on_value(self, value: Tensor, hook: HookPoint) -> Tensor | None:
        """Called with a copy of the value at a site."""
        raise NotImplementedError

    def on_grad(self, grad: Tensor, hook: HookPoint) -> Tensor | None:
        """Called with the gradient at a site."""
        raise NotImplementedError


class Detector(Hook):
    """Looks at values or gradients and changes nothing. Override `read`, `read_grad`, or both.

    ```python
    class Largest(ip.Detector):
        def read(self, value, hook):
            print(hook.name, value.abs().max())
    ```

    Args:
        site: where it looks.
        copies: False hands out the live value without a copy: cheaper, but a model that works in
            place may change it after you looked.
    """

    def __init__(self, site: Filter = None, *, id: str | None = None, copies: bool = True) -> None:  # noqa: A002
        super().__init__(site, id=id)
        self.copies = copies

    copies = True

    def read(self, value: Tensor, hook: HookPoint) -> None:
        """Look at a value."""
        raise NotImplementedError

    def read_grad(self, grad: Tensor, hook: HookPoint) -> None:
        """Look at a gradient."""
        raise NotImplementedError

    def directions(self) -> tuple[str, ...]:
        """``fwd`` if it reads values, ``bwd`` if it reads gradients."""
        return _overridden(self, Detector, fwd="read", bwd="read_grad")

    def on_value(self, value: Tensor, hook: HookPoint) -> None:
        """Read; what it returns is an error."""
        _no_return(self, self.read, value, hook)

    def on_grad(self, grad: Tensor, hook: HookPoint) -> None:
        """Read; what it returns is an error."""
        _no_return(self, self.read_grad, grad, hook)


class Controller(Hook):
    """Changes values or gradients. Override `change`, `change_grad`, or both.

    Both get a copy: return a tensor to replace the value, or change the copy in place and return
    None.
    """

    def change(self, value: Tensor, hook: HookPoint) -> Tensor | None:
        """Return what the model goes on with, or None for "as you left it"."""
        raise NotImplementedError

    def change_grad(self, grad: Tensor, hook: HookPoint) -> Tensor | None:
        """Return the gradient that flows on, or None for "as you left it"."""
        raise NotImplementedError

    def directions(self) -> tuple[str, ...]:
        """``fwd`` if it changes values, ``bwd`` if it changes gradients."""
        return _overridden(self, Controller, fwd="change", bwd="change_grad")

    def on_value(self, value: Tensor, hook: HookPoint) -> Tensor | None:
        """Change a value."""
        return _on_part(self.change, value, hook)

    def on_grad(self, grad: Tensor, hook: HookPoint) -> Tensor | None:
        """Change a gradient."""
        return _on_part(self.change_grad, grad, hook)


class FunctionHook(Hook):
    """A plain function ``fn(value, hook)`` as a hook that has an id and can be switched off.

    A pair ``(site, function)`` in a list of hooks is one too, which nobody has a hand on.

    Args:
        site: where it runs.
        function: as in ``fwd_hooks``.
        dir: ``fwd`` for values, ``bwd`` for gradients.
    """

    def __init__(
        self,
        site: Filter,
        function: Callable[..., Any],
        dir: str = "fwd",  # noqa: A002 - TransformerLens's word
        *,
        id: str | None = None,  # noqa: A002
    ) -> None:
        super().__init__(site, id=id)
        self.function = function
        self.direction = checked_direction(dir)
        self._call = caller_of(function, forward=dir == "fwd")

    def directions(self) -> tuple[str, ...]:
        """The one it was made for."""
        return (self.direction,)

    @property
    def label(self) -> str:
        """The function's name and where it stands."""
        return _label_of(self.function)

    def on_value(self, value: Tensor, hook: HookPoint) -> Tensor | None:
        """Call the function."""
        return _on_part(self._call, value, hook)

    def on_grad(self, grad: Tensor, hook: HookPoint) -> Tensor | None:
        """Call the function; a one-element tuple, as torch's backward hooks return, is unwrapped."""
        return _on_part(self._call_for_grad, grad, hook)

    def _call_for_grad(self, grad: Tensor, hook: HookPoint) -> Any:
        made: Any = self._call(grad, hook)
        return made[0] if isinstance(made, tuple) and len(made) == 1 else made


class Engine(Hook):
    """Stands for the library's own listeners, such as a cache, in messages."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label = label

    @property
    def label(self) -> str:
        """What errors call it."""
        return self._label


class TorchHook(Hook):
    """A PyTorch forward hook, with PyTorch's arguments. Made by `torch_hook`."""

    def __init__(self, function: Callable[..., Any], *, before: bool, with_kwargs: bool) -> None:
        super().__init__()
        self.function = function
        self.before = before
        self.with_kwargs = with_kwargs

    @property
    def label(self) -> str:
        """The function's name and where it stands."""
        return _label_of(self.function)


def torch_hook(
    function: Callable[..., Any], *, pre: bool = False, with_kwargs: bool | None = None
) -> TorchHook:
    """Use a hook written for PyTorch: ``fn(module, args, output)`` or ``fn(module, args, kwargs, output)``.

    It is scoped, ordered and checked like every other hook, and gets copies of the output's
    tensors, so changing them in place and returning them come to the same.

    Example:
        ``model.run_with_hooks(x, fwd_hooks=[("fc1", ip.torch_hook(my_forward_hook))])``

    Args:
        function: the hook, as one would give it to ``register_forward_hook``.
        pre: it is a forward pre-hook, ``fn(module, args)`` or ``fn(module, args, kwargs)``.
        with_kwargs: whether it takes ``kwargs``; by default found by counting its parameters.
    """
    if with_kwargs is None:
        wanted = 3 if pre else 4
        with_kwargs = len(inspect.signature(function).parameters) >= wanted
    return TorchHook(function, before=pre, with_kwargs=with_kwargs)


class skip(Hook):
    """Do not run a module at all: return a replacement instead of its output.

    Example:
        ``model.run_with_hooks(x, hooks=[ip.skip("layer2", lambda x: x)])``

    Args:
        site: the module or modules to skip.
        replacement: what it returns: a tensor (or the container the module returns), or a
            function that is called with all its arguments.
    """

    def __init__(self, site: Filter, replacement: Any) -> None:
        super().__init__(site)
        self.replacement = replacement

    @property
    def label(self) -> str:
        """What errors call it."""
        return repr(self)


def as_hook(item: object, direction: str = "fwd") -> Hook:
    """A hook from what users write: a hook object, or a pair of a site filter and a function or hook."""
    if isinstance(item, Hook):
        return item
    if isinstance(item, tuple) and len(item) == 2:
        site, what = item
        if isinstance(what, TorchHook):
            moved = copy.copy(what)
            vars(moved)["site"] = site
            return moved
        if callable(what) and not isinstance(what, (Hook, str, Site)):
            return FunctionHook(site, what, direction)
    if isinstance(item, tuple) and len(item) == 3 and isinstance(item[0], str):
        raise TypeError(f"kind and layer go together: (({item[0]!r}, {item[1]!r}), function).")
    if isinstance(item, type) and issubclass(item, Hook):
        raise TypeError(f"{item.__name__} is a class of hooks: make one, ip.{item.__name__}(...).")
    raise TypeError(
        "a hook is a pair (site, function) such as ('fc1', fn), or a Detector, Controller or "
        f"edit; got {item!r}"
    )


def all_hooks(hooks: Any, fwd_hooks: Any, bwd_hooks: Any) -> list[Hook]:
    """The hooks of a run, in order, from the three ways to give them."""
    given = [some for some in (hooks, fwd_hooks) if some != ()]
    found = [as_hook(item) for some in given for item in _items(some)]
    for item in _items(bwd_hooks) if bwd_hooks != () else ():
        hook = as_hook(item, "bwd")
        if not isinstance(hook, FunctionHook):
            why = f" {_NO_TORCH_HOOK}" if isinstance(hook, TorchHook) else ""
            raise TypeError(f"bwd_hooks takes pairs (site, function); got {item!r}.{why}")
        found.append(hook)
    return found


def _items(given: Any) -> Iterable[Any]:
    """The hooks in a list, in a mapping from sites, or a single one that is not in a list."""
    if type(given) is list:
        return given
    if isinstance(given, Mapping):
        return given.items()
    one_pair = isinstance(given, tuple) and len(given) == 2 and callable(given[1])
    if isinstance(given, Hook) or (one_pair and not isinstance(given[0], (tuple, Hook))):
        return [given]
    if isinstance(given, Iterable) and not isinstance(given, str):
        return given
    if isinstance(given, type):
        return [given]
    raise TypeError(f"hooks come in a list, such as [('fc1', fn)]; got {given!r}")


def checked_direction(text: str) -> str:
    """``fwd`` or ``bwd``, or an error."""
    if text not in ("fwd", "bwd"):
        raise ValueError(f"dir is 'fwd' or 'bwd'; got {text!r}")
    return text


def _on_part(function: Callable[..., Any], value: Tensor, hook: HookPoint) -> Tensor | None:
    """Call a function with the part of a value that a selector means, and put back what it makes."""
    part = hook.selected(value)
    made: Tensor | None = None if part is None else function(part, hook)
    if hook.part is not None and part is not None:
        made = hook.part.put(value, part if made is None else made, hook)
    return made


def _label_of(function: Callable[..., Any]) -> str:
    while isinstance(function := inspect.unwrap(function), functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None)
    if code is None:
        return f"hook {name!r}"
    return f"hook {name!r} ({Path(code.co_filename).name}, line {code.co_firstlineno})"


_NO_TORCH_HOOK = (
    "It gets one gradient, that of the value at its site: fn(grad, hook). Torch's backward hooks of modules get "
    "others, and stay with torch: module.register_full_backward_hook(fn)."
)


def caller_of(
    function: Callable[..., Any], *, forward: bool = True
) -> Callable[[Tensor, HookPoint], Any]:
    """How to call a user's function: with ``hook=`` if it takes that, else by place or not at all."""
    code = getattr(function, "__code__", None)
    if code is not None:
        # The common case without inspect, which takes as long as ten hooks.
        named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if "hook" in named[code.co_posonlyargcount :] or code.co_flags & inspect.CO_VARKEYWORDS:
            return lambda value, hook: function(value, hook=hook)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins such as torch.zeros_like have no signature
        return lambda value, hook: function(value)  # noqa: ARG005
    if any(
        p.kind is p.VAR_KEYWORD or (p.name == "hook" and p.kind is not p.POSITIONAL_ONLY)
        for p in parameters
    ):
        return lambda value, hook: function(value, hook=hook)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    if len(required) > 2:
        names = ", ".join(p.name for p in required)
        raise TypeError(
            f"{_label_of(function)} takes ({names}); a hook function takes (value, hook)."
            + (
                " If it is a PyTorch hook, wrap it: ip.torch_hook(fn)."
                if forward
                else f" {_NO_TORCH_HOOK}"
            )
        )
    if len(required) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function
    return lambda value, hook: function(value)  # noqa: ARG005


def _overridden(hook: Hook, parent: type[Hook], **methods: str) -> tuple[str, ...]:
    found = tuple(
        direction
        for direction, name in methods.items()
        if getattr(type(hook), name) is not getattr(parent, name)
    )
    if not found:
        names = " or ".join(f"{name}(self, value, hook)" for name in methods.values())
        raise TypeError(f"{type(hook).__name__} does nothing yet: define {names}.")
    return found


def _no_return(hook: Hook, function: Callable[..., Any], value: Tensor, point: HookPoint) -> None:
    part = point.selected(value)
    returned = None if part is None else function(part, point)
    if returned is not None:
        raise TypeError(
            f"{hook.label} is a Detector and returned a {type(returned).__name__} at "
            f"{point.name!r}. Detectors change nothing; use a Controller to change a value."
        )
