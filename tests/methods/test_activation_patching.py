"""Every family of patching by one run for each cell, as TransformerLens's functions do it, and by raw torch hooks."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch

import interpose as ip
from interpose.dialects.transformer_lens import patching
from interpose.methods.activation_patching import FAMILIES
from tests.bounds import assert_near
from tests.leftovers import same_state, state_of
from tests.pages import loads_nothing
from tests.sweeps import oracle
from tests.sweeps.oracle import Cell, at, head

NAMES = ("gpt2", "llama", "gemma2", "gpt_neox")
LENGTH, FIRST = 6, 3
METRIC = ip.metrics.logit_difference(11, 42)
PROMPTS = (
    "When Mary and John went to the store, John gave a drink to",
    "When Mary and John went to the store, Mary gave a drink to",
)


def lead(logits: torch.Tensor) -> torch.Tensor:
    return logits[..., -1, 11] - logits[..., -1, 42]


@functools.cache
def build(name: str) -> Any:
    return ip.wrap(oracle.build(name).requires_grad_(False))


@functools.cache
def pocket() -> Any:
    return ip.load("pocket").requires_grad_(False)


def there(model: Any, family: str) -> bool:
    """Whether a model has a family's sites: parallel blocks have no stream between attention and MLP."""
    return family != "resid_mid" or "blocks.0.hook_resid_mid" in model.sites


def by_hand(model: Any, base: torch.Tensor, cache: ip.Cache) -> dict[str, torch.Tensor]:
    """Each family by one run for each cell, as the functions of TransformerLens's names do it."""

    def run(family: str) -> torch.Tensor:
        function = getattr(patching, f"get_act_patch_{family}")
        return function(model, base, cache, lambda logits: lead(logits).mean())  # type: ignore[no-any-return]

    wholes = ("block_every", "attn_head_all_pos_every", "attn_head_by_pos_every")
    found = {family: run(family) for family in wholes}
    found["resid_pre"], found["attn_out"], found["mlp_out"] = found["block_every"]
    for places in ("all_pos", "by_pos"):
        for number, kind in enumerate(("out", "q", "k", "v", "pattern")):
            single = found[f"attn_head_{places}_every"][number]
            heads = model.cfg.n_key_value_heads if kind in ("k", "v") else model.cfg.n_heads
            found[f"attn_head_{kind}_{places}"] = single[..., :heads]
    if there(model, "resid_mid"):
        found["resid_mid"] = run("resid_mid")
    found["attn_head_pattern_dest_src_pos"] = run("attn_head_pattern_dest_src_pos")
    return found


@pytest.mark.parametrize(
    ("name", "patch"), [*((name, "clean") for name in NAMES), ("llama", "corrupt")]
)
def test_every_family_is_what_one_run_for_each_cell_gives(name: str, patch: str) -> None:
    model = build(name)
    clean, corrupt = oracle.pair(2, LENGTH, FIRST)
    base, source = (corrupt, clean) if patch == "clean" else (clean, corrupt)
    wanted = by_hand(model, base, model.run_with_cache(source)[1])
    assert set(FAMILIES) - set(wanted) <= {"resid_post", "resid_mid"}
    largest = 0.0
    for family, values in wanted.items():
        options = {"metric": METRIC, "family": family, "patch": patch}
        found = ip.activation_patching(model, clean, corrupt, **options)
        assert found.values.shape == values.shape, family
        assert found.values.isnan().equal(values.isnan()), family
        off = float((found.values - values).nan_to_num().abs().max())
        assert off < 1e-4, (family, off)
        largest = max(largest, float(found.effect.nan_to_num().abs().max()))
    assert largest > 0.1


def test_grouped_queries_have_fewer_keys_and_values_and_the_rest_is_nan() -> None:
    model = build("llama")
    assert (model.cfg.n_heads, model.cfg.n_key_value_heads) == (4, 2)
    clean, corrupt = oracle.pair(2, LENGTH, FIRST)
    found = ip.activation_patching(
        model, clean, corrupt, metric=METRIC, family="attn_head_all_pos_every"
    )
    assert found.axes["site"] == ["z", "q", "k", "v", "pattern"]
    missing = found.values.isnan()
    assert missing[2:4, :, 2:].all()
    assert int(missing.sum()) == 2 * 3 * 2
    single = ip.activation_patching(
        model, clean, corrupt, metric=METRIC, family="attn_head_k_all_pos"
    )
    assert found.each[:, 2, :, :2].equal(single.each)


