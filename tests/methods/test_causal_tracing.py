"""Causal tracing by one forward per cell with raw torch hooks: noise on embeddings, clean values put back."""

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
from tests.models.texts import PAD, speaking
from tests.pages import loads_nothing
from tests.sweeps import oracle
from tests.sweeps.oracle import Spot

pytestmark = pytest.mark.bits

ATTENTION = {"gpt2": "attn", "llama": "self_attn", "gemma2": "self_attn", "gpt_neox": "attention"}
LAYERS, LENGTH, SAMPLES, ANSWER = 4, 6, 3, 11
SUBJECT = [2, 3]
METRIC = ip.metrics.logit_difference(ANSWER, 42)


@functools.cache
def build(name: str) -> Any:
    return ip.wrap(oracle.build(name, LAYERS).requires_grad_(False))


@functools.cache
def pocket() -> Any:
    return ip.load("pocket").requires_grad_(False)


def tokens() -> Tensor:
    return oracle.pair(1, LENGTH, 3)[0]


def spot(module: Any, name: str, site: str, layer: int) -> Spot:
    block = oracle.blocks(module)[layer]
    if site == "attn_out":
        return Spot(block.get_submodule(ATTENTION[name]), True)
    found = oracle.spot(module, name, site, layer)
    assert found is not None
    return found


def by_hand(
    module: Any, name: str, site: str, windows: list[list[int]], subject: list[int], seed: int = 0
) -> tuple[Tensor, Tensor]:
    """The metric with values restored, [window, pos, sample], and of the noisy runs, [sample]."""
    embed = module.get_input_embeddings()
    rows = embed(torch.arange(embed.weight.shape[0]))
    draw = torch.Generator("cpu").manual_seed(seed)
    shape = (SAMPLES, len(subject), rows.shape[-1])
    noise = 3 * rows.std() * torch.randn(shape, generator=draw, device="cpu").to(rows)
    given = tokens().expand(SAMPLES, -1)
    places = [spot(module, name, site, layer) for layer in range(LAYERS)]
    clean = oracle.values(module, tokens(), places)

    def blur(value: Tensor) -> Tensor:
        value[:, subject] += noise
        return value

    def run(layers: list[int], pos: int) -> Tensor:
        with ExitStack() as stack:
            stack.enter_context(Spot(embed, True).through(blur))
            for layer in layers:

                def restore(value: Tensor, layer: int = layer) -> Tensor:
                    value[:, pos] = clean[layer][:, pos]
                    return value

                stack.enter_context(places[layer].through(restore))
            logits = oracle.logits(module, given)[:, -1]
        return logits[:, ANSWER] - logits[:, 42]

    each = [torch.stack([run(layers, pos) for pos in range(LENGTH)]) for layers in windows]
    return torch.stack(each), run([], 0)


WINDOWS = {
    1: [[0], [1], [2], [3]],
    2: [[0], [0, 1], [1, 2], [2, 3]],
    3: [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]],
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(
    ("site", "window"), [("resid_post", 1), ("mlp_out", 2), ("attn_out", 3), ("mlp_out", 1)]
)
def test_it_is_what_one_forward_for_each_cell_gives(name: str, site: str, window: int) -> None:
    model = build(name)
    wanted, noisy = by_hand(model.module, name, site, WINDOWS[window], SUBJECT)
    effect = wanted - noisy
    assert float(effect.abs().max()) > 0.1
    found = ip.causal_tracing(
        model,
        tokens(),
        subject=SUBJECT,
        metric=METRIC,
        site=site,
        window=window,
        samples=SAMPLES,
        max_rows=7,
    )
    assert oracle.near(model.module, found.values, effect.mean(-1))
    assert found.errors is not None
    assert oracle.near(model.module, found.errors, effect.std(-1) / SAMPLES**0.5)
    assert_near(found.protocol["noisy"], float(noisy.mean()), oracle.some_logits(model.module))
    clean = oracle.logits(model.module, tokens())[0, -1]
    assert_near(
        found.protocol["clean"], float(clean[ANSWER] - clean[42]), oracle.some_logits(model.module)
    )
    assert not found.values[:, : SUBJECT[0]].any()  # exactly
    assert found.axes == {"layer": [0, 1, 2, 3], "pos": list(range(LENGTH))}


@pytest.mark.parametrize("name", ATTENTION)
def test_restoring_all_that_noise_changed_gives_the_clean_run(name: str) -> None:
    model = build(name)
    options: dict[str, Any] = {"metric": METRIC, "samples": SAMPLES}
    # At the last position nothing else is touched by the noise, whatever the layer.
    last = ip.causal_tracing(model, tokens(), subject=-1, **options)
    back = last.protocol["clean"] - last.protocol["noisy"]
    assert abs(back) > 1e-2
    assert oracle.near(model.module, last.values[:, -1], torch.tensor(back))
    # Before the first block a subject of one token is all there is to restore.
    first = ip.causal_tracing(model, tokens(), subject=2, site="resid_pre", **options)
    back = first.protocol["clean"] - first.protocol["noisy"]
    assert_near(first.at(layer=0, pos=2), back, oracle.some_logits(model.module))


