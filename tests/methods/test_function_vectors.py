"""Effects are those of raw hooks, the vector is the heads' mean output by hand, and the pocket model says capitals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.methods.function_vectors import FunctionVector
from tests.bounds import assert_near
from tests.leftovers import same_state, state_of
from tests.models import tiny
from tests.pages import loads_nothing
from tests.sweeps import oracle

TYPES = ["gpt2", "llama", "gemma2", "gpt_neox", "granite", "olmo2"]
HEADS, SIZE = 4, 8
TRAIN = {
    "Spain": "Madrid", "Egypt": "Cairo", "Peru": "Lima", "Norway": "Oslo", "Cuba": "Havana", "Kenya": "Nairobi",
    "Iraq": "Baghdad", "Chile": "Santiago", "Poland": "Warsaw", "Greece": "Athens",
}  # fmt: skip
TEST = {
    "France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Canada": "Ottawa", "China": "Beijing",
    "Sweden": "Stockholm", "Finland": "Helsinki", "Austria": "Vienna",
}  # fmt: skip


def tokens(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(10, 60, (rows, length), generator=torch.Generator().manual_seed(seed))


SHOW, CORRUPT = tokens(5, 9, 1), tokens(3, 7, 2)
LOGIT = ip.metrics.logit([12, 13, 14])


def last_z(module: Any, name: str, layer: int, rows: Tensor) -> Tensor:
    """What enters the output projection at the last token, by a raw hook: [example, head, d_head]."""
    (found,) = oracle.values(module, rows, [oracle.spot(module, name, "z", layer)])
    return found[:, -1].unflatten(-1, (HEADS, SIZE))


def output_weight(module: Any, name: str, layer: int) -> Tensor:
    """[head, d_head, d_model] of the module's own output projection."""
    part = oracle.blocks(module)[layer].get_submodule(oracle.TYPES[name].z)
    weight = part.weight if name == "gpt2" else part.weight.T  # Conv1D has it the other way round
    return weight.detach().unflatten(0, (HEADS, SIZE))


@pytest.mark.parametrize("name", TYPES)
def test_effects_are_those_of_mean_heads_put_in_by_raw_hooks(name: str) -> None:
    module = oracle.build(name)
    before = state_of(module)
    found = ip.function_vector(ip.wrap(module), SHOW, CORRUPT, metric=LOGIT, head=2)
    assert same_state(before, state_of(module))
    answers = torch.tensor([12, 13, 14])
    plain = oracle.logits(module, CORRUPT)[range(3), -1, answers]
    wanted = torch.zeros(3, HEADS)
    for layer in range(3):
        mean = last_z(module, name, layer, SHOW).mean(0)
        for head in range(HEADS):

            def change(value: Tensor) -> Tensor:
                value[:, -1, head * SIZE : (head + 1) * SIZE] = mean[head]  # noqa: B023
                return value

            with oracle.spot(module, name, "z", layer).through(change):
                patched = oracle.logits(module, CORRUPT)[range(3), -1, answers]
            wanted[layer, head] = (patched - plain).mean()
    assert wanted.abs().max() > 0.02
    assert_near(found.values, wanted, oracle.some_logits(module))
    best = wanted.flatten().topk(2).indices.tolist()
    assert found.heads == [[place // HEADS, place % HEADS] for place in best]
    assert_near(found.protocol["baseline"], float(plain.mean()), oracle.some_logits(module))


@pytest.mark.parametrize("name", TYPES)
def test_the_vector_is_what_the_heads_write_on_average(name: str) -> None:
    module = oracle.build(name)
    model = ip.wrap(module)
    heads = [(0, 1), (2, 3), (1, 0)]
    found = ip.function_vector(model, SHOW, head=heads)
    assert found.heads == [list(pair) for pair in heads]
    assert found.values.isnan().all()
    for (layer, head), part in zip(heads, found.parts):
        z = last_z(module, name, layer, SHOW)[:, head]
        written = z @ output_weight(module, name, layer)[head]  # [example, d_model]
        block = oracle.blocks(module)[layer]
        if name in ("gemma2", "olmo2"):
            place = oracle.Spot(block.self_attn.o_proj, leaves=True)
            (out,) = oracle.values(module, SHOW, [place])
            norm = block.post_attention_layernorm
            eps = module.config.rms_norm_eps
            weight = norm.weight.detach() + (1 if name == "gemma2" else 0)
            written = written / (out[:, -1].square().mean(-1, keepdim=True) + eps).sqrt() * weight
        if name == "granite":
            written = written * module.config.residual_multiplier
        assert_near(part, written.mean(0), oracle.some_logits(model.module))
        assert part.norm() > 0.05
    torch.testing.assert_close(found.vector, found.parts.sum(0))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "granite"])
def test_adding_the_vector_is_writing_the_head_into_the_stream(name: str) -> None:
    model = ip.wrap(oracle.build(name))
    found = ip.function_vector(model, SHOW, head=[(1, 2)])
    mean = model.run_with_cache(SHOW, names_filter=("z", 1))[1]["z", 1][:, -1, 2].mean(0)
    filled = model.run_with_hooks(CORRUPT, hooks=[ip.fill("z", mean, layer=1, head=2, pos=-1)])
    instead = [ip.zero("z", layer=1, head=2, pos=-1), ip.add("attn_out", found.vector, layer=1, pos=-1)]  # fmt: skip
    torch.testing.assert_close(
        model.run_with_hooks(CORRUPT, hooks=instead), filled, rtol=1e-4, atol=1e-4
    )
    assert (filled - model(CORRUPT)).abs().max() > 1e-2


