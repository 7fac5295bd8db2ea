"""Training: its steps against formulas written down once more, what it says against definitions, and going on."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import interpose as ip
from interpose.sae.training.ahead import Ahead
from interpose.sae.training.dead import resample
from interpose.sae.training.learner import Learner
from interpose.sae.training.losses import losses
from interpose.sae.training.sources import InMemory
from interpose.store.pools import PooledBatches
from tests.bounds import assert_near
from tests.sae.oracles import KINDS, codes_of, made, output_of
from tests.sae.vectors import mixed

RECIPE = ip.SAERecipe(aux=0.7, aux_k=2)
COST = 0.3
QUIET: dict[str, Any] = {"progress": False, "device": "cpu"}


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


def test_however_often_it_is_killed_it_ends_as_one_that_was_not(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.sae.training_killed", str(tmp_path), "6", "0"]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "6 kills\n"
    assert not [
        path for path in tmp_path.rglob(".*") if path.is_file()
    ]  # nor anything half written


class Largest(TorchDispatchMode):
    """The largest tensors of numbers that are made, and how many of them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else [found]:
            fresh = isinstance(one, Tensor) and one.numel() >= self.size and "view" not in str(func)
            if fresh and not any(one is other for other in args):
                self.made.append(str(func))
        return found


@pytest.mark.parametrize("kind", SPARSE)
def test_no_dense_codes_are_made_in_a_step(kind: str) -> None:
    """One tensor [vector, latent] has what each latent is given; a plain step makes five and more of that size."""
    sae = getattr(ip, kind)(8, 512, **KINDS[kind]).train()
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    with Largest(256 * 512) as largest:
        losses(sae, x, x, recipe=RECIPE, cost=0.0, dead=None).loss.backward()
    assert largest.made
    few = {"TopKSAE": 1, "AbsTopKSAE": 2, "BatchTopKSAE": 2, "MatryoshkaSAE": 2}[kind]
    assert len(largest.made) <= few, largest.made
    with Largest(256 * 512) as plain:
        sae(x).square().sum().backward()
    assert len(plain.made) > few


def test_what_is_said_is_what_it_is_called(tmp_path: Path) -> None:
    """Loss, explained variance, latents that fire and dead ones of each record, from every batch by hand."""
    x = mixed(640)
    twin, sae = (ip.TopKSAE(8, 32, k=2) for _ in range(2))
    recipe = ip.SAERecipe(dead_after=200, aux=0.0)
    options: dict[str, Any] = {"batch_size": 64, "recipe": recipe, "say_every": 3, **QUIET}
    found = ip.train_sae(x, sae, steps=9, **options)
    learner = Learner(twin, recipe, steps=9, dtype=torch.float32, seed=0)
    since = torch.zeros(32)
    seen: list[tuple[Tensor, Tensor, float]] = []
    records = []
    batches = PooledBatches(InMemory(x), batch_size=64, shuffle=True, seed=0, epochs=None)
    for number in range(9):
        batch = next(batches)["values"]
        if not number:
            learner.begin(batch, batch, 64)
        assert learner.scales is not None
        scaled = batch * learner.scales[0]
        codes = codes_of(twin, scaled).detach()
        out = output_of(twin, codes, scaled).detach()
        seen.append((scaled, out, float((codes != 0).sum())))
        since = torch.where((codes != 0).any(0), 0, since + 64)
        learner.step(batch, batch, number)
        if number % 3 == 2:
            wanted, made_ = (torch.cat([one[part] for one in seen]) for part in (0, 1))
            error = (made_ - wanted).square().sum()
            records.append(
                {
                    "mse": float(error / len(wanted)),
                    "explained_variance": float(
                        1 - error / (wanted - wanted.mean(0)).square().sum()
                    ),
                    "l0": sum(one[2] for one in seen) / len(wanted),
                    "dead": float((since >= 200).float().mean()),
                }
            )
            seen = []
    assert any(0 < one["dead"] < 1 for one in records)
    assert len(found.history) == 3
    for said, by_hand in zip(found.history, records):
        for name, number_ in by_hand.items():
            assert_near(said[name], number_, 30.0)
        assert_near(said["loss"], said["mse"], 30.0)


