"""The parts of a logit are what the algebra by hand says, and add up to it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.dialects.transformer_lens import HookedTransformer, HookedTransformerConfig
from interpose.methods.direct_logit_attribution import DirectLogitAttribution
from tests.leftovers import same_state, state_of
from tests.models import tiny
from tests.pages import loads_nothing
from tests.sweeps import oracle

TYPES = ["gpt2", "llama", "gemma2", "gpt_neox", "granite", "cohere", "phi", "olmo2", "minicpm3"]
WAYS = ["component", "layer", "head", "neuron"]
TEXT = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="module")
def pocket() -> ip.TransformerModel:
    found = ip.load("pocket")
    assert isinstance(found, ip.TransformerModel)
    return found


@cache
def built(name: str) -> Any:
    return ip.wrap(tiny.build(name, layers=3).requires_grad_(False))


def summed(found: DirectLogitAttribution) -> float:
    return float(found.values.sum()) + sum(found.rest.values())


def before_the_cap(module: Any, tokens: Tensor) -> Tensor:
    """Logits of the last position, as they are before a soft cap."""
    logits: Tensor = module(tokens).logits[:, -1]
    cap = getattr(module.config, "final_logit_softcapping", None)
    return logits if not cap else cap * torch.atanh(logits / cap)


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("name", TYPES)
def test_the_parts_add_up_to_the_bare_modules_logits(name: str, by: str) -> None:
    model = built(name)
    module, (tokens, _) = model.module, oracle.pair(batch=3)
    answer, instead = [5, 7, 9], [8, 8, 3]
    with torch.no_grad():
        logits = before_the_cap(module, tokens)
    rows = range(3)
    lead = logits[rows, answer] - logits[rows, instead]
    found = ip.direct_logit_attribution(model, tokens, answer=answer, instead=instead, by=by)
    torch.testing.assert_close(found.totals, lead, atol=1e-4, rtol=1e-4)
    assert summed(found) == pytest.approx(float(lead.mean()), abs=1e-4)
    assert abs(found.rest["remainder"]) < 1e-5
    assert found.values.abs().max() > 1e-3
    assert ("before the soft cap" in found.unit) == (name == "gemma2")
    one = ip.direct_logit_attribution(model, tokens, answer=5, by=by)
    assert summed(one) == pytest.approx(float(logits[:, 5].mean()), abs=1e-4)


def test_a_soft_cap_is_seen_also_where_it_hardly_bends_the_logits() -> None:
    module = tiny.build("gemma2", layers=2).requires_grad_(False)
    tokens, _ = oracle.pair(batch=2)
    with torch.no_grad():
        module.lm_head.weight.mul_(0.3)
        logits = module(tokens).logits[:, -1]
        plain = before_the_cap(module, tokens)
    assert 1e-3 < (1 - logits.abs().max() / plain.abs().max()) < 5e-3
    found = ip.direct_logit_attribution(ip.wrap(module), tokens, answer=5)
    assert "before the soft cap" in found.unit
    torch.testing.assert_close(found.totals, plain[:, 5], atol=1e-4, rtol=1e-4)
    few = ip.logit_lens(ip.wrap(module), tokens, logits_of=[5], pos=-1, layer=[-1])
    torch.testing.assert_close(few.values[0, :, 0, 0], logits[:, 5], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_neox", "granite"])
def test_a_heads_part_is_what_the_logit_loses_with_it_when_all_else_is_held(name: str) -> None:
    """By brute force: zero the head, take what it changes from the last stream, hold norms' scales as they were."""
    model, (tokens, _) = built(name), oracle.pair(batch=1)
    module = model.module
    found = ip.direct_logit_attribution(model, tokens, answer=5, instead=8, by="head")
    norms = [f"blocks.{layer}.ln1_post.hook_scale" for layer in range(3)]
    names = ["resid_post", "attn_out", "ln_final.hook_scale", *(norms if name == "gemma2" else [])]
    _, seen = model.run_with_cache(tokens, names_filter=names)
    held = {site: ip.fill(site, seen[site]) for site in seen if site.endswith("scale")}

    def lead(stream: Tensor) -> float:
        _, kept = model.run_with_cache(
            stream,
            start_at_layer=3,
            hooks=[held["ln_final.hook_scale"]],
            names_filter="unembed.hook_out",
        )
        return float(kept["unembed.hook_out"][0, -1, 5] - kept["unembed.hook_out"][0, -1, 8])

    whole = lead(seen["resid_post", 2])
    times = found.total / whole
    assert times == pytest.approx(
        1 / module.config.logits_scaling if name == "granite" else 1, rel=1e-4
    )
    for layer, head in ((0, 1), (1, 0), (2, 1)):
        edits = [ip.zero("z", layer=layer, head=head)]
        edits += [held[site] for site in held if site == norms[layer]]
        _, less = model.run_with_cache(tokens, names_filter=("attn_out", layer), hooks=edits)
        change = seen["attn_out", layer] - less["attn_out", layer]
        assert change[0, -1].norm() > 1e-3
        expected = times * (whole - lead(seen["resid_post", 2] - change))
        assert found.at(layer=layer, head=head) == pytest.approx(expected, abs=1e-4)


