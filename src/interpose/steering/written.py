"""`written`: edits of what is written to the stream as weights of a copy that computes the same without hooks.

A linear map y = x W + b that writes to the stream takes up three kinds of edits of y: project_out(d) is W (1 - u u')
and b (1 - u u'), scale(c) is c W and c b, add(v) is b + v. So does a table of embeddings, row by row. What the stream
is after a block grows by what its MLP writes, so that add() at ``resid_post`` is one at ``mlp_out``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interpose.edits.basic import add, scale
from interpose.edits.edit import Edit
from interpose.edits.sources import looked_up
from interpose.edits.subspace import orthonormal, project_out
from interpose.errors import Unsupported
from interpose.models.discovery.anatomy import Endpoint
from interpose.models.discovery.inputs import probe_inputs
from interpose.models.processing import copies, observed
from interpose.models.processing.centre import writers_of
from interpose.models.processing.linear import add_to_bias, bias, check_alone, matrix, put, wide
from interpose.models.running.trial import first_tensor, trial
from interpose.models.transformer import TransformerModel
from interpose.sites.tree import Site

_KINDS = (add, scale, project_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """What writes a site's value: a linear map, or a table of embeddings."""

    endpoint: Endpoint
    table: bool


def written(model: TransformerModel, edits: Edit | Sequence[Edit]) -> TransformerModel:
    """A copy of a model whose weights do what edits do, to be run, saved and shared without them.

    ```python
    never = ip.written(model, vector.remove_from(model, layer=4))    # no part can write that direction
    always = ip.written(model, vector.add(2.0, layer=4))             # as a bias
    never.module.save_pretrained("folder")
    ```

    Taken are `ip.add`, `ip.scale` and `ip.project_out` of what is written to the stream, whole: at ``embed``,
    ``pos_embed``, ``attn_out`` and ``mlp_out``; and `ip.add` at ``resid_mid`` and ``resid_post``. What weights cannot
    do (only some positions or rows, conditions) and what would not be exact (a norm behind the map, a mixture of
    experts) is refused. The copy is compared with the edited run on a probe before it is returned.

    Args:
        model: whose weights; not changed.
        edits: in the order in which they are done.
    """
    several = [edits] if isinstance(edits, Edit) else list(edits)
    if not several:
        raise ValueError("give one edit or more: without any the copy would be the model itself.")
    for edit in several:
        _check_whole(edit)
    made = copies.rewrapped(model, copies.copied(model.module))
    names = set(made.module.state_dict())
    tables = False
    for edit in several:
        for site, _ in made.select(edit.site):
            writer = _writer_of(made, site, edit)
            if writer.table and not tables:
                copies.untie(made)
                tables = True
            _write(made, writer, site, edit)
    _prove(model, made, several)
    if tables:
        copies.settle_ties(made.module)
    copies.refuse_saving(
        made.module, [name for name in made.module.state_dict() if name not in names]
    )
    return made


def _check_whole(edit: Edit) -> None:
    """Refuse what no weight can do."""
    if type(edit) not in _KINDS:
        raise Unsupported(
            f"{edit!r} is not linear in what a map writes: weights take ip.add, ip.scale and ip.project_out."
        )
    if edit.where.narrows or edit.when is not None:
        raise Unsupported(
            f"{edit!r} is of some positions, rows, heads or units, or has a condition: weights are the same everywhere."
        )
    if isinstance(edit.strength, Tensor) and edit.strength.ndim:
        raise Unsupported(f"{edit!r} has a strength for each row: weights are the same for all.")
    if isinstance(edit, project_out) and edit.mean is not None:
        raise Unsupported(f"{edit!r} counts from a mean: add it back with ip.add.")


