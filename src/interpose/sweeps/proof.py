"""Whether a model's rows may run together, proven on a short text, and again when the model has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.edits.basic import add, clamp, fill, scale, zero
from interpose.edits.subspace import project_cap, project_out
from interpose.models.discovery.anatomy import Tower
from interpose.models.discovery.inputs import probe_inputs
from interpose.models.knowledge import foreign_hooks, home_of, known
from interpose.models.running.trial import first_tensor, trial
from interpose.models.weights.weights import main_tower
from interpose.sweeps.answers import Kept, can_be_picked, only, others_look
from interpose.sweeps.cells import Cell, Row, patch
from interpose.sweeps.reference import refer
from interpose.sweeps.wavefront import run_rows
from interpose.taps import context

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Why rows cannot run in one way or another; nothing where they can."""

    batches: str = ""
    wavefront: str = ""
    prefix: str = ""
    answers: str = ""
    """Why logits cannot be computed for some tokens and positions alone."""
    finer: str = ""
    """Why, if they can, not in float32 beside the model's own in 16 bits."""


def prove(model: TransformerModel) -> Proof:
    """Find out how the rows of a sweep may run on a model as it is now."""

    def find_out() -> Proof:
        with trial(model):
            return _try(model)

    return known(model, "sweeps", find_out)


def others_listen(model: TransformerModel) -> bool:
    """Whether hooks of somebody else are on the model: they may count on its batch and positions."""
    return bool(model.list_hooks() or context.current().scopes)


def strangers(model: TransformerModel) -> bool:
    """Whether somebody's hooks of torch are on the model: a proof on a short text may not show what they do."""
    return any(home_of(hook) not in _MACHINERY for hook in foreign_hooks(model.root))


_MACHINERY = ("torch", "transformers", "accelerate")
"""Packages whose hooks move weights and note outputs, and leave values as they are."""


def tower_of(model: TransformerModel) -> Tower | None:
    """The blocks whose rows can join one after another."""
    tower = main_tower(model.anatomy)
    shapes = [block.shape for block in tower.blocks] if tower is not None else []
    plain_stream = bool(shapes) and all(len(shape) == 3 for shape in shapes)
    stream = model.tree.table.sites.get("blocks.0.hook_resid_pre")
    plain_stream &= stream is not None and stream.lens is None and stream.axes[1:2] == ("pos",)
    return tower if plain_stream and tower is not None and tower.prefix == "" else None


_PLACELESS = (zero, fill, add, scale, clamp, project_out, project_cap)
"""Edits that make the same of a value whatever stands before it."""
_NUMBERS = ("value", "by", "min", "max", "low", "high")
_OVER_KEYS = ("attn_scores", "pattern")


def may_begin_late(
    model: TransformerModel,
    cells: Sequence[Cell],
    edit: Callable[[Cell], Any] | None,
    *,
    grows: bool,
) -> bool:
    """Whether a cell's position is the first that it changes, and values at later ones can be told by their places.

    Args:
        model: whose sites cells are of.
        cells: all of them.
        edit: what makes the edit of a cell; None to patch.
        grows: whether the KV cache of a part is a part of the KV cache.
    """
    kinds = {model.tree.site(cell.site).kind for cell in cells}
    if kinds & set(_OVER_KEYS) and not grows:
        return False  # a sliding window shows other keys
    if edit is None:
        return True
    if "rot_k" in kinds:
        return False  # keys of all positions come there
    return all(_is_placeless(edit(cell), cell) for cell in cells)


def _is_placeless(edit: Any, cell: Cell) -> bool:
    """Whether an edit is at its cell's position alone, and tells nothing by the places of others."""
    if type(edit) not in _PLACELESS or not isinstance(edit.pos, int) or edit.pos != cell.pos:
        return False
    given = [getattr(edit, name, None) for name in _NUMBERS]
    # A tensor of several axes may have one of positions, of which fewer come.
    return not any(isinstance(one, Mapping) or getattr(one, "ndim", 0) > 1 for one in given)


