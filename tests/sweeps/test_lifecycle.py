"""A sweep leaves nothing behind, however it ends, and says how far it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.errors import Unsupported
from interpose.models.transformer import TransformerModel
from interpose.taps import context, eager
from tests.leftovers import same_state, state_of
from tests.sweeps import oracle
from tests.sweeps.oracle import LAYERS, LENGTH

METRIC = ip.metrics.logit_difference(20, 33)
PLANS = ("wavefront", "batches", "one per cell")


def sweep(model: Any, clean: Any, corrupt: Any = None, **options: Any) -> ip.SweepResult:
    return ip.sweep(model, clean, corrupt, **{"metric": METRIC, "progress": False, **options})


@pytest.fixture(params=["gpt2", "mistral"])
def model(request: pytest.FixtureRequest) -> TransformerModel:
    return TransformerModel(oracle.build(request.param))


# Progress.


@pytest.mark.parametrize("plan", PLANS)
def test_progress_rises_to_the_whole(model: TransformerModel, plan: str) -> None:
    seen: list[tuple[int, int]] = []
    result = sweep(
        model, *oracle.pair(3), plan=plan, max_rows=9, batch_size=2,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    total = result.each.numel()
    assert {whole for _, whole in seen} == {total}
    done = [count for count, _ in seen]
    assert done == sorted(done)
    assert done[-1] == total
    assert len(set(done)) > 3


def test_a_bar_goes_to_the_screen_and_away(
    model: TransformerModel, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(model, *oracle.pair(), progress=True)
    assert capfd.readouterr().err == ""  # nobody would see it
    monkeypatch.setattr("interpose.progress.has_screen", lambda: True)
    sweep(model, *oracle.pair(), progress=True)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "row/s" in printed.err
    assert not printed.err.endswith("\n")


# Ends.


def ending(error: BaseException | None, after: int) -> Any:
    calls: list[int] = []

    def progress(done: int, total: int) -> bool:
        calls.append(done)
        if len(calls) < after:
            return True
        if error is not None:
            raise error
        return False

    return progress


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), RuntimeError("mine")], ids=repr)
def test_nothing_is_left_when_a_sweep_is_ended(
    model: TransformerModel, plan: str, error: BaseException | None
) -> None:
    ends = oracle.pair()
    wanted = sweep(model, *ends, plan=plan)
    before = state_of(model.module)
    kind = ip.Cancelled if error is None else type(error)
    with pytest.raises(kind) as caught:
        sweep(model, *ends, plan=plan, max_rows=4, progress=ending(error, 3))
    if error is None:
        total = wanted.each.numel()
        assert str(caught.value).endswith(f" of {total}. What is done is the error's result.")
    assert same_state(before, state_of(model.module))
    assert not any("forward" in vars(part) for part in model.module.modules())
    assert torch.is_grad_enabled()
    assert context.current().scopes == ()
    assert eager._holders == 0
    del caught  # and the frames of the ended sweep
    assert torch.equal(sweep(model, *ends, plan=plan).each, wanted.each)


@pytest.mark.parametrize("plan", PLANS)
def test_an_ended_sweep_keeps_what_is_done(model: TransformerModel, plan: str) -> None:
    clean, corrupt = oracle.pair(batch=4)
    options: dict[str, Any] = {"plan": plan, "max_rows": 8, "batch_size": 2}
    wanted = sweep(model, clean, corrupt, **options)
    for share in (0.0, 0.5):
        options["progress"] = lambda done, total, share=share: done <= (share + 0.1) * total
        with pytest.raises(ip.Cancelled) as caught:
            sweep(model, clean, corrupt, **options)
        found = caught.value.result
        assert isinstance(found, ip.SweepResult)
        assert found.each.shape == wanted.each.shape
        done = ~found.each.isnan()
        assert share < float(done.float().mean()) < share + 0.5
        assert torch.equal(found.each[done], wanted.each[done])
        begun = ~found.clean.isnan()
        assert torch.equal(found.clean[begun], wanted.clean[begun])
        assert int(begun.sum()) == (4 if share else 2)
        assert 0 < found.tally.forwards < wanted.tally.forwards
        assert repr(found)
        assert ip.SweepResult.from_dict(found.to_dict()).tally == found.tally


def test_methods_that_sweep_keep_what_is_done_as_their_own_result() -> None:
    model, ends = ip.load("pocket", device="cpu"), oracle.pair()
    options: dict[str, Any] = {"metric": ip.metrics.logit(20), "max_rows": 12, "layer": [5, 6]}
    with pytest.raises(ip.Cancelled) as caught:
        ip.ablation(model, ends[0], **options, progress=ending(None, 1))
    whole = ip.ablation(model, ends[0], **options, progress=False)
    found = caught.value.result
    assert isinstance(found, ip.Scores)
    done = ~found.values.isnan()
    assert 0 < int(done.sum()) < done.numel()
    torch.testing.assert_close(found.values[done], whole.values[done])
    for family, over in (("block_every", 3), ("attn_head_pattern_dest_src_pos", LENGTH)):
        calls = ending(None, 8)
        with pytest.raises(ip.Cancelled) as caught:
            ip.activation_patching(model, *ends, family=family, **options, progress=calls)
        found = caught.value.result
        assert over in found.each.shape
        assert 0 < int((~found.each.isnan()).sum()) < found.each.numel()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("where", ["metric", "edit", "module"])
def test_nothing_is_left_when_something_raises(
    model: TransformerModel, plan: str, where: str
) -> None:
    ends = oracle.pair()
    wanted = sweep(model, *ends, plan=plan)
    options: dict[str, Any] = {}
    handle = None
    calls: list[int] = []

    def raising(*_: Any, **__: Any) -> Any:
        calls.append(0)
        if len(calls) > 2:
            raise ZeroDivisionError

        return ip.zero("blocks.0.hook_resid_pre") if where == "edit" else torch.zeros(2)

    if where == "module":
        last = oracle.blocks(model.module)[-1]

        def broken(*_: Any) -> None:
            raising()

        handle = last.mlp.register_forward_pre_hook(broken)
        options["max_rows"] = 4
    else:
        options[where] = raising
    before = state_of(model.module)
    with pytest.raises(ZeroDivisionError):
        sweep(model, *ends, plan=plan, **options)
    assert same_state(before, state_of(model.module))
    if handle is not None:
        handle.remove()
    assert torch.equal(sweep(model, *ends, plan=plan).each, wanted.each)


@pytest.mark.parametrize("plan", PLANS)
def test_the_model_and_its_hook_points_are_untouched(model: TransformerModel, plan: str) -> None:
    before, ends = state_of(model.module), oracle.pair()
    points = {name: point.offset for name, point in model.hook_dict.items()}
    logits = oracle.logits(model.module, ends[0])
    given = [each.clone() for each in ends]
    for site in ("resid_pre", "z"):
        sweep(model, *ends, site=site, plan=plan, pos=[8, 9])
    assert same_state(before, state_of(model.module))
    assert torch.equal(oracle.logits(model.module, ends[0]), logits)
    assert all(torch.equal(one, other) for one, other in zip(given, ends))
    assert {name: point.offset for name, point in model.hook_dict.items()} == points


@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_are_off_inside_and_as_before_afterwards(
    model: TransformerModel, enabled: bool
) -> None:
    seen: list[tuple[bool, bool]] = []

    def measured(logits: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), logits.requires_grad))
        return logits[:, -1, 20]

    with torch.set_grad_enabled(enabled):
        result = sweep(model, *oracle.pair(), metric=measured)
        assert torch.is_grad_enabled() is enabled
    assert set(seen) == {(False, False)}
    assert not result.each.requires_grad
    assert all(parameter.grad is None for parameter in model.module.parameters())


# Hooks of others.


def half(value: Tensor, hook: Any) -> Tensor:
    return value * 0.5


def by_hand(model: TransformerModel, clean: Tensor, corrupt: Tensor) -> Tensor:
    """One forward per cell, while something else changes the second block's MLP too."""
    spots = [oracle.Spot(block) for block in oracle.blocks(model.module)]
    cells = [oracle.Cell(spot, oracle.at(pos)) for spot in spots for pos in range(LENGTH)]
    mlp = oracle.Spot(oracle.blocks(model.module)[1].mlp, leaves=True)
    with mlp.through(lambda value: value * 0.5):
        last = oracle.patched(model.module, corrupt, clean, cells)[..., -1, :]
    return (last[..., 20] - last[..., 33]).reshape(LAYERS, LENGTH, 2)


