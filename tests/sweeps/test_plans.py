"""Every plan gives what one forward per cell by hand gives; see `tests.sweeps.oracle`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.models.transformer import TransformerModel
from interpose.sweeps.planning import Sizes
from tests.bounds import rounding
from tests.models import texts, tiny
from tests.sweeps import oracle
from tests.sweeps.oracle import FIRST, LAYERS, LENGTH, Cell, at, head, near

pytestmark = pytest.mark.bits

PLANS = ("wavefront", "batches", "one per cell")
POSITIONS = (2, FIRST, 8, LENGTH - 1)  # nothing changes at the first of them
HEADS = (0, 3)


def sweep(model: Any, clean: Any, corrupt: Any = None, **options: Any) -> ip.SweepResult:
    return ip.sweep(model, clean, corrupt, progress=False, **options)


@functools.cache
def build(name: str) -> TransformerModel:
    return TransformerModel(oracle.build(name))


def difference(a: int, b: int) -> Callable[[Tensor], Tensor]:
    """What `ip.metrics.logit_difference` is, by hand."""
    return lambda logits: logits[..., -1, a] - logits[..., -1, b]


def head_size(model: TransformerModel, spot: oracle.Spot) -> int:
    weight = spot.module.weight
    return (
        max(weight.shape) // model.cfg.n_heads
        if len(set(weight.shape)) > 1
        else (weight.shape[0] // model.cfg.n_heads)
    )


def off(model: Any, found: ip.SweepResult, wanted: Tensor, baseline: Tensor) -> float:
    """How far a result is from what it must be, in what rounding may do; effects must be far larger than that."""
    effect = float((wanted - baseline).abs().max())
    allowed = rounding(wanted, oracle.some_logits(model.module))
    assert effect >= max(1e-2, 30 * allowed)
    assert found.each[0].shape == wanted.shape
    return float((found.each[0] - wanted).abs().max()) / allowed


# Architectures.


def grids(model: TransformerModel, name: str) -> dict[str, tuple[dict[str, Any], list[Cell]]]:
    """What is swept for each kind of site, and the same cells by hand."""
    module, found = model.module, {}
    there = {
        kind: [
            (layer, spot)
            for layer in range(len(oracle.blocks(module)))
            if (spot := oracle.spot(module, name, kind, layer)) is not None
        ]
        for kind in ("resid_pre", "z", "mlp_out")
        if kind == "resid_pre" or getattr(oracle.TYPES[name], kind) is not None
    }
    for kind, spots in there.items():
        options: dict[str, Any] = {"site": kind, "layer": [layer for layer, _ in spots]}
        if kind == "resid_pre":
            options |= {"over": ("layer", "pos"), "pos": POSITIONS}
            cells = [Cell(spot, at(pos)) for _, spot in spots for pos in POSITIONS]
        elif kind == "z":
            options |= {"over": ("layer", "head"), "head": HEADS}
            cells = [
                Cell(spot, head(number, head_size(model, spot)))
                for _, spot in spots
                for number in HEADS
            ]
        else:
            options |= {"over": ("layer",)}
            cells = [Cell(spot, slice(None)) for _, spot in spots]
        found[kind] = options, cells
    return found


def differences(name: str) -> dict[tuple[str, str, str], float]:
    """How far each plan is from the oracle, by kind of site, direction and plan."""
    model, (clean, corrupt) = build(name), oracle.pair()
    found = {}
    for kind, (options, cells) in grids(model, name).items():
        for patch in ("clean", "corrupt"):
            ends = (corrupt, clean) if patch == "clean" else (clean, corrupt)
            base = oracle.logits(model.module, ends[0])
            changed = oracle.patched(model.module, *ends, cells)
            answer, instead = oracle.telling(changed, base)
            measured = difference(answer, instead)
            for plan in PLANS:
                result = sweep(
                    model,
                    clean,
                    corrupt,
                    metric=ip.metrics.logit_difference(answer, instead),
                    patch=patch,
                    plan=plan,
                    **options,
                )
                wanted = measured(changed).reshape(result.each.shape[1:])
                found[kind, patch, plan] = off(model, result, wanted, measured(base))
                assert near(model.module, result.baseline[0], measured(base))
                assert result.tally.plan == plan
    return found


@pytest.mark.parametrize("name", oracle.TYPES)
def test_every_plan_gives_what_one_forward_per_cell_gives(name: str) -> None:
    found = differences(name)
    assert ("resid_pre", "corrupt", "wavefront") in found
    assert (("z", "corrupt", "wavefront") in found) == (oracle.TYPES[name].z is not None)
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("name", sorted(oracle.NO_KV_CACHE | {"llama", "mistral"}))
def test_the_wavefront_is_chosen_and_says_if_it_has_no_kv_cache(name: str) -> None:
    result = sweep(build(name), *oracle.pair(), metric=ip.metrics.logit(20), over="layer")
    assert result.tally.plan == "wavefront"
    assert result.tally.why.startswith("without KV cache") == (name in oracle.NO_KV_CACHE)


def test_the_architectures_are_what_they_are_here_for() -> None:
    llama = oracle.build("llama").config
    assert llama.num_key_value_heads < llama.num_attention_heads
    for name in oracle.SLIDING:
        config = oracle.build(name).config
        assert config.sliding_window < LENGTH - FIRST, (
            name
        )  # the start is out of the last token's window
    assert not oracle.build(oracle.OPT_POST_NORM).config.do_layer_norm_before


@pytest.mark.parametrize("name", sorted(oracle.SLIDING))
def test_sliding_windows_matter_at_this_length(name: str) -> None:
    module = oracle.build(name)
    clean, _ = oracle.pair()
    with_window = oracle.logits(module, clean)
    module.config.sliding_window = 4 * LENGTH
    for part in module.modules():
        if getattr(part, "sliding_window", None) is not None:
            part.sliding_window = 4 * LENGTH
    assert float((oracle.logits(module, clean) - with_window).abs().max()) > 1e-2


def test_a_model_from_scratch_without_kv_cache() -> None:
    from interpose.dialects.transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=LAYERS, d_model=32, n_ctx=32, d_head=8, n_heads=4, d_mlp=64, d_vocab=80,
        act_fn="gelu", normalization_type="LN", seed=0,
    )  # fmt: skip
    model = HookedTransformer(config).eval()
    tiny.randomise(model.module)
    clean, corrupt = oracle.pair()
    stack = next(part for part in model.module.modules() if isinstance(part, torch.nn.ModuleList))
    spots = [oracle.Spot(block) for block in stack]
    cells = [Cell(spot, at(pos)) for spot in spots for pos in range(LENGTH)]
    base = oracle.logits(model.module, corrupt)
    changed = oracle.patched(model.module, corrupt, clean, cells)
    answer, instead = oracle.telling(changed, base)
    measured = difference(answer, instead)
    for plan in PLANS:
        metric = ip.metrics.logit_difference(answer, instead)
        result = sweep(model, clean, corrupt, metric=metric, plan=plan)
        wanted = measured(changed).reshape(LAYERS, LENGTH, 2)
        assert off(model, result, wanted, measured(base)) <= 1


# Other sites: raw hooks cannot reach all of them, so one forward per cell is done by the engine.


def by_hand(
    model: Any, clean: Tensor, corrupt: Tensor, site: str, part: Any, measured: Any
) -> Tensor:
    """A forward of its own for one cell, with the engine's hooks but none of the sweep's code."""
    with torch.no_grad():
        there = model.run_with_cache(input_ids=clean, names_filter=[site])[1][site]

    def put(value: Tensor, hook: Any) -> Tensor:
        value[part] = there[part]
        return value

    with torch.no_grad(), model.hooks(fwd_hooks=[(site, put)]):
        return measured(model.module(input_ids=corrupt).logits)  # type: ignore[no-any-return]


KINDS = {
    "resid_mid": "blocks.{}.hook_resid_mid",
    "resid_post": "blocks.{}.hook_resid_post",
    "attn_out": "blocks.{}.hook_attn_out",
    "mlp_out": "blocks.{}.hook_mlp_out",
    "q": "blocks.{}.attn.hook_q",
    "k": "blocks.{}.attn.hook_k",
    "v": "blocks.{}.attn.hook_v",
    "z": "blocks.{}.attn.hook_z",
    "pattern": "blocks.{}.attn.hook_pattern",
    "attn_scores": "blocks.{}.attn.hook_attn_scores",
}
QUERIES = {"pattern", "attn_scores"}  # [batch, head, query, key]
HEADED = {"q": 4, "k": 2, "v": 2, "z": 4, "pattern": 4, "attn_scores": 4}


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2"])
@pytest.mark.parametrize("kind", KINDS)
def test_positions_at_every_kind_of_site(name: str, kind: str) -> None:
    model, (clean, corrupt) = build(name), oracle.pair()
    measured = difference(20, 33)
    base = measured(oracle.logits(model.module, corrupt))
    parts = [(..., pos, slice(None)) if kind in QUERIES else at(pos) for pos in POSITIONS]
    wanted = torch.stack(
        [
            by_hand(model, clean, corrupt, KINDS[kind].format(layer), part, measured)
            for layer in range(LAYERS)
            for part in parts
        ]
    ).reshape(LAYERS, len(POSITIONS), 2)
    for plan in PLANS:
        metric = ip.metrics.logit_difference(20, 33)
        result = sweep(model, clean, corrupt, site=kind, pos=POSITIONS, metric=metric, plan=plan)
        assert off(model, result, wanted, base) <= 1, plan


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("kind", HEADED)
def test_heads_of_every_kind_of_site_also_grouped_ones(name: str, kind: str) -> None:
    model, (clean, corrupt) = build(name), oracle.pair()
    measured = difference(20, 33)
    base = measured(oracle.logits(model.module, corrupt))
    parts = [
        (slice(None), number) if kind in QUERIES else (slice(None), slice(None), number)
        for number in range(HEADED[kind])
    ]
    wanted = torch.stack(
        [
            by_hand(model, clean, corrupt, KINDS[kind].format(layer), part, measured)
            for layer in range(LAYERS)
            for part in parts
        ]
    ).reshape(LAYERS, len(parts), 2)
    for plan in PLANS:
        metric = ip.metrics.logit_difference(20, 33)
        over = ("layer", "head")
        result = sweep(model, clean, corrupt, site=kind, over=over, metric=metric, plan=plan)
        assert result.axes["head"] == list(range(HEADED[kind]))
        assert off(model, result, wanted, base) <= 1, plan


@pytest.mark.parametrize("site", ["blocks.{}.attn.hook_v", "blocks.{}.hook_k_input"])
def test_grouped_heads_are_counted_at_the_site_itself(site: str) -> None:
    model, (clean, corrupt) = build("llama"), oracle.pair()
    sites = [site.format(layer) for layer in range(LAYERS)]
    result = sweep(
        model, clean, corrupt, site=sites, over=("site", "head"), metric=ip.metrics.logit(20)
    )
    assert result.axes == {"site": sites, "head": [0, 1]}


def test_a_head_at_a_position() -> None:
    model, (clean, corrupt) = build("llama"), oracle.pair()
    measured = difference(20, 33)
    spots = [oracle.spot(model.module, "llama", "z", layer) for layer in range(LAYERS)]
    cells = [
        Cell(spot, (slice(None), pos, head(number, head_size(model, spot))[1]))
        for spot in spots
        if spot is not None
        for number in HEADS
        for pos in POSITIONS
    ]
    base = measured(oracle.logits(model.module, corrupt))
    wanted = measured(oracle.patched(model.module, corrupt, clean, cells))
    for plan in PLANS:
        result = sweep(
            model, clean, corrupt, site="z", over=("layer", "head", "pos"), head=HEADS,
            pos=POSITIONS, metric=ip.metrics.logit_difference(20, 33), plan=plan,
        )  # fmt: skip
        wanted = wanted.reshape(result.each.shape[1:])
        assert off(model, result, wanted, base) <= 1, plan


def test_neurons_in_any_order_and_from_the_end() -> None:
    model, (clean, corrupt) = build("gpt2"), oracle.pair()
    measured = difference(20, 33)
    spots = [oracle.Spot(block.mlp.c_proj) for block in oracle.blocks(model.module)]
    last = model.cfg.d_mlp - 1
    cells = [Cell(spot, (..., number)) for spot in spots for number in (7, 3, last)]
    base = measured(oracle.logits(model.module, corrupt))
    wanted = measured(oracle.patched(model.module, corrupt, clean, cells)).reshape(LAYERS, 3, 2)
    for plan in PLANS:
        result = sweep(
            model, clean, corrupt, site="post", over=("layer", "neuron"), neuron=[7, 3, -1],
            metric=ip.metrics.logit_difference(20, 33), plan=plan,
        )  # fmt: skip
        assert off(model, result, wanted, base) <= 1, plan


def test_sites_by_their_names_also_outside_of_blocks() -> None:
    model, (clean, corrupt) = build("gpt2"), oracle.pair()
    measured = difference(20, 33)
    module: Any = model.module
    spots = {
        "hook_embed": oracle.Spot(module.transformer.wte, leaves=True),
        "blocks.1.hook_resid_pre": oracle.Spot(module.transformer.h[1]),
        "ln_final.hook_normalized": None,
    }
    cells = [Cell(spot, at(pos)) for spot in spots.values() if spot for pos in POSITIONS]
    base = measured(oracle.logits(module, corrupt))
    wanted = measured(oracle.patched(module, corrupt, clean, cells)).reshape(2, 4, 2)
    for plan in ("auto", "one per cell"):
        result = sweep(
            model, clean, corrupt, site=list(spots), over=("site", "pos"), pos=POSITIONS,
            metric=ip.metrics.logit_difference(20, 33), plan=plan,
        )  # fmt: skip
        assert near(model.module, result.each[0, :2], wanted)
        whole = measured(oracle.logits(module, clean))
        assert near(model.module, result.each[0, 2, -1], whole)  # the last position is all
        assert near(model.module, result.each[0, 2, :-1], result.baseline[0].expand(3, 2))
        assert float((wanted - base).abs().max()) >= 1e-2
        if plan == "auto":
            assert result.tally.plan == "batches"
            assert result.tally.why == "hook_embed is in no block"


def test_the_logits_themselves_are_a_site() -> None:
    model, (clean, corrupt) = build("gpt2"), oracle.pair()
    ends = [oracle.logits(model.module, each)[:, -1] for each in (clean, corrupt)]
    result = sweep(
        model, clean, corrupt, site="unembed.hook_out", over=("site", "neuron"),
        neuron=[20, 33, 50], metric=ip.metrics.logit_difference(20, 33),
    )  # fmt: skip
    assert near(model.module, result.each[0, 0, 0], ends[0][:, 20] - ends[1][:, 33])
    assert near(model.module, result.each[0, 0, 1], ends[1][:, 20] - ends[0][:, 33])
    assert near(model.module, result.each[0, 0, 2], result.baseline[0])


# Edits.


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen3_next"])
def test_zeros_without_a_second_text(name: str) -> None:
    model, (clean, _) = build(name), oracle.pair()
    measured, module = difference(20, 33), model.module
    base = measured(oracle.logits(module, clean))
    assert oracle.TYPES[name].z is not None
    spots = [
        (layer, spot)
        for layer in range(len(oracle.blocks(module)))
        if (spot := oracle.spot(module, name, "z", layer)) is not None
    ]
    heads = [Cell(spot, head(n, head_size(model, spot))) for _, spot in spots for n in range(4)]
    places = [Cell(oracle.Spot(b), at(pos)) for b in oracle.blocks(module) for pos in POSITIONS]
    for cells, options in (
        (heads, {"site": "z", "over": ("layer", "head"), "layer": [layer for layer, _ in spots]}),
        (places, {"site": "resid_pre", "over": ("layer", "pos"), "pos": POSITIONS}),
    ):
        wanted = measured(oracle.zeroed(module, clean, cells))
        for plan in PLANS:
            metric = ip.metrics.logit_difference(20, 33)
            result = sweep(model, clean, edit=ip.zero, metric=metric, plan=plan, **options)
            assert result.corrupt is None
            assert off(model, result, wanted.reshape(result.each.shape[1:]), base) <= 1, plan


@pytest.mark.parametrize("site", ["resid_pre", "z", "pattern", "rot_k", "mlp_out"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_edits_are_the_same_when_earlier_positions_come_from_a_kv_cache(
    name: str, site: str
) -> None:
    model, (clean, _) = build(name), oracle.pair()
    metric = ip.metrics.logit_difference(20, 33)
    found = [
        sweep(model, clean, site=site, edit=ip.zero, pos=[9, 6], metric=metric, plan=plan)
        for plan in PLANS
    ]
    assert found[0].tally.token_layers < found[2].tally.token_layers
    assert float(found[2].effect.abs().max()) >= 1e-2
    assert all(near(model.module, each.each, found[2].each) for each in found)


def test_noise_with_a_seed_is_the_same_in_every_plan() -> None:
    model, (clean, _) = build("gpt2"), oracle.pair()

    def noise(site: str, pos: int) -> Any:
        return ip.noise(site, 1.0, seed=0, pos=pos)

    metric = ip.metrics.logit_difference(20, 33)
    found = [
        sweep(model, clean, edit=noise, pos=[9, 6], metric=metric, plan=plan) for plan in PLANS
    ]
    assert float(found[2].effect.abs().max()) >= 1e-2
    assert all(near(model.module, each.each, found[2].each) for each in found)


@pytest.mark.parametrize("plan", PLANS)
def test_an_edit_sees_the_examples_of_its_cell_together(plan: str) -> None:
    """A mean over the batch, and a value for each row: as in a plain run of the same texts."""
    model, (clean, _) = build("gpt2"), oracle.pair()
    given = torch.randn(2, 1, 32, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    for make in (ip.mean, lambda site, **at: ip.fill(site, given, **at)):
        result = sweep(model, clean, edit=make, pos=[6, 9], metric=ip.metrics.logit(20), plan=plan)
        for layer in range(LAYERS):
            for number, pos in enumerate((6, 9)):
                edit = make(f"blocks.{layer}.hook_resid_pre", pos=pos)
                with model.hooks([edit]):
                    wanted = oracle.logits(model.module, clean)[:, -1, 20]
                assert float((wanted - result.clean[0]).abs().max()) >= 1e-2
                assert near(model.module, result.each[0, layer, number], wanted)


def test_an_edit_may_change_another_position_than_its_cells() -> None:
    """What makes the edit is free to look back, so earlier positions must be there."""
    model, (clean, _) = build("gpt2"), oracle.pair()

    def before(site: str, pos: int) -> Any:
        return ip.zero(site, pos=pos - 4)

    metric = ip.metrics.logit_difference(20, 33)
    found = [
        sweep(model, clean, edit=before, pos=[9, 6], metric=metric, plan=plan) for plan in PLANS
    ]
    assert float(found[2].effect.abs().max()) >= 1e-2
    assert all(near(model.module, each.each, found[2].each) for each in found)


def test_an_edit_may_say_positions_by_their_text() -> None:
    model = texts.speaking("gpt2", layers=LAYERS)
    said = ["the cat sat on the mat", "on the mat the cat sat"]

    def cat(site: str) -> Any:
        return ip.zero(site, pos=" cat")

    options: dict[str, Any] = {"over": "layer", "edit": cat, "metric": ip.metrics.logit(20)}
    alone = torch.cat([sweep(model, t, plan="one per cell", **options).each for t in said], -1)
    for plan in PLANS:
        result = sweep(model, said, plan=plan, **options)
        assert float((alone - result.clean[:, None]).abs().max()) >= 1e-2
        assert near(model.module, result.each, alone), plan


def at_its_place(site: str, pos: int) -> Any:
    """Of numbers for every position those of its own."""
    return ip.add(site, torch.linspace(-1, 1, LENGTH * 32).reshape(1, LENGTH, 32), pos=pos)


def at_its_place_by_name(site: str, pos: int) -> Any:
    return dataclasses.replace(at_its_place(site, pos), value={site: at_its_place(site, pos).value})


def at_two_places(site: str, pos: int) -> Any:
    return ip.zero(site, pos=torch.tensor([pos, pos - 2]))


@pytest.mark.parametrize("edit", [at_its_place, at_its_place_by_name, at_two_places])
@pytest.mark.parametrize("site", ["resid_pre", "mlp_out"])
def test_edits_with_positions_of_their_own_see_all_positions(
    edit: Callable[..., Any], site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sizes, "least_tokens", 0)  # as on large models, where passes begin late
    model, clean = build("gpt2"), oracle.pair()[0]
    options: dict[str, Any] = {"site": site, "pos": [4, 9], "layer": [0, 1]}
    options |= {"edit": edit, "metric": ip.metrics.logit(20)}
    found = [sweep(model, clean, plan=plan, **options) for plan in PLANS]
    assert float(found[2].effect.abs().min()) > 1e-4
    assert all(near(model.module, each.each, found[2].each) for each in found)


# Batches of texts.


def padded() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tokens whose first row has three of padding at the left."""
    clean, corrupt = oracle.pair()
    mask = torch.ones_like(clean)
    mask[0, :3] = clean[0, :3] = corrupt[0, :3] = 0
    return (
        {"input_ids": clean, "attention_mask": mask},
        {"input_ids": corrupt, "attention_mask": mask},
    )