@pytest.mark.parametrize("name", NAMES)
def test_raw_hooks_agree_on_the_stream_and_on_heads(name: str) -> None:
    model = build(name)
    clean, corrupt = oracle.pair(2, LENGTH, FIRST)
    spots = [oracle.spot(model.module, name, "resid_pre", layer) for layer in range(3)]
    cells = [Cell(spot, at(pos)) for spot in spots if spot for pos in range(LENGTH)]
    wanted = lead(oracle.patched(model.module, corrupt, clean, cells)).unflatten(0, (3, LENGTH))
    found = ip.activation_patching(model, clean, corrupt, metric=METRIC)
    assert oracle.near(model.module, found.each[0], wanted)
    spots = [oracle.spot(model.module, name, "z", layer) for layer in range(3)]
    size = oracle.values(model.module, clean, [s for s in spots[:1] if s])[0].shape[-1] // 4
    cells = [Cell(spot, head(number, size)) for spot in spots if spot for number in range(4)]
    wanted = lead(oracle.patched(model.module, corrupt, clean, cells)).unflatten(0, (3, 4))
    found = ip.activation_patching(
        model, clean, corrupt, metric=METRIC, family="attn_head_out_all_pos"
    )
    assert oracle.near(model.module, found.each[0], wanted)


@pytest.mark.parametrize("name", NAMES)
def test_all_that_differs_gives_the_other_run_and_what_comes_before_is_an_exact_zero(
    name: str,
) -> None:
    model = build(name)
    clean, _ = oracle.pair(2, LENGTH, FIRST)
    corrupt = clean.clone()
    corrupt[:, -1] = 65  # the last token alone: its position is all that differs
    for family in ("resid_pre", "resid_post"):
        found = ip.activation_patching(model, clean, corrupt, metric=METRIC, family=family)
        way = found.clean - found.baseline
        assert float(way.abs().min()) > 1e-3
        effect = found.each[0] - found.baseline[0]
        assert oracle.near(model.module, effect[:, -1], way[:1].expand_as(effect[:, -1]))
        assert not found.effect[:, :-1].any()
        assert not effect[:, :-1].any()


def test_on_the_pocket_model_the_name_moves_to_the_end_in_the_last_block() -> None:
    lead = ip.metrics.logit_difference(" Mary", " John")
    found = ip.activation_patching(pocket(), *PROMPTS, metric=lead, family="block_every")
    assert found.axes["site"] == ["resid_pre", "attn_out", "mlp_out"]
    assert_near(float(found.normalised[0, 0, 9]), 1, oracle.some_logits(pocket().module))
    assert not found.effect[:, :, :9].any()
    assert found.tally.forwards == 6
    last = found.top(1)[0]
    assert (last["site"], last["layer"], last["token"]) == ("attn_out", 6, " to")
    again = ip.SweepResult.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again.effect.equal(found.effect)
    html = found.html()
    loads_nothing(html)
    assert "attn_out" in html


def test_some_layers_and_heads_are_those_of_all() -> None:
    clean, corrupt = oracle.pair(2, LENGTH, FIRST)
    given = (build("gpt2"), clean, corrupt)
    for family in ("attn_head_by_pos_every", "attn_head_q_by_pos"):
        every = ip.activation_patching(*given, metric=METRIC, family=family)
        some = ip.activation_patching(
            *given, metric=METRIC, family=family, layer=[-1, 0], head=[3], pos=[4, 5]
        )
        wanted = every.values[..., [2, 0], 4:, 3:]
        assert torch.allclose(some.values, wanted, atol=1e-5)
        assert (some.axes["layer"], some.axes["head"]) == ([2, 0], [3])


