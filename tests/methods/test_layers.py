"""All methods read layers the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import interpose as ip
from interpose.methods.layers import chosen_layers

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
LEAD = ip.metrics.logit_difference(" Mary", " John")
METHODS: dict[str, Callable[..., Any]] = {
    "logit_lens": lambda m, **w: ip.logit_lens(m, CLEAN, **w),
    "direct_logit_attribution": lambda m, **w: ip.direct_logit_attribution(
        m, CLEAN, answer=" Mary", by="head", **w
    ),
    "ablation": lambda m, **w: ip.ablation(m, CLEAN, metric=LEAD, **w),
    "activation_patching": lambda m, **w: ip.activation_patching(
        m, CLEAN, CORRUPT, metric=LEAD, **w
    ),
    "causal_tracing": lambda m, **w: ip.causal_tracing(
        m, CLEAN, subject=" store", answer=" Mary", samples=1, **w
    ),
    "attention_knockout": lambda m, **w: ip.attention_knockout(
        m, CLEAN, metric=LEAD, query=-1, key=9, **w
    ),
    "attention_patterns": lambda m, **w: ip.attention_patterns(m, CLEAN, **w),
    "head_scores": lambda m, **w: ip.head_scores(m, "previous", texts=CLEAN, **w),
    "attribution_patching": lambda m, **w: ip.attribution_patching(
        m, CLEAN, CORRUPT, metric=LEAD, **w
    ),
    "saliency": lambda m, **w: ip.saliency(m, CLEAN, metric=LEAD, site="resid_pre", **w),
    "integrated_gradients": lambda m, **w: ip.integrated_gradients(
        m, CLEAN, metric=LEAD, site="resid_pre", baseline=CORRUPT, steps=2, **w
    ),
    "probe": lambda m, **w: ip.probe(
        m, ["one", "two", "a", "b", "the", "to"], [0, 1] * 3, folds=2, control=False, **w
    ),
}


@pytest.fixture(scope="module")
def model() -> ip.TransformerModel:
    return ip.load("pocket")


@pytest.mark.parametrize("name", METHODS)
def test_one_layer_several_and_those_from_the_end(model: ip.TransformerModel, name: str) -> None:
    run = METHODS[name]
    assert run(model, layer=[2, 5]).axes["layer"] == [2, 5]
    for given in (5, [5], [-2], -2, [5, 5], [5, -2]):
        assert run(model, layer=given).axes["layer"] == [5], given


@pytest.mark.parametrize("name", METHODS)
def test_layers_that_are_not_there_are_refused(model: ip.TransformerModel, name: str) -> None:
    run = METHODS[name]
    for given in ([9], 9, [-9], []):
        with pytest.raises((IndexError, ValueError, ip.NothingSelected, ip.SiteNotFound)):
            run(model, layer=given)
    with pytest.raises((TypeError, ValueError)):
        run(model, layer=["3"])


def test_what_is_asked_for_is_given_in_its_order_and_errors_say_what_is_there() -> None:
    def chosen(layers: Any) -> list[int]:
        return chosen_layers(layers, [0, 2, 4, 6], 7, "'z'")

    assert chosen(None) == [0, 2, 4, 6]
    assert chosen([4, 0, -1, 4]) == [4, 0, 6]
    assert chosen(slice(1, 5)) == [2, 4]
    for wrong in ("3", 3.0, True):
        with pytest.raises(TypeError, match=f"layers are whole numbers; got {wrong!r}"):
            chosen([wrong])
    with pytest.raises(
        IndexError, match="layer is empty: 'z' has layers 0, 2, 4, 6; None means all"
    ):
        chosen([])
    with pytest.raises(IndexError, match="layer 3 is not there: 'z' has layers 0, 2, 4, 6"):
        chosen([2, 3])
