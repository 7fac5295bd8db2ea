"""Functions as metrics: only what they look at is computed, and what they say is what they say of all logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.models.transformer import TransformerModel
from interpose.sweeps import answers
from interpose.sweeps.proof import prove
from tests.sweeps import oracle
from tests.sweeps.oracle import FIRST, LAYERS, LENGTH

pytestmark = pytest.mark.bits

POSITIONS = [5, 9, 12]
WIDTH = 99
Function = Callable[[Tensor], Any]


def sweep(model: Any, metric: Any, **options: Any) -> ip.SweepResult:
    options = {"pos": POSITIONS, "progress": False, **options}
    return ip.sweep(model, *oracle.pair(), metric=metric, **options)


@functools.cache
def model() -> TransformerModel:
    made = TransformerModel(oracle.build("gpt2"))
    prove(made)
    return made


@functools.cache
def by_hand() -> Tensor:
    """The logits of each cell by itself, [cell, example, pos, d_vocab]."""
    module, (clean, corrupt) = model().module, oracle.pair()
    cells = [
        oracle.Cell(oracle.Spot(block), oracle.at(pos))
        for block in oracle.blocks(module)
        for pos in POSITIONS
    ]
    return oracle.patched(module, corrupt, clean, cells)


def wanted(function: Function) -> Tensor:
    each = [torch.as_tensor(function(logits.clone())).float() for logits in by_hand()]
    return torch.stack(each).reshape(LAYERS, len(POSITIONS), 2)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many positions and tokens the unembedding computes, where it does not compute all."""
    model()
    seen: list[tuple[int, int]] = []
    output = answers.Columns.output

    def spied(self: Any, *given: Any) -> Tensor:
        found = output(self, *given)
        seen.append((found.shape[1], found.shape[2]))
        return found

    monkeypatch.setattr(answers.Columns, "output", spied)
    return seen


def flat_argmax(x: Tensor) -> Tensor:
    return x.flatten(1).argmax(-1).float()


def in_place(x: Tensor) -> Tensor:
    x[:, -1] *= 2
    return x[:, -1, 20]


# The function, and how many positions and tokens are computed for it: None for all.
FUNCTIONS: dict[str, tuple[Function, tuple[int, int] | None]] = {
    "two tokens": (lambda x: x[:, -1, 20] - x[:, -1, 33], (1, 2)),
    "a token at an earlier position": (lambda x: x[:, 9, 20], (1, 1)),
    "tokens at two positions": (lambda x: x[:, -1, 20] - x[:, 10, 33], (2, 2)),
    "a token at every position": (lambda x: x[:, :, 20].mean(1), (LENGTH - FIRST, 1)),
    "its mean without NaN": (lambda x: x[:, :, 20].nanmean(1), (LENGTH - FIRST, 1)),
    "the last position": (lambda x: x[:, -1].log_softmax(-1)[:, 20], (1, WIDTH)),
    "an earlier position": (lambda x: x[:, 9].log_softmax(-1)[:, 20], (1, WIDTH)),
    "the choice": (lambda x: x[:, -1].argmax(-1).float(), (1, WIDTH)),
    "the rank": (lambda x: (x[:, -1] > x[:, -1, 20:21]).sum(-1).float(), (1, WIDTH)),
    "the lead over the best": (lambda x: x[:, -1, 20] - x[:, -1].amax(-1), (1, WIDTH)),
    "numbers of Python": (lambda x: [float(one) for one in x[:, -1, 20]], (1, 1)),
    "in place": (in_place, (1, WIDTH)),
    "numbers of NumPy": (lambda x: x[:, -1, 20].numpy() + 1, (1, WIDTH)),
    "gathered": (lambda x: x[:, -1].gather(1, torch.tensor([[20], [7]]))[:, 0], (1, 2)),
    "indexed": (lambda x: x[torch.arange(2), [12, 9], [20, 7]], (2, 2)),
    "nothing": (lambda x: torch.arange(len(x)) + 1.0, (1, 1)),
    "everything": (lambda x: x.sum((1, 2)), None),
    "everything but NaN": (lambda x: x.nan_to_num().sum((1, 2)), None),
    "the mean without NaN": (lambda x: x.nanmean((1, 2)), None),
    "how many are NaN": (lambda x: x.isnan().sum((1, 2)) + x[:, -1, 20], None),
    "how many are numbers": (lambda x: (x == x).sum((1, 2)).float(), None),
    "where the largest is": (flat_argmax, None),
    "the largest": (lambda x: x.flatten(1).topk(3).values.sum(-1), None),
    "the smallest": (lambda x: x.amin((1, 2)), None),
    "what is large": (lambda x: x[:, -1, 20] + (x - 60).relu().sum((1, 2)), None),
    "differences in the batch": (lambda x: (x - x.mean(0)).sum((1, 2)), None),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_says_of_all_logits(
    name: str, computed: list[tuple[int, int]]
) -> None:
    function, few = FUNCTIONS[name]
    found = sweep(model(), function)
    assert oracle.near(model().module, found.each[0], wanted(function))
    assert set(computed) == ({few} if few else set())


@pytest.mark.parametrize("plan", ["wavefront", "batches", "one per cell"])
@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "mistral"])
def test_every_plan_computes_what_functions_look_at(kind: str, plan: str) -> None:
    other = TransformerModel(oracle.build(kind))
    few, whole = (
        (lambda x: x[:, 9, 20] - x[:, -1, 33]),
        (lambda x: x[:, 9, 20] - x[:, -1, 33] + 0 * x.sum((1, 2))),
    )
    found = [sweep(other, function, plan=plan) for function in (few, whole)]
    assert float(found[1].effect.abs().max()) > 1e-3
    for name in ("each", "clean", "corrupt"):
        assert oracle.near(other.module, getattr(found[0], name), getattr(found[1], name)), name


