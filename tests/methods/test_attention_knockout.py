"""Attention knockout with masks by hand: raw hooks hand attention a mask without the edges."""

from __future__ import annotations

import functools
import json
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from tests.bounds import assert_near
from tests.leftovers import same_state, state_of
from tests.models import tiny
from tests.models.texts import PAD, speaking
from tests.pages import loads_nothing
from tests.sweeps import oracle

ATTENTION = {"gpt2": "attn", "llama": "self_attn", "gemma2": "self_attn", "gpt_neox": "attention"}
LAYERS, HEADS, LENGTH = 4, 4, 7
METRIC = ip.metrics.logit_difference(11, 42)
TEXT = "The Eiffel Tower is in"


def lead(logits: Tensor) -> Tensor:
    return logits[..., -1, 11] - logits[..., -1, 42]


@functools.cache
def build(name: str) -> Any:
    return ip.wrap(oracle.build(name, LAYERS).requires_grad_(False))


@functools.cache
def pocket() -> Any:
    return ip.load("pocket").requires_grad_(False)


def tokens() -> Tensor:
    return oracle.pair(2, LENGTH, 3)[0]


def masked(name: str, layers: list[int], queries: Any, keys: Any, heads: Any = None) -> Tensor:
    """The metric of a run in which attention gets a mask of its own, [batch, head, query, key]."""
    module = build(name).module

    def hide(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = kwargs["attention_mask"]
        causal = torch.ones(LENGTH, LENGTH).tril().bool()
        if given is None:
            seen = causal
        else:
            seen = given if given.dtype == torch.bool else given == 0
        seen = seen.expand(2, HEADS, LENGTH, LENGTH).clone()
        for head in range(HEADS) if heads is None else heads:
            for query in queries:
                seen[:, head, query, keys] = False
        least = torch.finfo(torch.float32).min
        mask = torch.zeros(seen.shape).masked_fill(~seen, least)
        return args, {**kwargs, "attention_mask": mask}

    with ExitStack() as stack:
        for layer in layers:
            part = oracle.blocks(module)[layer].get_submodule(ATTENTION[name])
            handle = part.register_forward_pre_hook(hide, with_kwargs=True)
            stack.callback(handle.remove)
        return lead(oracle.logits(module, tokens()))


WINDOWS = {
    1: [[0], [1], [2], [3]],
    2: [[0], [0, 1], [1, 2], [2, 3]],
    3: [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]],
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("heads", [None, [0, 3]])
def test_it_is_what_masks_by_hand_give(name: str, window: int, heads: Any) -> None:
    model, base = build(name), lead(oracle.logits(build(name).module, tokens()))
    queries, keys = [4, 6], [3, 5]
    found = ip.attention_knockout(
        model, tokens(), metric=METRIC, query=queries, key=keys, window=window, head=heads
    )
    wanted = torch.stack([masked(name, some, queries, keys, heads) for some in WINDOWS[window]])
    effect = wanted - base  # [layer, example]
    assert float(effect.abs().max()) > 1e-2
    assert oracle.near(model.module, found.values, effect.mean(-1))
    assert found.errors is not None
    assert oracle.near(model.module, found.errors, effect.std(-1) / 2**0.5)
    assert_near(found.protocol["clean"], float(base.mean()), oracle.some_logits(model.module))


@pytest.mark.parametrize("name", ATTENTION)
def test_every_key_by_itself_and_those_that_no_query_sees_are_exact_zeros(name: str) -> None:
    model, base = build(name), lead(oracle.logits(build(name).module, tokens()))
    found = ip.attention_knockout(
        model, tokens(), metric=METRIC, query=[4, 5], over=("layer", "key"), max_rows=6
    )
    assert found.axes == {"layer": [0, 1, 2, 3], "key": list(range(LENGTH))}
    for layer in range(LAYERS):
        for key in range(6):
            wanted = (masked(name, [layer], [4, 5], [key]) - base).mean()
            assert_near(
                found.at(layer=layer, key=key), float(wanted), oracle.some_logits(model.module)
            )
    assert not found.values[:, 6:].any()
    if name == "gemma2":  # layers 0 and 2 see four positions back
        assert not found.values[[0, 2], 0].any()
    assert float(found.values[:-1].abs().max()) > 1e-2


def test_keys_behind_every_query_are_not_run() -> None:
    found = ip.attention_knockout(build("gpt2"), tokens(), metric=METRIC, query=2, key=[3, 6])
    assert not found.values.any()
    assert found.protocol["forwards"] == 1


def test_it_agrees_with_the_edit() -> None:
    model = pocket()
    paris = ip.metrics.probability(" Paris")
    base = model(TEXT)[0, -1].softmax(-1)[model.to_single_token(" Paris")]
    found = ip.attention_knockout(
        model, TEXT, metric=paris, query=-1, key="Eiffel Tower", window=2, layer=[-1, 4]
    )
    for layer, layers in ((6, [5, 6]), (4, [3, 4])):
        edit = ip.knockout(layers, query=-1, key=[" Eiffel", " Tower"])
        logits = model.run_with_hooks(TEXT, hooks=[edit])
        wanted = logits[0, -1].softmax(-1)[model.to_single_token(" Paris")] - base
        assert_near(found.at(layer=layer), float(wanted), oracle.some_logits(model.module))
    assert found.at(layer=6) < -0.5
    by_key = ip.attention_knockout(model, TEXT, metric=paris, query=-1, over=("layer", "key"))
    assert by_key.top(1)[0] == {**by_key.top(1)[0], "layer": 5, "key": 1}
    assert by_key.labels["key"][1] == "1 ' Eiffel'"
    again = ip.Scores.from_dict(json.loads(json.dumps(by_key.to_dict())))
    assert again.values.equal(by_key.values)
    html = by_key.html()
    loads_nothing(html)
    assert "come round through other positions" in html


def test_a_text_is_found_in_every_example_by_itself() -> None:
    texts = [TEXT, "People say that the Eiffel Tower is in"]
    options: dict[str, Any] = {"metric": ip.metrics.probability(" Paris"), "query": -1}
    both = ip.attention_knockout(pocket(), texts, key=" Eiffel", **options)
    alone = [ip.attention_knockout(pocket(), text, key=" Eiffel", **options) for text in texts]
    assert oracle.near(pocket().module, both.values, (alone[0].values + alone[1].values) / 2)
    assert both.tokens is None


def test_with_hooks_of_somebody_else_runs_come_one_after_another() -> None:
    model = build("llama")
    options: dict[str, Any] = {"metric": METRIC, "query": -1, "over": ("layer", "key"), "window": 2}
    quick = ip.attention_knockout(model, tokens(), **options)
    with model.hooks(fwd_hooks=[(("mlp_out", 0), lambda value, hook: None)]):
        alone = ip.attention_knockout(model, tokens(), **options)
    assert quick.protocol["plan"].startswith("wavefront, ")
    assert alone.protocol["plan"].startswith("one per cell, ")
    assert oracle.near(model.module, quick.values, alone.values)


def test_layers_without_attention_are_no_layers_of_it() -> None:
    model = ip.wrap(tiny.build("jamba", layers=3).requires_grad_(False))
    found = ip.attention_knockout(model, tokens(), metric=METRIC, query=-1, key=2, window=3)
    assert found.axes["layer"] == [0, 2]
    with pytest.raises(IndexError, match="layer 1 is not there: attention has layers 0, 2"):
        ip.attention_knockout(model, tokens(), metric=METRIC, query=-1, key=2, layer=[1])


def test_errors_say_what_to_write() -> None:
    options: dict[str, Any] = {"metric": ip.metrics.probability(" Paris")}
    with pytest.raises(ip.EditError, match="position 0 has no key left to look at"):
        ip.attention_knockout(pocket(), TEXT, query=0, key=0, **options)
    with pytest.raises(ValueError, match=r"say which keys are not seen: key="):
        ip.attention_knockout(pocket(), TEXT, query=-1, **options)
    with pytest.raises(ValueError, match=r"over is 'layer' or \('layer', 'key'\); got 'head'"):
        ip.attention_knockout(pocket(), TEXT, query=-1, key=1, over="head", **options)
    with pytest.raises(ip.NothingSelected, match=r"'Rome' is not in text 0, whose tokens are"):
        ip.attention_knockout(pocket(), TEXT, query=-1, key="Rome", **options)
    with pytest.raises(IndexError, match="head 6 is not there: the model has heads 0 to 5"):
        ip.attention_knockout(pocket(), TEXT, query=-1, key=1, head=[6], **options)
    with pytest.raises(ValueError, match="window is at least 1; got 0"):
        ip.attention_knockout(pocket(), TEXT, query=-1, key=1, window=0, **options)
    texts = [TEXT, "People say that the Eiffel Tower is in"]
    with pytest.raises(ValueError, match="an axis of keys needs the same places in all"):
        ip.attention_knockout(pocket(), texts, query=-1, over=("layer", "key"), **options)


def test_nothing_is_left_behind() -> None:
    model = build("gpt_neox")
    before = state_of(model.module)
    ip.attention_knockout(model, tokens(), metric=METRIC, query=-1, key=1)
    with pytest.raises(ip.EditError):
        ip.attention_knockout(model, tokens(), metric=METRIC, query=0, key=0)
    assert same_state(before, state_of(model.module))


def test_heads_count_from_the_end_and_nothing_to_cut_is_an_error() -> None:
    model, options = build("gpt2"), {"metric": METRIC, "query": -1, "key": 1}
    last = model.cfg.n_heads - 1
    found = [ip.attention_knockout(model, tokens(), head=[n], **options) for n in (last, -1)]
    assert torch.equal(found[0].values, found[1].values)
    assert found[0].values.abs().max() > 1e-3
    for name in ("head", "layer"):
        with pytest.raises(IndexError, match=name):
            ip.attention_knockout(model, tokens(), **{**options, name: []})
    for name in ("query", "key"):
        with pytest.raises(ValueError, match="no place looks, or none is seen"):
            ip.attention_knockout(model, tokens(), **{**options, name: []})


def test_padding_is_not_seen() -> None:
    model, options = speaking("llama"), {"metric": METRIC, "query": -1, "key": -3}
    padded = torch.cat([torch.full((len(tokens()), 3), PAD), tokens()], 1)
    one, other = (
        ip.attention_knockout(model, given, **options).values for given in (padded, tokens())
    )
    assert other.abs().max() > 1e-2
    assert_near(one, other, oracle.some_logits(model.module))
