"""Training: its steps against formulas written down once more, what it says against definitions, and going on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.sae.training.losses import losses
from tests.bounds import assert_near
from tests.sae.oracles import KINDS, made

RECIPE = ip.SAERecipe(aux=0.7, aux_k=2)
COST = 0.3
QUIET: dict[str, Any] = {"progress": False, "device": "cpu"}


def mixed(count: int, features: int = 20, width: int = 8, seed: int = 0) -> Tensor:
    """Vectors that are sums of few of some directions, away from zero."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.nn.functional.normalize(
        torch.randn(features, width, generator=torch.Generator().manual_seed(99)), dim=-1
    )
    some = torch.rand(count, features, generator=draw) < 0.08
    return (torch.rand(count, features, generator=draw) + 0.5) * some @ rows + 0.5


def dense_loss(sae: Any, x: Tensor, y: Tensor, dead: list[int]) -> Tensor:
    """The losses of the papers, with dense codes and nothing shared with the package but its weights."""
    centred = x - sae.b_dec if sae.subtract_bias else x
    norms = sae.W_dec.pow(2).sum(-1).sqrt()
    weights = norms if sae.by_norm else torch.ones_like(norms)
    rows = sae.W_dec / norms[:, None] if sae.by_norm else sae.W_dec
    wanted = y if sae.is_transcoder else x
    base = sae.b_dec + (x @ sae.W_skip.T if sae.W_skip is not None else 0)

    def error(codes: Tensor) -> Tensor:
        return ((codes @ rows + base - wanted) ** 2).sum(-1).mean()

    name = type(sae).__name__
    if name == "GatedSAE":
        gate = (centred @ sae.W_enc + sae.b_gate) * weights
        size = ((centred @ sae.W_enc) * sae.r_mag.exp() + sae.b_mag) * weights
        if sae.by_norm:  # r_mag counts what the gate is given, without its bias
            size = (centred @ sae.W_enc * weights) * sae.r_mag.exp() + sae.b_mag * weights
        opened = gate.clamp(min=0)
        alone = opened @ rows.detach() + (base.detach() if torch.is_tensor(base) else base)
        first = error((gate > 0) * size.clamp(min=0))
        return (
            first + COST * (opened * norms).sum(-1).mean() + ((alone - wanted) ** 2).sum(-1).mean()
        )
    pre = (centred @ sae.W_enc + sae.b_enc) * weights
    if name == "StandardSAE":
        return error(pre.clamp(min=0)) + COST * (pre.clamp(min=0) * norms).sum(-1).mean()
    if name in ("TopKSAE", "AbsTopKSAE"):
        size = pre.abs() if name == "AbsTopKSAE" else pre
        kept = size >= size.sort(-1, descending=True).values[:, sae.k - 1 : sae.k]
    else:
        kept = pre >= pre.flatten().sort(descending=True).values[int(sae.k * len(x)) - 1]
    codes = torch.where(kept, pre if name == "AbsTopKSAE" else pre.clamp(min=0), 0.0)
    total = error(codes)
    if name == "MatryoshkaSAE":
        for width in sae.widths[:-1]:
            first = torch.arange(sae.d_sae) < width
            total = total + error(codes * first)
    if dead:
        residual = (wanted - codes @ rows - base).detach()
        given = pre[:, dead]
        size = given.abs() if name == "AbsTopKSAE" else given
        most = min(2, len(dead))
        best = size >= size.sort(-1, descending=True).values[:, most - 1 : most]
        again = torch.where(best, given if name == "AbsTopKSAE" else given.clamp(min=0), 0.0)
        found = ((again @ rows[dead] - residual) ** 2).sum(-1).mean()
        total = total + 0.7 * min(len(dead) / 2, 1) * found
    return total


SPARSE = ["TopKSAE", "AbsTopKSAE", "BatchTopKSAE", "MatryoshkaSAE"]
CASES = [
    (kind, options, dead)
    for kind in ("StandardSAE", "GatedSAE", *SPARSE)
    for options in ({}, {"by_norm": True}, {"subtract_bias": False}, {"d_out": 4, "skip": True})
    for dead in ([], [7], [3, 7, 12])
    if not dead or kind in SPARSE
]


@pytest.mark.parametrize(("kind", "options", "dead"), CASES)
def test_losses_and_their_gradients_are_those_of_dense_formulas(
    kind: str, options: dict[str, Any], dead: list[int]
) -> None:
    sae = made(kind, **options).train()
    draw = torch.Generator().manual_seed(5)
    x, y = (torch.randn(9, size, generator=draw) for size in (6, sae.d_out))
    found = losses(sae, x, y, recipe=RECIPE, cost=COST, dead=torch.tensor(dead) if dead else None)
    wanted = dense_loss(sae, x, y, dead)
    assert_near(found.loss, wanted)
    names, weights = zip(*sae.named_parameters())
    ours = torch.autograd.grad(found.loss, weights, allow_unused=True)
    theirs = torch.autograd.grad(wanted, weights, allow_unused=True)
    for name, one, other in zip(names, ours, theirs):
        zero = torch.zeros(())
        assert (one is None) == (other is None), name
        assert_near(zero if one is None else one, zero if other is None else other, 100.0)
        assert other is None or bool(other.any()), name