def test_several_metrics_stay_apart() -> None:
    clean, corrupt = oracle.pair(2, LENGTH, FIRST)
    metrics = {"lead": METRIC, "kl": ip.metrics.kl()}
    found = ip.activation_patching(
        build("llama"), clean, corrupt, metric=metrics, family="attn_head_all_pos_every"
    )
    assert found.values.shape == (2, 5, 3, 4)
    single = ip.activation_patching(
        build("llama"), clean, corrupt, metric=ip.metrics.kl(), family="attn_head_q_all_pos"
    )
    assert torch.allclose(found.values[1, 1], single.values, atol=1e-6)


def test_errors_say_what_there_is() -> None:
    model = pocket()
    options: dict[str, Any] = {"metric": ip.metrics.logit(" Mary")}
    with pytest.raises(ValueError, match=r"no family is called 'resid'. There are: resid_pre, "):
        ip.activation_patching(model, *PROMPTS, family="resid", **options)
    with pytest.raises(ValueError, match="patching needs a second text"):
        ip.activation_patching(model, PROMPTS[0], None, **options)
    with pytest.raises(ValueError, match=r"'attn_out' goes over layer, pos: head="):
        ip.activation_patching(model, *PROMPTS, family="attn_out", head=[0], **options)
    with pytest.raises(ValueError, match="so that positions do not correspond"):
        ip.activation_patching(model, "The Eiffel Tower", "Rome", **options)
    pair = oracle.pair(1, LENGTH, FIRST)
    with pytest.raises(ip.InterposeError, match=r"GPTNeoXForCausalLM has no"):
        ip.activation_patching(build("gpt_neox"), *pair, metric=METRIC, family="resid_mid")


def test_nothing_is_left_behind() -> None:
    model = build("gemma2")
    before = state_of(model.module)
    for family in ("attn_head_all_pos_every", "block_every"):
        pair = oracle.pair(2, LENGTH, FIRST)
        ip.activation_patching(model, *pair, metric=METRIC, family=family)
    assert same_state(before, state_of(model.module))


def test_chosen_heads_that_keys_and_values_lack_are_nan() -> None:
    model = build("llama")  # 4 heads, 2 of keys and values
    clean, corrupt = oracle.pair()
    options: dict[str, Any] = {"metric": METRIC, "family": "attn_head_all_pos_every"}
    every = ip.activation_patching(model, clean, corrupt, **options)
    for heads, numbers in (([3], [3]), ([1, 3], [1, 3]), ([-3], [1]), (slice(1, 3), [1, 2])):
        some = ip.activation_patching(model, clean, corrupt, head=heads, **options)
        assert some.axes == {**every.axes, "head": numbers}
        torch.testing.assert_close(
            some.values, every.values[..., numbers], rtol=1e-4, atol=1e-5, equal_nan=True
        )
        assert some.values[:2].isfinite().all()
    for wrong in ([], [4]):
        with pytest.raises(IndexError, match="the model has heads 0 to 3"):
            ip.activation_patching(model, clean, corrupt, head=wrong, **options)


def test_single_numbers_of_patterns_know_whose_answer_is_whose() -> None:
    model = pocket()
    clean = ["When Mary and John ate, John gave it to", "When Anna and Tom ate, Tom gave it to"]
    corrupt = ["When Mary and John ate, Mary gave it to", "When Anna and Tom ate, Anna gave it to"]
    family = "attn_head_pattern_dest_src_pos"
    both = ip.activation_patching(
        model,
        clean,
        corrupt,
        metric=ip.metrics.logit_difference([" Mary", " Anna"], [" John", " Tom"]),
        family=family,
        layer=[6],
        pos=[-1],
    )
    assert list(both.axes) == ["layer", "head", "pos", "key"]
    for number, names in enumerate(((" Mary", " John"), (" Anna", " Tom"))):
        alone = ip.activation_patching(
            model,
            clean[number],
            corrupt[number],
            metric=ip.metrics.logit_difference(*names),
            family=family,
            layer=[6],
            pos=[-1],
        )
        assert oracle.near(model.module, both.each[..., number], alone.each[..., 0])
        assert oracle.near(model.module, both.clean[:, number], alone.clean[:, 0])
    assert both.tally.forwards >= 2 * alone.tally.forwards - 2
    assert float(both.effect.abs().max()) > 0.05