def test_neurons_and_heads_add_up_to_their_components(pocket: ip.TransformerModel) -> None:
    how = {"answer": " Mary", "instead": " John"}
    parts, heads, neurons = (
        ip.direct_logit_attribution(pocket, TEXT, by=by, **how)
        for by in ("component", "head", "neuron")
    )
    assert heads.values.shape == (7, 6)
    assert neurons.values.shape == (7, 768)
    attn = sum(parts.at(component=f"attn {layer}") for layer in range(7))
    mlp = sum(parts.at(component=f"mlp {layer}") for layer in range(7))
    assert float(heads.values.sum()) + heads.rest["bias of attn"] == pytest.approx(attn, abs=1e-4)
    assert heads.rest["mlp"] == pytest.approx(mlp, abs=1e-4)
    assert float(neurons.values.sum()) + neurons.rest["bias of mlp"] == pytest.approx(mlp, abs=1e-4)
    layers = ip.direct_logit_attribution(pocket, TEXT, by="layer", **how)
    for layer in range(7):
        both = parts.at(component=f"attn {layer}") + parts.at(component=f"mlp {layer}")
        assert layers.at(layer=layer) == pytest.approx(both, abs=1e-4)
    # The movers of the first name write for it, those of the second against it.
    assert {(r["layer"], r["head"]) for r in heads.top(3)} == {(5, 2), (5, 1), (5, 0)}
    assert heads.at(layer=5, head=2) > 2 > -2 > heads.at(layer=5, head=1)


def test_only_some_layers_leave_the_others_as_one_part(pocket: ip.TransformerModel) -> None:
    for by in WAYS:
        found = ip.direct_logit_attribution(pocket, TEXT, answer=" Mary", by=by, layer=[5, -1])
        whole = ip.direct_logit_attribution(pocket, TEXT, answer=" Mary", by=by)
        assert summed(found) == pytest.approx(whole.total, abs=1e-4)
        assert found.rest["other layers"] != 0
        if by != "component":
            assert found.axes["layer"] == [5, 6]
            torch.testing.assert_close(found.values, whole.values[[5, 6]])


def test_texts_have_their_own_answers_and_lengths(pocket: ip.TransformerModel) -> None:
    texts, answers = [TEXT, "The capital of Japan is", "Hello"], [" Mary", " Tokyo", " and"]
    found = ip.direct_logit_attribution(pocket, texts, answer=answers, by="head", batch_size=2)
    for number, text in enumerate(texts):
        alone = ip.direct_logit_attribution(pocket, text, answer=answers[number], by="head")
        torch.testing.assert_close(found.each[..., number], alone.values, atol=1e-5, rtol=1e-4)
        assert found.totals[number] == pytest.approx(alone.total, abs=1e-4)
    torch.testing.assert_close(found.values, found.each.mean(-1))
    assert found.errors is not None


def test_another_position_has_the_logits_of_that_position(pocket: ip.TransformerModel) -> None:
    token = pocket.to_single_token(" John")
    for pos in (2, -12):
        found = ip.direct_logit_attribution(pocket, TEXT, answer=" John", pos=pos)
        assert summed(found) == pytest.approx(pocket(TEXT)[0, 2, token].item(), abs=1e-4)


@pytest.mark.parametrize("norm", [None, "LN", "RMS"])
def test_models_from_scratch_are_taken_apart(norm: str | None) -> None:
    sizes = {"n_layers": 2, "d_model": 15, "d_head": 5, "n_ctx": 16, "d_vocab": 30, "n_heads": 3}
    config = HookedTransformerConfig(**sizes, act_fn="gelu", normalization_type=norm, seed=0)
    model = HookedTransformer(config).eval().requires_grad_(False)
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=draw))
    tokens = torch.arange(8)[None]
    for by in WAYS:
        found = ip.direct_logit_attribution(model, tokens, answer=3, by=by)
        assert summed(found) == pytest.approx(model(tokens)[0, -1, 3].item(), abs=1e-4)
        assert abs(found.rest["bias of the unembedding"]) > 1e-3