def test_the_edit_adds_it_after_a_layer_at_the_last_token() -> None:
    module = oracle.build("llama")
    model = ip.wrap(module)
    found = ip.function_vector(model, SHOW, head=[(0, 1), (1, 2)])

    def change(value: Tensor) -> Tensor:
        value[:, -1] += 2.5 * found.vector
        return value

    with oracle.spot(module, "llama", "resid_post", 1).through(change):
        wanted = oracle.logits(module, CORRUPT)
    edited = model.run_with_hooks(CORRUPT, hooks=[found.edit(1, 2.5)])
    torch.testing.assert_close(edited, wanted)
    assert (wanted - oracle.logits(module, CORRUPT)).abs().max() > 1e-2


@pytest.fixture(scope="module")
def pocket() -> Any:
    return ip.load("pocket").requires_grad_(False)


def asked(wording: str, some: dict[str, str]) -> list[str]:
    return [wording.format(country) for country in some]


def right(model: Any, texts: list[str], some: dict[str, str], *edits: Any) -> float:
    said = model.run_with_hooks(texts, hooks=list(edits))[:, -1].argmax(-1)
    return sum(
        int(token) == model.to_single_token(f" {city}") for token, city in zip(said, some.values())
    ) / len(some)


@pytest.fixture(scope="module")
def capitals(pocket: Any) -> FunctionVector:
    return ip.function_vector(
        pocket,
        asked("The capital of {} is", TRAIN),
        asked("The currency of {} is", TRAIN),
        answer=[f" {city}" for city in TRAIN.values()],
        head=3,
    )


def test_the_vector_of_capitals_makes_the_pocket_model_say_capitals(
    pocket: Any, capitals: FunctionVector
) -> None:
    assert capitals.heads[0] == [2, 0]
    assert capitals.at(layer=2, head=0) > 0.8
    others = asked("The currency of {} is", TEST)
    assert right(pocket, others, TEST) == 0
    assert right(pocket, others, TEST, capitals.edit(layer=1)) == 1
    chance = torch.randn(192, generator=torch.Generator().manual_seed(0))
    chance *= capitals.vector.norm() / chance.norm()
    assert right(pocket, others, TEST, ip.add("resid_post", chance, layer=1, pos=-1)) == 0


def test_prompts_of_different_lengths_go_together(pocket: Any) -> None:
    show = ["The capital of Spain is", "If you want to see the capital of Peru, travel to"]
    corrupt = ["The currency of Spain is", "People in Cuba speak", "The currency of Peru is"]
    answers = [" Madrid", " Havana", " Lima"]
    found = ip.function_vector(pocket, show, corrupt, answer=answers, head=1)
    z = [pocket.run_with_cache(text, names_filter=("z", 2))[1]["z", 2][0, -1, 0] for text in show]
    edit = ip.fill("z", torch.stack(z).mean(0), layer=2, head=0, pos=-1)
    moved = []
    for text, answer in zip(corrupt, answers):
        runs = pocket(text), pocket.run_with_hooks(text, hooks=[edit])
        plain, patched = (run[0, -1].softmax(-1)[pocket.to_single_token(answer)] for run in runs)
        moved.append(patched - plain)
    assert_near(
        found.at(layer=2, head=0),
        float(torch.stack(moved).mean()),
        oracle.some_logits(pocket.module),
    )
    assert found.protocol["prompts"] == 2
    assert found.protocol["corrupt"] == 3


def test_it_says_what_it_is_and_is_saved(capitals: FunctionVector) -> None:
    assert "is written by heads 2.0, 1.5, 1.0" in repr(capitals)
    assert "probability of the answers" in repr(capitals)
    loads_nothing(capitals.html())
    again = FunctionVector.from_dict(capitals.to_dict())
    assert torch.equal(again.vector, capitals.vector)
    assert again.heads == capitals.heads
    assert repr(again) == repr(capitals)


def test_wrong_questions_are_refused(pocket: Any) -> None:
    show = asked("The capital of {} is", TRAIN)
    with pytest.raises(ValueError, match="head=10 are chosen by their effect on corrupted prompts"):
        ip.function_vector(pocket, show)
    with pytest.raises(ValueError, match=r"answer=\.\.\. or metric=\.\.\."):
        ip.function_vector(pocket, show, show)
    with pytest.raises(IndexError, match="of layers 0 to 6 and heads 0 to 5"):
        ip.function_vector(pocket, show, head=[(7, 0)])
    with pytest.raises(IndexError, match="at least one"):
        ip.function_vector(pocket, show, head=[])
    with pytest.raises(ValueError, match="for 10 examples"):
        ip.function_vector(pocket, show, show, answer=[" Paris", " Rome"])
    with pytest.raises(ip.NothingMatched):
        ip.function_vector(ip.wrap(tiny.build("mamba")), SHOW, head=[(0, 0)])


def test_layers_count_from_the_end_and_several_metrics_are_refused() -> None:
    model, rows = ip.wrap(tiny.build("gpt2", layers=3)), tokens(3, 5, 1)
    found = [ip.function_vector(model, rows, head=[(layer, 1)]) for layer in (-1, 2)]
    assert found[0].heads == [[2, 1]]
    assert torch.equal(found[0].vector, found[1].vector)
    with pytest.raises(IndexError, match="layers 0 to 2"):
        ip.function_vector(model, rows, head=[(-4, 1)])
    with pytest.raises(TypeError, match=r"a metric is one of ip\.metrics"):
        ip.function_vector(model, rows, rows, metric={"one": LOGIT, "other": LOGIT})