def counted_from_text(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with positions that begin at the first token, for models that take any."""
    if "position_ids" not in inspect.signature(model.module.forward).parameters:
        return given
    return {**given, "position_ids": (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)}


@pytest.mark.parametrize("name", ["gpt2", "mistral", "bloom", "opt, post-norm", "gemma2"])
def test_texts_padded_at_the_left(name: str) -> None:
    model, given = build(name), padded()
    clean, corrupt = (counted_from_text(model, one) for one in given)
    cells = [
        Cell(oracle.Spot(b), at(pos)) for b in oracle.blocks(model.module) for pos in POSITIONS
    ]
    base = oracle.logits(model.module, corrupt)
    changed = oracle.patched(model.module, corrupt, clean, cells)
    answer, instead = oracle.telling(changed[:, :1], base[:1])  # of the row with padding
    measured = difference(answer, instead)
    wanted = measured(changed).reshape(LAYERS, len(POSITIONS), 2)
    # Eight rows get a ninth that stands for nothing: then the last rows are not the first ones' texts.
    for plan, max_rows in ((PLANS[0], None), (PLANS[0], 8), (PLANS[1], 8), (PLANS[2], None)):
        metric = ip.metrics.logit_difference(answer, instead)
        options = {"pos": POSITIONS, "max_rows": max_rows, "align": "end"}
        result = sweep(model, *given, metric=metric, plan=plan, **options)
        assert off(model, result, wanted, measured(base)) <= 1, (plan, max_rows)
        if (plan, max_rows) == ("wavefront", None):  # earlier positions are not computed
            before = 2 * 2 * LENGTH * LAYERS
            assert result.tally.token_layers - before < LAYERS * 20 * LENGTH


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "bloom"])
def test_passes_that_begin_at_several_positions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a pass costs nothing by itself, as on large models, positions have passes of their own."""
    monkeypatch.setattr(Sizes, "least_tokens", 0)
    model, (clean, corrupt) = build(name), oracle.pair()
    places = range(FIRST, LENGTH)
    cells = [Cell(oracle.Spot(b), at(pos)) for b in oracle.blocks(model.module) for pos in places]
    base = oracle.logits(model.module, corrupt)
    changed = oracle.patched(model.module, corrupt, clean, cells)
    for metric, measured in (
        (ip.metrics.logit_difference(20, 33), difference(20, 33)),
        (ip.metrics.loss(), lambda x: loss_of(x, corrupt)),
        (ip.metrics.logit(20, pos=-4), lambda x: x[..., -4, 20]),
    ):
        result = sweep(model, clean, corrupt, pos=places, metric=metric)
        assert result.tally.forwards > 3
        wanted = measured(changed).reshape(LAYERS, len(places), 2)
        assert off(model, result, wanted, measured(base)) <= 1


def test_a_mask_that_only_one_of_the_two_has() -> None:
    """Positions differ from the first padding on, not from the first token that differs."""
    model, (masked, padded_corrupt) = build("llama"), padded()
    clean, corrupt = (
        counted_from_text(model, masked),
        {"input_ids": padded_corrupt["input_ids"]},
    )
    cells = [
        Cell(oracle.Spot(b), at(pos)) for b in oracle.blocks(model.module) for pos in POSITIONS
    ]
    base = oracle.logits(model.module, corrupt)
    changed = oracle.patched(model.module, corrupt, clean, cells)
    answer, instead = oracle.telling(changed[:, :1], base[:1])
    measured = difference(answer, instead)
    metric = ip.metrics.logit_difference(answer, instead)
    for plan in PLANS:
        options = {"pos": POSITIONS, "metric": metric, "align": "end"}
        result = sweep(model, masked, corrupt, plan=plan, **options)
        wanted = measured(changed).reshape(LAYERS, len(POSITIONS), 2)
        assert off(model, result, wanted, measured(base)) <= 1, plan
        assert POSITIONS[0] < FIRST
        assert float((wanted[:, 0] - measured(base)).abs().max()) >= 1e-2


SHORT, LONG = "the cat sat on the mat", "a dog ran in the park and the cat saw it"


def left(model: Any, text: str, length: int) -> dict[str, Tensor]:
    """A text with padding at the left, by hand: its positions are counted from its first token."""
    tokens = model.to_tokens(text)[0]
    missing = length - len(tokens)
    ids = torch.cat([torch.full((missing,), texts.PAD), tokens])[None]
    mask = torch.cat([torch.zeros(missing), torch.ones(len(tokens))]).long()[None]
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }


