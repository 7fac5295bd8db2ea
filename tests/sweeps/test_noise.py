"""Sweeps in 16 bits: a noise floor that is true against float32, and logits that are finer than the model's own."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.models.transformer import TransformerModel
from interpose.sweeps.proof import prove
from tests.sweeps import oracle

SHORT = (torch.bfloat16, torch.float16)
METRIC = ip.metrics.logit_difference(20, 33)
NAMES = (
    "When Mary and John went to the store, John gave a drink to",
    "When Mary and John went to the store, Mary gave a drink to",
)
LEAD = ip.metrics.logit_difference(" Mary", " John")


def sweep(model: Any, *texts: Any, **options: Any) -> ip.SweepResult:
    return ip.sweep(model, *texts, **{"metric": METRIC, "progress": False, **options})


@functools.cache
def pocket(dtype: torch.dtype) -> tuple[ip.TransformerModel, ip.TransformerModel]:
    """The pocket model in 16 bits, and the same weights in float32."""
    model = ip.load("pocket", device="cpu")
    short = copy.deepcopy(model.module).to(dtype)
    modules = (short, copy.deepcopy(short).float())
    first, second = (ip.wrap(module, tokenizer=model.tokenizer) for module in modules)
    return first, second


@functools.cache
def tiny(name: str, dtype: torch.dtype) -> TransformerModel:
    return TransformerModel(oracle.build(name).to(dtype))


# The floor.


@pytest.mark.parametrize("dtype", SHORT)
def test_an_effect_of_the_wrong_sign_is_within_the_noise_floor(dtype: torch.dtype) -> None:
    short, exact = pocket(dtype)
    options = {"site": "z", "over": ("layer", "head"), "metric": LEAD}
    found, wanted = (sweep(model, *NAMES, **options) for model in (short, exact))
    for result in (found, found.own):
        assert result is not None
        wrong = result.effect * wanted.effect < 0
        assert not bool((wrong & ~result.within_noise).any())
        beyond = wanted.effect.abs() > 3 * result.noise_floor
        assert int(beyond.sum()) >= 2  # so much is left that can be seen
        assert not bool((beyond & result.within_noise).any())
        assert bool(wrong.any())
    assert wanted.noise_floor == 0
    assert wanted.own is None


def test_logits_have_the_resolution_of_their_dtype() -> None:
    """Near 17, numbers of bfloat16 are 0.125 apart."""
    short, _ = pocket(torch.bfloat16)
    texts = ("The Eiffel Tower is in", "The Trevi Fountain is in")
    found = sweep(short, *texts, over="layer", metric=ip.metrics.logit(" Paris"))
    assert found.own is not None
    assert 16 < float(found.clean) < 32
    assert found.own.noise_floor >= 0.125
    steps = found.own.values.unique()
    assert bool((steps == steps.bfloat16()).all())
    assert not bool((found.values == found.values.bfloat16()).all())


@pytest.mark.parametrize("plan", ["wavefront", "batches", "one per cell"])
def test_what_a_plan_does_to_a_run_that_is_not_changed_is_in_the_floor(plan: str) -> None:
    """A module that computes otherwise for more rows, as kernels do, by little enough to pass for rounding."""
    module = oracle.build("gpt2").half()
    (clean, corrupt), last = oracle.pair(batch=1), oracle.blocks(module)[-1]
    far = 0.1 * oracle.values(module, clean, [oracle.Spot(last, leaves=True)])[0].abs().mean()

    def shift(_: Any, args: Any, output: Any) -> Any:
        moved = output if isinstance(output, Tensor) else output[0]
        moved[..., :7] += far if len(moved) not in (1, 2) else 0
        return output

    last.register_forward_hook(shift)
    few, many = (oracle.logits(module, corrupt.repeat(rows, 1))[0, -1].float() for rows in (1, 4))
    up, down = int((many - few).argmax()), int((many - few).argmin())
    by_plan = float((many - few)[up] - (many - few)[down])
    near = 4 * torch.finfo(torch.float16).eps * float(few.abs().max())
    assert by_plan > 4 * near
    found = sweep(
        TransformerModel(module),
        clean,
        corrupt,
        metric=ip.metrics.logit_difference(up, down),
        plan=plan,
        site="attn_out",
    )
    assert found.own is not None
    idle = float(found.own.noise[0, 0, 0])
    assert abs(idle - (0 if plan == "one per cell" else by_plan)) <= near
    assert found.own.noise_floor >= abs(idle)


@pytest.mark.parametrize("max_rows", [1, 2, 5, None])
def test_rows_that_change_nothing_leave_the_others_alone(max_rows: int | None) -> None:
    model, texts = tiny("llama", torch.float16), oracle.pair(batch=1)
    exact = TransformerModel(copy.deepcopy(model.module).float())
    found = sweep(model, *texts, max_rows=max_rows)
    wanted = sweep(exact, *texts, max_rows=max_rows)
    assert float((found.effect - wanted.effect).abs().max()) <= 2 * found.noise_floor
    assert float(wanted.effect.abs().max()) > 4 * found.noise_floor > 0
    assert found.noise.shape == (1, 17, 1)


def test_a_floor_is_of_the_mean_over_examples_and_of_each_example() -> None:
    model, texts = tiny("gpt2", torch.bfloat16), oracle.pair(batch=4)
    found = sweep(model, *texts, batch_size=3)
    assert found.noise.shape == (1, 17, 4)
    assert found.noise_floor == pytest.approx(float(found.noise[0].mean(-1).abs().max()))
    each = found.noise[0].abs().amax(0)
    assert found.noise_floor < float(each.mean())  # the noise of several examples averages out
    effects = found.each[0] - found.baseline[0]
    marked = torch.tensor([record["within_noise"] for record in found.records(examples=True)])
    assert torch.equal(marked, (effects.abs() <= each).flatten())
    assert 0 < int(marked.sum()) < marked.numel()


def test_texts_that_do_not_differ_have_no_noise() -> None:
    model, (clean, _) = tiny("gpt2", torch.float16), oracle.pair()
    assert sweep(model, clean, clean).noise_floor == 0


def test_logits_that_a_model_hands_out_in_float32_have_a_floor_all_the_same() -> None:
    model, (clean, corrupt) = tiny("mamba", torch.bfloat16), oracle.pair()
    assert oracle.logits(model.module, clean).dtype == torch.float32
    found = sweep(model, clean, corrupt, over="layer", metric=lambda x: x[:, -1, 20] - x[:, -1, 33])
    assert found.noise_floor > 0
    assert found.own is None


# Finer logits.


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", ["gpt2", "llama", "gptj", "mamba", "phi"])
def test_logits_of_a_few_tokens_are_multiplied_in_float32(name: str, dtype: torch.dtype) -> None:
    model, texts = tiny(name, dtype), oracle.pair()
    head = model.module.get_output_embeddings()
    found = sweep(model, *texts, over="layer")
    assert found.own is not None
    assert (found.logits, found.own.logits) == ("float32", str(dtype).removeprefix("torch."))
    for end, tokens in zip(("clean", "corrupt"), texts):
        (stream,) = oracle.values(model.module, tokens, [oracle.Spot(head)])
        last, rows = stream[:, -1].double(), head.weight.detach()[[20, 33]].double()
        bias = 0 if head.bias is None else head.bias.detach()[[20, 33]].double()
        logits = last @ rows.T + bias
        # The stream may round otherwise in a batch of both texts.
        size = float((last.abs() @ rows.abs().T).max())
        near = 4 * torch.finfo(dtype).eps * size
        assert torch.allclose(
            getattr(found, end)[0], (logits[:, 0] - logits[:, 1]).float(), rtol=0, atol=near
        )
        own = oracle.logits(model.module, tokens)[:, -1, [20, 33]].float()
        assert torch.allclose(getattr(found.own, end)[0], own[:, 0] - own[:, 1], rtol=0, atol=near)
    assert not torch.equal(found.each, found.own.each)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite"])
def test_logits_that_are_capped_or_scaled_are_the_model_s_own(name: str) -> None:
    model, (clean, corrupt) = tiny(name, torch.bfloat16), oracle.pair()
    assert prove(model).finer == "logits are more than the unembedding gives"
    found = sweep(model, clean, corrupt, over="layer")
    assert found.own is None
    assert found.logits == "bfloat16"
    logits = oracle.logits(model.module, clean)[:, -1].float()
    near = 4 * torch.finfo(torch.bfloat16).eps * float(logits.abs().max())
    assert torch.allclose(found.clean[0], logits[:, 20] - logits[:, 33], rtol=0, atol=near)
    assert float((logits[:, 20] - logits[:, 33]).abs().max()) > 2 * near
    assert "logits are the model's own, in bfloat16" in repr(found)


def test_metrics_of_all_logits_read_the_model_s_own() -> None:
    model, texts = tiny("gpt2", torch.float16), oracle.pair()
    for metric in (ip.metrics.probability(20), {"one": METRIC, "all": ip.metrics.kl()}):
        found = sweep(model, *texts, over="layer", metric=metric)
        assert found.own is None
        assert found.logits == "float16"
        assert min(found.noise_floors) > 0


def test_a_text_too_short_for_a_proof_has_all_its_logits_computed() -> None:
    """Whether logits are the unembedding's columns is then not known."""
    module = oracle.build("gemma2")
    module.config.max_position_embeddings = 3
    assert prove(TransformerModel(module)).answers


