"""Ablations by one forward per unit with raw torch hooks, on several architectures."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from tests.bounds import assert_near
from tests.leftovers import same_state, state_of
from tests.pages import loads_nothing
from tests.sweeps import oracle
from tests.sweeps.oracle import LAYERS, Cell, Spot, head

NAMES = ("gpt2", "llama", "gemma2", "gpt_neox")
HEADS, ANSWER, INSTEAD = 4, 11, 42
METRIC = ip.metrics.logit_difference(ANSWER, INSTEAD)


@functools.cache
def build(name: str) -> Any:
    return ip.wrap(oracle.build(name).requires_grad_(False))


@functools.cache
def pocket() -> Any:
    return ip.load("pocket")


def tokens(batch: int = 3, length: int = 9, seed: int = 1) -> Tensor:
    return oracle.pair(batch, length, seed=seed)[0]


def lead(logits: Tensor) -> Tensor:
    return logits[..., -1, ANSWER] - logits[..., -1, INSTEAD]


def spots(model: Any, name: str, kind: str) -> list[Spot]:
    found = [oracle.spot(model.module, name, kind, layer) for layer in range(LAYERS)]
    return [spot for spot in found if spot is not None]


def heads_of(model: Any, spot: Spot) -> list[Cell]:
    (value,) = oracle.values(model.module, tokens(1), [spot])
    size = value.shape[-1] // HEADS
    return [Cell(spot, head(number, size)) for number in range(HEADS)]


def with_value(model: Any, given: Tensor, cell: Cell, value: Tensor) -> Tensor:
    """The logits of a run whose part of a spot is that of another value, which broadcasts."""

    def change(own: Tensor) -> Tensor:
        own[cell.part] = value.expand_as(own)[cell.part]
        return own

    with cell.spot.through(change):
        return oracle.logits(model.module, given)


def must_be(found: ip.Scores, wanted: Tensor) -> None:
    """[layer, head, example] by hand."""
    effect = float(wanted.abs().max())
    assert effect > 1e-2
    assert float((found.values - wanted.mean(-1)).abs().max()) < 1e-4 * max(1.0, effect)
    assert found.errors is not None
    error = wanted.std(-1) / wanted.shape[-1] ** 0.5
    assert float((found.errors - error).abs().max()) < 1e-4 * max(1.0, effect)


@pytest.mark.parametrize("name", NAMES)
def test_heads_and_mlps_set_to_zero_are_those_of_one_forward_for_each(name: str) -> None:
    model, given = build(name), tokens()
    base = lead(oracle.logits(model.module, given))
    cells = [cell for spot in spots(model, name, "z") for cell in heads_of(model, spot)]
    by_hand = lead(oracle.zeroed(model.module, given, cells)) - base
    must_be(ip.ablation(model, given, metric=METRIC), by_hand.unflatten(0, (LAYERS, HEADS)))
    whole = [Cell(spot, ...) for spot in spots(model, name, "mlp_out")]
    by_hand = lead(oracle.zeroed(model.module, given, whole)) - base
    must_be(ip.ablation(model, given, metric=METRIC, site="mlp_out", over="layer"), by_hand)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_a_mean_is_over_the_reference_texts(name: str, own: bool, apart: bool) -> None:
    model, given = build(name), tokens()
    reference = given if own else tokens(5, seed=2)
    base, each = lead(oracle.logits(model.module, given)), []
    for spot in spots(model, name, "z"):
        (value,) = oracle.values(model.module, reference, [spot])
        mean = value.mean(0, keepdim=True) if apart else value.mean((0, 1), keepdim=True)
        each += [
            lead(with_value(model, given, cell, mean)) - base for cell in heads_of(model, spot)
        ]
    options = {} if apart else {"per_position": False}
    found = ip.ablation(
        model,
        given,
        metric=METRIC,
        replace_by="mean",
        reference=None if own else reference,
        batch_size=2,
        **options,
    )
    must_be(found, torch.stack(each).unflatten(0, (LAYERS, HEADS)))
    assert found.protocol["mean over"] == f"{len(reference)} texts" + (
        "" if apart else " and their positions"
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("own", [True, False])
def test_resampled_values_are_those_of_the_texts_that_were_drawn(name: str, own: bool) -> None:
    model, given = build(name), tokens(4)
    reference = given if own else tokens(6, seed=5)
    found = ip.ablation(
        model,
        given,
        metric=METRIC,
        replace_by="resample",
        seed=3,
        reference=None if own else reference,
    )
    draw = found.protocol["draw"]
    assert len(draw) == 4
    assert all(
        0 <= other < len(reference) and not (own and other == n) for n, other in enumerate(draw)
    )
    base, each = lead(oracle.logits(model.module, given)), []
    for spot in spots(model, name, "z"):
        (value,) = oracle.values(model.module, reference[draw], [spot])
        each += [
            lead(with_value(model, given, cell, value)) - base for cell in heads_of(model, spot)
        ]
    must_be(found, torch.stack(each).unflatten(0, (LAYERS, HEADS)))


def test_draws_follow_the_seed_and_leave_the_random_state_alone() -> None:
    model, given = build("gpt2"), tokens(6)

    def draw(seed: int) -> Any:
        options = {
            "metric": METRIC,
            "replace_by": "resample",
            "seed": seed,
            "layer": [0],
            "head": [0],
        }
        return ip.ablation(model, given, **options).protocol["draw"]

    before = torch.get_rng_state()
    assert draw(0) == draw(0)
    assert len({tuple(draw(seed)) for seed in range(6)}) > 1
    assert torch.equal(before, torch.get_rng_state())


def test_neurons_and_positions_are_axes_too() -> None:
    model, given = build("gpt2"), tokens()
    base = lead(oracle.logits(model.module, given))
    neurons, positions = [0, 5, 63], [2, 8]
    found = ip.ablation(
        model,
        given,
        metric=METRIC,
        site="post",
        over=("layer", "neuron", "pos"),
        neuron=neurons,
        pos=positions,
    )
    cells = [
        Cell(Spot(block.get_submodule("mlp.c_proj")), (slice(None), pos, neuron))
        for block in oracle.blocks(model.module)
        for neuron in neurons
        for pos in positions
    ]
    must_be(found, (lead(oracle.zeroed(model.module, given, cells)) - base).reshape(3, 3, 2, 3))
    assert list(found.axes) == ["layer", "neuron", "pos"]


def test_texts_of_different_lengths_have_one_mean_over_all_positions() -> None:
    model = pocket()
    texts = ["The Eiffel Tower is in", "People say that the Eiffel Tower is in"]
    found = ip.ablation(
        model,
        texts,
        metric=ip.metrics.logit(" Paris"),
        site="attn_out",
        over="layer",
        replace_by="mean",
    )
    assert found.protocol["mean over"] == "2 texts and their positions"
    runs = [model.run_with_cache(text, names_filter="attn_out") for text in texts]
    mean = torch.cat([cache["attn_out", 5][0] for _, cache in runs]).mean(0)
    paris = model.to_single_token(" Paris")
    by_hand = [
        model.run_with_hooks(text, fwd_hooks=[(("attn_out", 5), lambda v: mean.expand_as(v))])
        - logits
        for text, (logits, _) in zip(texts, runs)
    ]
    wanted = torch.stack([logits[0, -1, paris] for logits in by_hand]).mean().detach()
    assert abs(wanted) > 1
    assert_near(found.at(layer=5), float(wanted), oracle.some_logits(model.module))
    text = texts[0]  # one text alone has no mean of its own at each position
    alone = ip.ablation(model, text, metric=ip.metrics.logit(" Paris"), replace_by="mean")
    assert float(alone.values.abs().max()) > 0.1


def test_the_ranking_of_heads_is_one_call_and_names_the_movers_of_the_first_name() -> None:
    text = "When Mary and John went to the store, John gave a drink to"
    lead = ip.metrics.logit_difference(" Mary", " John")
    found = ip.ablation(pocket(), text, metric=lead)
    first = found.top(1)[0]
    assert (first["layer"], first["head"]) == (6, 0)
    again = ip.Scores.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again.values.equal(found.values)
    assert found.errors is None
    html = found.html()
    loads_nothing(html)
    assert "others may stand in for it" in html


def test_errors_say_what_to_write() -> None:
    model = pocket()
    options: dict[str, Any] = {"metric": ip.metrics.logit(" Paris")}
    with pytest.raises(
        ValueError, match=r"replace_by is 'zero', 'mean' or 'resample'; got 'median'"
    ):
        ip.ablation(model, "a text", replace_by="median", **options)
    with pytest.raises(ValueError, match=r"reference goes with replace_by='mean'"):
        ip.ablation(model, "a text", reference="b", **options)
    with pytest.raises(ValueError, match=r"per_position goes with replace_by='mean'"):
        ip.ablation(model, "a text", replace_by="resample", per_position=True, **options)
    with pytest.raises(ValueError, match=r"text 0 has 5 tokens, and no other text has as many"):
        ip.ablation(model, "The Eiffel Tower is in", replace_by="resample", **options)
    texts = ["The Eiffel Tower is in", "The Eiffel"]
    with pytest.raises(ValueError, match=r"tokens, so that positions are not the same places"):
        ip.ablation(model, texts, replace_by="mean", per_position=True, **options)
    with pytest.raises(ValueError, match=r"has no mean over positions"):
        ip.ablation(model, "The Eiffel Tower is in", site="pattern", replace_by="mean", **options)
    with pytest.raises(TypeError, match=r"a metric is one of ip\.metrics"):
        ip.ablation(model, "a text", metric={"a": ip.metrics.logit(1)})
    with pytest.raises(ip.InterposeError, match="no site 'zz'"):
        ip.ablation(model, "a text", site="zz", over="layer", replace_by="mean", **options)


def test_nothing_is_left_behind() -> None:
    model = build("llama")
    before = state_of(model.module)
    for by in ("zero", "mean", "resample"):
        ip.ablation(model, tokens(), metric=METRIC, replace_by=by)
    assert same_state(before, state_of(model.module))
    assert not any(parameter.requires_grad for parameter in model.module.parameters())


def test_another_text_is_never_one_that_is_the_same() -> None:
    """Its value would be the unit's own, and the effect nothing."""
    model, rows = build("gpt2"), tokens(2)
    twice = torch.cat([rows, rows])
    for reference in (None, twice):
        found = ip.ablation(model, twice, metric=METRIC, replace_by="resample", reference=reference)
        assert all(
            not torch.equal(twice[n], twice[m]) for n, m in enumerate(found.protocol["draw"])
        )
        assert found.values.abs().min() > 0
    with pytest.raises(ValueError, match="no other text has as many"):
        ip.ablation(model, rows[:1], metric=METRIC, replace_by="resample", reference=rows[:1])


def test_means_are_taken_of_a_single_site_too() -> None:
    model = build("llama")
    every = ip.ablation(model, tokens(), metric=METRIC, replace_by="mean")
    one = ip.ablation(model, tokens(), metric=METRIC, replace_by="mean", site=("z", 1), over="head")
    torch.testing.assert_close(one.values, every.values[1], rtol=1e-4, atol=1e-6)
