"""Path patching sender by sender with raw torch hooks, and in closed form where nothing is between."""

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
from tests.sweeps.oracle import Spot

pytestmark = pytest.mark.bits

NAMES = ("gpt2", "llama", "gemma2", "gpt_neox")
LAYERS, HEADS, LENGTH = 3, 4, 6
METRIC = ip.metrics.logit_difference(11, 42)
TEXTS = (
    "When Mary and John went to the store, John gave a drink to",
    "When Mary and John went to the store, Mary gave a drink to",
)


def lead(logits: Tensor) -> Tensor:
    return logits[..., -1, 11] - logits[..., -1, 42]


@functools.cache
def build(name: str) -> Any:
    return ip.wrap(oracle.build(name, LAYERS).requires_grad_(False))


@functools.cache
def pocket() -> Any:
    return ip.load("pocket").requires_grad_(False)


def pair() -> tuple[Tensor, Tensor]:
    return oracle.pair(2, LENGTH, 2)


def reading(module: Any, name: str, layer: int, head: int, kind: str) -> tuple[Spot, slice]:
    """Where a query, key or value leaves its projection, and which columns are the head's."""
    block, config = oracle.blocks(module)[layer], module.config
    size = getattr(config, "head_dim", None) or config.hidden_size // HEADS
    number = "qkv".index(kind)
    if name == "gpt2":
        path, first = "attn.c_attn", number * config.hidden_size + head * size
    elif name == "gpt_neox":
        path, first = "attention.query_key_value", (3 * head + number) * size
    else:
        path, first = f"self_attn.{kind}_proj", head * size
    return Spot(block.get_submodule(path), True), slice(first, first + size)


class Hand:
    """Wang et al.'s two runs by raw hooks, for one sender at a time."""

    def __init__(self, name: str) -> None:
        self.name, self.module = name, build(name).module
        self.clean, self.corrupt = pair()
        kinds = {"z": [], "mlp_out": []}  # type: ignore[var-annotated]
        for kind, found in kinds.items():
            found += [oracle.spot(self.module, name, kind, layer) for layer in range(LAYERS)]
        self.z, self.mlps = kinds["z"], kinds["mlp_out"]
        self.clean_z = oracle.values(self.module, self.clean, self.z)
        self.corrupt_z = oracle.values(self.module, self.corrupt, self.z)
        self.clean_mlps = oracle.values(self.module, self.clean, self.mlps)
        self.size = self.clean_z[0].shape[-1] // HEADS

    def columns(self, head: int) -> slice:
        return slice(head * self.size, (head + 1) * self.size)

    def effect(self, sender: tuple[int, int], receivers: Any, frozen: bool) -> Tensor:
        base = lead(oracle.logits(self.module, self.clean))
        heard: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for layer, spot in enumerate(self.z):
                value = self.clean_z[layer].clone()
                if layer == sender[0]:
                    value[..., self.columns(sender[1])] = self.corrupt_z[layer][
                        ..., self.columns(sender[1])
                    ]
                stack.enter_context(spot.through(lambda _, value=value: value))
            for layer, spot in enumerate(self.mlps if frozen else []):
                held = self.clean_mlps[layer]
                stack.enter_context(spot.through(lambda _, held=held: held.clone()))
            if receivers == "logits":
                return lead(oracle.logits(self.module, self.clean)) - base
            places = [reading(self.module, self.name, *one) for one in receivers]
            for number, (spot, _) in enumerate(places):

                def note(value: Tensor, number: int = number) -> None:
                    heard[number] = value

                stack.enter_context(spot.through(note))
            oracle.logits(self.module, self.clean)
        with ExitStack() as stack:
            for number, (spot, own) in enumerate(places):
                value = heard[number]

                def put(now: Tensor, value: Tensor = value, own: slice = own) -> Tensor:
                    now[..., own] = value[..., own]
                    return now

                stack.enter_context(spot.through(put))
            return lead(oracle.logits(self.module, self.clean)) - base


