"""`LanguageModelLayers`: the layers of a model by any of their names, and the hooks on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from interpose.dialects.mi_crow.hooks.controller import Controller
from interpose.dialects.mi_crow.hooks.detector import Detector
from interpose.dialects.mi_crow.hooks.hook import Hook, HookType, as_hook_type
from interpose.dialects.mi_crow.language_model.context import LanguageModelContext
from interpose.engine.hooks import TorchHook, torch_hook
from interpose.engine.points import Handle
from interpose.explain.words import hint, some

Signature = str | int | None
"""A layer: its flattened name, its path, its index; None, ``input`` and ``output`` for the model itself."""


class Registered(TorchHook):
    """A hook of mi-crow's on the engine: it stays the user's object, whose ``enabled`` counts."""

    def __init__(self, hook: Hook, hook_type: HookType) -> None:
        before = hook_type is HookType.PRE_FORWARD
        super().__init__(self._call, before=before, with_kwargs=True)
        vars(self)["_id"] = hook.id
        self.hook = hook
        self.hook_type = hook_type

    @property
    def enabled(self) -> bool:
        """Whether it runs."""
        return self.hook.enabled

    @property
    def label(self) -> str:
        """What errors call it."""
        return f"hook {self.hook.id!r}"

    def _call(self, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> Any:
        if self.before:
            return self.hook.before(module, args, kwargs, self.hook_type)
        return self.hook.after(module, args, kwargs, output[0], self.hook_type)


class Registration(NamedTuple):
    """A hook and where it is."""

    hook: Hook
    path: str
    hook_type: HookType
    handle: Handle


class LanguageModelLayers:
    """The layers of a model, and what is registered on them."""

    def __init__(self, context: LanguageModelContext) -> None:
        self.context = context
        self._registered: dict[str, Registration] = {}

    # Names.

    def list_layers(self) -> list[str]:
        """The path of every layer, as torch has it, in the order of their indices."""
        return [path for path, _ in self.context.model.named_modules() if path]

    def get_layer_names(self) -> list[str]:
        """The flattened name of every layer, such as ``llamaforcausallm_model_layers_1``, in the same order."""
        return [self._flat(path) for path in self.list_layers()]

    def print_layer_names(self) -> None:
        """Print every layer with its index."""
        for number, (path, module) in enumerate(self._layers()):
            print(f"{number}: {self._flat(path)} ({type(module).__name__})")  # noqa: T201

    def path_of(self, layer_signature: Signature) -> str:
        """The path of a layer by any of its names; empty for the model itself."""
        paths = self.list_layers()
        if layer_signature is None or layer_signature == self._flat(""):
            return ""
        if isinstance(layer_signature, int):
            if not 0 <= layer_signature < len(paths):
                raise ValueError(
                    f"Layer index '{layer_signature}' not found in model. It has layers 0 to {len(paths) - 1}."
                )
            return paths[layer_signature]
        if layer_signature in paths:
            return layer_signature
        found = [path for path in paths if self._flat(path) == layer_signature]
        if len(found) > 1:
            raise ValueError(
                f"Layer name '{layer_signature}' is that of {len(found)} layers: say which, {some(map(repr, found))}."
            )
        if not found and layer_signature in ("input", "output"):
            return ""
        if not found:
            near = hint(layer_signature, [*self.get_layer_names(), *paths])
            raise ValueError(
                f"Layer name '{layer_signature}' not found in model.{near} lm.layers.get_layer_names() and "
                "list_layers() show them."
            )
        return found[0]

    def module_of(self, layer_signature: Signature) -> nn.Module:
        """A layer by any of its names."""
        found: nn.Module = self.context.model.get_submodule(self.path_of(layer_signature))
        return found

    def site_of(self, path: str) -> Any:
        """A layer as a site of interpose."""
        tree, module = self.context.view.tree, self.context.model.get_submodule(path)
        return path if tree.site(path).module is module else tree.place(path, module)

    def _layers(self) -> list[tuple[str, nn.Module]]:
        return [(path, module) for path, module in self.context.model.named_modules() if path]

    def _flat(self, path: str) -> str:
        """mi-crow's name of a layer."""
        return "_".join([type(self.context.model).__name__.lower(), *path.split(".")]).rstrip("_")

    # Hooks.

    def register_hook(
        self,
        layer_signature: Signature,
        hook: Hook,
        hook_type: HookType | str | None = None,
    ) -> str:
        """Put a hook on a layer, and return its id. It stays until it is unregistered.

        Args:
            layer_signature: the layer by its flattened name, its path or its index; ``input``, ``output`` or None for
                what the model itself takes and returns.
            hook: the hook; any number of any kind may be on one layer, and they run in the order they came.
            hook_type: when it runs; by default as it says itself.
        """
        if not isinstance(hook, Hook):
            raise TypeError(
                f"register_hook takes a Detector, a Controller or a Hook; got {hook!r}."
            )
        if hook.id in self._registered:
            raise ValueError(f"Hook with ID '{hook.id}' is already registered.")
        path = self.path_of(layer_signature)
        kind = as_hook_type(hook.hook_type if hook_type is None else hook_type)
        if not path and layer_signature in ("input", "output") and hook_type is None:
            kind = HookType.PRE_FORWARD if layer_signature == "input" else HookType.FORWARD
        handle = self.context.view.register((self.site_of(path), Registered(hook, kind)))
        hook.set_context(self.context)
        if hook.layer_signature is None:
            hook.layer_signature = layer_signature
        self._registered[hook.id] = Registration(hook, path, kind, handle)
        return hook.id

    def unregister_hook(self, hook_or_id: Hook | str) -> bool:
        """Take a hook off, by itself or by its id; False if it is not there."""
        id = hook_or_id.id if isinstance(hook_or_id, Hook) else hook_or_id
        found = self._registered.get(id)
        if found is None or (isinstance(hook_or_id, Hook) and found.hook is not hook_or_id):
            return False
        del self._registered[id]
        found.handle.remove()
        return True

    def get_hooks(
        self, layer_signature: Signature = None, hook_type: HookType | str | None = None
    ) -> list[Hook]:
        """The hooks on a layer (by default on all), of a type (by default of both), in the order they came."""
        path = None if layer_signature is None else self.path_of(layer_signature)
        kind = None if hook_type is None else as_hook_type(hook_type)
        return [
            one.hook
            for one in self._registered.values()
            if (path is None or one.path == path) and (kind is None or one.hook_type is kind)
        ]

    def registrations(self) -> list[Registration]:
        """Every hook and where it is."""
        return list(self._registered.values())

    def get_detectors(self) -> list[Detector]:
        """The hooks that detect."""
        return [hook for hook in self.get_hooks() if isinstance(hook, Detector)]

    def get_controllers(self) -> list[Controller]:
        """The hooks that change values."""
        return [hook for hook in self.get_hooks() if isinstance(hook, Controller)]

    def enable_hook(self, hook_id: str) -> bool:
        """Let a hook run again; False if it is not there."""
        return self._switch([hook_id], on=True)

    def disable_hook(self, hook_id: str) -> bool:
        """Keep a hook but do not run it; False if it is not there."""
        return self._switch([hook_id], on=False)

    def enable_all_hooks(self) -> None:
        """Let all hooks run again."""
        self._switch(list(self._registered), on=True)

    def disable_all_hooks(self) -> None:
        """Keep all hooks but run none."""
        self._switch(list(self._registered), on=False)

    def _switch(self, ids: list[str], *, on: bool) -> bool:
        found = [self._registered[id].hook for id in ids if id in self._registered]
        for hook in found:
            hook.enable() if on else hook.disable()
        return bool(found)

    # Functions as torch's hooks.

    def register_forward_hook_for_layer(
        self,
        layer_signature: Signature,
        hook: Callable[..., Any],
        hook_args: dict[str, Any] | None = None,
    ) -> Handle:
        """Put a torch forward hook on a layer, ``fn(module, input, output)``; the handle takes it off.

        Args:
            layer_signature: the layer.
            hook: gets copies; what it returns takes the output's place.
            hook_args: ``with_kwargs``, as for ``register_forward_hook``.
        """
        return self._function(layer_signature, hook, hook_args, pre=False)

    def register_pre_forward_hook_for_layer(
        self,
        layer_signature: Signature,
        hook: Callable[..., Any],
        hook_args: dict[str, Any] | None = None,
    ) -> Handle:
        """Put a torch forward pre-hook on a layer, ``fn(module, input)``; the handle takes it off.

        Args:
            layer_signature: the layer.
            hook: gets copies; what it returns takes the inputs' place.
            hook_args: ``with_kwargs``, as for ``register_forward_pre_hook``.
        """
        return self._function(layer_signature, hook, hook_args, pre=True)

    def _function(
        self, signature: Signature, function: Any, options: dict[str, Any] | None, *, pre: bool
    ) -> Handle:
        options = {} if options is None else options
        if set(options) - {"with_kwargs"}:
            raise TypeError(f"hook_args may have with_kwargs; got {some(map(repr, options))}.")
        made = torch_hook(function, pre=pre, with_kwargs=bool(options.get("with_kwargs")))
        return self.context.view.register((self.site_of(self.path_of(signature)), made))