def test_rows_keep_their_norms_and_vectors_their_units() -> None:
    x = mixed(2000) * 40 + 7
    sae = ip.TopKSAE(8, 32, k=2)
    found = ip.train_sae(x, sae, steps=60, batch_size=128, **QUIET)
    norms = sae.W_dec.norm(dim=-1)
    assert_near(norms, norms[0].expand_as(norms))
    with torch.no_grad():
        explained = 1 - (sae(x) - x).square().sum() / (x - x.mean(0)).square().sum()
    assert float(explained) == pytest.approx(found.last["explained_variance"], abs=0.1)
    assert explained > 0.3
    before = sae(x).detach()
    ip.train_sae(x, sae, steps=1, batch_size=128, recipe=ip.SAERecipe(learning_rate=1e-12), **QUIET)
    assert_near(sae(x), before, 1000.0)  # it goes on from where it was, not anew


def test_dead_latents_begin_anew_where_vectors_are_explained_badly() -> None:
    x = mixed(1000)
    sae = ip.StandardSAE(8, 16)
    learner = Learner(sae, ip.SAERecipe(dead_after=100), steps=100, dtype=torch.float32, seed=0)
    learner.begin(x, x, 100)
    learner.step(x, x, 0)
    learner.dead.since[[3, 5]] = 100
    errors, residual = torch.zeros(1000), torch.randn(1000, 8)
    errors[17] = 1.0  # the only one that is drawn
    before = {name: one.clone() for name, one in sae.state_dict().items()}
    kept = learner.norms[[3, 5]]
    count = resample(sae, learner.optimizer, learner.dead, x, errors, residual, seed=0, step=1)
    assert count == 2
    other = [latent for latent in range(16) if latent not in (3, 5)]
    for latent in (3, 5):
        along = torch.nn.functional.cosine_similarity(sae.W_dec[latent], residual[17], dim=0)
        assert_near(along, 1.0)
        assert_near(
            torch.nn.functional.cosine_similarity(sae.W_enc[:, latent], residual[17], dim=0), 1.0
        )
    assert_near(sae.W_dec[[3, 5]].norm(dim=-1), kept[:, 0])
    size = 0.2 * before["W_enc"][:, other].norm(dim=0).mean()
    assert_near(sae.W_enc[:, [3, 5]].norm(dim=0), size.expand(2))
    assert torch.equal(sae.W_dec[other], before["W_dec"][other])
    assert torch.equal(sae.W_enc[:, other], before["W_enc"][:, other])
    moments = learner.optimizer.state[sae.W_enc]["exp_avg"]
    assert not moments[:, [3, 5]].any()
    assert bool(moments[:, other].any())
    assert not learner.dead.since[[3, 5]].any()


def test_a_wanted_number_of_latents_is_reached() -> None:
    x = mixed(4000)
    recipe = ip.SAERecipe(l0=2.0, sparsity=0.5, learning_rate=1e-2)
    saes = [ip.StandardSAE(8, 32), ip.JumpReLUSAE(8, 32)]
    found = ip.train_sae(x, saes, steps=300, batch_size=128, recipe=recipe, **QUIET)
    without = ip.SAERecipe(sparsity=0.01, learning_rate=1e-2)
    free = [ip.StandardSAE(8, 32), ip.JumpReLUSAE(8, 32)]
    dense = ip.train_sae(x, free, steps=60, batch_size=128, recipe=without, **QUIET)
    for number in range(2):
        assert 1.4 < found.of(number)[-1]["l0"] < 2.8, found.of(number)[-1]
        assert dense.of(number)[-1]["l0"] > 3


def test_it_ends_when_told_to_and_hands_over_what_there_is() -> None:
    x = mixed(1000)
    options: dict[str, Any] = {"steps": 50, "batch_size": 64, "say_every": 1, **QUIET}
    found = ip.train_sae(x, ip.TopKSAE(8, 16, k=2), watch=lambda said: said["step"] < 7, **options)
    assert len(found.history) == 7
    assert found.protocol["ended"] == "watch said so"
    still = ip.SAERecipe(learning_rate=1e-9)
    found = ip.train_sae(x, ip.TopKSAE(8, 16, k=2), patience=4, recipe=still, **options)
    assert 5 <= len(found.history) < 12
    assert found.protocol["ended"] == "no better in 4 records"
    options["progress"] = lambda done, total: done < 3
    with pytest.raises(ip.Cancelled) as ended:
        ip.train_sae(x, ip.TopKSAE(8, 16, k=2), **options)
    assert len(ended.value.result.history) == 3
    batches = PooledBatches(InMemory(x), batch_size=64, shuffle=True, seed=0, epochs=1)
    with pytest.warns(UserWarning, match="ends after 16 of 50 steps: the source had 16 batches"):
        ip.train_sae(batches, ip.TopKSAE(8, 16, k=2), steps=50, **QUIET)


