"""Perturb an activation where it hurts most: the fast gradient sign method, at any site."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from interpose.engine.hooks import Controller
from interpose.engine.model import Model
from interpose.engine.points import HookPoint
from interpose.errors import EditShapeError
from interpose.models.loading import as_model
from interpose.sites.tree import Filter


@dataclass(frozen=True, eq=False, repr=False)
class shift(Controller):
    """Add a tensor to the value at a site. It has the value's own shape; nothing is broadcast.

    Args:
        site: where.
        delta: what is added, moved and cast to the value.
    """

    site: Filter
    delta: Tensor

    def change(self, value: Tensor, hook: HookPoint) -> Tensor:
        """The value, shifted."""
        if self.delta.shape != value.shape:
            raise EditShapeError(
                f"{self.label} adds {tuple(self.delta.shape)} at {hook.name!r}; the value is "
                f"{tuple(value.shape)}. Run it on inputs of the shape it was made with."
            )
        return value + self.delta.to(value)


def adversarial(
    model: Model | nn.Module,
    *inputs: Any,
    site: str,
    loss: Callable[[Any], Tensor],
    step: float,
    **kwargs: Any,
) -> shift:
    """A hook that shifts a site by ``step`` per element so that the loss grows as fast as it can.

    One forward and one backward pass; parameters and their ``.grad`` stay as they are. Use what it
    returns on the same inputs:

    ```python
    loss = lambda output: F.cross_entropy(output, y)
    worse = ip.adversarial(model, x, site="fc1", loss=loss, step=0.1)
    model.run_with_hooks(x, hooks=[worse])
    ```

    Args:
        model: the model, run once in the mode (train or eval) it is in.
        *inputs: what the model takes.
        site: the name of one site; ``"input"`` for the model's own input.
        loss: a function from the model's output to one number.
        step: how far each element moves; negative makes the loss smaller.
        **kwargs: what the model takes by name.
    """
    _, cache = as_model(model).run_with_cache(*inputs, names_filter=site, incl_bwd=loss, **kwargs)
    return shift(site, step * cache.grad[site].sign())