# What is shown.


def test_a_result_says_which_logits_it_shows() -> None:
    short, exact = pocket(torch.float16)
    found = sweep(short, *NAMES, over="layer", metric=LEAD)
    line = "logits of these tokens in float32, from a stream in float16; result.own has the same by"
    assert line in repr(found)
    assert line in found.html()
    assert "logits are the model's own, in float16" in repr(found.own)
    assert "float16" not in repr(sweep(exact, *NAMES, over="layer", metric=LEAD))
    data = json.loads(json.dumps(found.to_dict()))
    assert (data["logits"], data["own"]["logits"]) == ("float32", "float16")
    again = ip.SweepResult.from_dict(data)
    assert again.own is not None
    assert found.own is not None
    for one, two in ((again, found), (again.own, found.own)):
        assert torch.equal(one.each, two.each)
        assert one.noise_floors == two.noise_floors
    assert repr(again) == repr(found)


def test_places_within_the_noise_are_marked_in_tables_and_pictures() -> None:
    short, _ = pocket(torch.bfloat16)
    found = sweep(short, *NAMES, site="z", over=("layer", "head"), metric=LEAD)
    within = found.within_noise
    count = int(within.sum())
    assert 0 < count < within.numel()
    assert [record["within_noise"] for record in found.records()] == within.flatten().tolist()
    assert "effects are within it, grey or in brackets\n" in repr(found)
    assert f"{count} of 42 effects are within it, grey or in brackets" in found.html()
    assert found.svg().count('fill="#eaeef2"') == count
    assert "grey: within the noise floor" in found.svg()
    assert "grey: within the noise floor" in found.html()
    layers = sweep(short, *NAMES, site="attn_out", over="layer", metric=LEAD, pos=-1)
    few = int(layers.within_noise.sum())
    assert 0 < few < 7
    assert layers.svg().count('fill="#d0d7de"') == few
    assert "grey: within the noise floor" in layers.html()