@pytest.mark.parametrize("plan", ["auto", "one per cell"])
def test_hooks_that_stand_on_the_model_are_part_of_every_run(plan: str) -> None:
    model, ends = TransformerModel(oracle.build("gpt2")), oracle.pair()
    wanted, without = by_hand(model, *ends), sweep(model, *ends)
    model.add_hook("blocks.1.hook_mlp_out", half)
    result = sweep(model, *ends, plan=plan)
    assert len(model.list_hooks()) == 1
    model.reset_hooks()
    assert oracle.near(model.module, result.each[0], wanted)
    assert float((wanted - without.each[0]).abs().max()) > 1e-2
    if plan == "auto":
        assert result.tally.plan == "one per cell"
        assert result.tally.why == "other hooks are on the model"
    with model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", half)]):
        result = sweep(model, *ends, plan=plan)
    assert oracle.near(model.module, result.each[0], wanted)
    assert torch.equal(sweep(model, *ends).each, without.each)


@pytest.mark.parametrize("plan", ["wavefront", "batches"])
def test_rows_of_several_cells_are_not_run_under_hooks_of_others(plan: str) -> None:
    """They would be edited twice where rows join, or as other rows than they are."""
    model = TransformerModel(oracle.build("gpt2"))
    with model.hooks([ip.scale("resid_pre", 1.5, layer=1)]):
        assert sweep(model, *oracle.pair()).tally.plan == "one per cell"
        with pytest.raises(Unsupported, match="other hooks are on the model"):
            sweep(model, *oracle.pair(), plan=plan)


