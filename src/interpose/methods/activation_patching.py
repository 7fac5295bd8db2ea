"""`ip.activation_patching`: where in a model what tells two texts apart is, family by family.

A value of one run takes the place of the same value in another run, at one place after another:

    share(place) = (metric(corrupt, with the clean value at the place) - metric(corrupt))
                   / (metric(clean) - metric(corrupt))

Each family below is a sweep: which sites, and over which axes. The names are those of TransformerLens's ``patching``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.layers import heads_of
from interpose.progress import ShowProgress

_HEAD = ("z", "q", "k", "v", "pattern")
_STREAM, _ALL_POS, _BY_POS = ("layer", "pos"), ("layer", "head"), ("layer", "pos", "head")

FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # family: (sites, axes); the position of a pattern is the one that looks
    "resid_pre": (("resid_pre",), _STREAM),
    "resid_mid": (("resid_mid",), _STREAM),
    "resid_post": (("resid_post",), _STREAM),
    "attn_out": (("attn_out",), _STREAM),
    "mlp_out": (("mlp_out",), _STREAM),
    "block_every": (("resid_pre", "attn_out", "mlp_out"), ("site", *_STREAM)),
    "attn_head_out_all_pos": (("z",), _ALL_POS),
    "attn_head_q_all_pos": (("q",), _ALL_POS),
    "attn_head_k_all_pos": (("k",), _ALL_POS),
    "attn_head_v_all_pos": (("v",), _ALL_POS),
    "attn_head_pattern_all_pos": (("pattern",), _ALL_POS),
    "attn_head_all_pos_every": (_HEAD, ("site", *_ALL_POS)),
    "attn_head_out_by_pos": (("z",), _BY_POS),
    "attn_head_q_by_pos": (("q",), _BY_POS),
    "attn_head_k_by_pos": (("k",), _BY_POS),
    "attn_head_v_by_pos": (("v",), _BY_POS),
    "attn_head_pattern_by_pos": (("pattern",), _BY_POS),
    "attn_head_by_pos_every": (_HEAD, ("site", *_BY_POS)),
    "attn_head_pattern_dest_src_pos": (("pattern",), ("layer", "head", "pos", "key")),
}


def activation_patching(
    model: ip.TransformerModel,
    clean: Any,
    corrupt: Any,
    *,
    metric: Any,
    family: str = "resid_pre",
    patch: str = "clean",
    layer: Sequence[int] | None = None,
    head: Sequence[int] | None = None,
    pos: Sequence[int] | None = None,
    batch_size: int = 16,
    max_rows: int | None = None,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> ip.SweepResult:
    """How much of the way from one run to the other each place goes, as a sweep's result.

    ```python
    model = ip.load("pocket")
    clean = "When Mary and John went to the store, John gave a drink to"
    corrupt = "When Mary and John went to the store, Mary gave a drink to"
    lead = ip.metrics.logit_difference(" Mary", " John")
    ip.activation_patching(model, clean, corrupt, metric=lead, family="attn_head_out_all_pos").top(3)
    ```

    A family of several sites has an axis ``site``. With grouped queries keys and values have fewer heads than queries;
    in a family that has them all, heads that do not exist are NaN.

    Args:
        model: a model of transformers, in eval mode.
        clean: a text, several, or tokens [batch, pos].
        corrupt: the texts to compare with, token by token.
        metric: one of `ip.metrics`, a function of logits that gives a number for each example, or several by name.
        family: what is patched, and over which axes: a name in `FAMILIES`, such as ``resid_pre``, ``block_every``,
            ``attn_head_out_all_pos``, ``attn_head_by_pos_every``.
        patch: which run's values go into the other: ``clean`` ones into the corrupted run, what is enough; ``corrupt``
            ones into the clean run, what cannot be missed.
        layer: which; by default all that have the sites.
        head: which; by default all.
        pos: which; by default all.
        batch_size: how many pairs run together, at most.
        max_rows: how many rows run together, at most; by default as many as fit.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    if family not in FAMILIES:
        raise ValueError(f"no family is called {family!r}. There are: {', '.join(FAMILIES)}.")
    if corrupt is None:
        raise ValueError(
            "patching needs a second text: corrupt=... For what a model can do without, see ip.ablation."
        )
    sites, axes = FAMILIES[family]
    for name, given in (("head", head), ("pos", pos)):
        if given is not None and name not in axes:
            raise ValueError(
                f"{family!r} goes over {', '.join(axes)}: {name}=... means nothing there."
            )
    options: dict[str, Any] = {
        "metric": metric,
        "over": tuple(axis for axis in axes if axis != "site"),
        "patch": patch,
        "layer": layer,
        "head": head,
        "pos": pos,
        "batch_size": batch_size,
        "max_rows": max_rows,
        "prepend_bos": prepend_bos,
        "progress": progress,
    }
    if "key" in axes:
        return _by_key(model, clean, corrupt, options)
    if len(sites) == 1:
        return ip.sweep(model, clean, corrupt, site=sites[0], **options)
    found = {}
    for site in sites:
        options["head"] = _heads(model, site, head)
        if options["head"] != [] or head == []:
            try:
                found[site] = ip.sweep(model, clean, corrupt, site=site, **options)
            except ip.Cancelled as error:
                error.result = _together(sites, {**found, site: error.result})
                raise
    return _together(sites, found)