@pytest.mark.parametrize("clean", [SHORT, LONG])
def test_texts_of_different_lengths_end_together(clean: str) -> None:
    model = texts.speaking("gpt2", layers=LAYERS)
    corrupt = LONG if clean == SHORT else SHORT
    length = model.to_tokens(LONG).shape[1]
    assert model.to_tokens(SHORT).shape[1] < length
    ends = [left(model, text, length) for text in (clean, corrupt)]
    cells = [
        Cell(oracle.Spot(b), at(p)) for b in oracle.blocks(model.module) for p in range(length)
    ]
    base = oracle.logits(model.module, ends[1])
    changed = oracle.patched(model.module, ends[1], ends[0], cells)
    answer, instead = oracle.telling(changed, base)
    measured = difference(answer, instead)
    for plan in PLANS:
        metric = ip.metrics.logit_difference(answer, instead)
        result = sweep(model, clean, corrupt, align="end", metric=metric, plan=plan)
        wanted = measured(changed).reshape(LAYERS, length, 1)
        assert off(model, result, wanted, measured(base)) <= 1, plan


def test_pairs_of_several_lengths_and_answers_of_their_own() -> None:
    model = build("gpt2")
    lengths = (9, 13, 9, 11, 13, 9)
    pairs = [oracle.pair(1, length, seed=n) for n, length in enumerate(lengths)]
    answers, instead = [20, 21, 22, 23, 24, 25], [33, 34, 35, 36, 37, 38]
    for plan in PLANS:
        result = sweep(
            model,
            [clean[0] for clean, _ in pairs],
            [corrupt[0] for _, corrupt in pairs],
            over="layer",
            batch_size=2,
            metric=ip.metrics.logit_difference(answers, instead),
            plan=plan,
        )
        assert result.each.shape == (1, LAYERS, len(pairs))
        for number, (clean, corrupt) in enumerate(pairs):
            measured = difference(answers[number], instead[number])
            cells = [Cell(oracle.Spot(block), slice(None)) for block in oracle.blocks(model.module)]
            wanted = measured(oracle.patched(model.module, corrupt, clean, cells))
            ends = [measured(oracle.logits(model.module, each)) for each in (clean, corrupt)]
            assert float((ends[0] - ends[1]).abs()) >= 1e-2
            assert near(model.module, result.each[0, :, number], wanted[:, 0])
            assert near(model.module, result.clean[:, number], ends[0])
            assert result.corrupt is not None
            assert near(model.module, result.corrupt[:, number], ends[1])


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_the_size_of_batches_changes_nothing(batch_size: int) -> None:
    model, (clean, corrupt) = build("mistral"), oracle.pair(5)
    metric = ip.metrics.logit_difference([20, 21, 22, 23, 24], 33)
    whole = sweep(model, clean, corrupt, metric=metric)
    result = sweep(model, clean, corrupt, metric=metric, batch_size=batch_size)
    assert float(whole.effect.abs().max()) >= 1e-2
    assert near(model.module, result.each, whole.each)
    assert near(model.module, result.clean, whole.clean)