def test_functions_and_metrics_are_measured_together(computed: list[tuple[int, int]]) -> None:
    metrics: dict[str, Any] = {
        "mine": lambda x: x[:, 9, 20],
        "lead": ip.metrics.logit_difference(20, 33),
        "earlier": ip.metrics.logit(7, pos=-3),
    }
    found = sweep(model(), metrics)
    assert set(computed) == {(4, 3)}
    for number, metric in enumerate(metrics.values()):
        alone = sweep(model(), metric)
        assert oracle.near(model().module, found.each[number], alone.each[0])
    computed.clear()
    found = sweep(
        model(),
        {
            **metrics,
            "loss": ip.metrics.loss(),
            "last": ip.metrics.function(lambda x: x[:, 0, 20], last=2),
        },
    )
    assert not computed
    assert oracle.near(model().module, found.each[0], wanted(metrics["mine"]))
    assert oracle.near(model().module, found.each[4], wanted(lambda x: x[:, -2, 20]))


def test_a_function_gets_all_logits_by_their_shape(computed: list[tuple[int, int]]) -> None:
    shapes = set()

    def look(x: Tensor) -> Tensor:
        shapes.add((tuple(x.shape), x.dtype))
        return x[:, -1, 20]

    sweep(model(), look)
    assert computed
    assert shapes == {((2, LENGTH, WIDTH), torch.float32)}


def looks_elsewhere(odd: Tensor, known: Tensor) -> Function:
    """The last logit of a token; another one in the row where that is furthest from all that are known."""
    off = (odd[:, None] - known).abs().amin(1)
    value, near = odd[off.argmax()], off.max() / 2
    assert near > 1e-4

    def function(x: Tensor) -> Tensor:
        there = (x[:, -1, 20] - value).abs() < near
        return torch.stack([x[n, 2, 33] if there[n] else x[n, -1, 20] for n in range(len(x))])

    return function


