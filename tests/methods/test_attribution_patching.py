"""Attribution patching: exact where the model is straight, raw autograd everywhere, and beside real patching."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from interpose.dialects.transformer_lens import HookedTransformer, HookedTransformerConfig
from tests.leftovers import hooks_on
from tests.pages import loads_nothing
from tests.sweeps import oracle

TYPES = ["gpt2", "llama", "gemma2", "gpt_neox"]
METRIC = ip.metrics.logit_difference(5, 9)
CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
LEAD = ip.metrics.logit_difference(" Mary", " John")


@functools.cache
def wrapped(name: str) -> Any:
    return ip.load("pocket") if name == "pocket" else ip.wrap(oracle.build(name))


@functools.cache
def straight() -> Any:
    """A model without norms and MLPs: after the last layer's heads it is linear."""
    config = HookedTransformerConfig(
        n_layers=2, d_model=16, n_ctx=32, d_head=4, n_heads=4, d_vocab=80, attn_only=True, normalization_type=None
    )  # fmt: skip
    model = HookedTransformer(config)
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    model.eval()
    return model


def pearson(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


# Identities.


@pytest.mark.parametrize("patch", ["clean", "corrupt"])
@pytest.mark.parametrize("rule", ["gradient", "relp"])
@pytest.mark.parametrize("site", ["z", "v", "attn_out"])
def test_it_is_patching_itself_where_the_model_is_linear(patch: str, rule: str, site: str) -> None:
    model, (clean, corrupt) = straight(), oracle.pair()
    options: dict[str, Any] = {
        "metric": METRIC,
        "site": site,
        "layer": [1],
        "patch": patch,
    }
    over = ("layer", "pos") if site != "z" else ("layer", "head", "pos")
    found = ip.attribution_patching(model, clean, corrupt, over=over, rule=rule, **options)
    real = ip.sweep(model, clean, corrupt, over=over, progress=False, **options)
    assert real.effect.abs().max() > 0.1
    torch.testing.assert_close(found.values, real.effect, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.normalised, real.normalised, rtol=1e-4, atol=1e-4)


def test_patching_corrupt_values_is_patching_clean_ones_turned_round_where_the_model_is_linear() -> (
    None
):
    model, (clean, corrupt) = straight(), oracle.pair()
    there, back = (
        ip.attribution_patching(
            model, clean, corrupt, metric=METRIC, site="z", layer=[1], patch=patch
        )
        for patch in ("clean", "corrupt")
    )
    torch.testing.assert_close(there.each, -back.each, rtol=1e-4, atol=1e-4)
    assert (there.clean, there.corrupt) == (back.clean, back.corrupt)
    for name in TYPES:  # and everywhere: the corrupted text in the place of the clean one
        one = ip.attribution_patching(wrapped(name), clean, corrupt, metric=METRIC, patch="corrupt")
        other = ip.attribution_patching(wrapped(name), corrupt, clean, metric=METRIC, patch="clean")
        torch.testing.assert_close(one.each, other.each)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
@pytest.mark.parametrize("rule", ["gradient", "relp"])
def test_the_heads_of_a_layer_add_up_to_its_attention(name: str, rule: str) -> None:
    model, (clean, corrupt) = wrapped(name), oracle.pair()
    heads, whole = (
        ip.attribution_patching(
            model, clean, corrupt, metric=METRIC, rule=rule, site=site, over=("layer", "pos")
        )
        for site in ("z", "attn_out")
    )
    assert whole.values.abs().max() > 1e-3
    torch.testing.assert_close(heads.values, whole.values, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("rule", ["gradient", "relp"])
def test_what_did_not_change_has_exactly_no_effect(name: str, rule: str) -> None:
    model, (clean, corrupt) = wrapped(name), oracle.pair()
    same = ip.attribution_patching(model, clean, clean, metric=METRIC, rule=rule, verify=3)
    assert same.values.count_nonzero() == 0
    assert same.verified == []
    assert same.correlation is None
    found = ip.attribution_patching(
        model, clean, corrupt, metric=METRIC, rule=rule, site="resid_pre"
    )
    assert found.values[:, : oracle.FIRST].count_nonzero() == 0
    assert found.values[:, oracle.FIRST :].abs().max() > 1e-3


# Against raw autograd, and real patching.


def lead(logits: Tensor) -> Tensor:
    return logits[:, -1, 5] - logits[:, -1, 9]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("kind", ["resid_pre", "z"])
def test_the_plain_gradient_is_what_raw_autograd_gives(name: str, kind: str) -> None:
    model, (clean, corrupt) = wrapped(name), oracle.pair()
    module, expected = model.module, []
    for layer in range(oracle.LAYERS):
        spot, leaves = oracle.spot(module, name, kind, layer), []
        assert spot is not None
        (there,) = oracle.values(module, clean, [spot])

        def swap(value: Tensor, leaves: list[Tensor] = leaves) -> Tensor:
            leaves.append(value.detach().clone().requires_grad_())
            return leaves[0].clone()

        with spot.through(swap):
            (grad,) = torch.autograd.grad(lead(module(input_ids=corrupt).logits).sum(), leaves)
        product = (there - leaves[0].detach()) * grad
        heads = product.unflatten(-1, (model.cfg.n_heads, -1)).sum(-1).permute(2, 1, 0)
        expected.append(heads if kind == "z" else heads.sum(0))
    found = ip.attribution_patching(
        model, clean, corrupt, metric=METRIC, site=kind, rule="gradient"
    )
    assert found.each.abs().max() > 1e-3
    torch.testing.assert_close(found.each, torch.stack(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("patch", ["clean", "corrupt"])
def test_verified_effects_are_those_of_a_sweep(name: str, patch: str) -> None:
    model, (clean, corrupt) = wrapped(name), oracle.pair()
    options: dict[str, Any] = {
        "metric": METRIC,
        "over": ("layer", "pos"),
        "site": "mlp_out",
        "patch": patch,
    }
    found = ip.attribution_patching(model, clean, corrupt, verify=6, **options)
    real = ip.sweep(model, clean, corrupt, progress=False, **options)
    assert len(found.verified) == 6
    assert abs(found.verified[0]["effect"]) > 1e-3
    for place in found.verified:
        effect = float(real.effect[place["layer"], place["pos"]])
        assert place["effect"] == pytest.approx(effect, rel=1e-3, abs=1e-5)
        assert place["estimate"] == pytest.approx(found.at(layer=place["layer"], pos=place["pos"]))
        ratio = place["estimate"] / place["effect"]
        assert place["agrees"] == (0.5 <= ratio <= 2)
    pairs = torch.tensor([[place["estimate"], place["effect"]] for place in found.verified])
    assert found.correlation == pytest.approx(pearson(*pairs.T), abs=1e-5)


def test_places_of_any_shape_are_verified() -> None:
    model, (clean, corrupt) = wrapped("llama"), oracle.pair()
    neurons = ip.attribution_patching(
        model, clean, corrupt, metric=METRIC, site="post", over=("layer", "neuron"), verify=2
    )
    sites = ip.attribution_patching(
        model,
        clean,
        corrupt,
        metric=METRIC,
        site=["attn_out", "mlp_out"],
        over=("site", "pos"),
        verify=2,
    )
    for found, kind in ((neurons, "post"), (sites, None)):
        for place in found.verified:
            words = {word: place[word] for word in ("layer", "neuron", "pos") if word in place}
            _, cache = model.run_with_cache(clean, names_filter=kind or place["site"])
            hook = ip.patch(kind or place["site"], cache, **words)
            moved = lead(model.run_with_hooks(corrupt, hooks=[hook])) - lead(model(corrupt))
            assert place["effect"] == pytest.approx(moved.mean().item(), rel=1e-3, abs=1e-5)


@torch.no_grad()
def test_layers_that_are_no_axis_are_patched_where_all_sites_are() -> None:
    model, (clean, corrupt) = wrapped("qwen3_next"), oracle.pair()
    kinds = ["attn_out", "mlp_out"]
    shared = [site.layer for site in (model.sites[name] for name in model.sites.select(kinds[0]))]
    assert 0 < len(shared) < model.cfg.n_layers
    found = ip.attribution_patching(
        model, clean, corrupt, metric=METRIC, site=kinds, over="site", verify=2
    )
    for place in found.verified:
        _, cache = model.run_with_cache(clean, names_filter=place["site"])
        hook = ip.patch(place["site"], cache, layer=shared)
        moved = lead(model.run_with_hooks(corrupt, hooks=[hook])) - lead(model(corrupt))
        assert abs(float(moved.mean())) > 1e-3
        assert place["effect"] == pytest.approx(moved.mean().item(), rel=1e-3, abs=1e-5)
        assert list(place) == ["site", "estimate", "effect", "agrees"]


def test_relp_agrees_with_patching_better_than_the_gradient_on_the_pocket_model() -> None:
    model = wrapped("pocket")
    for site, least in (("resid_pre", 0.95), ("mlp_out", 0.95), ("attn_out", 0.97)):
        real = ip.sweep(
            model, CLEAN, CORRUPT, site=site, over=("layer", "pos"), metric=LEAD, progress=False
        )
        relp, plain = (
            pearson(
                ip.attribution_patching(
                    model, CLEAN, CORRUPT, metric=LEAD, site=site, rule=rule
                ).values,
                real.effect,
            )
            for rule in ("relp", "gradient")
        )
        assert relp > least
        assert relp > plain


# Cost, and what is left.


def test_it_takes_two_forwards_and_a_backward_and_leaves_nothing() -> None:
    model, (clean, corrupt) = wrapped("gpt2"), oracle.pair()
    module, calls = model.module, []
    assert model.sites
    before, state = hooks_on(module), torch.get_rng_state()
    counting = module.register_forward_pre_hook(lambda *_: calls.append(1))
    found = ip.attribution_patching(model, clean, corrupt, metric=METRIC)
    assert len(calls) == found.protocol["forwards"] == 2
    assert found.protocol["backwards"] == 1
    assert (
        ip.attribution_patching(model, clean, corrupt, metric=METRIC, verify=4).protocol["forwards"]
        == 7
    )
    counting.remove()
    assert hooks_on(module) == before
    assert all(p.requires_grad and p.grad is None for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_other_metrics_work() -> None:
    model, (clean, corrupt) = wrapped("llama"), oracle.pair()
    for metric in (ip.metrics.kl(), ip.metrics.loss(), lambda logits: logits[:, 2:, 5].sum(-1)):
        found = ip.attribution_patching(
            model, clean, corrupt, metric=metric, site="resid_pre", verify=3
        )
        real = ip.sweep(model, clean, corrupt, metric=metric, site="resid_pre", progress=False)
        assert found.corrupt == pytest.approx(float(real.baseline.mean()), rel=1e-4)
        assert found.clean == pytest.approx(float(real.clean.mean()), rel=1e-4, abs=1e-6)
        for place in found.verified:
            assert place["effect"] == pytest.approx(
                float(real.effect[place["layer"], place["pos"]]), rel=1e-3, abs=1e-4
            )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"patch": "both"}, "patch is 'clean' or 'corrupt'; got 'both'."),
        (
            {"patch": "corrupt", "metric": ip.metrics.kl()},
            "its gradient is zero there: use patch='clean'.",
        ),
        ({"verify": -1}, "verify is how many places to patch really"),
        ({"rule": "lrp"}, "rule is 'relp', 'gradient', or a list of rules for ip.relp; got 'lrp'."),
        ({"rule": ["lrp"]}, "no rule 'lrp'. The rules are: norm, activation, gate, attention."),
        ({"site": "pre"}, "the rules of RelP go past 'pre'"),
        ({"over": "neuron", "site": "nothing"}, "no site 'nothing'"),
    ],
)
def test_what_cannot_be_done_is_refused(options: dict[str, Any], said: str) -> None:
    clean, corrupt = oracle.pair()
    with pytest.raises((ValueError, ip.SiteNotFound)) as raised:
        ip.attribution_patching(wrapped("gpt2"), clean, corrupt, **{"metric": METRIC, **options})
    assert said in str(raised.value)


def test_one_text_alone_is_refused() -> None:
    clean, _ = oracle.pair()
    for patch in ("clean", "corrupt"):
        with pytest.raises(ValueError, match="patching needs two texts, clean and corrupt"):
            ip.attribution_patching(wrapped("gpt2"), clean, None, metric=METRIC, patch=patch)


def test_results_are_data_and_pages() -> None:
    found = ip.attribution_patching(wrapped("pocket"), CLEAN, CORRUPT, metric=LEAD, verify=3)
    again = type(found).from_dict(found.to_dict())
    assert torch.equal(again.each, found.each)
    assert again.verified == found.verified
    assert "really patched: 3 places" in repr(found)
    assert repr(again) == repr(found)
    html = found.html()
    assert "really patched" in html
    loads_nothing(html)
    left = ip.attribution_patching(wrapped("mixtral"), *oracle.pair(), metric=METRIC).protocol
    assert "mixture of experts" in left["with_their_true_gradient"][0]
