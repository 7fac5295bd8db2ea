"""Activation patching: put values of a clean run into a corrupted one, cell by cell, and measure what comes back.

```python
from interpose.dialects.transformer_lens import patching

_, clean_cache = model.run_with_cache(clean_tokens)
patching.get_act_patch_resid_pre(model, corrupted_tokens, clean_cache, metric)   # [layer, pos]
```
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from interpose.dialects.transformer_lens.patching.patching_result import (
    Cell,
    Hook,
    MetricFn,
    Metrics,
    PatchingResult,
    kept,
    must_fit,
    pandas,
    require_eval,
    run_cells,
)
from interpose.dialects.transformer_lens.patching.path_patching import (
    get_act_patch_direct_path,
    get_act_patch_direct_path_all_sources,
)
from interpose.errors import EditShapeError
from interpose.names import of_kind

__all__ = [
    "AxisNames",
    "MetricFn",
    "PatchingResult",
    "generic_activation_patch",
    "get_act_patch_attn_head_all_pos_every",
    "get_act_patch_attn_head_by_pos_every",
    "get_act_patch_attn_head_k_all_pos",
    "get_act_patch_attn_head_k_by_pos",
    "get_act_patch_attn_head_out_all_pos",
    "get_act_patch_attn_head_out_by_pos",
    "get_act_patch_attn_head_pattern_all_pos",
    "get_act_patch_attn_head_pattern_by_pos",
    "get_act_patch_attn_head_pattern_dest_src_pos",
    "get_act_patch_attn_head_q_all_pos",
    "get_act_patch_attn_head_q_by_pos",
    "get_act_patch_attn_head_v_all_pos",
    "get_act_patch_attn_head_v_by_pos",
    "get_act_patch_attn_out",
    "get_act_patch_block_every",
    "get_act_patch_direct_path",
    "get_act_patch_direct_path_all_sources",
    "get_act_patch_mlp_out",
    "get_act_patch_resid_mid",
    "get_act_patch_resid_pre",
    "layer_head_dest_src_pos_pattern_patch_setter",
    "layer_head_pattern_patch_setter",
    "layer_head_pos_pattern_patch_setter",
    "layer_head_vector_patch_setter",
    "layer_pos_head_vector_patch_setter",
    "layer_pos_patch_setter",
    "make_df_from_ranges",
]

AxisNames = Literal["layer", "pos", "head_index", "head", "src_pos", "dest_pos"]
PatchSetter = Callable[[Tensor, Sequence[int], Any], Tensor | None]
_ONE_PER_KEY = ("k", "v", "rot_k", "k_input", "v_input")  # as many heads as there are keys


def make_df_from_ranges(column_max_ranges: Sequence[int], column_names: Sequence[str]) -> Any:
    """A pandas data frame of all combinations of indices below some sizes, the last column fastest."""
    cells = itertools.product(*map(range, column_max_ranges))
    return pandas().DataFrame(list(cells), columns=list(column_names))


def generic_activation_patch(
    model: Any,
    corrupted_tokens: Tensor,
    clean_cache: Mapping[str, Tensor],
    patching_metric: MetricFn | Mapping[str, MetricFn],
    patch_setter: PatchSetter,
    activation_name: str,
    index_axis_names: Sequence[AxisNames] | None = None,
    index_df: Any = None,
    return_index_df: bool = False,
    *,
    reduce: Literal["scalar", "mean", "none"] = "scalar",
    baseline: bool = False,
) -> Any:
    """Patch a clean value into the corrupted run, one run for each cell, and measure every run.

    Returns a tensor with an axis for each of ``index_axis_names``, or a number for each row of ``index_df``;
    a `PatchingResult` if examples are kept apart, a baseline is wanted, or there are several metrics. The
    gradient mode is the caller's: under ``torch.no_grad()`` the runs cost less, and the numbers are the same.

    Args:
        model: the model, in eval mode.
        corrupted_tokens: tokens of the corrupted run, [batch, pos].
        clean_cache: values of the clean run, or a dict of them by full names.
        patching_metric: takes logits [batch, pos, d_vocab] and returns a number, or one for each example if
            ``reduce`` is not ``scalar``; or a mapping of names to such callables.
        patch_setter: called with the corrupted value, the cell and the clean value of that layer; writes into
            the corrupted value, or returns another one, or both.
        activation_name: what is patched, as in ``cache["z", layer]``.
        index_axis_names: the axes to go through, the layer first. Heads of keys and values are counted as the
            model has them: ``n_key_value_heads``, which is fewer than ``n_heads`` with grouped queries.
        index_df: a pandas data frame with a row for each cell, its first column the layer; instead of axes.
        return_index_df: also return the data frame of cells (needs pandas).
        reduce: ``scalar`` for a metric that returns one number; ``mean`` takes the mean of the examples;
            ``none`` keeps them.
        baseline: also measure the corrupted run without a patch.
    """
    require_eval(model)
    tokens = corrupted_tokens if corrupted_tokens.ndim > 1 else corrupted_tokens[None]
    metrics = Metrics.of(patching_metric, reduce=reduce, batch=len(tokens))
    as_result = reduce == "none" or baseline or metrics.several
    if return_index_df and as_result:
        raise ValueError("return_index_df goes with a plain tensor; a PatchingResult has index_df.")
    columns, sizes, cells = _cells(model, tokens, activation_name, index_axis_names, index_df)

    def hook_of(cell: Cell) -> tuple[str, Hook]:
        name = of_kind(activation_name, cell[0])
        clean = kept(clean_cache, name, which="clean_cache")

        def patch(value: Tensor, hook: Any) -> Any:  # noqa: ARG001
            must_fit(name, clean, value)
            return patch_setter(value, cell, clean)

        return name, patch

    unpatched = metrics(model(tokens, return_type="logits")) if baseline else None
    found = torch.stack(run_cells(model, tokens, cells, hook_of, metrics), 1)
    values = found.unflatten(1, sizes)
    if not metrics.several:
        values, unpatched = values[0], None if unpatched is None else unpatched[0]
    if as_result:
        return PatchingResult(
            values=values,
            axis_names=columns if index_df is None else [],
            cells=cells,
            columns=columns,
            metric_names=list(metrics.named),
            reduced=reduce != "none",
            baseline=unpatched,
            has_metric_axis=metrics.several,
        )
    return (values, pandas().DataFrame(cells, columns=columns)) if return_index_df else values


def _cells(
    model: Any, tokens: Tensor, activation_name: str, axes: Sequence[str] | None, table: Any
) -> tuple[list[str], list[int], list[Cell]]:
    """The names of a cell's numbers, the shape of the result, and the cells."""
    if (axes is None) == (table is None):
        raise ValueError("say which cells: index_axis_names or index_df, one of the two.")
    if axes is None:
        cells = [tuple(map(int, row)) for row in table.to_numpy().tolist()]
        if not cells:
            raise ValueError("index_df has no rows: there is nothing to patch.")
        return [str(name) for name in table.columns], [len(cells)], cells
    heads = model.cfg.n_heads
    if activation_name in _ONE_PER_KEY:
        heads = getattr(model.cfg, "n_key_value_heads", None) or heads
    length = tokens.shape[-1]
    known = {"layer": model.cfg.n_layers, "head": heads, "head_index": heads}
    known |= {"pos": length, "src_pos": length, "dest_pos": length}
    unknown = [name for name in axes if name not in known]
    if unknown or axes[0] != "layer":
        raise ValueError(
            f"axes begin with 'layer', and are among {', '.join(known)}; got {', '.join(axes)}. "
            "For others, give index_df."
        )
    sizes = [known[name] for name in axes]
    return list(axes), sizes, list(itertools.product(*map(range, sizes)))