# Chunks.


@pytest.mark.parametrize("max_rows", [1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 26, 31, 32])
@pytest.mark.parametrize("name", ["gpt2", "mistral", "bloom", "qwen3_next"])
def test_rows_may_come_in_any_number_at_a_time(name: str, max_rows: int) -> None:
    """Passes begin at later layers, and numbers of rows are those of other axes: 13 positions, 4 heads, 32 wide."""
    model, (clean, corrupt) = build(name), oracle.pair(1)
    metric = ip.metrics.logit_difference(20, 33)
    wanted = _whole(name)
    assert float(wanted.effect.abs().max()) >= 1e-2
    result = sweep(model, clean, corrupt, metric=metric, max_rows=max_rows, plan="wavefront")
    assert near(model.module, result.each, wanted.each)
    result = sweep(model, clean, corrupt, metric=metric, max_rows=max_rows, plan="batches")
    assert near(model.module, result.each, wanted.each)


@functools.cache
def _whole(name: str) -> ip.SweepResult:
    metric = ip.metrics.logit_difference(20, 33)
    return sweep(build(name), *oracle.pair(1), metric=metric, plan="one per cell")


def test_chosen_layers_and_positions_are_parts_of_the_whole_in_their_order() -> None:
    model, (clean, corrupt) = build("llama"), oracle.pair()
    metric = ip.metrics.logit_difference(20, 33)
    whole = sweep(model, clean, corrupt, metric=metric, plan="one per cell").each
    some = sweep(model, clean, corrupt, metric=metric, layer=[-1, 0], pos=[-1, 5, -6])
    assert some.axes == {"layer": [2, 0], "pos": [12, 5, 7]}
    assert near(model.module, some.each, whole[:, [2, 0]][:, :, [12, 5, 7]])
    heads = {"site": "z", "over": ("layer", "head"), "metric": metric}
    whole = sweep(model, clean, corrupt, plan="one per cell", **heads).each
    some = sweep(model, clean, corrupt, head=[-1, 1], **heads)
    assert some.axes["head"] == [3, 1]
    assert near(model.module, some.each, whole[:, :, [3, 1]])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("max_rows", [None, 10])