# Methods.


def test_families_of_patching_have_the_floor_of_all_their_sweeps() -> None:
    model, texts = tiny("llama", torch.bfloat16), oracle.pair(length=6, first=3)
    for family in ("block_every", "attn_head_all_pos_every", "attn_head_pattern_dest_src_pos"):
        found = ip.activation_patching(model, *texts, metric=METRIC, family=family)
        assert found.own is not None
        for one in (found, found.own):
            assert one.each.shape[1:-1] == tuple(len(entries) for entries in one.axes.values())
            assert one.noise.shape[-1] == one.examples == 2
            assert one.noise_floor > 0
        assert (found.logits, found.own.logits) == ("float32", "bfloat16")
        assert found.own.axes == found.axes
        repr(found), repr(found.own)


def test_ablations_mark_what_is_within_the_noise() -> None:
    short, exact = pocket(torch.bfloat16)
    found, wanted = (ip.ablation(model, NAMES[0], metric=LEAD) for model in (short, exact))
    wrong = found.values * wanted.values < 0
    assert not bool((wrong & ~found.within_noise).any())
    count = int(found.within_noise.sum())
    assert 0 < count < 42
    assert [record["within_noise"] for record in found.records()].count(True) == count
    assert f"{count} of 42 are within it" in repr(found)
    assert found.svg().count('fill="#eaeef2"') == count
    assert found.protocol["logits"] == "float32"
    assert "within_noise" not in wanted.top(1)[0]
    assert ip.Scores.from_dict(found.to_dict()).noise_floor == found.noise_floor
    assert found.sum("head").noise_floor == pytest.approx(6 * found.noise_floor)


FACT, PARIS = "The Eiffel Tower is in", ip.metrics.logit(" Paris")
METHODS: dict[str, tuple[str, Any, Any]] = {
    "a path": (NAMES[0], LEAD, lambda model, **said: ip.path_patching(model, *NAMES, **said)),
    "a path to heads": (
        NAMES[0],
        LEAD,
        lambda model, **said: ip.path_patching(
            model, *NAMES, receivers=[(6, 0, "v"), (6, 4, "v")], **said
        ),
    ),
    "a knockout": (
        NAMES[0],
        LEAD,
        lambda model, **said: ip.attention_knockout(
            model, NAMES[0], query=-1, over=("layer", "key"), **said
        ),
    ),
    "tracing": (
        FACT,
        PARIS,
        lambda model, **said: ip.causal_tracing(
            model, FACT, subject="Eiffel Tower", samples=4, **said
        ),
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_variants_mark_what_is_within_the_noise(method: str) -> None:
    text, metric, run = METHODS[method]
    short, exact = pocket(torch.bfloat16)
    found, wanted = (run(model, metric=metric, progress=False) for model in (short, exact))
    assert wanted.noise_floor == 0
    assert "noise floor" not in repr(wanted)
    # By the model's own logits, about as a sweep's: a mean over noises has less.
    swept = sweep(short, text, edit=ip.zero, site="z", over="layer", metric=metric).own
    assert swept is not None
    assert 0.1 * swept.noise_floor < found.noise_floor < 4 * swept.noise_floor
    within = found.within_noise
    count = int(within.sum())
    off = (found.values - wanted.values).abs()
    assert 0 < float(off[within].max()) <= found.noise_floor
    assert not bool((found.values * wanted.values < 0)[~within].any())
    assert 0 < count < within.numel()
    assert float(wanted.values.abs().max()) > 2 * found.noise_floor
    assert f"{count} of {within.numel()} are within it" in repr(found)
    assert [record["within_noise"] for record in found.records()].count(True) == count


def test_a_method_that_is_ended_does_not_know_its_floor() -> None:
    short, _ = pocket(torch.bfloat16)
    with pytest.raises(ip.Cancelled) as raised:
        ip.path_patching(short, *NAMES, metric=LEAD, progress=lambda done, _: done < 5)
    assert raised.value.result.noise_floor == float("inf")
    repr(raised.value.result)
