"""`Stream`: all that is added to the residual stream, and what becomes of it at its ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.errors import Unsupported
from interpose.models.discovery.anatomy import Block, Tower
from interpose.models.discovery.inputs import probe_inputs
from interpose.models.knowledge import known
from interpose.models.reach.lenses import Times
from interpose.models.running.trial import first_tensor, trial
from interpose.models.stream.branch import Branch, branches_of
from interpose.models.stream.formula import Formula, formula_at
from interpose.models.weights.weights import main_tower
from interpose.precision import wide

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""What configs call a soft cap: a large one hardly bends small logits, so that these alone may not show it."""
_ENDS = ("hook_embed", "hook_pos_embed", "blocks.0.hook_resid_pre", "ln_final.hook_normalized")
_NO_SUM = "it is not what its heads or neurons write and a bias, normed or times a number"


@dataclass(slots=True)
class Multipliers:
    """Numbers that a short run shows; None where no number explains what was seen."""

    branches: dict[str, float | str] = field(default_factory=dict)
    embeddings: float | None = None
    unembedded: float | None = None
    logits: float | None = None
    cap: float | None = None


class Stream:
    """The residual stream of a model: what is added to it, and what is done to it at its ends, as the model is now.

    Of a model with several towers it is the language model's, or the decoder's.

    ```python
    model.stream.branches            # what every attention, MLP and mixer adds, in order
    model.stream.embeddings          # sites that add up to what enters block 0, but for embedding_multiplier
    model.stream.end                 # from the last stream to what is unembedded: the final norm, a multiplier
    model.stream.logits(unembedded)  # and what is then done to logits: logit_multiplier, soft_cap
    ```
    """

    def __init__(self, model: TransformerModel) -> None:
        self._model = model

    def _found(self) -> Multipliers:
        return multipliers(self._model)

    @property
    def _tower(self) -> Tower:
        """The stack of blocks, as it was discovered."""
        found = main_tower(self._model.anatomy)
        if found is None:
            raise Unsupported(
                f"{self._model.tree.label} has no one stack of blocks whose stream could be taken apart."
            )
        return found

    def __len__(self) -> int:
        """How many blocks add to it."""
        return len(self._tower.blocks)

    @property
    def branches(self) -> list[Branch]:
        """What every block adds, in the order in which it is added."""
        tower, found = self._tower, self._found().branches
        each = (branches_of(self._model, tower.prefix, block, found) for block in tower.blocks)
        return [branch for some in each for branch in some.values()]

    def branch(self, layer: int, kind: str) -> Branch:
        """What one block adds: ``model.stream.branch(3, "mlp")``.

        Args:
            layer: of the block.
            kind: ``attn``, ``mlp``, ``mixer``, ``cross_attn``.
        """
        tower = self._tower
        block = next((block for block in tower.blocks if block.index == layer), None)
        if block is None:
            raise IndexError(f"there is no block {layer}: the model has {len(self)}.")
        found = branches_of(self._model, tower.prefix, block, self._found().branches)
        if kind not in found:
            said = ", ".join(map(repr, found)) or "nothing that is known"
            raise Unsupported(f"block {layer} adds no {kind!r} to the stream; it adds {said}.")
        return found[kind]

    def norm(self, path: str) -> Formula | None:
        """What the norm of a name such as ``blocks.3.ln1`` does; None if there is none."""
        return formula_at(self._model, path)

    @property
    def embeddings(self) -> list[str]:
        """The sites of token and position embeddings."""
        names = (f"{self._tower.prefix}{name}" for name in ("hook_embed", "hook_pos_embed"))
        return [name for name in names if name in self._model.tree.table.sites]

    @property
    def embedding_multiplier(self) -> float | None:
        """What the embeddings are multiplied with before block 0 (gemma, granite); None if more happens to them."""
        return self._found().embeddings

    @property
    def end_multiplier(self) -> float | None:
        """What the normed last stream is multiplied with before it is unembedded (minicpm); None if more is done."""
        return self._found().unembedded

    @property
    def end(self) -> Formula:
        """From the last block's output to what is unembedded: the final norm, and a number (minicpm)."""
        model, times = self._model, self._found().unembedded
        norm = formula_at(model, f"{self._tower.prefix}ln_final") or Formula()
        if times is None or (norm.scale_site and norm.scale_site not in model.tree.table.sites):
            raise Unsupported(
                f"what {model.tree.label} unembeds is not its last stream, or a norm of it with a scale that is known, "
                "times a number: it cannot be taken apart. What is not known of norms is in model.sites.absent."
            )
        return norm.times(times)

    @property
    def logit_multiplier(self) -> float | None:
        """What the unembedding's output is multiplied with (granite, cohere); None if more is done (a soft cap)."""
        return self._found().logits

    @property
    def soft_cap(self) -> float | None:
        """The size that a soft cap keeps logits under (gemma2): they are ``cap * tanh(unembedded / cap)``; or None."""
        return self._found().cap

    def logits(self, unembedded: Tensor) -> Tensor:
        """The model's logits from what its unembedding returns, of all tokens or of some."""
        found = self._found()
        if found.cap is not None:
            return found.cap * (unembedded / found.cap).tanh()
        if found.logits is None:
            raise Unsupported(
                "what this model does to its logits behind the unembedding is neither a multiplier nor a soft cap of "
                "its config, so it cannot be done to a few of them: compute all of them."
            )
        return unembedded if found.logits == 1 else unembedded * found.logits

    def must_add_up(self) -> None:
        """Refuse a model whose stream is not the sum of what is added to it."""
        label = self._model.tree.label
        for block in self._tower.blocks:
            if any(not whole.startswith("hook_") for _, _, whole in block.sums):
                raise Unsupported(
                    f"{label} norms the stream itself in every block, so that what was added before is no longer a "
                    "part of it. resid_pre and resid_post show the stream layer by layer."
                )
            if block.kept:
                number = next(iter(block.kept.values()))
                raise Unsupported(
                    f"{label} multiplies the stream itself in {block.path} (with {number:.4g}), so that what was added "
                    "before is a part of it no more as it was. resid_pre and resid_post show the stream layer by layer."
                )

    def __repr__(self) -> str:
        added = ", ".join(dict.fromkeys(branch.kind for branch in self.branches))
        return f"Stream({len(self)} blocks add {added})"