def test_latents_that_fire_at_every_vector_are_summed_in_pieces() -> None:
    sae = ip.TopKSAE(6, 20, k=3).train()
    with torch.no_grad():
        sae.b_enc[4] = 100.0  # fires at all 500 vectors
    x = torch.randn(500, 6, generator=torch.Generator().manual_seed(1))
    found = losses(sae, x, x, recipe=RECIPE, cost=0.0, dead=None)
    assert int(found.fired[4]) == 500
    wanted = dense_loss(sae, x, x, [])
    for one, other in zip(
        torch.autograd.grad(found.loss, [sae.W_enc, sae.W_dec]),
        torch.autograd.grad(wanted, [sae.W_enc, sae.W_dec]),
    ):
        assert_near(one, other)


LEARNS: dict[str, Any] = {
    **{kind: lambda kind=kind: getattr(ip, kind)(8, 32, **KINDS[kind]) for kind in KINDS},
    "JumpReLUSAE": lambda: ip.JumpReLUSAE(8, 32),
    "transcoder": lambda: ip.TopKSAE(4, 32, k=3, d_out=4, skip=True),
    "crosscoder": lambda: ip.CrossCoder(4, 32, site=["a", "b"]),
}


@pytest.mark.parametrize("kind", LEARNS)
def test_every_architecture_learns(kind: str) -> None:
    x, sae = mixed(4000), LEARNS[kind]()
    halves = kind in ("transcoder", "crosscoder")
    where = {"site": "a", "out": "b"} if kind == "transcoder" else {}
    found = ip.train_sae(
        Halves(x) if halves else x,
        sae,
        steps=150,
        batch_size=256,
        recipe=ip.SAERecipe(learning_rate=0.01),
        **where,
        **QUIET,
    )
    assert found.sae is sae
    assert not sae.training
    given = wanted = mixed(2000, seed=1)
    if kind == "transcoder":
        given, wanted = given[:, :4], wanted[:, 4:]
    with torch.no_grad():
        out, codes = sae(given), sae.codes(given)
    explained = 1 - (out - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum()
    fires = float(codes.counts.float().mean())
    assert explained > (0.25 if kind == "transcoder" else 0.6), (explained, fires)
    assert 0.3 < fires < 16, (explained, fires)


class Halves:
    """A source of two sites: the halves of vectors."""

    def __init__(self, vectors: Tensor) -> None:
        self.sites = {"a": None, "b": None}
        self.vectors = vectors

    def batches(self, site: Any = None, **options: Any) -> Any:
        from interpose.sae.training.sources import InMemory
        from interpose.store.pools import PooledBatches

        inner = PooledBatches(InMemory(self.vectors), shuffle=True, **options)
        return Split(inner)


class Split:
    """Batches whose vectors are cut in two."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.left_out = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> ip.ActivationBatch:
        batch = next(self.inner)
        whole = batch["values"]
        return dataclasses.replace(batch, values={"a": whole[:, :4], "b": whole[:, 4:]})

    def state_dict(self) -> dict[str, Any]:
        return dict(self.inner.state_dict())

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


def test_several_on_one_stream_are_as_each_alone() -> None:
    x = mixed(2000)
    together = [ip.TopKSAE(8, 16, k=2), ip.StandardSAE(8, 24)]
    options: dict[str, Any] = {"steps": 20, "batch_size": 128, **QUIET}
    ip.train_sae(x, together, **options)
    for one, alone in zip(together, (ip.TopKSAE(8, 16, k=2), ip.StandardSAE(8, 24))):
        ip.train_sae(x, alone, **options)
        for name, weights in one.state_dict().items():
            assert torch.equal(weights, alone.state_dict()[name]), name


class Enough(Exception):
    """In the middle."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_ended_goes_on_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    x = mixed(3000)

    def saes() -> list[ip.SAE]:
        return [ip.TopKSAE(8, 32, k=2), ip.JumpReLUSAE(8, 16), ip.BatchTopKSAE(8, 16, k=2)]

    options: dict[str, Any] = {
        "steps": 40,
        "batch_size": 128,
        "dtype": dtype,
        "say_every": 5,
        "keep_every": 7,
        "recipe": ip.SAERecipe(dead_after=300, resample=6, warm_up=0.5),
        **QUIET,
    }

    def end(said: dict[str, Any]) -> None:
        if said["step"] == 25:
            raise Enough

    whole = ip.train_sae(x, saes(), folder=tmp_path / "whole", **options)
    with pytest.raises(Enough):
        ip.train_sae(x, saes(), folder=tmp_path / "ended", watch=end, **options)
    seen = []
    again = ip.train_sae(
        x, saes(), folder=tmp_path / "ended", watch=lambda one: seen.append(one["step"]), **options
    )
    assert min(seen) == 25  # it went on after step 21
    assert again.history == whole.history
    for one, other in zip(again.saes, whole.saes):
        for name, weights in one.state_dict().items():
            assert torch.equal(weights, other.state_dict()[name]), (one, name)
    third = ip.train_sae(x, saes(), folder=tmp_path / "ended", watch=end, **options)
    assert third.history == whole.history  # nothing is done anew
    assert torch.equal(third.saes[0].W_dec, whole.saes[0].W_dec)
    loaded = ip.SAE.from_pretrained(tmp_path / "ended" / "0")
    assert torch.equal(loaded.W_dec, whole.saes[0].W_dec)
    with pytest.raises(
        ip.FileError, match="another training: its steps is 40, and 41 is asked for"
    ):
        ip.train_sae(x, saes(), folder=tmp_path / "ended", **{**options, "steps": 41})