def _by_key(
    model: ip.TransformerModel, clean: Any, corrupt: Any, options: dict[str, Any]
) -> ip.SweepResult:
    """Single numbers of patterns: a sweep over queries for each key that they can see, pair by pair."""
    asked = options.pop("pos")
    said = {**options, "over": ("layer", "head", "pos")}
    parts: list[tuple[int, ip.SweepResult]] = []
    for batch in ip.batches(
        model, clean, corrupt, batch_size=1, prepend_bos=said.pop("prepend_bos")
    ):
        length = batch.clean.shape[1]
        queries = list(range(length) if asked is None else batch.positions(asked)[0])
        source = batch.clean if options["patch"] == "clean" else batch.corrupt
        with torch.no_grad():
            _, cache = model.run_with_cache(source, names_filter="pattern", return_type=None)
        said |= {"metric": _of_example(options["metric"], batch.numbers[0]), "pos": queries}
        pair = (batch.clean, batch.corrupt)
        swept = []
        for key in range(length):
            edit = functools.partial(_number, cache, key)
            try:
                swept.append(ip.sweep(model, *pair, site="pattern", edit=edit, **said))
            except ip.Cancelled as error:
                nothing = error.result.each * torch.nan
                rest = [dataclasses.replace(error.result, each=nothing)] * (length - key - 1)
                done = _keyed([*swept, error.result, *rest], list(range(length)))
                error.result = _in_order([*parts, (batch.numbers[0], done)], options["metric"])
                raise
        parts.append((batch.numbers[0], _keyed(swept, list(range(length)))))
    return _in_order(parts, options["metric"])


def _in_order(parts: Sequence[tuple[int, ip.SweepResult]], metric: Any) -> ip.SweepResult:
    """Sweeps of one pair each, with its number, as one."""
    found = [part for _, part in sorted(parts, key=lambda part: part[0])]
    if len({len(part.axes["key"]) for part in found}) > 1:
        raise ValueError("the texts have different lengths, so that keys are not the same places.")
    named = metric.values() if found[0].several else [metric]
    return _pairs(found, tuple(map(ip.metrics.label, named)))


def _keyed(swept: Sequence[ip.SweepResult], keys: list[int]) -> ip.SweepResult:
    """Sweeps of one pair, one for each key, as one with an axis of keys."""
    own = _own(swept)
    return dataclasses.replace(
        swept[0],
        each=torch.stack([one.each for one in swept], -2),  # [metric, layer, head, query, key, 1]
        noise=torch.cat([one.noise for one in swept], 1),
        axes={**swept[0].axes, "key": keys},
        tally=_counted(swept),
        edit="",
        own=_keyed(own, keys) if own else None,
    )


