"""From what a head or a neuron writes to what of it reaches the residual stream.

Most blocks add the output projection as it is. Some norm it first (gemma2, olmo2), some multiply it by a number
(granite). Given the norm's scale in a run, both are linear, so that parts of the output can be followed through them
one by one, and add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interpose.errors import Unsupported
from interpose.models.knowledge import known
from interpose.models.running.trial import trial
from interpose.models.weights.norms import affine, norm_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interpose.models.transformer import TransformerModel


_NORMED = "ln_final.hook_normalized"
_NEEDED = (
    _NORMED,
    "hook_attn_out",
    "attn.hook_z",
    "hook_mlp_out",
    "mlp.hook_post",
    "hook_resid_pre",
    "hook_embed",
    "hook_pos_embed",
    "_post.hook_scale",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """How the output of a block's attention or MLP becomes what is added to the stream.

    Attributes:
        norm: The name of a norm it goes through, such as ``blocks.3.ln1_post``, or None.
        centred: Whether that norm takes off the mean.
        factor: What it is multiplied with, feature by feature or as one number.
    """

    norm: str | None
    centred: bool
    factor: Tensor

    def through(self, part: Tensor, scale: Tensor | None) -> Tensor:
        """What a part of the output adds to the stream, in its own dtype, summands of the norm left out.

        Args:
            part: [..., d_model].
            scale: the norm's in this run, [..., 1], if there is a norm.
        """
        made = part - part.mean(-1, keepdim=True) if self.centred else part
        if scale is not None:
            made = made / scale
        return (made * self.factor.to(part.device)).to(part.dtype)


@dataclass(slots=True)
class Branches:
    """The branches of a model, and whether its embeddings are all that the first block gets. One short run tells."""

    model: TransformerModel
    _times: dict[tuple[int, str], float] = field(default_factory=dict)
    _embeds: bool | None = None
    _logit_times: float = 1.0

    @staticmethod
    def of_model(model: TransformerModel) -> Branches:
        """The branches of a model as it is now."""
        return known(model, "branches", lambda: Branches(model))

    def of(self, layer: int, kind: str) -> Branch:
        """The branch of a block: ``attn`` or ``mlp``. The norm's weight is the one it has now."""
        if (layer, kind) not in self._times:
            self._look()
        branch, _ = self._normed(layer, kind)
        return replace(branch, factor=branch.factor * self._times[layer, kind])

    @property
    def embeds_are_all(self) -> bool:
        """Whether token and position embeddings add up to what enters the first block."""
        if self._embeds is None:
            self._look()
        return bool(self._embeds)

    @property
    def logit_multiplier(self) -> float:
        """What the unembedding's output is multiplied with (granite, cohere); 1 where there is a softcap."""
        if self._embeds is None:
            self._look()
        return self._logit_times

    def must_add_up(self) -> None:
        """Refuse a model whose stream is not a sum."""
        if not self.model.tree.blocks():
            raise Unsupported(
                f"{self.model.tree.label} has no one stack of blocks whose stream could be taken apart."
            )
        tower = next(tower for tower in self.model.anatomy.towers if tower.prefix == "")
        for block in tower.blocks:
            if any(not whole.startswith("hook_") for _, _, whole in block.sums):
                raise Unsupported(
                    f"{self.model.tree.label} norms the stream itself in every block, so that what was added before "
                    "is no longer a part of it. accumulated_resid shows the stream layer by layer."
                )

    def _look(self) -> None:
        self.must_add_up()
        model = self.model
        sites = model.tree.table.sites
        wanted = [name for name in sites if name.endswith(_NEEDED)]
        length = min(8, getattr(model.root.config, "max_position_embeddings", None) or 8)
        tokens = torch.arange(1, length + 1, device=model.device)[None] % int(model.W_E.shape[0])
        with trial(model):
            logits, seen = model.run_with_cache(tokens, names_filter=wanted, prepend_bos=False)
            unembedded = (
                model.unembed(seen["ln_final.hook_normalized"]) if _NORMED in seen else None
            )
            embeds = [seen[name] for name in ("hook_embed", "hook_pos_embed") if name in seen]
            first = seen["blocks.0.hook_resid_pre"]
            self._embeds = bool(embeds) and _alike(sum(embeds, 0 * first), first)
            if unembedded is not None:
                times = _ratio(logits, unembedded)
                self._logit_times = times if _alike(unembedded * times, logits) else 1.0
            for layer in range(model.tree.blocks()):
                for kind in ("attn", "mlp"):
                    self._times[layer, kind] = self._multiplier(layer, kind, seen)

    def _normed(self, layer: int, kind: str) -> tuple[Branch, Tensor]:
        """A branch as its norm alone makes it, and what that norm adds."""
        path = f"blocks.{layer}.{'ln1_post' if kind == 'attn' else 'ln2_post'}"
        norm = norm_at(self.model, path)
        one, nothing = (
            torch.ones((), device=self.model.device),
            torch.zeros((), device=self.model.device),
        )
        if norm is None:
            return Branch(norm=None, centred=False, factor=one), nothing
        factor, summand = affine(norm, int(self.model.W_E.shape[1]))
        return Branch(norm=path, centred=norm.centred, factor=factor), summand

    def _multiplier(self, layer: int, kind: str, seen: Mapping[str, Tensor]) -> float:
        """The number that a branch is multiplied with before it is added; mostly 1."""
        block, at = self.model.blocks[layer], f"blocks.{layer}"
        added = f"{at}.hook_{kind}_out"
        inside = f"{at}.attn.hook_z" if kind == "attn" else f"{at}.mlp.hook_post"
        if added not in seen or inside not in seen:
            return 1.0
        values = seen[inside].float()
        if kind == "attn":
            made = torch.einsum("bphd,hdm->bpm", values, block.attn.W_O.float()) + block.attn.b_O
        else:
            made = values @ block.mlp.W_out.float() + block.mlp.b_out
        branch, summand = self._normed(layer, kind)
        made = (
            branch.through(made, seen[f"{branch.norm}.hook_scale"] if branch.norm else None)
            + summand
        )
        times = _ratio(seen[added], made)
        if not _alike(made * times, seen[added]):
            raise Unsupported(
                f"{added!r} of {self.model.tree.label} is not its output projection, normed or multiplied by a "
                "number: what single heads or neurons add to the stream cannot be told."
            )
        return times


def _ratio(whole: Tensor, part: Tensor) -> float:
    """The number that makes one value of another, exactly 1 if it is about that."""
    whole, part = whole.float(), part.float()
    size = float(part.square().sum())
    found = float((whole * part).sum()) / size if size else 1.0
    return 1.0 if abs(found - 1) < 5e-3 else found


def _alike(made: Tensor, seen: Tensor) -> bool:
    """Whether two values are the same up to the rounding of the second's dtype."""
    room = max(1e-3, 16 * torch.finfo(seen.dtype).eps)
    size = float(seen.float().abs().max())
    return torch.allclose(made.float(), seen.float(), rtol=room, atol=room * size)