def test_axes_may_come_in_any_order(plan: str, max_rows: int | None) -> None:
    """Rows run by layers and sites, whatever the order they are asked for in."""
    model, (clean, corrupt) = build("gpt2"), oracle.pair()
    metric = ip.metrics.logit_difference(20, 33)
    sites = ["resid_post", "attn_out", "resid_pre"]
    whole = torch.stack(
        [
            sweep(model, clean, corrupt, site=site, metric=metric, plan="one per cell").each[0]
            for site in sites
        ]
    )
    spread = [float((one - other).abs().max()) for one, other in itertools.pairwise(whole)]
    assert min(spread) > 1e-2
    result = sweep(
        model, clean, corrupt, site=sites, over=("pos", "layer", "site"), metric=metric, plan=plan,
        max_rows=max_rows,
    )  # fmt: skip
    assert near(model.module, result.each[0], whole.permute(2, 1, 0, 3))


# Metrics.


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    lines = logits.log_softmax(-1)[..., :-1, :].flatten(0, -3)
    targets = tokens[:, 1:].expand(*logits.shape[:-2], -1).reshape(len(lines), -1)
    picked = torch.stack([line[range(len(t)), t].mean() for line, t in zip(lines, targets)])
    return -picked.reshape(logits.shape[:-2])


