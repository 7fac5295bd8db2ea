"""Take off means that nothing reads: of what is written to the stream, and of the logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from interpose.errors import Unsupported
from interpose.models.discovery.anatomy import Block, Endpoint, Norm
from interpose.models.discovery.record import Value, in_and_out
from interpose.models.processing import observed
from interpose.models.processing.linear import bias, check_alone, matrix, put, wide
from interpose.models.stream.formula import formula_of
from interpose.models.stream.whole import soft_caps
from interpose.models.transformer import TransformerModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Writers:
    """What writes to the stream: tables of embeddings, and linear maps."""

    tables: list[Endpoint]
    maps: list[Endpoint]


def plan_writers(model: TransformerModel) -> Writers:
    """All that writes to the stream; an error if something reads the stream with its mean."""
    anatomy = model.anatomy
    if not anatomy.towers:
        raise Unsupported("no stack of blocks was found.")
    maps: dict[int, Endpoint] = {}
    for tower in anatomy.towers:
        for block in tower.blocks:
            _check_readers(block)
            for endpoint in writers_of(block).values():
                check_alone(model, endpoint)
                maps.setdefault(id(endpoint.module), endpoint)
        if tower.final_norm is None:
            raise Unsupported(f"no norm stands after {tower.path}, so the stream's mean is read.")
        _check_centred(tower.final_norm)
    width = matrix(next(iter(maps.values()))).shape[1]
    tables = [endpoint for endpoint in (anatomy.embed, anatomy.pos_embed) if endpoint is not None]
    for endpoint in tables:
        module = endpoint.module
        if not isinstance(module, nn.Embedding) or module.weight.shape[1] != width:
            raise Unsupported(
                f"{endpoint.path} ({type(module).__name__}) does not write to the stream."
            )
    return Writers(tables=tables, maps=list(maps.values()))


def _check_readers(block: Block) -> None:
    """Whether all that reads the stream takes off its mean first."""
    for norm in block.norms.values():
        if norm.reads_sum:
            raise Unsupported(
                f"{norm.endpoint.path} stands in the stream, or after a branch: what it writes has a "
                "mean that no weight before it can take off."
            )
        _check_centred(norm)
    bare = next((name for name in block.sites if name.endswith("_in")), None)
    if bare == "mixer_in":
        raise Unsupported(
            f"{block.path} has {block.mixer}, whose way back to the stream is unknown."
        )
    if bare is not None or not block.norms:
        raise Unsupported(f"{block.path} reads the stream without a norm that takes off its mean.")


def _check_centred(norm: Norm) -> None:
    if not formula_of(norm, norm.endpoint.shape[-1], torch.empty(0)).centred:
        raise Unsupported(
            f"{norm.endpoint.path} ({type(norm.endpoint.module).__name__}) does not take off the mean of "
            "the stream (an RMS norm), so the mean counts."
        )


def writers_of(block: Block) -> dict[str, Endpoint]:
    """The linear maps that write to the stream in one block, by the names of what they write: ``hook_mlp_out``.

    Args:
        block: as it was found.
    """
    found: dict[str, Endpoint | None] = {f"hook_{a.name}_out": a.out for a in block.attentions}
    if block.mlp is not None:
        if block.mlp.experts is not None or block.mlp.router is not None:
            raise Unsupported(f"{block.mlp.path} is a mixture of experts: many maps write there.")
        found["hook_mlp_out"] = block.mlp.down
    added = [name for _, names, _ in block.sums for name in names]
    endpoints = {name: found.get(name) for name in added}
    if not added or None in endpoints.values():
        raise Unsupported(f"it is not known which linear maps write to the stream in {block.path}.")
    return {name: endpoint for name, endpoint in endpoints.items() if endpoint is not None}


def centre_writers(writers: Writers) -> None:
    """Take the mean over the stream's features off whatever writes to it."""
    for endpoint in writers.tables:
        table = endpoint.module.get_parameter("weight")
        put(table, wide(table) - wide(table).mean(-1, keepdim=True))
    for endpoint in writers.maps:
        weight, summand = matrix(endpoint), bias(endpoint)
        put(weight, wide(weight) - wide(weight).mean(-1, keepdim=True))
        if summand is not None:
            put(summand, wide(summand) - wide(summand).mean())


def check_nothing_added(model: TransformerModel) -> None:
    """Prove that no block adds anything to the stream's mean any more."""
    blocks = {id(b.module): b for tower in model.anatomy.towers for b in tower.blocks}
    for event in observed.record(model).events:
        pair = in_and_out(event) if id(event.module) in blocks else None
        if pair is None:
            continue
        for before, after in ((pair[0].row, pair[1].row), (pair[0].last, pair[1].last)):
            added = abs(float(after.mean() - before.mean()))
            if not added <= observed.tolerance(model) * float(np.abs(after).max()):
                raise Unsupported(
                    f"{event.path} still adds {added:.2g} to the mean of the stream: something "
                    "stands between its last linear maps and the stream."
                )


# The unembedding.


def plan_unembed(model: TransformerModel) -> Endpoint:
    """The unembedding; an error if a number added to all its outputs is not one added to all logits."""
    endpoint = model.anatomy.unembed
    if endpoint is None:
        raise Unsupported("the model has no unembedding.")
    matrix(endpoint)
    check_alone(model, endpoint)
    events = observed.record(model).events
    made = next(event.made[0] for event in events if event.module is endpoint.module)
    logits = [v for v in events[0].made if v.is_float and v.numel == made.numel]
    if not logits:
        raise Unsupported(f"what {endpoint.path} makes is not what the model returns.")
    close = 1e-5 if observed.tolerance(model) <= 1e-4 else 2e-3
    if soft_caps(model) or not any(_follows(logit, made, close) for logit in logits):
        raise Unsupported(
            f"the logits are no multiple of what {endpoint.path} makes (a softcap?), so that a number "
            "added to all of them does not cancel in the softmax."
        )
    return endpoint


def _follows(logit: Value, made: Value, close: float) -> bool:
    """Whether logits are a multiple of what the unembedding makes."""
    factor = float(logit.sketch @ made.sketch / (made.sketch @ made.sketch))
    far = np.abs(logit.sketch - factor * made.sketch).max()
    return bool(far <= close * np.abs(logit.sketch).max())


def centre_unembed(endpoint: Endpoint) -> None:
    """Take the mean over the vocabulary off the unembedding, for each feature of the stream."""
    weight, summand = matrix(endpoint), bias(endpoint)
    put(weight, wide(weight) - wide(weight).mean(-1, keepdim=True))
    if summand is not None:
        put(summand, wide(summand) - wide(summand).mean())
