"""Padding that changes nothing: what a padded text needs so that the model computes the same as for the text alone.

Models differ in whether they take positions, from where they count them and what they do with a mask. So it is
tried on the model itself, once for each side: a short text alone and the same text padded.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from interpose.engine.model import Model
from interpose.errors import Unsupported
from interpose.models.discovery.inputs import probe_inputs
from interpose.models.knowledge import known
from interpose.models.running.trial import first_tensor, trial

_SHORT = 7  # of 11 positions: longer than the windows of tiny models


def positions(mask: Tensor) -> Tensor:
    """Positions [batch, pos] that count from each text's first token; holes inside the text count too."""
    begun = (mask != 0).cumsum(-1) > 0
    return (begun.cumsum(-1) - 1).clamp(min=0)


def accepts(model: Model, name: str, *, outright: bool = True) -> bool:
    """Whether the module's forward takes an argument (by name, or with everything else)."""
    root: Any = model.root
    inner = root.get_base_model() if hasattr(root, "get_base_model") else root  # of an adapter
    parameters = inspect.signature(inner.forward).parameters
    rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return name in parameters or (rest and not outright)


def arguments(model: Model, mask: Tensor, filler: int) -> dict[str, Tensor]:
    """What to give the module for a batch of which some is padding.

    Args:
        model: the model.
        mask: [batch, pos], 0 where there is padding.
        filler: the token that stands there.
    """
    padded = [
        side for side, edge in (("left", 0), ("right", -1)) if bool((mask[:, edge] == 0).any())
    ]
    if not padded:
        return {"attention_mask": mask}  # holes inside are no padding, but somebody's wish
    needed = frozenset[str]().union(*(_needed(model, side, filler) for side in padded))
    made = {"attention_mask": mask, "position_ids": positions(mask)}
    return {name: made[name] for name in made if name in needed}


def _needed(model: Model, side: str, filler: int) -> frozenset[str]:
    """Which arguments make padding on one side harmless; proven once for a model as it is built."""
    return known(model, ("padding", side, filler), lambda: _prove(model, side, filler), tried=False)


def _prove(model: Model, side: str, filler: int) -> frozenset[str]:
    tried = [{"attention_mask"}] if accepts(model, "attention_mask", outright=False) else [set()]
    if side == "left" and accepts(model, "position_ids"):
        tried.insert(0, tried[0] | {"position_ids"})
    with trial(model):
        inputs = probe_inputs(model.root)
        if "input_ids" not in inputs:
            return frozenset(tried[0])
        try:
            errors = {
                frozenset(names): _error(model, inputs, side, filler, names) for names in tried
            }
        except Exception as raised:
            raised.add_note(f"raised by a trial of padding on the {side}; give one text at a time.")
            raise
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    for names, error in errors.items():
        if error < max(1e-4, 4 * torch.finfo(dtype).eps):
            return names
    other = "right" if side == "left" else "left"
    raise Unsupported(
        f"{type(model.root).__name__} computes something else for a text that is padded on the {side} "
        f"({min(errors.values()):.1%} off in a trial), also with a mask"
        f"{' and positions' if len(tried) > 1 else ''}.\n  Run texts of one length together, or try "
        f"padding_side={other!r}."
    )


def _error(
    model: Model, inputs: Mapping[str, Any], side: str, filler: int, names: set[str]
) -> float:
    """How far off a padded text is, relative to the size of what the model gives."""
    tokens = inputs["input_ids"].clone()
    short = min(_SHORT, tokens.shape[1] - 1)
    alone = first_tensor(
        model.module(**{**inputs, "input_ids": tokens[:1, :short]} | _row(inputs, 1))
    )
    text = slice(tokens.shape[1] - short, None) if side == "left" else slice(short)
    mask = torch.ones_like(tokens)
    mask[0] = 0
    mask[0, text] = 1
    tokens[0, text] = inputs["input_ids"][0, :short]
    tokens[0][mask[0] == 0] = filler
    made = {"attention_mask": mask, "position_ids": positions(mask)}
    given = {**inputs, "input_ids": tokens} | {name: made[name] for name in names}
    padded = first_tensor(model.module(**given))[:1]
    if padded.ndim > 1 and padded.shape[1] == tokens.shape[1] and alone.shape[1] == short:
        padded = padded[:, text]
    difference = (padded.float() - alone.float()).abs().mean()
    return float(difference / alone.float().abs().mean().clamp_min(1e-12))


def _row(inputs: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The other inputs of the first texts."""
    return {
        name: value[:count]
        for name, value in inputs.items()
        if isinstance(value, Tensor) and name != "input_ids"
    }