def metrics_by_hand(clean: Tensor, corrupt: Tensor) -> Mapping[str, tuple[Any, Any]]:
    """Each metric, and what it is of logits [..., example, pos, d_vocab]. ``clean`` are logits, ``corrupt`` tokens."""
    rows = torch.arange(2)
    answers, instead = torch.tensor([20, 7]), torch.tensor([33, 40])

    def divergence(logits: Tensor) -> Tensor:
        p, q = clean[:, -1].softmax(-1), logits[..., -1, :].softmax(-1)
        return (p * (p / q).log()).sum(-1)

    def ranked(logits: Tensor) -> Tensor:
        order = logits[..., -1, :].argsort(-1, descending=True)
        return (order == answers[:, None]).float().argmax(-1).float()

    return {
        "logit": (ip.metrics.logit(20), lambda x: x[..., -1, 20]),
        "each its own": (ip.metrics.logit([20, 7]), lambda x: x[..., rows, -1, answers]),
        "earlier": (ip.metrics.logit(20, pos=-3), lambda x: x[..., -3, 20]),
        "from the start": (ip.metrics.logit(20, pos=6), lambda x: x[..., 6, 20]),
        "difference": (
            ip.metrics.logit_difference([20, 7], [33, 40]),
            lambda x: x[..., rows, -1, answers] - x[..., rows, -1, instead],
        ),
        "probability": (ip.metrics.probability(20), lambda x: x[..., -1, :].softmax(-1)[..., 20]),
        "log probability": (
            ip.metrics.probability(20, log=True),
            lambda x: x[..., -1, 20] - x[..., -1, :].exp().sum(-1).log(),
        ),
        "rank": (ip.metrics.rank([20, 7]), ranked),
        "loss": (ip.metrics.loss(), lambda x: loss_of(x, corrupt)),
        "kl": (ip.metrics.kl(), divergence),
        "function": (lambda x: x.sum((1, 2)), lambda x: x.sum((-1, -2))),
        "function of the last": (
            ip.metrics.function(lambda x: x.mean((1, 2)), last=2),
            lambda x: x[..., -2:, :].mean((-1, -2)),
        ),
    }


