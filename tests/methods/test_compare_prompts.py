"""Two prompts compared: every number against raw hooks, and attributions that add up to the change of the logits."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.methods.compare_prompts import PromptComparison
from tests.leftovers import same_state, state_of
from tests.models import tiny
from tests.pages import loads_nothing
from tests.sweeps import oracle

A, B = "The Eiffel Tower is in", "The Trevi Fountain is in"
WHAT = {"answer": " Paris", "instead": " Rome"}


@pytest.fixture(scope="module")
def pocket() -> ip.TransformerModel:
    found = ip.load("pocket")
    assert isinstance(found, ip.TransformerModel)
    return found


@cache
def built(name: str) -> Any:
    return ip.wrap(tiny.build(name, layers=3).requires_grad_(False))


def raw(module: Any, tokens: Tensor, part: str) -> list[Tensor]:
    """What a part of each block returns, or takes if its name begins with '>', by raw hooks."""
    kept: list[Tensor] = []

    def keep(_: Any, args: Any, output: Any) -> None:
        value = args[0] if part.startswith(">") else output
        kept.append((value if isinstance(value, Tensor) else value[0]).detach().clone())

    handles = [
        block.get_submodule(part.strip(">")).register_forward_hook(keep)
        for block in oracle.blocks(module)
    ]
    module(tokens)
    for handle in handles:
        handle.remove()
    return kept


# What adds to the stream, behind post-norms: attention's part and the MLP's.
PARTS = {
    "gpt2": ("attn", "mlp"),
    "llama": ("self_attn", "mlp"),
    "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gpt_neox": ("attention", "mlp"),
}


@pytest.mark.parametrize("name", list(PARTS))
def test_differences_and_cosines_are_those_of_what_the_parts_add(name: str) -> None:
    model = built(name)
    module, (clean, corrupt) = model.module, oracle.pair(batch=2)
    found = ip.compare_prompts(model, clean, corrupt, pos=None)
    assert list(found.axes) == ["component", "pos"]
    for kind, part in zip(("attn", "mlp"), PARTS[name]):
        for layer, (x, y) in enumerate(zip(raw(module, clean, part), raw(module, corrupt, part))):
            relative = ((x - y).norm(dim=-1) / x.norm(dim=-1)).mean(0)
            cosine = torch.cosine_similarity(x, y, dim=-1).mean(0)
            torch.testing.assert_close(
                found.at(component=f"{kind} {layer}"), relative, atol=1e-5, rtol=1e-4
            )
            row = found.axes["component"].index(f"{kind} {layer}")
            torch.testing.assert_close(found.cosine[row], cosine, atol=1e-5, rtol=1e-4)
    assert (found.values[:, : oracle.FIRST] == 0).all()  # nothing differs before the texts do
    assert (found.cosine[:, : oracle.FIRST] == 1).all()
    assert found.values[:, oracle.FIRST :].max() > 0.1


def test_heads_are_compared_by_what_they_write(pocket: ip.TransformerModel) -> None:
    found = ip.compare_prompts(pocket, A, B, by="head", **WHAT)
    inputs = [raw(pocket.module, pocket.to_tokens(text), ">attn.c_proj") for text in (A, B)]
    assert list(found.axes) == ["layer", "head"]
    for layer, (x, y) in enumerate(zip(*inputs)):
        weight = pocket.module.transformer.h[layer].attn.c_proj.weight.detach().view(6, 32, 192)
        first, second = (torch.einsum("hd,hdm->hm", z[0, -1].view(6, 32), weight) for z in (x, y))
        expected = (first - second).norm(dim=-1) / first.norm(dim=-1)
        torch.testing.assert_close(found.values[layer], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("by", ["component", "head"])
@pytest.mark.parametrize("name", [*PARTS, "granite", "pocket"])
def test_attributions_add_up_to_the_change_of_the_logit_difference(
    name: str, by: str, pocket: ip.TransformerModel
) -> None:
    model: Any = pocket if name == "pocket" else built(name)
    clean, corrupt = oracle.pair(batch=2)
    answer, instead = [5, 19], 8
    found = ip.compare_prompts(model, clean, corrupt, answer=answer, instead=instead, by=by)

    def lead(tokens: Tensor) -> float:
        with torch.no_grad():
            _, seen = model.run_with_cache(tokens, names_filter="unembed.hook_out")
            logits = model(tokens)[:, -1]
        logits = seen["unembed.hook_out"][:, -1] if name == "gemma2" else logits  # before its cap
        return float((logits[[0, 1], answer] - logits[:, instead]).mean())

    change = lead(clean) - lead(corrupt)
    assert abs(change) > 1e-2
    assert found.total == pytest.approx(change, abs=1e-4)
    total = float(found.attribution.sum()) + sum(found.rest.values())
    assert total == pytest.approx(change, abs=1e-4)
    assert found.attribution.shape == found.values.shape


def test_the_landmark_is_told_apart_where_its_name_is_and_then_at_the_end(
    pocket: ip.TransformerModel,
) -> None:
    each = ip.compare_prompts(pocket, A, B, pos=None)
    assert each.at(component="embeddings", pos=1) > 0.5
    assert each.at(component="embeddings", pos=4) == 0
    last = ip.compare_prompts(pocket, A, B, **WHAT)
    assert torch.equal(last.values, each.values[:, -1])
    assert last.total > 15
    assert last.top(1)[0]["component"] in ("attn 4", "attn 5")


def test_the_same_prompt_twice_differs_nowhere(pocket: ip.TransformerModel) -> None:
    found = ip.compare_prompts(pocket, A, A, **WHAT)
    assert not found.values.any()
    assert (found.cosine == 1).all()
    assert not found.attribution.any()


def test_pairs_of_several_lengths_are_averaged(pocket: ip.TransformerModel) -> None:
    pairs = [(A, B), ("The capital of Japan is", "The capital of Spain is"), ("Hello", "Hello")]
    first, second = ([pair[side] for pair in pairs] for side in (0, 1))
    whole = ip.compare_prompts(pocket, first, second, **WHAT)
    alone = [ip.compare_prompts(pocket, a, b, **WHAT) for a, b in pairs]
    for name in ("values", "cosine", "attribution"):
        mean = torch.stack([getattr(each, name) for each in alone]).mean(0)
        torch.testing.assert_close(getattr(whole, name), mean, atol=1e-5, rtol=1e-3)
    texts = [A, "Hello"]
    with pytest.raises(ValueError, match=r"the pairs have 3 and 5 tokens.*pos=-1"):
        ip.compare_prompts(pocket, texts, texts, pos=None)


def test_wrong_arguments_say_so_and_nothing_is_left_behind(pocket: ip.TransformerModel) -> None:
    with pytest.raises(ValueError, match="by is 'component' or 'head'; got 'neuron'"):
        ip.compare_prompts(pocket, A, B, by="neuron")
    with pytest.raises(ValueError, match=r"give answer=\.\.\. too"):
        ip.compare_prompts(pocket, A, B, instead=" Rome")
    with pytest.raises(ValueError, match="positions do not correspond"):
        ip.compare_prompts(pocket, A, "Hello")
    with pytest.raises(ValueError, match="give clean and corrupt"):
        ip.compare_prompts(pocket, A, None)
    with pytest.raises(
        TypeError, match="pos is one position, a number, or None for each; got ' is'"
    ):
        ip.compare_prompts(pocket, A, B, pos=" is")
    before = state_of(pocket.module)
    ip.compare_prompts(pocket, A, B, by="head", **WHAT)
    assert same_state(before, state_of(pocket.module))


@pytest.mark.parametrize(
    "how", [{**WHAT}, {"pos": None}, {"by": "head", **WHAT}, {"by": "head", "pos": None}]
)
def test_it_prints_saves_and_shows_itself(pocket: ip.TransformerModel, how: Any) -> None:
    found = ip.compare_prompts(pocket, A, B, **how)
    again = PromptComparison.from_dict(json.loads(json.dumps(found.to_dict())))
    assert repr(again) == repr(found)
    assert torch.equal(again.cosine, found.cosine)
    assert len(repr(found).splitlines()) < 40
    page = found.html()
    loads_nothing(page)
    assert "1 - cosine" in page
    assert ("attribution: " in page) == ("answer" in how)