@pytest.mark.parametrize("site", ["resid_pre", "mlp_out"])
def test_raw_hooks_before_a_block_are_part_of_every_run_once(site: str) -> None:
    model, (clean, corrupt) = TransformerModel(oracle.build("gpt2")), oracle.pair()
    plain = sweep(model, clean, corrupt, site=site)  # and the proof
    blocks = oracle.blocks(model.module)
    with oracle.Spot(blocks[1]).through(lambda value: value * 1.5):
        spots = [
            oracle.Spot(block if site == "resid_pre" else block.mlp, site == "mlp_out")
            for block in blocks
        ]
        cells = [oracle.Cell(spot, oracle.at(pos)) for spot in spots for pos in range(LENGTH)]
        last = oracle.patched(model.module, corrupt, clean, cells)[..., -1, :]
        wanted = (last[..., 20] - last[..., 33]).reshape(LAYERS, LENGTH, 2)
        for plan in PLANS:
            found = sweep(model, clean, corrupt, site=site, plan=plan)
            assert oracle.near(model.module, found.each[0], wanted), plan
    assert float((wanted - plain.each[0]).abs().max()) > 1e-2


def test_raw_hooks_of_torch_are_part_of_every_run() -> None:
    model, ends = TransformerModel(oracle.build("gpt2")), oracle.pair()
    wanted = by_hand(model, *ends)
    with oracle.Spot(model.module.transformer.h[1].mlp, leaves=True).through(lambda x: x * 0.5):
        for plan in PLANS:
            result = sweep(model, *ends, plan=plan)
            assert oracle.near(model.module, result.each[0], wanted), plan