@pytest.mark.parametrize("plan", PLANS)
def test_each_metric_is_what_it_says(plan: str) -> None:
    model, (clean, corrupt) = build("gpt2"), oracle.pair()
    cells = [
        Cell(oracle.Spot(b), at(pos)) for b in oracle.blocks(model.module) for pos in POSITIONS
    ]
    changed = oracle.patched(model.module, corrupt, clean, cells)
    ends = [oracle.logits(model.module, each) for each in (clean, corrupt)]
    metrics = metrics_by_hand(ends[0], corrupt)
    alone = {
        name: sweep(model, clean, corrupt, pos=POSITIONS, metric=metric, plan=plan)
        for name, (metric, _) in metrics.items()
    }
    together = sweep(
        model, clean, corrupt, pos=POSITIONS, plan=plan,
        metric={name: metric for name, (metric, _) in metrics.items()},
    )  # fmt: skip
    assert together.metrics == tuple(metrics)
    assert together.values.shape == (len(metrics), LAYERS, len(POSITIONS))
    for number, (name, (_, measured)) in enumerate(metrics.items()):
        wanted = measured(changed).reshape(LAYERS, len(POSITIONS), 2)
        size = float((wanted - measured(ends[1])).abs().max())
        assert size >= 1e-3, name
        for found in (alone[name].each[0], together.each[number]):
            assert near(model.module, found, wanted), name
        assert alone[name].values.shape == (LAYERS, len(POSITIONS))
        assert alone[name].corrupt is not None
        assert near(model.module, alone[name].corrupt[0], measured(ends[1]))
        if name != "loss":  # whose own text is another
            assert near(model.module, alone[name].clean[0], measured(ends[0]))


