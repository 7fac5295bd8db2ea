"""Where the numbers break: the first site that is not finite, and the last that was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interpose.engine.hooks import Detector
from interpose.engine.points import HookPoint
from interpose.errors import NonFinite
from interpose.sites.tree import Filter, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """The first place where something stopped being finite.

    ``kind`` is ``value`` or ``gradient``; ``after`` is the site before it (in the backward pass,
    for a gradient) that was still finite, None if none was seen; ``parameters`` are those of the
    module itself that are not finite.
    """

    kind: str
    site: str
    call: int | None
    nans: int
    infs: int
    numbers: int
    after: str | None
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        call = f" (call {self.call})" if self.call else ""
        count = f"{self.nans} NaN and {self.infs} Inf among {self.numbers} numbers"
        lines = [f"the {self.kind} at {self.site!r}{call} has {count}."]
        if self.after is not None:
            lines.append(f"  the last finite {self.kind} before it was at {self.after!r}")
        elif self.kind == "value":
            lines.append("  no finite value was seen before it: look at the model's inputs too")
        else:
            lines.append("  no finite gradient was seen before it: look at the loss too")
        if self.parameters:
            lines.append(f"  not finite in this module: {', '.join(self.parameters)}")
        return "\n".join(lines)


class _Everything:
    """Selects every site that is computed anyway: the outputs of all modules, each by its meaning if it has one."""

    def select_in(self, tree: Any) -> list[tuple[Site, bool]]:
        """Its sites in a model."""
        found = {site.name: site for site, _ in tree.select(None)}
        for path, module in tree.modules():
            output, meaning = tree.place(path, module), tree.meaning(path)
            name = meaning or output.name
            if name not in found:
                found[name] = output if meaning is None else tree.site(meaning)
        return [(site, False) for site in found.values()]

    def __repr__(self) -> str:
        return "None"


class NaNGuard(Detector):
    """Raises `NonFinite` at the first site where a value or a gradient stops being finite.

    ```python
    with model.hooks([ip.NaNGuard()]):
        loss_function(model(x), y).backward()
    ```

    Each look waits for the device: a tool to find a fault with, not one to leave in for good.

    Args:
        site: where it looks; None for the output of every module, and all that a model of transformers has besides.
        gradients: look at gradients too, in a ``backward()`` inside the ``with`` block.
        raises: False only writes down ``guard.first`` and lets the model run on.
    """

    def __init__(self, site: Filter = None, *, gradients: bool = True, raises: bool = True) -> None:
        super().__init__(_Everything() if site is None else site, copies=False)
        self.gradients = gradients
        self.raises = raises
        self.first: Break | None = None
        self._finite: dict[str, dict[tuple[str, int | None], None]] = {"value": {}, "gradient": {}}

    def directions(self) -> tuple[str, ...]:
        """Values, and gradients where they are wanted."""
        return ("fwd", "bwd") if self.gradients else ("fwd",)

    def must_fire(self, direction: str) -> bool:
        """A run without a backward pass is not a mistake."""
        return direction == "fwd"

    def read(self, value: Tensor, hook: HookPoint) -> None:
        """Look at a value."""
        self._look("value", value, hook)

    def read_grad(self, grad: Tensor, hook: HookPoint) -> None:
        """Look at a gradient."""
        self._look("gradient", grad, hook)

    def _look(self, kind: str, value: Tensor, hook: HookPoint) -> None:
        if self.first is not None and not self.raises:
            return
        if not (value.is_floating_point() or value.is_complex()):
            return
        finite, here = self._finite[kind], (hook.name, hook.call)
        if here in finite:
            finite.clear()  # the same place again: another pass
        fine = torch.isfinite(value)
        if hook.canonical.endswith("hook_attn_scores"):
            fine |= value == -torch.inf  # how some models write that a key is masked
        if fine.all():
            finite[here] = None
            return
        self.first = Break(
            kind=kind,
            site=hook.name,
            call=hook.call,
            nans=int(torch.isnan(value).sum()),
            infs=int(torch.isinf(value).sum()),
            numbers=value.numel(),
            after=next(reversed(finite))[0] if finite else None,
            parameters=_broken_parameters(hook.module),
        )
        if self.raises:
            raise NonFinite(str(self.first))

    def reset(self) -> None:
        """Forget what was found, and look again."""
        self.first = None
        for finite in self._finite.values():
            finite.clear()


def _broken_parameters(module: nn.Module) -> tuple[str, ...]:
    own = module.named_parameters(recurse=False)
    return tuple(name for name, parameter in own if not torch.isfinite(parameter).all())
