"""Saliency and gradient times activation against raw torch: a leaf in the place of the value, and autograd."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.dialects.transformer_lens import HookedTransformer, HookedTransformerConfig
from tests.leftovers import hooks_on
from tests.pages import loads_nothing
from tests.sweeps import oracle

TYPES = ["gpt2", "llama", "gemma2", "gpt_neox"]
METRIC = ip.metrics.logit_difference(5, 9)


def lead(logits: Tensor) -> Tensor:
    """What METRIC measures, by hand."""
    return logits[:, -1, 5] - logits[:, -1, 9]


def lead_sum(logits: Tensor) -> Tensor:
    """Of all examples together."""
    return lead(logits).sum()


def by_hand(module: Any, tokens: Tensor, spot: oracle.Spot) -> tuple[Tensor, Tensor]:
    """A value and its gradient, from a leaf that takes its place."""
    leaves: list[Tensor] = []

    def swap(value: Tensor) -> Tensor:
        leaves.append(value.detach().clone().requires_grad_())
        return leaves[0].clone()

    with spot.through(swap):
        metric = lead(module(input_ids=tokens).logits).sum()
    (grad,) = torch.autograd.grad(metric, leaves)
    return leaves[0].detach(), grad


@functools.cache
def wrapped(name: str) -> Any:
    """One model of a type for all tests."""
    return ip.wrap(oracle.build(name))


@pytest.fixture(params=TYPES)
def case(request: pytest.FixtureRequest) -> Any:
    model = wrapped(request.param)
    return request.param, model.module, model, oracle.pair()[0]


@pytest.mark.parametrize("kind", ["resid_pre", "z"])
def test_they_are_what_autograd_gives_at_a_leaf(case: Any, kind: str) -> None:
    name, module, model, tokens = case
    spots = [oracle.spot(module, name, kind, layer) for layer in range(oracle.LAYERS)]
    pairs = [by_hand(module, tokens, spot) for spot in spots if spot is not None]
    over = ("layer", "head", "pos") if kind == "z" else ("layer", "pos")
    heads = model.cfg.n_heads if kind == "z" else 1
    apart = [[part.unflatten(-1, (heads, -1)) for part in pair] for pair in pairs]
    times = torch.stack(
        [(value * grad).sum(-1) for value, grad in apart]
    )  # [layer, batch, pos, head]
    sizes = torch.stack([grad.norm(dim=-1) for _, grad in apart])
    found = ip.gradient_times_activation(model, tokens, metric=METRIC, site=kind, over=over)
    seen = ip.saliency(model, tokens, metric=METRIC, site=kind, over=over)
    for result, expected in ((found, times), (seen, sizes)):
        each = expected.permute(0, 3, 2, 1) if kind == "z" else expected[..., 0].permute(0, 2, 1)
        assert each.abs().max() > 1e-3
        torch.testing.assert_close(result.each, each, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(result.values, each.mean(-1), rtol=1e-4, atol=1e-6)
        assert result.errors is not None
        assert result.protocol["forwards"] == result.protocol["backwards"] == 1


def test_axes_come_in_any_order_and_the_others_are_added_up() -> None:
    model, tokens = wrapped("gpt2"), oracle.pair()[0]
    options: dict[str, Any] = {"metric": METRIC, "site": "z"}
    whole = ip.gradient_times_activation(
        model, tokens, over=("layer", "pos", "head", "neuron"), **options
    )
    turned = ip.gradient_times_activation(model, tokens, over=("head", "layer"), **options)
    torch.testing.assert_close(turned.values, whole.values.sum((1, 3)).T)
    heads = ip.gradient_times_activation(model, tokens, over="head", **options)
    torch.testing.assert_close(heads.values, whole.values.sum((0, 1, 3)))
    some = ip.gradient_times_activation(
        model, tokens, over=("layer", "head"), layer=[-1, 0], **options
    )
    torch.testing.assert_close(some.values, turned.values.T[[2, 0]])
    assert some.axes["layer"] == [2, 0]
    sizes = ip.saliency(model, tokens, over=("layer", "head", "pos"), **options).each
    fewer = ip.saliency(model, tokens, over="pos", **options).each
    torch.testing.assert_close(fewer, sizes.square().sum((0, 1)).sqrt())


def test_several_sites_are_an_axis() -> None:
    model, tokens = wrapped("llama"), oracle.pair()[0]
    both = ip.gradient_times_activation(model, tokens, metric=METRIC, site=["attn_out", "mlp_out"])
    assert both.axes["site"] == ["attn_out", "mlp_out"]
    alone = ip.gradient_times_activation(model, tokens, metric=METRIC, site="mlp_out")
    torch.testing.assert_close(both.at(site="mlp_out"), alone.values)


def test_the_baseline_is_subtracted_and_measured() -> None:
    model = wrapped("gpt2")
    clean, corrupt = oracle.pair()
    options: dict[str, Any] = {"metric": METRIC, "site": "mlp_out", "over": ("layer", "neuron")}
    found = ip.gradient_times_activation(model, clean, baseline=corrupt, **options)
    _, there = model.run_with_cache(corrupt, names_filter="mlp_out")
    _, here = model.run_with_cache(clean, names_filter="mlp_out", incl_bwd=lambda x: lead(x).sum())
    expected = [
        (here["mlp_out", n] - there["mlp_out", n]) * here.grad["mlp_out", n] for n in range(3)
    ]
    torch.testing.assert_close(found.each, torch.stack(expected).sum(2).permute(0, 2, 1))
    torch.testing.assert_close(found.measured, lead(model(clean)).detach())
    assert found.baseline is not None
    torch.testing.assert_close(found.baseline, lead(model(corrupt)).detach())


def test_texts_of_several_lengths_keep_their_order() -> None:
    model = ip.load("pocket")
    texts = ["The capital city of Japan is", "The capital of Japan is"]
    found = ip.saliency(
        model, texts, metric=ip.metrics.logit(" Tokyo"), site="resid_pre", over="layer"
    )
    alone = [
        ip.saliency(model, text, metric=ip.metrics.logit(" Tokyo"), site="resid_pre", over="layer")
        for text in texts
    ]
    torch.testing.assert_close(
        found.each, torch.cat([one.each for one in alone], -1), rtol=1e-3, atol=1e-4
    )
    with pytest.raises(ValueError, match="different lengths"):
        ip.saliency(model, texts, metric=ip.metrics.logit(" Tokyo"))


def test_a_value_that_all_texts_share_is_not_shared_out_by_guessing() -> None:
    model, tokens = wrapped("gpt2"), oracle.pair()[0]
    with pytest.raises(ValueError, match=r"one value for all texts .* batch_size=1"):
        ip.saliency(model, tokens, metric=METRIC, site="pos_embed")
    found = ip.saliency(model, tokens, metric=METRIC, site="pos_embed", batch_size=1)
    spot = oracle.Spot(model.module.transformer.wpe, leaves=True)
    expected = [by_hand(model.module, row[None], spot)[1].norm(dim=-1)[0] for row in tokens]
    torch.testing.assert_close(found.each, torch.stack(expected, -1))


def test_the_loss_of_a_baseline_is_that_of_its_own_tokens() -> None:
    model, (clean, corrupt) = wrapped("llama"), oracle.pair()
    found = ip.gradient_times_activation(
        model, clean, baseline=corrupt, metric=ip.metrics.loss(), site="mlp_out"
    )
    logits = oracle.logits(model.module, corrupt)[:, :-1].transpose(1, 2)
    expected = torch.nn.functional.cross_entropy(logits, corrupt[:, 1:], reduction="none").mean(1)
    assert found.baseline is not None
    torch.testing.assert_close(found.baseline, expected)


def test_models_from_scratch_have_embeddings_and_masked_scores() -> None:
    config = HookedTransformerConfig(
        n_layers=2, d_model=16, n_ctx=32, d_head=4, n_heads=4, d_vocab=80, act_fn="gelu", seed=0
    )
    model, (clean, corrupt) = HookedTransformer(config).eval(), oracle.pair()
    found = ip.saliency(model, clean, metric=METRIC)
    _, cache = model.run_with_cache(clean, names_filter="hook_embed", incl_bwd=lead_sum)
    assert found.values.max() > 1e-3
    torch.testing.assert_close(found.each, cache.grad["hook_embed"].norm(dim=-1).T)
    path = ip.integrated_gradients(model, clean, metric=METRIC, baseline=corrupt, steps=16)
    assert path.converged
    patched = ip.attribution_patching(model, clean, corrupt, metric=METRIC, site="embed", verify=1)
    (place,) = patched.verified
    mixed = corrupt.clone()
    mixed[:, place["pos"]] = clean[:, place["pos"]]
    moved = (lead(model(mixed)) - lead(model(corrupt))).mean()
    assert place["effect"] == pytest.approx(moved.item(), rel=1e-3)
    scores = ip.gradient_times_activation(
        model, clean, baseline=corrupt, metric=METRIC, site="attn_scores"
    )
    assert scores.values.isfinite().all()  # where -inf less -inf has no gradient
    assert scores.values.abs().max() > 0
    with pytest.raises(ValueError, match="'unembed' is a module, and what its axes are"):
        ip.saliency(model, clean, metric=METRIC, site="unembed")


def test_nothing_is_left_behind() -> None:
    model, tokens = wrapped("gpt2"), oracle.pair()[0]
    module = model.module
    before, state = hooks_on(module), torch.get_rng_state()
    with torch.no_grad():
        found = ip.saliency(model, tokens, metric=METRIC)
    assert found.values.max() > 0
    assert found.axes == {"pos": list(range(oracle.LENGTH))}
    assert all(p.requires_grad and p.grad is None for p in module.parameters())
    assert hooks_on(module) == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"over": "head", "site": "resid_pre"},
            "resid_pre: no axis 'head'; there are site, layer, neuron, pos.",
        ),
        (
            {"over": ("pos", "pos")},
            "over names some of site, layer, head, neuron, pos, each once; got",
        ),
        ({"site": ["z", "q"], "over": "layer"}, "several sites need over=('site', ...)."),
        ({"site": "z", "layer": [7]}, "layer 7 is not there: z has layers 0 to 2."),
        (
            {"site": "z", "layer": []},
            "layer is empty: z has layers 0 to 2; None means all.",
        ),
        ({"layer": [0]}, "embed: in no layer, so that layer=... means nothing."),
        (
            {"site": "blocks.*.hook_*_out"},
            "has both 'blocks.0.hook_attn_out' and 'blocks.0.hook_mlp_out' in one layer",
        ),
        ({"metric": ip.metrics.kl()}, "kl compares with another run, and there is none"),
        ({"metric": ip.metrics.rank(5)}, "has no gradient: ranks jump"),
        (
            {"site": ["k", "z"], "over": ("site", "layer", "head")},
            "k, z do not have the same places",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(options: dict[str, Any], said: str) -> None:
    model, tokens = wrapped("llama"), oracle.pair()[0]
    with pytest.raises((ValueError, IndexError)) as raised:
        ip.saliency(model, tokens, **{"metric": METRIC, **options})
    assert said in str(raised.value)


def test_inference_mode_is_refused_by_every_method_that_needs_gradients() -> None:
    model, (clean, corrupt) = wrapped("gpt2"), oracle.pair()
    methods = [
        functools.partial(ip.saliency, model, clean),
        functools.partial(ip.integrated_gradients, model, clean),
        functools.partial(ip.attribution_patching, model, clean, corrupt),
        functools.partial(ip.edge_attribution, model, clean, corrupt),
    ]
    for method in methods:
        with torch.inference_mode(), pytest.raises(ip.Unsupported, match="call this outside of it"):
            method(metric=METRIC)


def test_results_are_data_and_pages() -> None:
    model = ip.load("pocket")
    found = ip.saliency(model, "The capital of Japan is", metric=ip.metrics.logit(" Tokyo"))
    again = type(found).from_dict(found.to_dict())
    assert torch.equal(again.each, found.each)
    assert again.tokens == found.tokens
    html = found.html()
    assert "Japan" in html
    loads_nothing(html)