def test_with_hooks_of_somebody_else_runs_come_one_after_another() -> None:
    options: dict[str, Any] = {
        "subject": SUBJECT,
        "metric": METRIC,
        "samples": SAMPLES,
        "window": 2,
    }
    model = build("llama")
    quick = ip.causal_tracing(model, tokens(), **options)
    with model.hooks(fwd_hooks=[(("mlp_out", 0), lambda value, hook: None)]):
        alone = ip.causal_tracing(model, tokens(), **options)
    assert quick.protocol["plan"].startswith("wavefront, ")
    assert alone.protocol["plan"].startswith("one per cell, ")
    assert oracle.near(model.module, quick.values, alone.values)
    assert float(quick.values.abs().max()) > 0.1


def test_noises_follow_the_seed_and_some_places_are_those_of_all() -> None:
    model, options = build("gpt2"), {"subject": SUBJECT, "metric": METRIC, "samples": SAMPLES}
    before = torch.get_rng_state()
    one, same, other = (ip.causal_tracing(model, tokens(), seed=s, **options) for s in (1, 1, 2))
    assert one.values.equal(same.values)
    assert not torch.allclose(one.values, other.values, atol=1e-3)
    assert torch.equal(before, torch.get_rng_state())
    some = ip.causal_tracing(
        model,
        tokens(),
        seed=1,
        layer=[-1, 1],
        pos=[0, 4],
        samples=SAMPLES,
        subject=SUBJECT,
        metric=METRIC,
    )
    assert oracle.near(model.module, some.values, one.values[[3, 1]][:, [0, 4]])
    assert some.axes == {"layer": [3, 1], "pos": [0, 4]}


def test_the_pocket_model_keeps_the_city_at_the_landmark_until_block_5() -> None:
    model, text = pocket(), "The Eiffel Tower is in"
    found = ip.causal_tracing(model, text, subject="Eiffel Tower", answer=" Paris")
    assert found.protocol["subject at"] == [1, 2]
    assert found.protocol["clean"] > 0.8 > 0.2 > found.protocol["noisy"]
    early, late = found.at(layer=1), found.at(layer=5)
    assert int(early.argmax()) == 1
    assert int(late.argmax()) == 4
    own = ip.causal_tracing(model, text, subject=" Eiffel Tower")
    assert own.protocol["metric"] == "probability(' Paris')"
    assert own.values.equal(found.values)
    assert found.tokens == ["The", " Eiffel", " Tower", " is", " in"]
    again = ip.Scores.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again.values.equal(found.values)
    assert again.errors is not None
    html = found.html()
    loads_nothing(html)
    assert "stored there" in html


def test_errors_show_the_tokens_and_what_there_is() -> None:
    model, text = pocket(), "The Eiffel Tower is in"
    with pytest.raises(
        ip.NothingSelected, match=r"'Trevi' is not in text 0, whose tokens are \['The', ' Eiffel'"
    ):
        ip.causal_tracing(model, text, subject="Trevi")
    with pytest.raises(IndexError, match="pos 9 is not there: text 0 has positions 0 to 4"):
        ip.causal_tracing(model, text, subject=[9])
    with pytest.raises(ValueError, match=r"the subject has no positions: \[\]"):
        ip.causal_tracing(model, text, subject=[])
    with pytest.raises(ValueError, match=r"give answer=... or metric=..., not both"):
        ip.causal_tracing(model, text, subject=1, answer=" Paris", metric=METRIC)
    with pytest.raises(ValueError, match=r"'blocks.0.attn.hook_pattern' is \('batch', 'head'"):
        ip.causal_tracing(model, text, subject=1, site="pattern")
    with pytest.raises(ValueError, match="causal tracing is of one text and its subject; got 2"):
        ip.causal_tracing(model, [text, text], subject=1)
    with pytest.raises(ValueError, match="samples and window are at least 1; got 0 and 1"):
        ip.causal_tracing(model, text, subject=1, samples=0)
    with pytest.raises(IndexError, match=r"layer 7 is not there: 'resid_post' has"):
        ip.causal_tracing(model, text, subject=1, layer=[7])
    with pytest.raises(ip.SiteNotFound, match="no site 'zz'"):
        ip.causal_tracing(model, text, subject=1, site="zz")


def test_nothing_is_left_behind() -> None:
    model = build("gpt_neox")
    before = state_of(model.module)
    ip.causal_tracing(model, tokens(), subject=SUBJECT, metric=METRIC, samples=SAMPLES)
    with pytest.raises(ZeroDivisionError):
        ip.causal_tracing(model, tokens(), subject=SUBJECT, metric=lambda logits: 1 / 0)
    assert same_state(before, state_of(model.module))


def test_an_answer_for_each_of_one_text_is_the_answer() -> None:
    model, options = build("gpt2"), {"subject": SUBJECT, "samples": SAMPLES}
    one = ip.causal_tracing(model, tokens(), metric=METRIC, **options)
    listed = ip.metrics.logit_difference([ANSWER], [42])
    assert torch.equal(
        ip.causal_tracing(model, tokens(), metric=listed, **options).values, one.values
    )
    with pytest.raises(IndexError, match="layer is empty"):
        ip.causal_tracing(model, tokens(), layer=[], **options)


def test_padding_is_not_seen() -> None:
    model, options = speaking("llama"), {"subject": [-2], "metric": METRIC, "samples": SAMPLES}
    padded = torch.cat([torch.full((1, 3), PAD), tokens()], 1)
    places = range(-LENGTH, 0)
    one, other = (
        ip.causal_tracing(model, given, pos=places, **options) for given in (padded, tokens())
    )
    assert other.values.abs().max() > 1e-2
    assert_near(one.values, other.values, oracle.some_logits(model.module))