def test_where_a_function_looks_may_follow_from_what_it_sees(
    computed: list[tuple[int, int]],
) -> None:
    ends = [oracle.logits(model().module, tokens)[:, -1, 20] for tokens in oracle.pair()]
    some = by_hand()[:, :, -1, 20]  # of nine cells two are tried first
    tried = [len(some) // 2, len(some) - 1]
    either = looks_elsewhere(some[:4].flatten(), torch.cat([*ends, *some[tried]]))
    found = sweep(model(), either)
    assert computed  # fewer were tried
    assert oracle.near(model().module, found.each[0], wanted(either))


def test_functions_that_draw_or_remember_have_all_logits(computed: list[tuple[int, int]]) -> None:
    calls, kept = [0], []

    def counts(x: Tensor) -> Tensor:
        calls[0] += 1
        return x[:, -1, 20] + calls[0]

    def keeps(x: Tensor) -> Tensor:
        kept.append(x)
        return x[:, -1, 20]

    def keeps_a_part(x: Tensor) -> Tensor:
        kept.append(x[:, -1])
        return x[:, -1, 20]

    for function in (counts, keeps, keeps_a_part, lambda x: x[:, -1, 20] + torch.rand(len(x))):
        kept.clear()
        sweep(model(), function)
        assert not computed
        assert not any(bool(one.isnan().any()) for one in kept)


def test_asking_a_function_draws_nothing() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x[:, -1, 20] + 100 * torch.rand(len(x))

    torch.manual_seed(3)
    found = sweep(model(), noisy, max_rows=2)
    torch.manual_seed(3)
    ends = [100 * torch.rand(2), 100 * torch.rand(2)]  # the changed run, then the other
    logits = [oracle.logits(model().module, tokens)[:, -1, 20] for tokens in oracle.pair()]
    assert found.corrupt is not None
    for got, drawn, plain in zip((found.corrupt, found.clean), ends, logits[::-1]):
        torch.testing.assert_close(got[0] - plain, drawn, rtol=1e-3, atol=1e-2)


def test_a_function_that_writes_into_its_logits_changes_no_other_metric() -> None:
    def wipes(x: Tensor) -> Tensor:
        x.zero_()
        return x.sum((1, 2)) + torch.rand(len(x))  # no two calls alike

    lead = ip.metrics.logit_difference(20, 33)
    found = sweep(model(), {"wipes": wipes, "lead": lead})
    assert oracle.near(model().module, found.each[1], sweep(model(), lead).each[0])


def test_others_who_look_at_the_unembedding_and_functions_see_all_of_it(
    computed: list[tuple[int, int]],
) -> None:
    seen = set()
    with model().hooks(
        fwd_hooks=[("unembed.hook_out", lambda value, hook: seen.add(value.shape[1:]))]
    ):
        sweep(model(), lambda x: x[:, -1, 20])
    assert seen == {(LENGTH, WIDTH)}
    assert not computed


def test_in_16_bits_a_function_has_every_token_of_the_positions_it_looks_at(
    computed: list[tuple[int, int]],
) -> None:
    half = TransformerModel(oracle.build("gpt2").bfloat16())
    found = sweep(half, lambda x: x[:, 9, 20])
    whole = sweep(half, lambda x: x[:, 9, 20] + 0 * x.sum((1, 2)))
    assert (1, WIDTH) in computed
    assert found.noise_floor > 0
    assert float((found.values - whole.values).abs().max()) <= 4 * found.noise_floor + 1e-2


def halved(count: int) -> list[ip.Variant]:
    return [
        ip.Variant([ip.scale("resid_pre", 0.5 - number / 40, layer=number % LAYERS)])
        for number in range(count)
    ]


@pytest.mark.parametrize("name", ["two tokens", "the last position", "in place", "everything"])
def test_variants_compute_what_a_function_looks_at(
    name: str, computed: list[tuple[int, int]]
) -> None:
    (function, few), tokens, variants = FUNCTIONS[name], oracle.pair()[0], halved(9)
    runs = ip.run_variants(model(), tokens, variants, metric=function, progress=False)
    found = runs.measured()
    assert set(computed) == ({few} if few else set())
    for number, variant in enumerate(variants):
        logits = model().run_with_hooks(tokens, hooks=list(variant.changes))
        assert oracle.near(model().module, found[number], function(logits).float())
    assert float((found - runs.base.measured).abs().min(1).values.max()) > 1e-3
    computed.clear()
    shown = list(ip.run_variants(model(), tokens, variants, metric=function, progress=False))
    assert shown[3].logits.shape == (2, LENGTH, WIDTH)
    assert not computed
    options: dict[str, Any] = {"return_type": None, "names_filter": ("mlp_out", 1)}
    for run in ip.run_variants(
        model(), tokens, variants, metric=function, progress=False, **options
    ):
        assert oracle.near(model().module, run.measured, found[run.number])
        assert run.logits.numel() == 0
        assert run.cache["mlp_out", 1].shape[1] == LENGTH
    assert bool(computed) == bool(few)


def test_variants_whose_function_looks_elsewhere_in_some_row_have_all_logits(
    computed: list[tuple[int, int]],
) -> None:
    tokens, variants = oracle.pair()[0], halved(9)
    plain = ip.run_variants(model(), tokens, variants, progress=False)
    last = torch.stack([run.logits[:, -1, 20] for run in plain])  # in the order in which they run
    known = torch.cat([plain.base.logits[:, -1, 20], last[4], last[8]])
    either = looks_elsewhere(last[:4].flatten(), known)
    runs = ip.run_variants(model(), tokens, variants, metric=either, progress=False)
    found = runs.measured()
    assert computed  # fewer were tried
    assert not found.isnan().any()
    for number, variant in enumerate(variants):
        logits = model().run_with_hooks(tokens, hooks=list(variant.changes))
        assert oracle.near(model().module, found[number], either(logits))
