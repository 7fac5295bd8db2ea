"""`Point`: a place in a model from scratch where a value can be read and changed by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn


class Point(nn.Module):
    """Hands on what it gets. Hooks come from the model around it: ``model.blocks[0].attn.hook_z.add_hook(fn)``.

    What it does not have as a module it has as the model's hook point of its name: ``add_hook``, ``ctx``, ``layer``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._place: tuple[Any, str] | None = None

    if TYPE_CHECKING:

        def __call__(self, value: Tensor) -> Tensor:
            """The value, or what hooks make of it."""

    def forward(self, value: Tensor) -> Tensor:
        """The value."""
        return value

    @property
    def heard(self) -> bool:
        """Whether anything listens here now, in any thread."""
        return bool(self._forward_hooks)

    def belong(self, model: Any, name: str) -> None:
        """Be the hook point of a name in a model, the first that asks."""
        if self._place is None:
            self._place = (model, name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            place = self.__dict__.get("_place")
            if place is None or name.startswith("__"):
                raise
            model, own = place
            return getattr(model.hook_dict[own], name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_place": None}  # a copy belongs to the model that is made of it
