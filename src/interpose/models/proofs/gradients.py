"""The proof of true gradients: a fresh leaf put in a value's place must have the same gradient, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from interpose.errors import GradientError
from interpose.models.running.trial import first_tensor
from interpose.sites.tree import Site

if TYPE_CHECKING:
    from interpose.models.proofs.check import Check


class GradientProofs:
    """The gradients of some sites, each against a leaf in its place."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self.model = check.model
        self.inputs = check.inputs
        self.differences = False

    def run(self, sites: Sequence[Site], *, differences: bool) -> None:
        """All of them; nothing where the bare model has no gradients."""
        self.differences = differences
        if not self._can_go_back():
            return
        for site in sites:
            if site.kind == "expert_indices":
                continue
            try:
                self._against_a_leaf(site)
            except GradientError as error:  # a loud refusal keeps the promise of true gradients
                self._note(site.name, True, f"refused: {error}")
            except Exception as error:  # whatever the model's own code raises
                self._note(site.name, False, f"{type(error).__name__}: {error}")

    def _note(self, site: str, passed: bool, about: str) -> None:
        self.check.note("gradients", site, passed, about)

    def _name(self, site: Site) -> str:
        """A site, or its last call: leaves in all calls would cut each other off."""
        calls = self.check.calls.get(site.name, 1)
        return site.name if calls == 1 else f"{site.name}#{calls - 1}"

    def _can_go_back(self) -> bool:
        """Whether the bare model has gradients at all."""
        parameters = [p for p in self.model.module.parameters() if p.is_floating_point()]
        frozen = [p for p in parameters if not p.requires_grad]
        modes: set[bool] = set()
        watch = register_module_forward_pre_hook(lambda *_: modes.add(torch.is_grad_enabled()))
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            loss = self._loss(self.model.module(**self.inputs))
            torch.autograd.grad(loss, parameters, allow_unused=True)
        except Exception as error:
            about = f"the bare model has none: {type(error).__name__}: {error}"
            self._note("", True, about)
            return False
        finally:
            watch.remove()
            for parameter in frozen:
                parameter.requires_grad_(False)
        # Where a part of the model runs without gradients, differences see more than they do.
        self.differences &= modes == {True}
        return True

    def _loss(self, output: Any) -> Tensor:
        logits = first_tensor(output).float()
        weights = torch.linspace(-1, 1, logits.numel(), device=logits.device)
        assert self.check.bare is not None
        return (logits.flatten() * weights).sum() / self.check.bare.float().abs().max()

    def _against_a_leaf(self, site: Site) -> None:
        # One site at a time: more would add up in another order, and differ in the last bits.
        name = self._name(site)
        _, cache = self.model.run_with_cache(names_filter=name, incl_bwd=self._loss, **self.inputs)
        leaves: list[Tensor] = []

        def inject(value: Tensor, hook: Any) -> Tensor:  # noqa: ARG001
            leaves.append(value.detach().clone().requires_grad_())
            return leaves[-1]

        output = self.model.run_with_hooks(fwd_hooks=[(name, inject)], **self.inputs)
        grads: Any = torch.autograd.grad(self._loss(output), leaves, allow_unused=True)
        (true,) = grads
        if true is None:
            self._note(site.name, name not in cache.grad, "the output has none here")
            return
        found = cache.grad[name]
        alike = bool(((found == true) | (found.isnan() & true.isnan())).all())
        about = "bit-equal to a leaf in its place"
        if not alike:
            about = f"off by {self.check.distance(true, found):.0e} of a leaf's"
        self._note(site.name, alike, about)
        if self.differences and name == site.name:
            self._difference(site, true)

    def _difference(self, site: Site, grad: Tensor) -> None:
        """Central differences along the gradient, with two steps; where those differ the loss has a kink."""
        size = float(grad.norm())
        if size < 1e-4:
            return
        near, nearer = (self._slope(site, grad / size, step) for step in (1e-2, 2e-3))
        if abs(near - nearer) > 0.05 * max(abs(near), abs(nearer)):
            return
        about = f"{nearer:.4g} against {size:.4g}"
        self.check.note("central differences", site.name, abs(nearer - size) < 0.1 * size, about)

    def _slope(self, site: Site, direction: Tensor, step: float) -> float:
        losses = []
        for sign in (1, -1):

            def move(given: Tensor, hook: Any, sign: int = sign) -> Tensor:  # noqa: ARG001
                return given + sign * step * direction

            with torch.no_grad():
                output = self.model.run_with_hooks(fwd_hooks=[(site.name, move)], **self.inputs)
                losses.append(float(self._loss(output)))
        return (losses[0] - losses[1]) / (2 * step)