def _pairs(found: Sequence[ip.SweepResult], measured: tuple[str, ...]) -> ip.SweepResult:
    """Sweeps of one pair each, as one of them all."""
    own = _own(found)
    ends: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in found], -1)
        for name in ("each", "clean", "corrupt", "noise")
    }
    return dataclasses.replace(
        found[0],
        tokens=found[0].tokens if len(found) == 1 else None,
        tally=_counted(found),
        measured=measured,
        own=_pairs(own, measured) if own else None,
        **ends,
    )


def _own(swept: Sequence[ip.SweepResult]) -> list[ip.SweepResult]:
    """The same by the model's own logits, where something else is shown."""
    return [one.own for one in swept if one.own is not None]


def _of_example(metric: Any, number: int) -> Any:
    """A metric of one example: of tokens that were given for each, its own."""
    if isinstance(metric, Mapping):
        return {name: _of_example(one, number) for name, one in metric.items()}
    if not dataclasses.is_dataclass(metric) or isinstance(metric, type):
        return metric
    said = {option.name: getattr(metric, option.name) for option in dataclasses.fields(metric)}
    lists = {name: value for name, value in said.items() if isinstance(value, (list, tuple))}
    return dataclasses.replace(metric, **{name: value[number] for name, value in lists.items()})


def _counted(swept: Sequence[ip.SweepResult]) -> Any:
    """What several sweeps took together."""
    counts = ("forwards", "token_layers", "one_per_cell")
    total = {name: sum(getattr(one.tally, name) for one in swept) for name in counts}
    return dataclasses.replace(swept[0].tally, **total)


def _number(cache: Any, key: int, site: str, **place: Any) -> ip.Edit:
    """One number of a head's pattern, from another run."""
    return ip.patch(site, cache, at=(..., key), **place)


def _heads(model: ip.TransformerModel, site: str, heads: Any) -> list[int] | None:
    """Those of the chosen heads that a site has: with grouped queries, keys and values have fewer."""
    if heads is None:
        return None
    count, shared = heads_of(model), model.cfg.n_key_value_heads
    chosen = range(count)[heads] if isinstance(heads, slice) else heads
    chosen = [chosen] if isinstance(chosen, int) else chosen
    numbers = [head + count if head < 0 else head for head in chosen]
    if not shared or site not in ("k", "v") or not all(0 <= head < count for head in numbers):
        return numbers  # the sweep says which are not there
    return [head for head in numbers if head < shared]


def _together(sites: Sequence[str], found: dict[str, ip.SweepResult]) -> ip.SweepResult:
    """Sweeps of several sites as one, with an axis of sites; NaN where a site has no such head or layer."""
    swept = list(found.values())
    own = {site: one.own for site, one in found.items() if one.own is not None}
    axes = {
        name: list(dict.fromkeys(entry for one in swept for entry in one.axes[name]))
        for name in swept[0].axes
        if name != "metric"
    }
    wide = {site: _spread(one, axes) for site, one in found.items()}
    nowhere = torch.full_like(next(iter(wide.values())), torch.nan)
    # [metric, site, *axes, example]
    each = torch.stack([wide.get(site, nowhere) for site in sites], 1)
    return dataclasses.replace(
        swept[0],
        axes={"site": list(sites), **axes},
        each=each,
        noise=torch.cat([one.noise for one in swept], 1),
        tally=_counted(swept),
        sites=tuple(sites),
        own=_together(sites, own) if own else None,
    )


def _spread(one: ip.SweepResult, axes: dict[str, list[int]]) -> Tensor:
    """The numbers of a sweep in a larger grid, [metric, *axes, example]."""
    if one.axes == axes:
        return one.each
    shape = [len(entries) for entries in axes.values()]
    wide = one.each.new_full((len(one.metrics), *shape, one.examples), torch.nan)
    places = [[axes[name].index(entry) for entry in one.axes[name]] for name in axes]
    index = torch.meshgrid(*(torch.tensor(some, device="cpu") for some in places), indexing="ij")
    where: tuple[Any, ...] = (slice(None), *index)
    wide[where] = one.each
    return wide
