"""Variants that change several sites give what raw torch hooks give, one run at a time."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.sweeps import planning
from tests.bounds import assert_near
from tests.models.texts import PAD, speaking
from tests.sweeps import oracle

pytestmark = pytest.mark.bits
SETS = [  # layers and kinds, so that rows of a site are not neighbours
    [(0, "resid_pre"), (2, "mlp_out")],
    [(1, "mlp_out")],
    [(0, "resid_pre"), (1, "resid_pre"), (2, "resid_post")],
    [(2, "mlp_out")],
    [(0, "mlp_out"), (2, "resid_pre")],
    [(1, "resid_pre"), (2, "mlp_out")],
]


@pytest.mark.parametrize("name", ["gpt2", "llama", "gptj", "bloom", "mamba"])
@pytest.mark.parametrize("max_rows", [None, 4])
def test_several_changes_of_a_row(name: str, max_rows: int | None) -> None:
    model, tokens = ip.wrap(oracle.build(name)), oracle.pair()[0]
    sets = [s for s in SETS if name != "mamba" or all(kind != "mlp_out" for _, kind in s)]
    variants, wanted = [], []
    for number, places in enumerate(sets):

        def act(value: Tensor, hook: Any = None, by: float = 0.3 + number / 4) -> Tensor:
            value[:, 3:] *= by
            return value

        example = 1 if number % 2 else None
        names = [f"blocks.{layer}.hook_{kind}" for layer, kind in places]
        variants.append(ip.Variant([(site, act) for site in names], example))
        with ExitStack() as stack:
            for layer, kind in places:
                spot = oracle.spot(model.module, name, kind, layer)
                assert spot is not None
                stack.enter_context(spot.through(act))
            whole = oracle.logits(model.module, tokens)
        wanted.append(whole if example is None else whole[[example]])
    runs = ip.run_variants(model, tokens, variants, max_rows=max_rows)
    found = {run.number: run.logits for run in runs}
    assert len(found) == len(sets)
    plain = oracle.logits(model.module, tokens)
    for number, each in enumerate(wanted):
        assert oracle.near(model.module, found[number], each), number
        assert not torch.allclose(each, plain[-len(each) :], atol=1e-2)


def halves(kinds: list[tuple[int, str]], by: float) -> ip.Variant:
    """Multiplies from the third position on."""

    def act(value: Tensor, hook: Any) -> None:
        value[:, 3:, ::2] *= by

    return ip.Variant([((kind, layer), act) for layer, kind in kinds])


def by_hand(model: Any, name: str, tokens: Tensor, changed: Any, read: Any, blur: Any) -> Any:
    """The logits of a run with raw hooks, and what then passes at some places."""
    found: list[Tensor] = []
    with ExitStack() as stack:
        embed = oracle.Spot(model.module.get_input_embeddings(), True)
        stack.enter_context(embed.through(blur))
        for (layer, kind), by in changed:

            def act(value: Tensor, by: float = by) -> Tensor:
                value[:, 3:, ::2] *= by
                return value

            stack.enter_context(oracle.spot(model.module, name, kind, layer).through(act))  # type: ignore[union-attr]
        for layer, kind in read:
            place = oracle.spot(model.module, name, kind, layer)
            stack.enter_context(place.through(found.append))  # type: ignore[union-attr]
        return oracle.logits(model.module, tokens), found


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bloom", "mamba"])
@pytest.mark.parametrize("max_rows", [None, 4])
@pytest.mark.parametrize("stop", [False, True])
def test_values_of_each_variant_with_what_all_share(
    name: str, max_rows: int | None, stop: bool
) -> None:
    model, tokens = ip.wrap(oracle.build(name)), oracle.pair()[0]
    sets = [[(2, "resid_pre")], [(0, "resid_pre")], [(1, "resid_post")], [(2, "resid_post")], []]
    read = [(0, "resid_post"), (1, "resid_post")]

    def blur(value: Tensor, hook: Any = None) -> Tensor:
        drawn = torch.randn(2, 1, value.shape[-1], generator=torch.Generator().manual_seed(3))
        value[:, [2]] += drawn
        return value

    runs = ip.run_variants(
        model,
        tokens,
        [halves(kinds, 0.3 + n / 4) for n, kinds in enumerate(sets)],
        names_filter=[("resid_post", 0), "blocks.1.hook_resid_post"],
        return_type=None if stop else "logits",
        hooks=[("hook_embed" if name != "mamba" else ("resid_pre", 0), blur)],
        max_rows=max_rows,
    )
    found = {run.number: run for run in runs}
    assert sorted(found) == list(range(len(sets)))
    plain, _ = by_hand(model, name, tokens, [], [], lambda value: value)
    blurred, base = by_hand(model, name, tokens, [], read, blur)
    assert not torch.allclose(plain, blurred, atol=1e-2)
    for layer, value in enumerate(base):
        assert_near(runs.base.cache["resid_post", layer], value, value)
    for number, kinds in enumerate(sets):
        changed = [(place, 0.3 + number / 4) for place in kinds]
        logits, there = by_hand(model, name, tokens, changed, read, blur)
        for layer, value in enumerate(there):
            assert_near(found[number].cache["resid_post", layer], value, value)
        if stop:
            assert found[number].logits.numel() == 0
        else:
            assert oracle.near(model.module, found[number].logits, logits)
            assert kinds == [] or not torch.allclose(logits, blurred, atol=1e-3)
    layers = 2 if stop else 3
    whole = sum(layers - min(layer, layers) for layer in (2, 0, 1, 2, 2)) * tokens.numel()
    assert runs.tally.plan == "wavefront"
    assert whole <= runs.tally.token_layers - 3 * tokens.numel() <= whole + 6 * tokens.shape[1]
    assert runs.tally.one_per_cell == 5 * 3 * tokens.numel()


def test_the_metric_is_measured_and_a_run_that_is_ended_keeps_what_is_done() -> None:
    model, tokens = ip.wrap(oracle.build("llama")), oracle.pair()[0]
    sets = [[(2, "mlp_out")], [(0, "resid_pre")], [(1, "mlp_out")]]
    variants = [halves(kinds, 0.3) for kinds in sets]
    own = lambda logits: logits[:, -1, 7] - logits[:, -1, 9]  # noqa: E731
    for metric in (ip.metrics.logit_difference(7, 9), own):
        runs = ip.run_variants(model, tokens, variants, metric=metric, progress=False)
        found = runs.measured()
        for number, kinds in enumerate(sets):
            changed = [(place, 0.3) for place in kinds]
            logits, _ = by_hand(model, "llama", tokens, changed, [], lambda value: value)
            assert oracle.near(model.module, found[number], own(logits))
            assert not torch.allclose(own(logits), runs.base.measured, atol=1e-4)
        assert len(found[0]) == 2
    assert "3 variants of 2 x 13 tokens\n  wavefront: 2 forwards, 2" in repr(runs)
    assert "token-layers, against 234 of one forward per cell" in repr(runs)
    seen: list[tuple[int, int | None]] = []

    def stop(done: int, total: int | None) -> bool:
        seen.append((done, total))
        return len(seen) < 2

    runs = ip.run_variants(model, tokens, variants, metric=own, progress=stop, max_rows=2)
    with pytest.raises(ip.Cancelled, match="ended after row 4 of 6") as caught:
        runs.measured()
    assert seen == [(2, 6), (4, 6)]
    assert torch.equal(caught.value.result[1:], found[1:]) or oracle.near(
        model.module, caught.value.result[1:], found[1:]
    )
    assert caught.value.result[0].isnan().all()


@pytest.mark.parametrize("fits", [0.5, 5])
def test_rows_are_as_many_as_fit_in_memory(fits: float, monkeypatch: Any) -> None:
    model, tokens = ip.wrap(oracle.build("gpt2")), oracle.pair(1)[0]
    variants = [halves([(layer, "mlp_out")], 0.3) for layer in (0, 1, 2) for _ in range(3)]
    row = 1 / planning.Sizes.of(model).most_rows(positions=13, length=13, logits=13 * 99)
    monkeypatch.setattr(planning, "_room", lambda _: fits * 2**27 * row)
    runs = ip.run_variants(model, tokens, variants, progress=False)
    assert len(list(runs)) == 9
    assert runs.tally.forwards == 1 + (9 if fits < 1 else 2)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_other_plans_give_the_same(name: str) -> None:
    model, tokens = ip.wrap(oracle.build(name)), oracle.pair()[0]
    variants = [halves([(1, "mlp_out"), (2, "mlp_out")], 0.3), halves([(2, "resid_pre")], 2.0)]
    variants.append(ip.Variant([ip.zero("z", layer=[0, 2], head=1)], example=1))
    options: dict[str, Any] = {"names_filter": ("mlp_out", 1), "progress": False}
    quick = ip.run_variants(model, tokens, variants, **options)
    idle = ip.Variant([("ln_final.hook_normalized", lambda value, hook: None)])
    whole = ip.run_variants(model, tokens, [*variants, idle], **options)
    with model.hooks(fwd_hooks=[("hook_embed", lambda value, hook: None)]):
        alone = ip.run_variants(model, tokens, variants, **options)
        one = {run.number: run for run in alone}
    assert whole.tally.why.endswith("is in no block")
    assert [r.tally.plan for r in (quick, whole, alone)] == ["wavefront", "batches", "one per cell"]
    assert alone.tally.token_layers == 2 * 78 + 78 + 39
    assert "other hooks are on the model" in repr(alone)
    for runs in (quick, whole):
        for run in runs:
            if run.number < 3:
                assert len(run.logits) == len(one[run.number].logits) == (1, 2)[run.number < 2]
                assert oracle.near(model.module, run.logits, one[run.number].logits)
                value = one[run.number].cache["mlp_out", 1]
                assert_near(run.cache["mlp_out", 1], value, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 6])
def test_short_and_masked_texts_in_16_bits_and_in_inference_mode(
    dtype: torch.dtype, length: int
) -> None:
    model = speaking("llama", layers=3)
    model.module.to(dtype)
    tokens = oracle.pair(2, max(length, 2), 1)[0][:, :length]
    padded = torch.cat([torch.full((2, 3), PAD), tokens], 1)
    variants = [ip.Variant([ip.scale("mlp_out", 3.0, layer=layer, pos=-1)]) for layer in (1, 2)]
    with torch.inference_mode():
        one, other = (
            ip.run_variants(model, given, variants, metric=ip.metrics.logit(7), progress=False)
            for given in (tokens, padded)
        )
        found, again = one.measured(), other.measured()
    assert torch.equal(found, again)
    for number, layer in enumerate((1, 2)):
        wanted = model.run_with_hooks(tokens, hooks=[ip.scale("mlp_out", 3.0, layer=layer, pos=-1)])
        assert_near(found[number], wanted[:, -1, 7].float(), wanted)
    assert (found - one.base.measured).abs().max() > 1e-2


@torch.no_grad()
def test_what_all_share_is_in_whole_runs_too() -> None:
    """One variant changes what is in no block, so that all run from the first block on."""
    model, (tokens, _) = ip.wrap(oracle.build("llama")), oracle.pair()
    shared = [ip.scale("mlp_out", 3.0, layer=0), ip.scale("hook_embed", 2.0)]
    variants = [
        ip.Variant([ip.zero("mlp_out", layer=2)]),
        ip.Variant([ip.scale("hook_embed", 0.5)]),
    ]
    metric = ip.metrics.logit_difference(20, 33)
    runs = ip.run_variants(model, tokens, variants, hooks=shared, metric=metric, progress=False)
    assert runs.tally.plan == "batches"
    embed, first, last = model.module.model.embed_tokens, *oracle.blocks(model.module)[::2]
    for found, scale, end in zip(runs.measured(), (2.0, 1.0), (0.0, 1.0)):
        with ExitStack() as stack:
            for module, by in ((embed, scale), (first.mlp, 3.0), (last.mlp, end)):
                stack.enter_context(oracle.Spot(module, True).through(lambda x, by=by: x * by))
            logits = oracle.logits(model.module, tokens)[:, -1]
        assert oracle.near(model.module, found, logits[:, 20] - logits[:, 33])
        bare = oracle.logits(model.module, tokens)[:, -1]
        assert float((logits - bare).abs().max()) > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("max_rows", [None, 3, 4, 7])
def test_in_16_bits_one_that_changes_nothing_runs_beside_the_others(
    max_rows: int | None, monkeypatch: Any
) -> None:
    """A module that computes otherwise for more rows, as kernels do, shows in the noise."""
    module = oracle.build("gpt2").half()
    tokens, rows = oracle.pair()[0], []
    last = oracle.blocks(module)[-1]
    far = 0.1 * oracle.values(module, tokens, [oracle.Spot(last, leaves=True)])[0].abs().mean()

    def shift(_: Any, args: Any, output: Any) -> Any:
        moved = output if isinstance(output, Tensor) else output[0]
        rows.append(len(moved))
        moved[..., :7] += far if len(moved) not in (1, 2) else 0
        return output

    last.register_forward_hook(shift)
    # A hook of torch would make the runs come one by one.
    monkeypatch.setattr("interpose.sweeps.execution.strangers", lambda model: False)
    model = ip.wrap(module)
    variants = [ip.Variant([ip.scale("mlp_out", 0.5, layer=layer)]) for layer in (0, 1, 1, 2)]
    metric = ip.metrics.logit_difference(20, 33)
    runs = ip.run_variants(
        model, tokens, variants, metric=metric, max_rows=max_rows, progress=False
    )
    rows.clear()
    found = runs.measured()
    assert max_rows is None or max(rows) <= max_rows + 2  # that are no multiple of another size
    assert found.shape == (4, 2)
    noise = runs.noise()
    assert noise.shape == (17, 2)
    few, many = (oracle.logits(module, tokens.repeat(n, 1))[:2, -1].float() for n in (1, 2))
    wanted = (many - few)[:, 20] - (many - few)[:, 33]
    together = max_rows != 3  # there is no room for it
    assert_near(noise[0], wanted if together else torch.zeros(2), many.half())
    exact = ip.wrap(oracle.build("gpt2"))
    assert ip.run_variants(
        exact, tokens, variants, metric=metric, progress=False
    ).noise().shape == (0, 2)


def test_errors_say_what_to_write() -> None:
    model, tokens = ip.wrap(oracle.build("gpt2")), oracle.pair()[0]
    scale = ip.Variant([ip.scale("mlp_out", 3.0, layer=1)])
    with pytest.raises(
        ValueError, match=r"the texts have 12 to 13 tokens.*for batch in ip.batches"
    ):
        ip.run_variants(model, [tokens[0].tolist(), tokens[1, 1:].tolist()], [scale])
    with pytest.raises(IndexError, match="a variant is of example 2, and 2 run"):
        ip.run_variants(model, tokens, [ip.Variant([], example=2)])
    with pytest.raises(TypeError, match=r"a variant changes values: give edits, or pairs"):
        ip.run_variants(model, tokens, [ip.Variant([ip.skip("blocks.0", lambda x: x)])])
    with pytest.raises(ValueError, match="there is no metric: give metric="):
        ip.run_variants(model, tokens, [scale]).measured()
    with pytest.raises(ValueError, match="return_type=None goes with names_filter"):
        ip.run_variants(model, tokens, [scale], return_type=None)
    with pytest.raises(ip.SiteNotFound, match="no site 'zz'"):
        ip.run_variants(model, tokens, [ip.Variant([("zz", print)])])
    wide = ip.Variant([(("mlp_out", 1), lambda value, hook: value[:1])])
    with pytest.raises(ip.EditShapeError, match="a variant's hook returned"):
        list(ip.run_variants(model, tokens, [wide]))
    absent = ip.Variant([ip.knockout(1, query=2, key=5)])
    with pytest.raises(ip.NothingSelected, match="no query that it selects sees a key"):
        list(ip.run_variants(model, tokens, [absent]))
    with pytest.raises(ip.Unsupported, match="training mode"):
        ip.run_variants(ip.wrap(oracle.build("gpt2").train()), tokens, [scale])