def test_a_loss_is_that_of_each_runs_own_text() -> None:
    model, (clean, corrupt) = build("gpt2"), oracle.pair()
    result = sweep(model, clean, corrupt, metric=ip.metrics.loss())
    assert result.corrupt is not None
    for found, tokens in ((result.clean, clean), (result.corrupt, corrupt)):
        wanted = loss_of(oracle.logits(model.module, tokens), tokens)
        assert near(model.module, found[0], wanted)


def test_a_loss_leaves_padding_out() -> None:
    model = texts.speaking("gpt2", layers=LAYERS)
    result = sweep(
        model, SHORT, LONG, align="end", over="layer", patch="corrupt", metric=ip.metrics.loss()
    )
    tokens = model.to_tokens(SHORT)
    wanted = loss_of(oracle.logits(model.module, tokens), tokens)
    assert near(model.module, result.clean[0], wanted)


def test_effects_and_shares() -> None:
    model, (clean, corrupt) = build("gpt2"), oracle.pair()
    for patch in ("clean", "corrupt"):
        metric = ip.metrics.logit_difference(20, 33)
        result = sweep(model, clean, corrupt, metric=metric, over="layer", patch=patch)
        assert result.corrupt is not None
        ends = [result.clean.mean(), result.corrupt.mean()]
        start, end = ends[::-1] if patch == "clean" else ends
        assert near(model.module, result.normalised, torch.ones(LAYERS))  # all of the stream
        assert near(model.module, result.effect, (end - start).expand(LAYERS))


def test_texts_that_do_not_differ_have_no_effects() -> None:
    model, (clean, _) = build("gpt2"), oracle.pair()
    result = sweep(model, clean, clean, metric=ip.metrics.logit(20))
    assert not result.effect.any()
    assert near(model.module, result.each, result.clean[:, None, None].expand_as(result.each))
    assert result.tally.forwards == 1


# Short floats.


def test_half_precision() -> None:
    exact, short = build("llama"), TransformerModel(oracle.build("llama").half())
    clean, corrupt = oracle.pair()
    metric = ip.metrics.logit_difference(20, 33)
    wanted = sweep(exact, clean, corrupt, metric=metric, plan="one per cell")
    for plan in PLANS:
        found = sweep(short, clean, corrupt, metric=metric, plan=plan)
        assert found.each.dtype == torch.float32
        assert 0 <= found.noise_floor < 0.05
        near = float((found.each - wanted.each).abs().max())
        assert 0 < near <= 0.05 * float(wanted.effect.abs().max()) + found.noise_floor