def _write(corrupted: Tensor, clean: Tensor, at: tuple[Any, ...]) -> Tensor:
    if corrupted.ndim != clean.ndim:
        raise EditShapeError(
            f"the clean value has shape {tuple(clean.shape)}, the corrupted one "
            f"{tuple(corrupted.shape)}. Cache the clean run with its batch axis: without "
            "remove_batch_dim=True."
        )
    corrupted[at] = clean[at].to(corrupted)
    return corrupted


def layer_pos_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patch a position of [batch, pos, ...]; the cell is [layer, pos]."""
    _, pos = index
    return _write(corrupted_activation, clean_activation, (slice(None), pos))


def layer_pos_head_vector_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patch a head's vector at a position of [batch, pos, head, d_head]; the cell is [layer, pos, head]."""
    _, pos, head = index
    return _write(corrupted_activation, clean_activation, (slice(None), pos, head))


def layer_head_vector_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patch a head's vectors at all positions of [batch, pos, head, d_head]; the cell is [layer, head]."""
    _, head = index
    return _write(corrupted_activation, clean_activation, (slice(None), slice(None), head))


def layer_head_pattern_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patch a head's whole pattern of [batch, head, query, key]; the cell is [layer, head]."""
    _, head = index
    return _write(corrupted_activation, clean_activation, (slice(None), head))