def _writer_of(model: TransformerModel, site: Site, edit: Edit) -> Writer:
    """The map or the table that writes a site's value."""
    anatomy, kind = model.anatomy, site.kind
    if kind in ("embed", "pos_embed"):
        endpoint = anatomy.embed if kind == "embed" else anatomy.pos_embed
        if endpoint is None or not isinstance(endpoint.module, torch.nn.Embedding):
            raise Unsupported(
                f"{edit!r}: {site.canonical!r} is not the row of a table of embeddings."
            )
        return Writer(endpoint=endpoint, table=True)
    wanted = f"hook_{kind}" if kind in ("attn_out", "mlp_out") else None
    if isinstance(edit, add) and kind in ("resid_mid", "resid_post"):
        wanted = "hook_attn_out" if kind == "resid_mid" else "hook_mlp_out"
    if wanted is None or site.layer is None:
        raise Unsupported(
            f"{edit!r}: {site.canonical!r} is not what one map writes. Edit what is written to the stream: embed, "
            "pos_embed, attn_out, mlp_out; vector.remove_from(model, layer=5) takes a direction out of all of it."
        )
    blocks = anatomy.towers[0].blocks
    block = blocks[site.layer]
    if any(norm.reads_sum for norm in block.norms.values()):
        raise Unsupported(
            f"{edit!r}: a norm stands between the maps of {block.path} and the stream, so that weights before it "
            "cannot say what is added."
        )
    found = writers_of(block)
    if wanted not in found:
        raise Unsupported(
            f"{edit!r}: {block.path} has no map of its own that writes there: {list(found)}."
        )
    check_alone(model, found[wanted])
    return Writer(endpoint=found[wanted], table=False)


def _write(model: TransformerModel, writer: Writer, site: Site, edit: Edit) -> None:
    """Let a map do what an edit does."""
    endpoint = writer.endpoint
    rows = endpoint.module.get_parameter("weight").detach() if writer.table else matrix(endpoint)
    if rows.is_meta or rows.itemsize == 1 or not rows.is_floating_point():
        raise Unsupported(f"the weight of {endpoint.path} is quantised, or not here.")
    strength = 1.0 if edit.strength is None else float(edit.strength)
    if isinstance(edit, add):
        summand = strength * _of(edit.value, model, site, edit, rows)
        if writer.table:
            put(rows, wide(rows) + summand)
        else:
            add_to_bias(endpoint, summand)
        return
    summand_there = None if writer.table else bias(endpoint)
    for weight in (rows,) if summand_there is None else (rows, summand_there):
        now = wide(weight)
        put(weight, now + strength * (_changed(now, model, site, edit) - now))


def _changed(weight: Tensor, model: TransformerModel, site: Site, edit: Edit) -> Tensor:
    if isinstance(edit, scale):
        return weight * _of(edit.by, model, site, edit, weight)
    assert isinstance(edit, project_out)
    found = _of(edit.direction, model, site, edit, weight, rows=True)
    unit = orthonormal(found, edit).to(weight)
    return weight - (weight @ unit.mT) @ unit


def _of(
    given: Any, model: TransformerModel, site: Site, edit: Edit, like: Tensor, *, rows: bool = False
) -> Tensor:
    """A number or a vector of an edit at a site, wide."""
    if isinstance(given, (int, float)):
        return torch.tensor(float(given), dtype=torch.float64)
    point = model.hook_dict[site.name]
    found = wide(given if isinstance(given, Tensor) else looked_up(given, point, edit)).to(
        like.device
    )
    found = found.squeeze() if not rows and found.ndim > 1 else found
    found = found[None] if rows and found.ndim == 1 else found
    if found.ndim > 1 + rows or (found.ndim and found.shape[-1] != like.shape[-1]):
        raise Unsupported(
            f"{edit!r} has a value of shape {tuple(found.shape)}; {site.canonical!r} is written {like.shape[-1]} wide."
        )
    return found.to(torch.float64 if like.device.type != "mps" else torch.float32)


@torch.no_grad()
def _prove(model: TransformerModel, made: TransformerModel, edits: Sequence[Edit]) -> None:
    """Refuse a copy that does not compute what the edited model does."""
    with trial(model):
        made_here: Any = model.run_with_hooks(hooks=list(edits), **probe_inputs(model.module))
    edited = made_here if isinstance(made_here, Tensor) else first_tensor(made_here)
    weights, plain = observed.output(made), observed.output(model)
    size = float(edited.double().abs().max().clamp_min(1e-30))
    far = float((edited.double() - weights.double()).abs().max()) / size
    allowed = observed.tolerance(model)
    if not far <= allowed:
        moved = float((edited.double() - plain.double()).abs().max()) / size
        raise Unsupported(
            f"written into the weights of {model.tree.label}, {', '.join(map(repr, edits))} would not be the same: on "
            f"a probe the outputs differ by {far:.2g} of their size, of {moved:.2g} that the edits change. Something "
            "stands between the maps and the stream."
        )