MISTAKES: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (ip.TopKSAE(8, 16, k=2), {"steps": 0}, ValueError, "steps and batch_size are 1 or more; got 0"),
    (
        ip.TopKSAE(9, 16, k=2),
        {},
        ip.EditShapeError,
        "has d_in 9, and the vectors of 'values' have 8",
    ),
    ("topk", {}, TypeError, "sae is an autoencoder such as ip.TopKSAE"),
    ([], {}, ValueError, "give at least one autoencoder, and none twice"),
    (ip.TopKSAE(8, 16, k=2), {"site": "resid"}, ip.SiteNotFound, "'resid' is not in these batches"),
    (ip.TopKSAE(8, 16, k=2, d_out=8), {}, TypeError, "is a transcoder: say which site it writes"),
    (ip.TopKSAE(8, 16, k=2), {"dtype": torch.int8}, ValueError, "dtype is one of torch.float32"),
    (ip.TopKSAE(8, 16, k=2), {"recipe": []}, ValueError, "1 autoencoders and 0 recipes"),
    (
        ip.TopKSAE(8, 16, k=2),
        {"recipe": ip.SAERecipe(l0=3)},
        ValueError,
        "says itself how many latents",
    ),
]


@pytest.mark.parametrize(
    ("sae", "options", "kind", "said"), MISTAKES, ids=lambda one: str(one)[:20]
)
def test_mistakes_say_what_to_write(
    sae: Any, options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=re.escape(said)):
        ip.train_sae(mixed(100), sae, **{"steps": 2, **options, **QUIET})


def test_recipes_are_refused_that_mean_nothing() -> None:
    for options in (
        {"centre": "middle"}, {"warm_up": 0.9, "decay": 0.2}, {"learning_rate": 0.0}, {"aux": -1.0}
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(options))):
            ip.SAERecipe(**options)


def test_vectors_that_are_no_numbers_end_it() -> None:
    x = mixed(500)
    x[77] = torch.nan
    sae = ip.TopKSAE(8, 16, k=2)
    with pytest.raises((FloatingPointError, ValueError), match=r"nan"):
        ip.train_sae(x, sae, steps=20, batch_size=50, say_every=1, **QUIET)


def test_batches_read_ahead_are_the_same_and_so_are_their_states() -> None:
    x = mixed(500)

    def made() -> PooledBatches:
        return PooledBatches(InMemory(x), batch_size=64, shuffle=True, seed=0, epochs=2)

    plain, ahead = made(), Ahead(made(), pinned=False)
    assert ahead.state_dict() == plain.state_dict()
    for count, batch in enumerate(ahead):
        assert torch.equal(batch["values"], next(plain)["values"])
        assert ahead.state_dict() == plain.state_dict(), count
        if count == 4:
            later = Ahead(made(), pinned=False)
            later.load_state_dict(ahead.state_dict())
    assert count == 15
    with pytest.raises(StopIteration):
        next(ahead)
    whole = list(made())
    assert torch.equal(next(later)["values"], whole[5]["values"])
    assert not torch.equal(whole[4]["values"], whole[5]["values"])
    later.close()
    assert later._thread is not None
    assert not later._thread.is_alive()


def test_what_fails_while_reading_ahead_is_raised_where_the_batch_is_asked_for() -> None:
    class Broken(PooledBatches):
        def __next__(self) -> ip.ActivationBatch:
            raise ip.FileError("cut off")

    ahead = Ahead(
        Broken(InMemory(mixed(9)), batch_size=2, shuffle=True, seed=0, epochs=1), pinned=False
    )
    for _ in range(2):
        with pytest.raises(ip.FileError, match="cut off"):
            next(ahead)


def test_reading_ahead_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = mixed(800)
    options: dict[str, Any] = {"steps": 12, "batch_size": 64, **QUIET}
    plain, ahead = (ip.TopKSAE(8, 16, k=2) for _ in range(2))
    ip.train_sae(x, plain, **options)
    train = sys.modules["interpose.sae.training.train"]
    usual = train.batches_of
    readers: list[Ahead] = []

    def as_on_a_gpu(*given: Any, **words: Any) -> Ahead:
        readers.append(Ahead(usual(*given, **words), pinned=False))
        return readers[-1]

    monkeypatch.setattr(train, "batches_of", as_on_a_gpu)
    ip.train_sae(x, ahead, **options)
    assert torch.equal(plain.W_dec, ahead.W_dec)
    assert readers[0]._thread is not None
    assert not readers[0]._thread.is_alive()