def test_a_standing_hook_sees_the_texts_and_nothing_else() -> None:
    """Other hooks may count on the batch they were made for."""
    model, ends = TransformerModel(oracle.build("gpt2")), oracle.pair()
    seen: set[tuple[int, ...]] = set()

    def note(value: Tensor, hook: Any) -> None:
        seen.add((*value.shape[:2], hook.offset))

    model.add_hook("blocks.1.hook_mlp_out", note)
    sweep(model, *ends)
    model.reset_hooks()
    assert seen == {(2, LENGTH, 0)}


# Many texts, many threads.

NAMES = ("Mary", "John", "Anna", "Tom", "Peter", "Susan", "Emma", "David", "Lisa", "Paul")


def prompts(model: Any) -> Iterator[tuple[str, str, str, str]]:
    """Clean and corrupted sentences, and their answers, as far as names are one token."""
    names = [name for name in NAMES if model.to_tokens(f" {name}", prepend_bos=False).shape[1] == 1]
    endings = ("gave a book to", "showed the dog to", "gave the key to")
    for ending in endings:
        for one in names:
            for two in names:
                if one != two:
                    start = f"When {one} and {two} went to the park,"
                    yield f"{start} {two} {ending}", f"{start} {one} {ending}", f" {one}", f" {two}"


def test_a_hundred_pairs_and_the_same_numbers_again() -> None:
    model = ip.load("pocket")
    some = list(prompts(model))[:100]
    assert len(some) == 100
    clean, corrupt, answers, instead = (list(column) for column in zip(*some))
    metric = ip.metrics.logit_difference(answers, instead)
    options = {"site": "z", "over": ("layer", "head"), "head": [0, 2], "metric": metric}
    result = sweep(model, clean, corrupt, **options)
    assert result.tally.plan == "wavefront"
    assert result.each.shape[-1] == 100
    assert float(result.clean.mean()) > 1  # the model knows how sentences end
    assert result.corrupt is not None
    assert float(result.corrupt.mean()) < -1
    assert float(result.effect.abs().max()) > 0.1
    again = sweep(model, clean, corrupt, **options)
    assert torch.equal(again.each, result.each)
    assert torch.equal(again.clean, result.clean)
    for number in (0, 37, 99):  # by itself each is the same
        alone = sweep(
            model, clean[number], corrupt[number], plan="one per cell",
            **(options | {"metric": ip.metrics.logit_difference(answers[number], instead[number])}),
        )  # fmt: skip
        assert oracle.near(model.module, alone.each[..., 0], result.each[..., number])


def in_threads(models: list[Any], wanted: list[Tensor], options: list[dict[str, Any]]) -> list[Any]:
    """What is wrong when each model is swept several times in a thread of its own."""
    wrong: list[Any] = []
    begin = threading.Barrier(len(models))

    def work(number: int) -> None:
        try:
            begin.wait()
            for _ in range(6):
                found = sweep(models[number], *oracle.pair(), **options[number]).each
                if not oracle.near(models[number].module, found, wanted[number]):
                    wrong.append((number, float((found - wanted[number]).abs().max())))
        except BaseException as error:
            wrong.append((number, error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_two_threads_sweep_two_models() -> None:
    models = [TransformerModel(oracle.build(name)) for name in ("gpt2", "mistral")]
    wanted = [sweep(model, *oracle.pair()).each for model in models]
    assert in_threads(models, wanted, [{}, {"max_rows": 6}]) == []


def test_two_threads_sweep_one_model() -> None:
    model = TransformerModel(oracle.build("gpt2"))
    options: list[dict[str, Any]] = [{}, {"max_rows": 6, "patch": "corrupt", "site": "z"}]
    wanted = [sweep(model, *oracle.pair(), **each).each for each in options]
    before = state_of(model.module)
    assert in_threads([model, model], wanted, options) == []
    assert same_state(before, state_of(model.module))
