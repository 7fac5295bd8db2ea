"""A branch: attention, an MLP or a mixer, and how what it makes becomes what is added to the stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.errors import Unsupported
from interpose.models.discovery.anatomy import Block
from interpose.models.stream.formula import Formula, formula_at
from interpose.models.weights.views import Getter, block_weights
from interpose.precision import wide

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

UNITS = {
    "attn": ("attn.hook_z", "attn.W_O", "attn.b_O"),
    "cross_attn": ("cross_attn.hook_z", "cross_attn.W_O", "cross_attn.b_O"),
    "mlp": ("mlp.hook_post", "mlp.W_out", "mlp.b_out"),
}
"""Of the branches that have heads or neurons: where these are seen, by which weight they write, and the bias."""
_POST = {"cross_attn": "ln_cross_post", "mlp": "ln2_post"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branch:
    """What a branch of a block adds to the stream: its heads or neurons, through a norm, times a number, and a rest.

    ```python
    branch = model.blocks[3].branches["attn"]
    _, cache = model.run_with_cache(text, names_filter=[branch.site, *branch.sites])
    branch.parts(cache).sum(-2) + branch.rest(cache)  # is cache[branch.site]
    ```

    Attributes:
        layer: of its block.
        kind: ``attn``, ``mlp``, ``mixer``, ``cross_attn``.
        site: where it is seen as it is added, such as ``blocks.3.hook_attn_out``.
        step: which of the block's additions it belongs to; those of one step (parallel blocks) read the same stream.
        norm: the norm that its output goes through before it is added, such as ``blocks.3.ln1_post``; or None.
        multiplier: the number it is multiplied with before it is added.
        keeps: the number that the stream before is multiplied with when it is added; 1 in most models.
        writes: both, as one formula.
        units: where its heads or neurons are seen, such as ``blocks.3.attn.hook_z``; empty if it has none.
        why_not: why it cannot be taken apart into heads or neurons, if so.
    """

    layer: int
    kind: str
    site: str
    step: int
    norm: str | None
    multiplier: float
    keeps: float
    writes: Formula
    units: str
    why_not: str = ""
    _weights: dict[str, Getter] = field(repr=False)

    @property
    def sites(self) -> list[str]:
        """What of a run is needed to take it apart."""
        self.must_have_parts()
        return [self.units, self.writes.scale_site] if self.norm else [self.units]

    def named(self, name: str) -> Tensor:
        """A weight of it: ``W_Q``, ``b_in``, as of ``model.blocks[3].attn``.

        Args:
            name: which.
        """
        getter = self._weights.get(f"{self.kind}.{name}")
        if getter is None:
            raise Unsupported(f"no {name} belongs to {self.site}.")
        return getter()

    @property
    def weight(self) -> Tensor:
        """What each head or neuron is multiplied out with, [unit, inside, d_model]; inside a neuron is one number."""
        found = self._weights[UNITS[self.kind][1]]()
        return found if found.ndim == 3 else found[:, None]

    @property
    def bias(self) -> Tensor:
        """What is added to their sum, before the norm, [d_model]."""
        return self._weights[UNITS[self.kind][2]]()

    def parts(self, cache: Mapping[str, Any]) -> Tensor:
        """What each head or neuron adds to the stream in a run, [..., unit, d_model].

        Args:
            cache: has `sites`.
        """
        values, weight, scale = self._seen(cache)
        made = torch.einsum("...ui,uim->...um", values, weight)
        return self.writes.through(made, None if scale is None else scale.unsqueeze(-2))

    def rest(self, cache: Mapping[str, Any]) -> Tensor:
        """What it adds besides: the bias, and the norm's summand, [..., d_model].

        Args:
            cache: has `sites`.
        """
        values, _, scale = self._seen(cache)
        return self.writes.through(wide(self.bias).to(values.device), scale) + self.writes.summand

    def whole(self, cache: Mapping[str, Any]) -> Tensor:
        """All of it, as it follows from its heads or neurons: what is at `site`, [..., d_model].

        Args:
            cache: has `sites`.
        """
        values, weight, scale = self._seen(cache)
        bias = wide(self.bias).to(values.device)
        made = torch.einsum("...ui,uim->...m", values, weight) + bias
        return self.writes.through(made, scale) + self.writes.summand

    def along(self, cache: Mapping[str, Any], direction: Tensor) -> tuple[Tensor, Tensor]:
        """The same along a direction, without ever making the vectors: of each unit [..., unit], and of the rest.

        Args:
            cache: has `sites`.
            direction: [..., d_model].
        """
        values, weight, scale = self._seen(cache)
        inner = self.writes.before(direction, scale)
        read = torch.einsum("uim,...m->...ui", weight, inner)
        bias = wide(self.bias).to(values.device)
        return (values * read).sum(-1), inner @ bias + (direction * self.writes.summand).sum(-1)

    def _seen(self, cache: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        """The values of units [..., unit, inside], their weight, and the norm's scale."""
        self.must_have_parts()
        values = wide(cache[self.units])
        weight = wide(self.weight).to(values.device)
        if self.kind == "mlp":
            values = values[..., None]
        return values, weight, self.writes.scale_in(cache)

    def must_have_parts(self) -> None:
        """Refuse a branch that cannot be taken apart."""
        if self.why_not:
            raise Unsupported(f"{self.site} cannot be taken apart: {self.why_not}.")


def branches_of(
    model: TransformerModel, prefix: str, block: Block, multipliers: Mapping[str, float | str]
) -> dict[str, Branch]:
    """The branches of a block by their kinds, in the order in which they are added.

    Args:
        model: whose.
        prefix: of the tower.
        block: of the tower.
        multipliers: what each is multiplied with, by site, or why it cannot be taken apart.
    """
    table, at = model.tree.table, f"{prefix}blocks.{block.index}."
    steps = {name: step for step, (_, added, _) in enumerate(block.sums) for name in added}
    weights = block_weights(block)
    found: dict[str, Branch] = {}
    for site in table.sites:
        name = site.removeprefix(at)
        if site == name or not name.startswith("hook_") or not name.endswith("_out"):
            continue
        kind, told = name[5:-4], multipliers.get(site, 1.0)
        times, why_not = (1.0, told) if isinstance(told, str) else (told, "")
        units, weight, _ = UNITS.get(kind, ("", "", ""))
        norm: str | None = f"{at}{_POST.get(kind, 'ln1_post')}"
        writes = Formula()
        try:
            writes = formula_at(model, str(norm)) or writes
            norm = norm if writes.scale_site else None
        except Unsupported as error:
            why_not = str(error)
        needed = [f"{at}{units}"] if units else []
        needed += [writes.scale_site] if writes.scale_site else []
        lacking = [each for each in needed if each not in table.sites]
        if lacking:
            why_not = (
                f"{lacking[0]} is not there: {table.absent.get(lacking[0], 'it was not found')}"
            )
        elif weight not in weights:
            why_not = f"a {kind} has no heads or neurons"
        found[kind] = Branch(
            layer=block.index,
            kind=kind,
            site=site,
            step=steps.get(name, len(found)),
            norm=norm,
            multiplier=times,
            keeps=block.kept.get(name, 1.0),
            writes=writes.times(times),
            units=f"{at}{units}" if f"{at}{units}" in table.sites else "",
            why_not=why_not,
            _weights=weights,
        )
    return {branch.kind: branch for branch in sorted(found.values(), key=attrgetter("step"))}
