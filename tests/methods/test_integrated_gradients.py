"""Integrated gradients: complete, exact where the metric is linear, and equal to a sum over points by raw torch."""

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


@functools.cache
def wrapped(name: str) -> Any:
    return ip.load("pocket") if name == "pocket" else ip.wrap(oracle.build(name))


def lead(logits: Tensor) -> Tensor:
    return logits[:, -1, 5] - logits[:, -1, 9]


def riemann(
    module: Any, tokens: Tensor, spot: oracle.Spot, start: Tensor | None, steps: int
) -> tuple[Tensor, Tensor]:
    """Attributions, one run per point, and the metric's way from the baseline, [example]."""
    (value,) = oracle.values(module, tokens, [spot])
    start = torch.zeros_like(value) if start is None else start
    total = torch.zeros_like(value)
    for step in range(steps):
        leaf = (start + (step + 0.5) / steps * (value - start)).requires_grad_()
        with spot.through(lambda _, leaf=leaf: leaf * 1):
            (grad,) = torch.autograd.grad(lead(module(input_ids=tokens).logits).sum(), leaf)
        total += grad / steps
    with spot.through(lambda _: start), torch.no_grad():
        begin = lead(module(input_ids=tokens).logits)
    return total * (value - start), lead(oracle.logits(module, tokens)) - begin


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("max_rows", [3, 64])
def test_it_is_a_sum_over_points_of_the_path(name: str, max_rows: int) -> None:
    model, tokens = wrapped(name), oracle.pair()[0]
    module = model.module
    embed = oracle.Spot(module.get_input_embeddings(), leaves=True)
    expected, way = riemann(module, tokens, embed, None, 6)
    found = ip.integrated_gradients(model, tokens, metric=METRIC, steps=6, max_rows=max_rows)
    assert expected.abs().max() > 1e-3
    assert found.protocol["forwards"] == 8
    torch.testing.assert_close(found.each, expected.sum(-1).T, rtol=1e-3, atol=1e-5)
    assert found.difference[0] == pytest.approx(way.mean().item(), abs=1e-5)
    assert found.added[0] == pytest.approx(expected.sum((1, 2)).mean().item(), rel=1e-3, abs=1e-5)
    gap = (expected.sum((1, 2)) - way).abs().mean() / way.abs().mean()
    assert found.gap[0] == pytest.approx(gap.item(), rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("name", TYPES)
def test_every_layer_has_its_own_path_from_another_text(name: str) -> None:
    model, (clean, corrupt) = wrapped(name), oracle.pair()
    rows = []
    for layer in (0, 2):
        spot = oracle.spot(model.module, name, "resid_pre", layer)
        assert spot is not None
        (start,) = oracle.values(model.module, corrupt, [spot])
        rows.append(riemann(model.module, clean, spot, start, 4)[0].sum(-1).T)
    options: dict[str, Any] = {
        "metric": METRIC,
        "site": "resid_pre",
        "layer": [0, -1],
        "baseline": corrupt,
    }
    found = ip.integrated_gradients(model, clean, steps=4, **options)
    torch.testing.assert_close(found.each, torch.stack(rows), rtol=1e-3, atol=1e-5)
    assert found.axes["layer"] == [0, 2]
    assert found.values[:, : oracle.FIRST].count_nonzero() == 0
    turned = ip.integrated_gradients(model, clean, steps=4, over=("pos", "layer"), **options)
    torch.testing.assert_close(turned.values, found.values.T)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("method", ["midpoint", "gauss"])
def test_attributions_add_up_on_models_of_every_kind(name: str, method: str) -> None:
    model, tokens = wrapped(name), oracle.pair()[0]
    found = ip.integrated_gradients(
        model, tokens, metric=METRIC, steps="auto", method=method, baseline="mean"
    )
    assert found.converged
    assert found.gap[0] <= 0.01
    assert found.steps[0] <= 512
    assert abs(found.difference[0]) > 1e-3
    assert float(found.values.sum()) == pytest.approx(found.difference[0], rel=0.05)


def test_attributions_add_up_on_the_pocket_model() -> None:
    model = wrapped("pocket")
    for text, metric in (
        ("The capital of Japan is", ip.metrics.logit(" Tokyo")),
        (
            "When Mary and John went to the store, John gave a drink to",
            ip.metrics.logit_difference(" Mary", " John"),
        ),
    ):
        found = ip.integrated_gradients(model, text, metric=metric)
        assert found.converged
        assert found.gap[0] < 0.01
    rough = ip.integrated_gradients(model, text, metric=metric, steps=4)
    assert not rough.converged
    assert rough.gap[0] > 0.01
    assert "NOT COMPLETE" in repr(rough)
    stopped = ip.integrated_gradients(model, text, metric=metric, steps="auto", max_steps=8)
    assert stopped.steps == [8]
    assert not stopped.converged


@pytest.mark.parametrize("method", ["midpoint", "gauss"])
def test_one_step_is_exact_where_the_metric_is_linear(method: str) -> None:
    config = HookedTransformerConfig(
        n_layers=2, d_model=16, n_ctx=32, d_head=4, n_heads=4, d_vocab=80, attn_only=True, normalization_type=None
    )  # fmt: skip
    model = HookedTransformer(config)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    model.eval()
    clean, corrupt = oracle.pair()
    options: dict[str, Any] = {
        "metric": METRIC,
        "site": "z",
        "layer": [1],
        "over": ("head", "pos"),
        "baseline": corrupt,
    }
    found = ip.integrated_gradients(model, clean, steps=1, method=method, **options)
    assert found.gap[0] < 1e-5
    assert abs(found.difference[0]) > 0.1
    straight = ip.gradient_times_activation(model, clean, **options)
    torch.testing.assert_close(found.each, straight.each, rtol=1e-4, atol=1e-5)


def test_points_are_those_of_gauss_and_legendre() -> None:
    from interpose.methods.integrated_gradients import _points

    for steps in (1, 2, 5):
        points, weights = _points(steps, "gauss")
        for power in range(2 * steps):  # exact for polynomials of this degree
            assert float((weights * points**power).sum()) == pytest.approx(
                1 / (power + 1), rel=1e-5
            )


def test_baselines_may_be_values() -> None:
    model, tokens = wrapped("gpt2"), oracle.pair()[0]
    options: dict[str, Any] = {"metric": METRIC, "steps": 5}
    zeros = ip.integrated_gradients(model, tokens, **options)
    given = ip.integrated_gradients(
        model, tokens, baseline=torch.zeros(model.cfg.d_model), **options
    )
    assert torch.equal(zeros.each, given.each)
    _, cache = model.run_with_cache(tokens, names_filter="hook_embed")
    mean = cache["hook_embed"].mean(1, keepdim=True)
    other = ip.integrated_gradients(model, tokens, baseline=mean, **options)
    named = ip.integrated_gradients(model, tokens, baseline="mean", **options)
    torch.testing.assert_close(other.each, named.each)
    assert not torch.allclose(zeros.each, named.each)


def test_examples_keep_their_own_baselines_in_any_batches() -> None:
    model = wrapped("gpt2")
    tokens = oracle.pair(batch=4)[0]
    values = torch.randn(4, oracle.LENGTH, model.cfg.d_model, generator=torch.manual_seed(3))
    options: dict[str, Any] = {"metric": METRIC, "steps": 3}
    found = ip.integrated_gradients(model, tokens, baseline=values, batch_size=2, **options)
    embed = oracle.Spot(model.module.get_input_embeddings(), leaves=True)
    expected, _ = riemann(model.module, tokens, embed, values, 3)
    torch.testing.assert_close(found.each, expected.sum(-1).T, rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match="2 rows for 4 examples: give one for each"):
        ip.integrated_gradients(model, tokens, baseline=values[:2], batch_size=2, **options)
    with pytest.raises(ValueError, match=r"a baseline \(5,\) does not fit the value at 'embed'"):
        ip.integrated_gradients(model, tokens, baseline=torch.zeros(5), **options)


def test_a_value_that_all_rows_share_is_moved_one_row_at_a_time() -> None:
    model, tokens = wrapped("gpt2"), oracle.pair()[0]
    options: dict[str, Any] = {"metric": METRIC, "steps": 3, "site": "pos_embed"}
    with pytest.raises(ValueError, match="give batch_size=1 and max_rows=1"):
        ip.integrated_gradients(model, tokens, **options)
    found = ip.integrated_gradients(model, tokens, batch_size=1, max_rows=1, **options)
    spot = oracle.Spot(model.module.transformer.wpe, leaves=True)
    rows = [riemann(model.module, row[None], spot, None, 3)[0].sum(-1)[0] for row in tokens]
    torch.testing.assert_close(found.each, torch.stack(rows, -1), rtol=1e-3, atol=1e-5)


def test_a_gradient_that_is_infinite_at_the_baseline_does_not_count() -> None:
    model, tokens = ip.wrap(oracle.build("llama", layers=16)), oracle.pair()[0]
    found = ip.integrated_gradients(model, tokens, metric=METRIC, steps=3, max_rows=4)
    embed = oracle.Spot(model.module.get_input_embeddings(), leaves=True)
    leaf = torch.zeros(*tokens.shape, model.cfg.d_model, requires_grad=True)
    with embed.through(lambda _: leaf * 1):
        lead(model.module(input_ids=tokens).logits).sum().backward()
    assert leaf.grad is not None
    assert not leaf.grad.isfinite().all()
    for parameter in model.module.parameters():
        parameter.grad = None
    expected, _ = riemann(model.module, tokens, embed, None, 3)
    torch.testing.assert_close(found.each, expected.sum(-1).T, rtol=1e-3, atol=1e-4)


def test_nothing_is_left_behind() -> None:
    model, tokens = wrapped("llama"), oracle.pair()[0]
    module = model.module
    assert model.sites
    before, state = hooks_on(module), torch.get_rng_state()
    with torch.no_grad():
        found = ip.integrated_gradients(model, tokens, metric=METRIC, steps=3, site="z", layer=[1])
    assert found.values.abs().max() > 0
    assert all(p.requires_grad and p.grad is None for p in module.parameters())
    assert hooks_on(module) == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, "steps is a number, at least 1, or 'auto'; got 0."),
        ({"method": "simpson"}, "method is 'gauss' or 'midpoint'; got 'simpson'."),
        ({"over": "layer"}, "over names some of pos, neuron, each once, at embed; got ('layer',)."),
        ({"site": "z", "over": "head"}, "z has a path for each of 3 layers"),
        ({"site": "z", "layer": [5]}, "layer 5 is not there: z has layers 0 to 2."),
        ({"site": "z", "layer": []}, "layer is empty"),
        ({"site": ["z", "q"]}, "site is one kind of site, such as 'embed' or 'z'; got ['z', 'q']."),
        ({"site": "blocks.*.hook_*_out"}, "ask for one at a time"),
        ({"metric": ip.metrics.rank(5)}, "has no gradient: ranks jump"),
        ({"metric": lambda logits: logits[:, -1].argmax(-1)}, "the metric has no gradient at"),
    ],
)
def test_what_cannot_be_done_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, IndexError, TypeError)) as raised:
        ip.integrated_gradients(wrapped("gpt2"), oracle.pair()[0], **{"metric": METRIC, **options})
    assert said in str(raised.value)


def test_results_are_data_and_pages() -> None:
    found = ip.integrated_gradients(
        wrapped("pocket"), "The capital of Japan is", metric=ip.metrics.logit(" Tokyo")
    )
    again = type(found).from_dict(found.to_dict())
    assert torch.equal(again.each, found.each)
    assert again.gap == found.gap
    assert again.converged
    html = found.html()
    assert "complete: " in html
    loads_nothing(html)