def test_what_is_no_sum_is_refused() -> None:
    tokens, _ = oracle.pair(batch=1)
    model = ip.wrap(oracle.build(oracle.OPT_POST_NORM))
    with pytest.raises(ip.Unsupported, match=r"the parts do not add up: .* instead of"):
        ip.direct_logit_attribution(model, tokens, answer=5)
    with pytest.raises(ip.Unsupported, match=r"no layer of these has mlp.hook_post"):
        ip.direct_logit_attribution(ip.wrap(tiny.build("mixtral")), tokens, answer=5, by="neuron")
    with pytest.raises(ip.Unsupported, match=r"model.sites.absent"):
        ip.direct_logit_attribution(ip.wrap(tiny.build("olmo")), tokens, answer=5)


def test_sixteen_bits_leave_a_remainder_that_is_shown() -> None:
    model = ip.wrap(tiny.build("llama").to(torch.float16))
    found = ip.direct_logit_attribution(model, oracle.pair(batch=1)[0], answer=5, by="head")
    assert 0 < abs(found.rest["remainder"]) < 0.02
    assert summed(found) == pytest.approx(found.total, abs=1e-4)


def test_wrong_arguments_say_so_and_nothing_is_left_behind(pocket: ip.TransformerModel) -> None:
    with pytest.raises(
        ValueError, match="by is 'component', 'layer', 'head', 'neuron'; got 'heads'"
    ):
        ip.direct_logit_attribution(pocket, TEXT, answer=" Mary", by="heads")
    with pytest.raises(IndexError, match="layer 7 is not there"):
        ip.direct_logit_attribution(pocket, TEXT, answer=" Mary", layer=[7])
    with pytest.raises(IndexError, match="layer is empty"):
        ip.direct_logit_attribution(pocket, TEXT, answer=" Mary", by="layer", layer=[])
    with pytest.raises(TypeError, match=r"pos is one position, a number, .* got ' John'"):
        ip.direct_logit_attribution(pocket, TEXT, answer=" Mary", pos=" John")
    before = state_of(pocket.module)
    for by in WAYS:
        ip.direct_logit_attribution(pocket, TEXT, answer=" Mary", by=by)
    assert same_state(before, state_of(pocket.module))
    assert all(parameter.grad is None for parameter in pocket.module.parameters())


@pytest.mark.parametrize("by", WAYS)
def test_it_prints_saves_and_shows_itself(pocket: ip.TransformerModel, by: str) -> None:
    found = ip.direct_logit_attribution(pocket, TEXT, answer=" Mary", by=by)
    again = DirectLogitAttribution.from_dict(json.loads(json.dumps(found.to_dict())))
    assert torch.equal(again.values, found.values)
    assert again.rest == found.rest
    assert repr(again) == repr(found)
    assert len(repr(found).splitlines()) < 40
    assert f"{found.total:.3f} = " in repr(found)
    loads_nothing(found.html())
    assert len(found.html()) < 60_000


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "granite"])
def test_float64_is_kept(name: str) -> None:
    model, (tokens, other) = (
        ip.wrap(tiny.build(name).requires_grad_(False).double()),
        oracle.pair(batch=2),
    )
    with torch.no_grad():
        logits = before_the_cap(model.module, tokens)
    for by in WAYS:
        found = ip.direct_logit_attribution(model, tokens, answer=5, instead=8, by=by)
        assert found.values.dtype == torch.float64
        assert summed(found) == pytest.approx(float((logits[:, 5] - logits[:, 8]).mean()), abs=1e-5)
    compared = ip.compare_prompts(model, tokens, other, answer=5, progress=False)
    assert compared.values.dtype == torch.float64
    assert compared.attribution.sum() + sum(compared.rest.values()) == pytest.approx(compared.total)


def test_it_tells_how_far_it_is(pocket: ip.TransformerModel) -> None:
    told: list[tuple[int, int | None]] = []
    texts = [TEXT, "The capital of Japan is", "Hello"]
    ip.direct_logit_attribution(
        pocket, texts, answer=" Mary", batch_size=1, progress=lambda *done: told.append(done)
    )
    assert told == [(1, 3), (2, 3), (3, 3)]
