"""Monitors and methods where they are easily wrong: logits, masks, few bits, lengths, memory, impossible arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from interpose.models.transformer import TransformerModel
from tests.models import tiny
from tests.peak import peak_of

TOKENS = torch.tensor([[3, 4, 5, 6, 7]])


def model_of(name: str = "llama", **options: Any) -> Any:
    return TransformerModel(tiny.build(name, layers=2, **options))


# NaN guard.


def test_the_guard_sees_the_logits() -> None:
    model = model_of()
    head = model.module.lm_head
    head.weight = nn.Parameter(head.weight.detach().clone())
    with torch.no_grad():
        head.weight[3] = math.nan
    guard = ip.NaNGuard(raises=False)
    model.run_with_hooks(TOKENS, hooks=[guard])
    assert guard.first is not None
    assert guard.first.site == "unembed.hook_out"
    assert guard.first.parameters == ("weight",)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gptj"])
def test_the_guard_blames_the_norm_itself(name: str) -> None:
    model = model_of(name)
    block = model.sites["blocks.1.hook_resid_post"].module
    norms = [part for part in block.modules() if "norm" in type(part).__name__.lower()]
    with torch.no_grad():
        norms[0].weight[0] = math.nan
    guard = ip.NaNGuard(raises=False)
    model.run_with_hooks(TOKENS, hooks=[guard])
    assert guard.first is not None
    assert guard.first.parameters == ("weight",)
    assert model.sites[guard.first.site].module is norms[0]


def test_minus_infinity_at_a_masked_key_is_no_fault() -> None:
    model = model_of()
    guard = ip.NaNGuard("attn_scores", raises=False)

    def masked(value: Tensor, hook: Any) -> None:
        value[..., 0, 1:] = -math.inf

    model.run_with_hooks(TOKENS, fwd_hooks=[("attn_scores", masked)], hooks=[guard])
    assert guard.first is None
    with torch.no_grad():
        model.blocks[1].attn.W_Q  # noqa: B018 - a view
        next(model.module.model.layers[1].self_attn.q_proj.parameters())[0] = math.nan
    model.run_with_hooks(TOKENS, hooks=[guard])
    assert guard.first is not None
    assert guard.first.nans > 0


# Health of gradients.


def loss_of(tokens: Tensor) -> Any:
    return lambda logits: nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )


def test_ratios_are_to_the_gradient_of_the_last_block_and_not_to_a_scale() -> None:
    model = model_of()
    found = ip.gradient_health(model, TOKENS, loss=loss_of(TOKENS))
    blocks, raw = model.module.model.layers, []
    handles = [block.register_forward_hook(lambda m, a, out: raw.append(out)) for block in blocks]
    logits = model.module(TOKENS, use_cache=False).logits
    for handle in handles:
        handle.remove()
    values = [out[0] if isinstance(out, tuple) else out for out in raw]
    grads = torch.autograd.grad(loss_of(TOKENS)(logits), values)
    rows = {row.site: row for row in found.rows}
    for layer, grad in enumerate(grads):
        ratio = rows[f"blocks.{layer}.hook_resid_post"].ratio
        assert ratio == pytest.approx(float(grad.norm() / grads[-1].norm()), rel=1e-4)
    explicit = ip.gradient_health(model, TOKENS, loss=loss_of(TOKENS), site="**.hook_*")
    scales = [row for row in explicit.rows if row.site.endswith("hook_scale")]
    assert scales
    assert all(row.ratio is None for row in scales)


def test_it_takes_at_most_about_twice_the_memory_of_forward_and_backward() -> None:
    model = model_of()
    tokens = torch.randint(3, 60, (4, 64), generator=torch.Generator().manual_seed(0))
    loss = loss_of(tokens)
    model.sites  # noqa: B018 - found before it is measured
    model.module.set_attn_implementation("sdpa")

    def bare() -> None:
        loss(model.module(tokens, use_cache=False).logits).backward()
        model.module.zero_grad()

    bare()
    alone = peak_of(bare)
    with_health = peak_of(lambda: ip.gradient_health(model, tokens, loss=loss))
    assert with_health < 2.2 * alone, f"{with_health / alone:.2f} times"


def test_gradients_of_many_sites_are_those_of_each_alone() -> None:
    """Though the backward pass asks only for those that lie behind all others."""
    model = model_of()
    names = [site.name for site, _ in model.tree.select(None)]
    _, whole = model.run_with_cache(TOKENS, incl_bwd=loss_of(TOKENS))
    for frozen in (False, True):
        model.module.requires_grad_(not frozen)
        for name in names[:: max(1, len(names) // 8)]:
            _, one = model.run_with_cache(TOKENS, names_filter=name, incl_bwd=loss_of(TOKENS))
            torch.testing.assert_close(one.grad[name], whole.grad[name], rtol=1e-4, atol=1e-6)


# Clipping in few bits.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [1e-3, 0.1, 1.0, 30.0])
def test_a_clipped_gradient_is_within_its_bound_and_not_gone(
    dtype: torch.dtype, bound: float
) -> None:
    clip = ip.clip_grad("0", bound)
    draw = torch.Generator().manual_seed(0)
    for scale in (1e-2, 1.0, 1e4):
        for size in (1, 7, 400):
            grad = (scale * torch.randn(size, generator=draw, dtype=torch.float64)).to(dtype)
            made = clip.change_grad(grad, None)
            before, after = grad.double().norm(), made.double().norm()
            slack = 1 + 4 * torch.finfo(torch.float32).eps * (dtype != torch.float64)
            assert made.dtype == dtype
            if before <= bound:
                assert torch.equal(made, grad)
            else:
                assert after <= bound * slack + 1e-12
                assert after >= 0.9 * bound, (scale, size)


def test_a_factor_that_sixteen_bits_cannot_hold_still_leaves_a_gradient() -> None:
    grad = torch.full((4,), 6e4, dtype=torch.float16)
    made = ip.clip_grad("0", 1e-3).change_grad(grad, None)
    assert 0.9e-3 < float(made.double().norm()) <= 1e-3


# Statistics of attention scores.


def test_statistics_of_scores_leave_masked_pairs_out() -> None:
    model = model_of()
    tokens = torch.randint(3, 60, (3, 6), generator=torch.Generator().manual_seed(1))
    found = ip.activation_statistics(model, tokens, "attn_scores", progress=False)
    _, cache = model.run_with_cache(tokens, names_filter="attn_scores")
    seen = torch.ones(6, 6).tril().bool()
    for layer in range(2):
        name = f"blocks.{layer}.attn.hook_attn_scores"
        kept = cache[name][:, :, seen].double().movedim(1, -1).flatten(0, 1)
        row = found[name]
        assert row.count == 3 * 21
        torch.testing.assert_close(row.mean, kept.mean(0))
        torch.testing.assert_close(row.minimum, kept.amin(0))
        torch.testing.assert_close(row.variance, kept.var(0))


# Merging, lengths, impossible arguments.


def test_places_along_different_directions_do_not_merge() -> None:
    model = model_of()
    width = model.cfg.d_model
    one, other = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    options = {"site": "resid_post", "layer": 1, "progress": False}
    found = [ip.max_activating(model, TOKENS, direction=way, **options) for way in (one, other)]
    with pytest.raises(ValueError, match="different searches do not merge: digest"):
        found[0].merge(found[1])
    again = ip.max_activating(model, TOKENS + 1, direction=one.clone(), **options)
    assert found[0].merge(again).count == 2
    pre = ip.max_activating(model, TOKENS, direction=one, **{**options, "site": "resid_pre"})
    with pytest.raises(ValueError, match="do not merge: site"):
        found[0].merge(pre)


def test_every_token_is_drawn_as_often_whatever_the_length_of_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from interpose.methods import tuned_lens

    model, drawn = model_of(), []

    def counted(model: Any, batch: ip.Batch, maps: list[Tensor]) -> Tensor:
        drawn.append(tuple(batch.clean.shape))
        for each in maps:
            each.grad = torch.zeros_like(each)
        return torch.zeros(2)

    monkeypatch.setattr(tuned_lens, "_gradients", counted)
    texts = [[3] * 20] * 16 + [[4] * 5] * 4
    ip.TunedLens.fit(model, texts, steps=2000, progress=False)
    share = drawn.count((4, 5)) / len(drawn)
    chance = 20 / 340  # of a token to be in the short texts
    assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / 2000)


@pytest.mark.parametrize("columns", [0, -1])
def test_maps_need_a_column(columns: int) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3))
    x = torch.randn(2, 1, 8, 8)
    with pytest.raises(ValueError, match="at least 1"):
        ip.feature_maps(net, x, "0", columns=columns)
    with pytest.raises(IndexError, match="channel 5 is not there: there are channels 0 to 1"):
        ip.feature_maps(net, x, "0", channels=[5])
    with pytest.raises(IndexError, match="example 2 is not there"):
        ip.feature_maps(net, x, "0", example=2)


def test_a_probe_of_what_is_in_no_layer_says_so() -> None:
    with pytest.raises(ValueError, match="'embed' is in no layer"):
        ip.probe(model_of(), TOKENS.repeat(6, 1), [0, 1] * 3, site="embed", progress=False)


@pytest.mark.parametrize("share", [-0.5, 0, 0.0])
def test_a_share_that_holds_nothing_out_is_refused(share: float) -> None:
    from interpose.methods.alignment_search import _held_out

    with pytest.raises(ValueError, match="Give a share between 0 and 1"):
        _held_out(share, 10, torch.Generator())