def _try(model: TransformerModel) -> Proof:
    tower = tower_of(model)
    inputs = {k: v for k, v in probe_inputs(model.root).items() if isinstance(v, Tensor)}
    if tower is None or set(inputs) != {"input_ids"}:
        why = "the model has no one stack of blocks that reads tokens"
        return Proof(batches=why, wavefront=why, prefix=why)
    tokens = inputs["input_ids"]
    length, count = tokens.shape[1], len(tower.blocks)
    if length < 4:
        why = f"the model has {length} positions, too few for a proof"
        return Proof(wavefront=why, prefix=why, answers=why, finer=why)
    layers = sorted({0, count // 2, count - 1})
    places = [length // 2, length - 1]
    cells = [
        Cell(site=f"blocks.{layer}.hook_resid_pre", layer=layer, pos=pos)
        for layer in layers
        for pos in places
    ]
    rows = [Row(number, example) for number in range(len(cells)) for example in range(2)]
    sites = [cell.site for cell in cells]
    other = {"input_ids": tokens.flip(1)}
    base = refer(model, tower, inputs, None, other=other, sites=sites)
    change = patch(cells, base.source.__getitem__)

    def ran(some: list[Row], start: int | None) -> Tensor:
        return run_rows(model, tower, base, cells, some, change, None, start=start).logits

    single = torch.cat([ran([row], None) for row in rows])
    allowed = _allowed(single, base.logits[[row.example for row in rows]])

    def problem(what: str, run: Any, start: int = 0) -> str:
        try:
            found = run()
        except Exception as error:  # whatever the model's own code raises
            return f"{what} raises {type(error).__name__}: {error}"
        off = float((found - single[:, start:]).abs().max())
        return "" if off <= allowed else f"{what} moves logits by {off:.1e} on a short text"

    together = problem("running rows together", lambda: ran(rows, None))
    causal = _causal(model, tokens)
    answers = _answers(model, tokens, base.logits)
    finer = answers or _finer(model, tokens)
    if together or causal:
        why = together or causal
        return Proof(batches=together, wavefront=why, prefix=why, answers=answers, finer=finer)

    def from_position(start: int) -> Tensor:
        """All rows, first those that begin in the first layer: the others pass by it."""
        split = next((n for n, row in enumerate(rows) if cells[row.cell].layer), len(rows))
        parts = [part for part in (rows[:split], rows[split:]) if part]
        return torch.cat([ran(part, start) for part in parts])

    start = length // 2
    joined = problem("letting rows join at their layers", lambda: from_position(0))
    cache = "reading earlier positions from a KV cache"

    def from_cache() -> Tensor:
        base.cache = refer(model, tower, inputs, None, cached=True).cache
        return from_position(start)

    prefix = joined or problem(cache, from_cache, start)
    return Proof(wavefront=joined, prefix=prefix, answers=answers, finer=finer)


def _allowed(single: Tensor, base: Tensor) -> float:
    """How far apart rounding may set logits: little of the effect in float32, more where floats are short."""
    effect = float((single - base).abs().max())
    rounding = 64 * torch.finfo(single.dtype).eps * float(single.abs().max())
    return max(1e-5 * effect, rounding)


def _answers(model: TransformerModel, tokens: Tensor, logits: Tensor) -> str:
    """Whether logits of some tokens and positions are those of the unembedding's columns, whatever comes after it."""
    if not can_be_picked(model) or others_look(model):
        return "the unembedding is not a plain linear map, or hooks of torch are on it"
    some, kept = torch.tensor([2, 5], device=tokens.device), Kept((-3, -1), picked=True)
    try:
        with only(model, some, kept=kept):
            found = first_tensor(model.module(input_ids=tokens))
    except (
        Exception
    ) as error:  # whatever the model's own code raises, or somebody's hook on its unembedding
        return f"an unembedding of some tokens raises {type(error).__name__}: {error}"
    small = 64 * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    wanted = kept.of(logits)[..., some]
    same = found.shape == wanted.shape and float((found - wanted).abs().max()) <= small
    return "" if same else "logits are more than the unembedding's columns"


def _finer(model: TransformerModel, tokens: Tensor) -> str:
    """Whether the unembedding gives the logits themselves, which nothing caps or scales: then float32 needs no more."""
    try:
        with only(model, torch.tensor([2, 5], device=tokens.device), finer=True) as columns:
            found = first_tensor(model.module(input_ids=tokens))
    except Exception as error:  # whatever the model's own code raises
        return f"an unembedding in float32 raises {type(error).__name__}: {error}"
    given = None if columns is None else columns.last
    same = given is not None and found.dtype == given.dtype and torch.equal(found, given)
    return "" if same else "logits are more than the unembedding gives"


def _causal(model: TransformerModel, tokens: Tensor) -> str:
    """Whether a token moves what comes before it."""
    other = tokens.clone()
    other[:, -1] = tokens[:, 0]
    first, second = (first_tensor(model.module(input_ids=each))[:, :-1] for each in (tokens, other))
    moved = float((first - second).abs().max())
    small = 64 * torch.finfo(first.dtype).eps * float(first.abs().max())
    return "" if moved <= small else "later tokens move what comes before them (not causal)"
