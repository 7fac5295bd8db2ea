"""Each architecture computes what its formulas say, with and without dense codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.sae.codes import Bags, bags
from tests.bounds import assert_near
from tests.sae.oracles import KINDS, codes_of, made, output_of

OPTIONS: list[dict[str, Any]] = [
    {},
    {"subtract_bias": False},
    {"by_norm": True},
    {"d_out": 4, "skip": True},
]


def vectors(count: int = 9, seed: int = 1) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (kind, options)
        for kind in KINDS
        for options in OPTIONS[: 2 if kind == "MatchingPursuitSAE" else None]
    ],
)
def test_codes_and_output_are_those_of_the_formulas(kind: str, options: dict[str, Any]) -> None:
    sae, x = made(kind, **options), vectors()
    wanted = codes_of(sae, x)
    assert 0 < (wanted != 0).float().mean() < 1
    assert_near(sae.encode(x), wanted, x)
    codes = sae.codes(x)
    assert_near(codes.dense(), wanted, x)
    assert codes.counts.tolist() == (wanted != 0).sum(-1).tolist()
    assert codes.fired.tolist() == (wanted != 0).sum(0).tolist()
    out = output_of(sae, wanted, x)
    for found in (sae(x), sae.decode(codes, x), sae.decode(wanted, x)):
        assert_near(found, out, x)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_vectors_keep_their_shape(kind: str) -> None:
    sae, x = made(kind), vectors(6)
    flat, deep = sae.codes(x), sae.codes(x.reshape(2, 3, 6))
    assert deep.dense().shape == (2, 3, 20)
    assert deep.counts.shape == (2, 3)
    assert_near(deep.dense().flatten(0, 1), flat.dense())
    assert_near(sae(x.reshape(2, 3, 6)).flatten(0, 1), sae(x))
    none = sae.codes(x[:0])
    assert none.dense().shape == (0, 20)
    assert sae.decode(none, x[:0]).shape == (0, 6)


def test_sparse_codes_decode_with_the_gradients_of_dense_ones() -> None:
    for kind in ("TopKSAE", "BatchTopKSAE", "StandardSAE"):
        sae, x = made(kind), vectors()
        weight = torch.randn(9, 6, generator=torch.Generator().manual_seed(5))
        (sae.decode(sae.codes(x)) * weight).sum().backward()
        found = {
            name: one.grad.clone() for name, one in sae.named_parameters() if one.grad is not None
        }
        sae.zero_grad()
        (sae.decode(sae.encode(x)) * weight).sum().backward()
        assert set(found) == {"W_enc", "W_dec", "b_enc", "b_dec"}
        for name, parameter in sae.named_parameters():
            assert_near(found[name], parameter.grad, 10.0)


def test_decoding_few_latents_of_many_never_makes_dense_codes() -> None:
    """The largest tensor that decoding makes is of the output's size, not of all latents."""
    sae = ip.TopKSAE(8, 50_000, k=4)
    codes = sae.codes(torch.randn(64, 8))
    seen: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            seen.extend(
                one.numel()
                for one in (made if isinstance(made, tuple) else (made,))
                if isinstance(one, Tensor)
            )
            return made

    with torch.no_grad(), Sizes():
        sae.decode(codes)
    assert seen
    assert max(seen) <= 64 * 8 < 64 * 50_000


def test_a_batch_top_k_fires_k_times_its_vectors_in_training_and_learns_a_threshold() -> None:
    sae = made("BatchTopKSAE")
    sae.threshold.zero_()
    sae.train()
    x = vectors(50)
    pre = sae.pre(x).relu()
    kept = sae.codes(x)
    assert int(kept.counts.sum()) == 150
    largest = pre.flatten().sort(descending=True).values[:150]
    assert_near(kept.values.detach().sort(descending=True).values, largest)
    assert_near(sae.threshold, largest.min())
    sae.codes(2 * x)
    again = sae.pre(2 * x).relu().flatten().sort(descending=True).values[149]
    assert_near(sae.threshold, 0.99 * largest.min() + 0.01 * again)
    assert_near(sae.codes(x).dense(), sae.encode(x))


def test_thresholds_have_the_estimated_gradient_of_the_paper() -> None:
    """d(code)/d(threshold) is -threshold/bandwidth within half a bandwidth of it, summed over vectors; else nothing."""
    sae = made("JumpReLUSAE", bandwidth=0.4)
    x, weight = vectors(200), torch.randn(200, 20, generator=torch.Generator().manual_seed(3))
    (sae.encode(x) * weight).sum().backward()
    pre = sae.pre(x).detach()
    near = ((pre - sae.threshold).abs() < 0.2) & (pre > 0)
    assert 20 < int(near.sum()) < near.numel() / 2
    wanted = -(weight * pre / 0.4 * near).sum(0)
    assert_near(sae.threshold.grad, wanted, 100.0)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "MatchingPursuitSAE"])