def layer_head_pos_pattern_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patch one query's row of a head's pattern; the cell is [layer, head, query]."""
    _, head, query = index
    return _write(corrupted_activation, clean_activation, (slice(None), head, query))


def layer_head_dest_src_pos_pattern_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """Patch one number of a head's pattern; the cell is [layer, head, query, key]."""
    _, head, query, key = index
    return _write(corrupted_activation, clean_activation, (slice(None), head, query, key))


def _sweep(name: str, setter: PatchSetter, axes: str, what: str) -> partial[Any]:
    """`generic_activation_patch` of one kind of value, with the axes of its result in words."""
    names = tuple(axes.split())
    made = partial(
        generic_activation_patch,
        patch_setter=setter,
        activation_name=name,
        index_axis_names=names,  # type: ignore[arg-type]
    )
    heads = " Keys and values have n_key_value_heads heads." if name in ("k", "v") else ""
    made.__doc__ = (
        f"Patch {what}: [{', '.join(names)}], one run of (model, corrupted_tokens, clean_cache, "
        f"patching_metric) for each cell.{heads} See `generic_activation_patch` for what else it takes."
    )
    return made


_STREAM, _ROW = layer_pos_patch_setter, layer_head_pos_pattern_patch_setter
_VECTOR, _VECTORS = layer_pos_head_vector_patch_setter, layer_head_vector_patch_setter
_BY_POS, _ALL_POS = "layer pos head", "layer head"
get_act_patch_resid_pre = _sweep("resid_pre", _STREAM, "layer pos", "the stream before each block")
get_act_patch_resid_mid = _sweep(
    "resid_mid", _STREAM, "layer pos", "the stream between attention and MLP, the skip path too"
)
get_act_patch_attn_out = _sweep("attn_out", _STREAM, "layer pos", "what attention adds")
get_act_patch_mlp_out = _sweep("mlp_out", _STREAM, "layer pos", "what the MLP adds")
get_act_patch_attn_head_out_by_pos = _sweep("z", _VECTOR, _BY_POS, "a head's output")
get_act_patch_attn_head_q_by_pos = _sweep("q", _VECTOR, _BY_POS, "a head's query")
get_act_patch_attn_head_k_by_pos = _sweep("k", _VECTOR, _BY_POS, "a head's key")
get_act_patch_attn_head_v_by_pos = _sweep("v", _VECTOR, _BY_POS, "a head's value")
get_act_patch_attn_head_pattern_by_pos = _sweep(
    "pattern", _ROW, "layer head_index dest_pos", "where a head looks from one position"
)
get_act_patch_attn_head_pattern_dest_src_pos = _sweep(
    "pattern",
    layer_head_dest_src_pos_pattern_patch_setter,
    "layer head_index dest_pos src_pos",
    "how much a head looks from one position to another",
)
get_act_patch_attn_head_out_all_pos = _sweep("z", _VECTORS, _ALL_POS, "a head's outputs")
get_act_patch_attn_head_q_all_pos = _sweep("q", _VECTORS, _ALL_POS, "a head's queries")
get_act_patch_attn_head_k_all_pos = _sweep("k", _VECTORS, _ALL_POS, "a head's keys")
get_act_patch_attn_head_v_all_pos = _sweep("v", _VECTORS, _ALL_POS, "a head's values")
get_act_patch_attn_head_pattern_all_pos = _sweep(
    "pattern", layer_head_pattern_patch_setter, "layer head_index", "a head's whole pattern"
)