RECEIVERS: list[Any] = [
    "logits",
    [(2, 1, "q")],
    [(1, 0, "k"), (2, 1, "v")],
    [(1, 1, "v"), (1, 3, "q"), (2, 0, "q")],
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mlps", ["live", "frozen"])
def test_it_is_what_two_runs_for_each_sender_give(name: str, mlps: str) -> None:
    model, hand = build(name), Hand(name)
    for receivers in RECEIVERS:
        wanted = torch.stack(
            [
                hand.effect((layer, head), receivers, mlps == "frozen")
                for layer in range(LAYERS)
                for head in range(HEADS)
            ]
        ).unflatten(0, (LAYERS, HEADS))
        assert float(wanted.abs().max()) > 1e-3, receivers
        found = ip.path_patching(
            model, *pair(), metric=METRIC, receivers=receivers, mlps=mlps, max_rows=10
        )
        assert oracle.near(model.module, found.values, wanted.mean(-1)), receivers
        assert found.errors is not None
        assert oracle.near(model.module, found.errors, wanted.std(-1) / 2**0.5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_with_frozen_mlps_the_way_to_the_logits_is_closed_form(name: str) -> None:
    model, hand = build(name), Hand(name)
    module = model.module
    (final,) = oracle.values(module, hand.clean, [Spot(oracle.blocks(module)[-1], True)])
    norm, head_ = (
        (module.transformer.ln_f, module.lm_head)
        if name == "gpt2"
        else (module.model.norm, module.lm_head)
    )
    base, wanted = lead(head_(norm(final))), torch.zeros(LAYERS, HEADS)
    for layer in range(LAYERS):
        weight = hand.z[layer].module.weight
        weight = weight if name == "gpt2" else weight.T  # [head and d_head, d_model]
        change = hand.corrupt_z[layer] - hand.clean_z[layer]
        for head in range(HEADS):
            own = hand.columns(head)
            stream = final + change[..., own] @ weight[own]
            wanted[layer, head] = (lead(head_(norm(stream))) - base).mean()
    found = ip.path_patching(model, *pair(), metric=METRIC, mlps="frozen")
    assert float(wanted.abs().max()) > 1e-2
    assert oracle.near(model.module, found.values, wanted)


def test_senders_behind_the_receivers_are_exact_zeros_and_not_run() -> None:
    model = build("gpt2")
    found = ip.path_patching(model, *pair(), metric=METRIC, receivers=[(1, 0, "q")])
    assert not found.values[1:].any()
    assert found.values[0].any()
    none = ip.path_patching(model, *pair(), metric=METRIC, receivers=[(0, 0, "q")])
    assert not none.values.any()
    assert none.protocol["forwards"] == 3  # the clean run, twice, and the corrupted one


def test_named_senders_have_an_axis_of_their_own() -> None:
    model = build("llama")
    every = ip.path_patching(model, *pair(), metric=METRIC)
    some = ip.path_patching(model, *pair(), metric=METRIC, senders=[(-1, 3), (0, 1)])
    assert some.axes == {"head": ["2.3", "0.1"]}
    wanted = torch.stack([every.values[2, 3], every.values[0, 1]])
    assert oracle.near(model.module, some.values, wanted)


def test_with_hooks_of_somebody_else_runs_come_one_after_another() -> None:
    model = build("gemma2")
    for receivers in ("logits", [(1, 1, "q"), (2, 1, "v")]):
        options: dict[str, Any] = {"metric": METRIC, "receivers": receivers, "max_rows": 4}
        quick = ip.path_patching(model, *pair(), **options)
        with model.hooks(fwd_hooks=[(("mlp_out", 0), lambda value, hook: None)]):
            alone = ip.path_patching(model, *pair(), **options)
        assert quick.protocol["plan"].startswith("wavefront, ")
        assert alone.protocol["plan"].startswith("one per cell, ")
        assert oracle.near(model.module, quick.values, alone.values)


def test_on_the_pocket_model_the_last_block_decides_and_hears_the_movers() -> None:
    metric = ip.metrics.logit_difference(" Mary", " John")
    direct = ip.path_patching(pocket(), *TEXTS, metric=metric)
    assert {place["layer"] for place in direct.top(6)} == {6}
    assert direct.errors is None
    receivers: list[Any] = [(6, head, "v") for head in range(6)]
    heard = ip.path_patching(pocket(), *TEXTS, metric=metric, receivers=receivers)
    assert {place["layer"] for place in heard.top(3)} == {5}
    assert not heard.values[6].any()
    again = ip.Scores.from_dict(json.loads(json.dumps(heard.to_dict())))
    assert again.values.equal(heard.values)
    html = heard.html()
    loads_nothing(html)
    assert "6.0 v" in html


def test_errors_say_what_to_write() -> None:
    given: Any = (build("llama"), *pair())
    with pytest.raises(ValueError, match="mlps is 'live' or 'frozen'; got 'off'"):
        ip.path_patching(*given, metric=METRIC, mlps="off")
    with pytest.raises(ValueError, match=r"heads with what they read: \[\(5, 1, 'q'\)"):
        ip.path_patching(*given, metric=METRIC, receivers=[(1, 2)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="path patching needs a second text"):
        ip.path_patching(given[0], given[1], None, metric=METRIC)
    with pytest.raises(ValueError, match="receivers is empty"):
        ip.path_patching(*given, metric=METRIC, receivers=[])
    with pytest.raises(IndexError, match=r"no head 1.2: layers are 0 to 2, key-value heads 0 to 1"):
        ip.path_patching(*given, metric=METRIC, receivers=[(1, 2, "k")])
    with pytest.raises(IndexError, match=r"no head 3.0: layers are 0 to 2, heads 0 to 3"):
        ip.path_patching(*given, metric=METRIC, senders=[(3, 0)])
    with pytest.raises(ip.Unsupported, match=r"block 1 has no 'blocks.1.attn.hook_z'"):
        ip.path_patching(ip.wrap(tiny.build("jamba")), *pair(), metric=METRIC)


def test_nothing_is_left_behind() -> None:
    model = build("gpt_neox")
    before = state_of(model.module)
    ip.path_patching(model, *pair(), metric=METRIC, receivers=[(2, 1, "q")])
    with pytest.raises(ZeroDivisionError):
        ip.path_patching(model, *pair(), metric=lambda logits: 1 / 0)
    assert same_state(before, state_of(model.module))


@pytest.mark.parametrize("senders", [[], (1, 2), [(1, 2, "q")]])
def test_senders_that_are_no_heads_are_refused(senders: Any) -> None:
    with pytest.raises(ValueError, match=r"senders are heads as \(layer, head\): \[\(5, 1\)"):
        ip.path_patching(build("gpt2"), *pair(), metric=METRIC, senders=senders)


def test_padding_is_not_seen() -> None:
    model, (clean, corrupt) = speaking("llama"), pair()
    start = torch.full((len(clean), 3), PAD)
    options: dict[str, Any] = {"metric": METRIC, "receivers": [(1, 0, "k"), (1, 1, "q")]}
    padded = [torch.cat([start, given], 1) for given in (clean, corrupt)]
    one, other = (ip.path_patching(model, *some, **options) for some in (padded, (clean, corrupt)))
    assert other.values.abs().max() > 1e-3
    assert_near(one.values, other.values, oracle.some_logits(model.module))


def test_the_ends_are_measured_against_the_clean_run() -> None:
    model, (clean, corrupt) = build("gpt2"), pair()
    found = ip.path_patching(model, clean, corrupt, metric=ip.metrics.kl(), senders=[(0, 1)])
    ends = [oracle.logits(model.module, given)[:, -1].log_softmax(-1) for given in (clean, corrupt)]
    wanted = (ends[0].exp() * (ends[0] - ends[1])).sum(-1).mean()
    assert_near(found.protocol["corrupt"], float(wanted), oracle.some_logits(model.module))
    assert float(wanted) > 0.02
    assert found.protocol["clean"] == 0