def multipliers(model: TransformerModel) -> Multipliers:
    """What a short run shows of the model as it is now."""
    return known(model, "multipliers", lambda: _look(model))


def _look(model: TransformerModel) -> Multipliers:
    main, found, table = main_tower(model.anatomy), Multipliers(), model.tree.table
    plain = [
        (branch, block)
        for tower in model.anatomy.towers
        for block in tower.blocks
        for branch in branches_of(model, tower.prefix, block, {}).values()
    ]
    wanted = {site for b, _ in plain for site in (b.site, *(() if b.why_not else b.sites))}
    at = "" if main is None else main.prefix
    last = f"blocks.{0 if main is None else len(main.blocks) - 1}.hook_resid_post"
    wanted |= {"unembed.hook_in", "unembed.hook_out", *(f"{at}{name}" for name in (*_ENDS, last))}
    names = [name for name in table.sites if name in wanted]
    given = probe_inputs(model.root) if model._probe_inputs is None else model._probe_inputs
    with trial(model):
        output, cache = model.run_with_cache(names_filter=names, **given)
        seen = {name: cache[name] for name in names if len(cache.calls(name)) == 1}
        for branch, block in plain:
            found.branches[branch.site] = _multiplier(branch, block, seen)
        own = {name.removeprefix(at): value for name, value in seen.items()}
        _at_the_ends(found, own, last)
        if "unembed.hook_out" in seen:
            _of_logits(model, found, seen["unembed.hook_out"], first_tensor(output))
    return found


def _multiplier(branch: Branch, block: Block, seen: Mapping[str, Tensor]) -> float | str:
    """The number that a branch is multiplied with before it is added; or why it cannot be taken apart."""
    lens = block.sites[name].lens if (name := f"{branch.kind}_out") in block.sites else None
    said = lens.factor if isinstance(lens, Times) else 1.0
    if branch.why_not or not {branch.site, *branch.sites} <= seen.keys():
        return said
    try:
        made = branch.whole(seen)
    except Unsupported as error:
        return str(error)
    added = seen[branch.site]
    times = ratio(added, made, said)
    return _NO_SUM if times is None else times


def _at_the_ends(found: Multipliers, seen: Mapping[str, Tensor], last: str) -> None:
    """The numbers for embeddings, and for what is unembedded."""
    first = seen.get("blocks.0.hook_resid_pre")
    embeds = [seen[name] for name in ("hook_embed", "hook_pos_embed") if name in seen]
    if embeds and first is not None and all(e.shape[-2:] == first.shape[-2:] for e in embeds):
        found.embeddings = ratio(first, sum(embeds, torch.zeros_like(first)))
    normed = seen.get("ln_final.hook_normalized", seen.get(last))
    if "unembed.hook_in" in seen and normed is not None:
        found.unembedded = ratio(seen["unembed.hook_in"], normed)


def _of_logits(model: TransformerModel, found: Multipliers, plain: Tensor, logits: Tensor) -> None:
    """What makes logits of what the unembedding returns."""
    room = 1e-5 if logits.dtype.itemsize >= 4 else 1e-2
    for cap in soft_caps(model):
        if ratio(logits, cap * (wide(plain) / cap).tanh(), room=room) == 1:
            found.cap = cap
            return
    found.logits = ratio(logits, plain, room=room)


def soft_caps(model: TransformerModel) -> list[float]:
    """The soft caps on logits that the config speaks of."""
    config: Any = getattr(model.root, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    caps = (float(getattr(config, name, None) or 0) for name in _CAPS)
    return [cap for cap in caps if cap > 0]


def ratio(
    whole: Tensor, part: Tensor, said: float = 1.0, room: float | None = None
) -> float | None:
    """The number that makes one value of another, up to rounding; None if no number does.

    Args:
        whole: a value, in the dtype in which the model computed it.
        part: of which.
        said: a number that is known from elsewhere: it is taken if it is about that.
        room: how far off a feature may be, relative to it and to the largest.
    """
    eps = torch.finfo(whole.dtype).eps
    whole, part = wide(whole), wide(part)
    if whole.shape != part.shape:
        return None
    size = float(part.square().sum())
    times = float((whole * part).sum()) / size if size else said
    times = said if abs(times - said) < max(1e-4, eps / 2) * abs(said) else times
    return times if _alike(part * times, whole, room or max(1e-3, 16 * eps)) else None


def _alike(made: Tensor, seen: Tensor, room: float) -> bool:
    return torch.allclose(made, seen, rtol=room, atol=room * float(seen.abs().max()))