def test_folding_norms_and_scales_changes_no_output(kind: str) -> None:
    sae, x = made(kind, by_norm=True), vectors()
    codes, out = sae.encode(x), sae(x)
    sae.fold_norms()
    assert not sae.by_norm
    assert_near(sae.W_dec.norm(dim=-1), 1.0)
    assert_near(sae.encode(x), codes, x)
    assert_near(sae(x), out, x)
    sae.fold_scale(2.5)
    assert_near(sae.encode(x / 2.5), codes, x)
    assert_near(sae(x / 2.5), out / 2.5, x)


def test_norms_that_decide_which_latents_fire_are_not_folded_away() -> None:
    with pytest.raises(ValueError, match="would change with the norms"):
        made("TopKSAE").fold_norms()
    sae, x = made("JumpReLUSAE"), vectors()
    out, codes, norms = sae(x), sae.encode(x), sae.W_dec.norm(dim=-1)
    assert_near(sae.fold_norms()(x), out, x)
    assert_near(sae.encode(x), codes * norms, x)


@pytest.mark.parametrize("normalize", ["layer_norm", "constant_norm_rescale"])
def test_normalised_vectors_come_back_in_their_own_units(normalize: str) -> None:
    sae, x = made("StandardSAE", normalize=normalize), 7 * vectors() + 3
    if normalize == "layer_norm":
        inner = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)
        back = lambda out: out * x.std(-1, keepdim=True) + x.mean(-1, keepdim=True)  # noqa: E731
    else:
        inner = x / x.norm(dim=-1, keepdim=True) * 6**0.5
        back = lambda out: out * x.norm(dim=-1, keepdim=True) / 6**0.5  # noqa: E731
    plain = made("StandardSAE")
    assert_near(sae.encode(x), codes_of(plain, inner), inner)
    assert_near(sae(x), back(output_of(plain, codes_of(plain, inner), inner)), x, inner)
    change = torch.zeros(9, 20)
    change[:, 3] = 2.0
    moved = sae.decode(sae.encode(x) + change, x) - sae.decode(sae.encode(x), x)
    assert_near(sae.moved(change, x), moved, x, 100.0)
    with pytest.raises(TypeError, match=r"needs the vectors too: decode\(codes, x\)"):
        sae.decode(sae.codes(x))


def test_a_crosscoder_is_one_set_of_latents_for_several_sites() -> None:
    coder = ip.CrossCoder(6, 20, site=["one", "two"])
    x = torch.randn(5, 2, 6)
    per_site = torch.einsum("nsd,sdl->nsl", x, coder.W_enc.view(2, 6, 20)).sum(1)
    assert_near(coder.encode(x.flatten(-2)), per_site.relu(), x)
    assert_near(
        coder.costs(), sum(coder.by_site(coder.W_dec)[:, site].norm(dim=-1) for site in (0, 1))
    )


def test_wrong_sizes_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match="k is how many of 20 latents fire; got 21"):
        ip.TopKSAE(6, 20, k=21)
    with pytest.raises(ValueError, match=r"takes vectors of 6 features; got \(3, 7\)"):
        made("TopKSAE").encode(torch.randn(3, 7))
    with pytest.raises(ValueError, match="sizes of 1 and more"):
        ip.StandardSAE(0, 4)
    with pytest.raises(ValueError, match="normalize is one of none, layer_norm"):
        ip.StandardSAE(3, 4, normalize="whitening")
    with pytest.raises(ValueError, match="not taken off the input"):
        ip.StandardSAE(3, 4, d_out=3, subtract_bias=True)
    with pytest.raises(ValueError, match="no d_out, skip or by_norm"):
        ip.MatchingPursuitSAE(3, 4, by_norm=True)
    with pytest.raises(TypeError, match="chooses latents one by one"):
        made("MatchingPursuitSAE").pre(torch.randn(2, 6))


def test_sums_of_rows_have_the_gradients_that_torch_lacks_on_some_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(12, generator=draw, dtype=torch.float64, requires_grad=True)
    indices = torch.randint(9, (12,), generator=draw)
    starts = torch.tensor([0, 3, 3, 8, 12])
    monkeypatch.setattr(Bags, "PIECE", 5)
    assert torch.autograd.gradcheck(lambda a, b: Bags.apply(a, indices, starts, b), (rows, weights))
    for asked in ((rows,), (weights,), (rows, weights)):
        ours = torch.autograd.grad(Bags.apply(rows, indices, starts, weights).square().sum(), asked)
        theirs = torch.autograd.grad(bags(rows, indices, starts, weights).square().sum(), asked)
        for one, other in zip(ours, theirs):
            torch.testing.assert_close(one, other)