def get_act_patch_attn_head_all_pos_every(
    model: Any,
    corrupted_tokens: Tensor,
    clean_cache: Mapping[str, Tensor],
    metric: MetricFn | Mapping[str, MetricFn],
    *,
    reduce: Literal["scalar", "mean", "none"] = "scalar",
    baseline: bool = False,
) -> Any:
    """Patch outputs, queries, keys, values and patterns of each head, at all positions: [5, layer, head].

    With grouped queries there are fewer keys and values than heads; the cells of heads that do not exist are NaN.
    """
    sweeps = {
        "out": get_act_patch_attn_head_out_all_pos,
        "q": get_act_patch_attn_head_q_all_pos,
        "k": get_act_patch_attn_head_k_all_pos,
        "v": get_act_patch_attn_head_v_all_pos,
        "pattern": get_act_patch_attn_head_pattern_all_pos,
    }
    given = (model, corrupted_tokens, clean_cache, metric)
    return _every(sweeps, _ALL_POS.split(), given, reduce=reduce, baseline=baseline)


def get_act_patch_attn_head_by_pos_every(
    model: Any,
    corrupted_tokens: Tensor,
    clean_cache: Mapping[str, Tensor],
    metric: MetricFn | Mapping[str, MetricFn],
    *,
    reduce: Literal["scalar", "mean", "none"] = "scalar",
    baseline: bool = False,
) -> Any:
    """Patch outputs, queries, keys, values and patterns of each head at each position: [5, layer, pos, head].

    The position of a pattern is the one that looks. NaN as in `get_act_patch_attn_head_all_pos_every`.
    """
    sweeps = {
        "out": get_act_patch_attn_head_out_by_pos,
        "q": get_act_patch_attn_head_q_by_pos,
        "k": get_act_patch_attn_head_k_by_pos,
        "v": get_act_patch_attn_head_v_by_pos,
        "pattern": get_act_patch_attn_head_pattern_by_pos,
    }
    given = (model, corrupted_tokens, clean_cache, metric)
    return _every(sweeps, _BY_POS.split(), given, reduce=reduce, baseline=baseline)


def get_act_patch_block_every(
    model: Any,
    corrupted_tokens: Tensor,
    clean_cache: Mapping[str, Tensor],
    metric: MetricFn | Mapping[str, MetricFn],
    *,
    reduce: Literal["scalar", "mean", "none"] = "scalar",
    baseline: bool = False,
) -> Any:
    """Patch the stream before each block, what attention adds and what the MLP adds: [3, layer, pos]."""
    sweeps = {
        "resid_pre": get_act_patch_resid_pre,
        "attn_out": get_act_patch_attn_out,
        "mlp_out": get_act_patch_mlp_out,
    }
    given = (model, corrupted_tokens, clean_cache, metric)
    return _every(sweeps, ["layer", "pos"], given, reduce=reduce, baseline=baseline)


def _every(
    sweeps: Mapping[str, partial[Any]],
    axes: list[str],
    given: tuple[Any, ...],
    *,
    reduce: str,
    baseline: bool,
) -> Any:
    """The results of several sweeps in one, their axes in the same order."""
    found = [sweep(*given, reduce=reduce, baseline=baseline) for sweep in sweeps.values()]
    first = found[0]
    is_result = isinstance(first, PatchingResult)
    at = int(is_result and first.has_metric_axis)  # where the axes of cells begin
    values = [each.values if is_result else each for each in found]
    if axes == _BY_POS.split():
        # A pattern has the head before the position.
        values[-1] = values[-1].transpose(at + 1, at + 2)
    if axes[-1] == "head":
        values = [_padded(each, at + len(axes) - 1, values[0]) for each in values]
    stacked = torch.stack(values, at)
    if not is_result:
        return stacked
    sizes = stacked.shape[at : at + 1 + len(axes)]
    return PatchingResult(
        values=stacked,
        axis_names=["patch_type", *axes],
        cells=list(itertools.product(*map(range, sizes))),
        columns=["patch_type", *axes],
        metric_names=first.metric_names,
        reduced=first.reduced,
        baseline=first.baseline,
        has_metric_axis=first.has_metric_axis,
        patch_type_names=list(sweeps),
    )


def _padded(values: Tensor, axis: int, like: Tensor) -> Tensor:
    """Values with NaN for heads that only ``like`` has."""
    shape = list(values.shape)
    shape[axis] = like.shape[axis] - shape[axis]
    return torch.cat([values, values.new_full(shape, torch.nan)], axis)
