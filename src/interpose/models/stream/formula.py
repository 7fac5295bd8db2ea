"""What a norm or a multiplier does, as numbers: given the scale of a run it is linear, so that parts add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.errors import Unsupported
from interpose.models.discovery.anatomy import Block, Norm
from interpose.precision import wide
from interpose.taps.context import unheard

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Formula:
    """What becomes of x: ``factor * straight(x) / scale + summand``. A norm, a number, or a norm and then a number.

    ```python
    norm = model.blocks[3].ln1.formula
    scale = cache["blocks.3.ln1.hook_scale"]
    norm.through(part, scale)      # of a part of x; all parts and the summand add up to what the norm returns
    norm.before(direction, scale)  # what reads in x what the direction reads in what the norm returns
    ```

    Attributes:
        factor: [d_model], in float32 at least; one number where there is no norm.
        summand: likewise.
        centred: whether the mean is taken off x first, as ``straight`` does.
        scale_site: where what it divides by is seen; empty where there is no norm.
        exact: whether factor and summand are the norm's own weight (or one more, as in gemma) and bias, not measured.
    """

    factor: Tensor | float = 1.0
    summand: Tensor | float = 0.0
    centred: bool = False
    scale_site: str = ""
    exact: bool = True

    def straight(self, x: Tensor) -> Tensor:
        """Without its mean over the features, where the norm takes that off."""
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def through(self, part: Tensor, scale: Tensor | None = None) -> Tensor:
        """What comes out of a part of x, without the summand.

        Args:
            part: [..., d_model].
            scale: that of the run, [..., 1]; without it the part is divided by nothing.
        """
        made = self.scaled(self.straight(part))
        return made if scale is None else made / scale

    def before(self, direction: Tensor, scale: Tensor | None = None) -> Tensor:
        """The direction that reads in x what a direction reads in what comes out, but for the summand.

        Args:
            direction: [..., d_model].
            scale: as in `through`.
        """
        made = self.straight(self.scaled(direction))
        return made if scale is None else made / scale

    def scale_in(self, cache: Mapping[str, Any]) -> Tensor | None:
        """What it divided by in a run; None where there is no norm."""
        return wide(cache[self.scale_site]) if self.scale_site else None

    def times(self, number: float) -> Formula:
        """The same, and then multiplied with a number."""
        if number == 1:
            return self
        return replace(self, factor=self.factor * number, summand=self.summand * number)

    def scaled(self, x: Tensor) -> Tensor:
        """Times the factor."""
        if isinstance(self.factor, Tensor):
            return x * self.factor.to(x.device)
        return x if self.factor == 1 else x * self.factor


def norm_at(model: TransformerModel, path: str) -> Norm | None:
    """The norm of a name: ``ln_final``, ``blocks.3.ln1``; None if there is none."""
    found = _found_at(model, path)
    return None if found is None else found[0]


def formula_at(model: TransformerModel, path: str) -> Formula | None:
    """What the norm of a name does, as it is now; None if there is none."""
    found = _found_at(model, path)
    if found is None:
        return None
    norm, block = found
    kinds = (p for p in block.module.parameters() if p.is_floating_point() and p.itemsize > 1)
    made = formula_of(norm, block.shape[-1], next(kinds, torch.empty(0)))
    return replace(made, scale_site=f"{path}.hook_scale")


def _found_at(model: TransformerModel, path: str) -> tuple[Norm, Block] | None:
    """A norm, and a block of the tower that it is in."""
    for tower in model.anatomy.towers:
        if path == f"{tower.prefix}ln_final" and tower.final_norm is not None:
            return tower.final_norm, tower.blocks[-1]
        rest = path.removeprefix(f"{tower.prefix}blocks.")
        index, _, name = rest.partition(".")
        for block in tower.blocks if rest != path else ():
            if index == str(block.index) and name in block.norms:
                return block.norms[name], block
    return None


@torch.no_grad()
def formula_of(norm: Norm, width: int, like: Tensor) -> Formula:
    """What a norm does, found by running it: its weight is not always its factor, and its class does not tell.

    Args:
        norm: which.
        width: how many features it takes.
        like: of the kind and on the device of what a norm without weights takes.
    """
    module, eps = norm.endpoint.module, norm.eps
    own = next(module.parameters(), like)
    signs = torch.ones(width)
    signs[1::2] = -1
    # Ten is so large that an epsilon is nothing beside it, and small enough for 16 bits.
    given = 10 * torch.stack([signs, -signs, torch.linspace(-1, 2, width)])
    given = given.to(own.device, own.dtype)[None]
    with unheard():
        up, down, bent = wide(module.forward(given))[0]
    x, told = (
        wide(given)[0],
        bent.isfinite(),
    )  # a NaN in its weight says nothing of the other features
    fits: list[tuple[float, bool, Tensor]] = []
    for centred in (False, True):
        core = x - x.mean(-1, keepdim=True) if centred else x
        core = core / (core.square().mean(-1, keepdim=True) + eps).sqrt()
        factor = (up - down) / 2 / core[0]
        far = (factor * core[2] + (up + down) / 2 - bent)[told].abs()
        fits.append((float(far.max()) if told.any() else float("inf"), centred, factor))
    error, centred, factor = min(fits, key=itemgetter(0))
    if not error <= 3e-2 * float(bent[told].abs().max()):
        raise Unsupported(
            f"{norm.endpoint.path} ({type(module).__name__}) is not a norm of the usual formula, a factor times what "
            f"is left when it is divided by its size{f': {norm.why_not}' if norm.why_not else ''}."
        )
    return _settled(module, Formula(factor=factor, summand=(up + down) / 2, centred=centred), own)


def _settled(module: torch.nn.Module, measured: Formula, own: Tensor) -> Formula:
    """The norm's own parameters in place of what was measured, where they say the same but for rounding."""
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    if not all(part is None or isinstance(part, Tensor) for part in (weight, bias)):
        return replace(measured, exact=False)
    assert isinstance(measured.factor, Tensor)
    assert isinstance(measured.summand, Tensor)
    ones = torch.ones_like(measured.factor)
    factors = [ones] if weight is None else [wide(weight.detach()), 1 + wide(weight.detach())]
    summand = torch.zeros_like(ones) if bias is None else wide(bias.detach())
    close = 1e-5 if own.dtype.itemsize >= 4 else 1e-2

    def says(settled: Tensor, found: Tensor) -> bool:
        if settled.numel() != len(found):
            return False
        told = found.isfinite()
        far = (settled.reshape(-1) - found)[told].abs()
        return bool((far <= close * (1 + found[told].abs().max())).all())

    factor = next((one for one in factors if says(one, measured.factor)), None)
    if factor is None or not says(summand, measured.summand):
        return replace(measured, exact=False)
    # Copies: the parameters are the model's, and will change.
    return replace(measured, factor=factor.reshape(-1).clone(), summand=summand.reshape(-1).clone())
