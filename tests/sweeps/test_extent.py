"""What axes range over, and what all places have though no axis goes through it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import interpose as ip
from tests.bounds import assert_near

pytestmark = pytest.mark.bits

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
LEAD = ip.metrics.logit_difference(" Mary", " John")


@pytest.fixture(scope="module")
def model() -> ip.TransformerModel:
    return ip.load("pocket")


def sweep(model: Any, **words: Any) -> ip.SweepResult:
    return ip.sweep(model, CLEAN, CORRUPT, metric=LEAD, progress=False, **words)


def patched(model: ip.TransformerModel, site: str, **where: Any) -> float:
    """The metric of one run with the clean value put in by an edit."""
    with torch.no_grad():
        _, cache = model.run_with_cache(CLEAN, names_filter=site)
        logits = model.run_with_hooks(CORRUPT, hooks=[ip.patch(site, cache, **where)])[0, -1]
    return float(logits[model.to_single_token(" Mary")] - logits[model.to_single_token(" John")])


@pytest.mark.parametrize("plan", ["auto", "batches", "one per cell"])
def test_what_is_no_axis_but_was_chosen_holds_at_every_place(
    model: ip.TransformerModel, plan: str
) -> None:
    logits = model(CORRUPT)
    one = sweep(model, site="z", over="layer", layer=[6], head=[0], plan=plan)
    assert_near(one.values, patched(model, "z", layer=6, head=0), logits)
    whole = sweep(model, site="z", over="layer", layer=[6], plan=plan)
    assert abs(float(one.values - whole.values)) > 1
    there = sweep(model, site="z", over=("layer", "head"), pos=9, plan=plan)
    wanted = patched(model, "z", layer=5, head=3, pos=9)
    assert_near(there.values[5, 3], wanted, logits)
    assert abs(wanted - patched(model, "z", layer=5, head=3)) > 0.05
    before = sweep(model, site="z", over=("layer", "head"), pos=[0], plan=plan)
    assert_near(before.effect, torch.zeros(()), logits)
    neuron = sweep(model, site="post", over="layer", layer=-1, neuron=7, plan=plan)
    wanted = patched(model, "post", layer=6, neuron=7)
    assert_near(neuron.values, wanted, logits)


def test_one_layer_may_be_said_in_four_ways(model: ip.TransformerModel) -> None:
    wanted = sweep(model, site="z", over=("layer", "head"), layer=[5]).values[0]
    assert wanted.std() > 0.5
    for words in (
        {"site": "z", "layer": 5},
        {"site": ("z", 5)},
        {"site": "blocks.5.attn.hook_z"},
        {"site": "z", "layer": slice(5, 6), "over": ("layer", "head")},
    ):
        found = sweep(model, **{"over": ("head",), **words})
        assert found.values.reshape(-1).equal(wanted)


def test_several_of_what_is_no_axis_are_refused_with_the_ways_out(
    model: ip.TransformerModel,
) -> None:
    for given in ([0, 1], slice(0, 2)):
        with pytest.raises(ValueError, match="the sweep does not go over 'head'") as caught:
            sweep(model, site="z", over="layer", head=given)
        assert "Add 'head' to over=('layer',), give one, or make an edit" in str(caught.value)


def test_all_neurons_are_gone_through_unless_some_are_chosen(model: ip.TransformerModel) -> None:
    found = sweep(model, site="post", over=("layer", "neuron"), layer=6)
    assert found.axes["neuron"] == list(range(model.cfg.d_mlp))
    some = sweep(model, site="post", over=("layer", "neuron"), layer=6, neuron=[3, -1])
    assert some.axes["neuron"] == [3, 767]
    assert_near(some.values, found.values[:, [3, 767]], model(CORRUPT))


@pytest.mark.parametrize(
    ("words", "kind", "text"),
    [
        (
            {"pos": [" John"]},
            TypeError,
            "positions are numbers; got ' John'; model.to_str_tok",
        ),
        ({"layer": []}, IndexError, "layer is empty: the model has layers 0 to 6"),
        ({"layer": 9}, IndexError, "layer 9 is not there: the model has layers 0 to 6"),
        ({"site": "residpre"}, ip.SiteNotFound, "did you mean 'blocks.0.hook_resid_pre'"),
        ({"site": "z", "over": ("head",)}, ip.AmbiguousSite, "say which"),
    ],
)
def test_wrong_places_are_named(
    model: ip.TransformerModel, words: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        sweep(model, **words)


def test_other_modules_and_tokens_that_are_not_there_are_refused(
    model: ip.TransformerModel,
) -> None:
    net = ip.wrap(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(ip.Unsupported, match="a sweep needs a model of transformers"):
        ip.sweep(net, torch.ones(1, 2), metric=LEAD)
    with pytest.raises(ValueError, match=r"has token 99999, and the model tokens 0 to \d+"):
        ip.sweep(model, CLEAN, CORRUPT, metric=ip.metrics.logit(99999), progress=False)


def test_two_texts_that_give_the_same_are_remarked_on(model: ip.TransformerModel) -> None:
    found = ip.sweep(model, CLEAN, CLEAN, metric=LEAD, progress=False)
    assert "the two texts give the same: there is nothing to carry over" in repr(found)
    assert "the two texts give the same" not in repr(sweep(model))


def test_a_sweep_is_a_picture_too(model: ip.TransformerModel) -> None:
    found = sweep(model, site="z", over=("layer", "head"))
    shown = f"{float(found.normalised[6, 0]):.2f}"
    assert shown in found.svg()
    assert found.svg().count("<rect") == 1 + 7 * 6


def test_long_lists_of_tokens_are_cut_in_titles() -> None:
    names = [" Mary"] * 20
    assert ip.metrics.label(ip.metrics.logit(names)) == (
        "logit([' Mary', ' Mary', ' Mary', ... 20 in all])"
    )
    assert ip.metrics.label(ip.metrics.logit(" Mary", pos=3)) == "logit(' Mary', pos=3)"
    assert ip.metrics.label(len) == "len"


def test_a_result_says_what_all_its_places_have(model: ip.TransformerModel) -> None:
    found = sweep(model, site="z", over="layer", head=-1, pos=[9])
    assert found.fixed == {"head": 5, "pos": 9}
    assert "z at head 5 at pos 9 ' John' patched, by layer (7)" in repr(found)
    assert ip.SweepResult.from_dict(found.to_dict()).fixed == found.fixed
    assert sweep(model).fixed == {}
    ablated = ip.ablation(model, CLEAN, metric=LEAD, pos=-1)
    assert ablated.protocol["pos"] == 13
