"""`ip.TopActivating`: the same places as all activations of texts run one by one, sorted by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import interpose as ip
from tests.models import texts as spoken
from tests.models import tiny
from tests.sweeps.oracle import blocks

TEXTS = ["the cat sat", "a dog ran in the park and the cat saw it", "when", "mat ran"]


def alone(model: ip.TransformerModel, texts: list[str]) -> list[torch.Tensor]:
    """The neurons of layer 1 for each text by itself, [pos, unit], by a raw hook."""
    found: list[torch.Tensor] = []
    part = blocks(model.module)[1].mlp.down_proj
    handle = part.register_forward_pre_hook(lambda _, args: found.append(args[0][0].detach()))
    with torch.no_grad():
        for text in texts:
            model.module(model.to_tokens(text))
    handle.remove()
    return found


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_places_are_those_of_texts_run_one_by_one(side: str, adds_bos: bool, sign: int) -> None:
    model = spoken.speaking("llama", adds_bos=adds_bos)
    top = ip.TopActivating(("post", 1), k=5, context=2, sign=sign)
    with torch.no_grad(), model.hooks([top]):
        model(TEXTS[:3], padding_side=side)
        model(TEXTS[3:], padding_side=side)
    values, rows = alone(model, TEXTS), [model.to_tokens(text)[0].tolist() for text in TEXTS]
    found = top.result()
    assert found.count == 4
    assert found.protocol["tokens"] == sum(map(len, rows)) - 4 * adds_bos
    for unit in range(0, values[0].shape[1], 5):
        every = [
            (float(value[pos, unit]), number, pos)
            for number, value in enumerate(values)
            for pos in range(int(adds_bos), len(value))
        ]
        expected = sorted(every, key=lambda place: (-sign * place[0], place[1], place[2]))[:5]
        places = found.examples(unit)
        assert [(one["text"], one["pos"]) for one in places] == [place[1:] for place in expected]
        for place, (value, number, pos) in zip(places, expected):
            assert place["value"] == pytest.approx(value, rel=1e-3, abs=1e-4)
            row, from_ = rows[number], max(0, pos - 2)
            assert place["token"] == model.to_single_str_token(row[pos])
            assert place["context"] == "".join(map(model.to_single_str_token, row[from_ : pos + 3]))
    kept = top.texts()
    assert kept == {number: TEXTS[number] for number in kept}


def test_the_token_is_the_one_at_which_the_unit_is_largest_in_spite_of_bos_and_padding() -> None:
    """A unit that is large at one word alone; and one that is largest at BOS and at padding."""
    model = spoken.speaking("llama", adds_bos=True)
    pieces = model.to_str_tokens("the cat saw it")
    at = pieces.index(" cat") if " cat" in pieces else 3
    word = int(model.to_tokens("the cat saw it")[0, at])

    def fires(value: torch.Tensor, hook: Any) -> torch.Tensor:
        tokens = hook.given["input_ids"]
        value[..., 0] = (tokens == word).float()
        value[..., 1] = torch.isin(tokens, torch.tensor([spoken.PAD, spoken.BOS])).float()
        return value

    top = ip.TopActivating(("post", 1), neuron=[0, 1], k=3, context=0)
    every = ip.TopActivating(("post", 1), neuron=1, k=1, context=0, skip_special=False)
    with torch.no_grad(), model.hooks([ip.FunctionHook(("post", 1), fires), top, every]):
        model(["the cat saw it", "a dog", "it"], padding_side="left")
    best = top.result().examples(0)[0]
    assert (best["value"], best["text"], best["pos"]) == (1.0, 0, at)
    assert best["token"] == pieces[at]
    assert {place["value"] for place in top.result().examples(1)} == {0.0}
    assert every.result().examples(1)[0]["token"] == "<s>"


def test_it_agrees_with_max_activating_on_texts_without_special_tokens() -> None:
    model = spoken.speaking("llama")
    options: Any = {"k": 4, "context": 3}
    expected = ip.max_activating(model, TEXTS, layer=0, batch_size=1, progress=False, **options)
    top = ip.TopActivating(("post", 0), **options)
    with torch.no_grad(), model.hooks([top]):
        for text in TEXTS:
            model(text)
    found = top.result()
    for name in ("values", "texts", "positions", "windows", "activations"):
        assert torch.equal(
            getattr(found, name).nan_to_num(-9), getattr(expected, name).nan_to_num(-9)
        ), name
    assert found.words == expected.words


def test_directions_heads_and_clearing() -> None:
    model = spoken.speaking("llama")
    v = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    size = model.cfg.d_head
    top = ip.TopActivating(ip.at("z", layer=1, head=1), direction=v[:, :size], k=2, context=0)
    with torch.no_grad(), model.hooks([top]):
        model(TEXTS[0])
    _, cache = model.run_with_cache(TEXTS[0], names_filter=("z", 1))
    projected = cache["z", 1][0, :, 1] @ v[:, :size].mT
    torch.testing.assert_close(top.result().values, projected.topk(2, dim=0).values.mT)
    top.clear()
    assert (top.metadata, dict(top.collected())) == ({}, {})
    with pytest.raises(ip.NothingMatched, match="has seen nothing yet"):
        top.result()
    with torch.no_grad(), model.hooks([top]):
        model(TEXTS[1])
    assert top.result().count == 1
    assert json.dumps(top.result().to_dict())


def test_what_it_cannot_count_is_refused() -> None:
    model = spoken.speaking("llama")
    for site, message in (
        (("z", 0), "Say which head: ip.at"),
        (("pattern", 0), "looks at a vector at each position"),
    ):
        with pytest.raises(ValueError, match=message), torch.no_grad():
            model.run_with_hooks(TEXTS[0], hooks=[ip.TopActivating(site)])
    with pytest.raises(ip.Unsupported, match="goes on from another, as in generating"):
        model.generate(TEXTS[0], max_new_tokens=2, hooks=[ip.TopActivating(("post", 0))])
    plain = ip.wrap(torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match="looks at a vector at each position"):
        plain.run_with_hooks(torch.randn(2, 3), hooks=[ip.TopActivating()])
    with pytest.raises(ValueError, match="give some of neuron, or direction"):
        ip.TopActivating(("post", 0), neuron=[])
    with pytest.raises(ValueError, match="sign is 1 or -1"):
        ip.TopActivating(("post", 0), sign=2)
    two = ip.TopActivating(["blocks.0.mlp.hook_post", "blocks.1.mlp.hook_post"], k=1)
    with torch.no_grad(), model.hooks([two]):
        model(TEXTS[0])
    with pytest.raises(ValueError, match="say which site"):
        two.result()
    assert two.result("blocks.1.mlp.hook_post").protocol["site"] == "blocks.1.mlp.hook_post"


def test_units_are_amplified_suppressed_and_clamped_by_edits() -> None:
    """No classes of their own: `ip.scale`, `ip.zero` and `ip.clamp` with ``neuron=``, against a raw torch hook."""
    module = tiny.build("llama")
    model, tokens = ip.wrap(module), torch.arange(10, 16)[None]
    part = blocks(module)[1].mlp.down_proj
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=("post", 1))
        most = float(cache["post", 1][..., 4].max()) / 2
        factors = torch.tensor([3.0, -2.0])
        for edit, change in (
            (ip.scale(("post", 1), 2.5, neuron=[3, 7]), lambda x: x[..., [3, 7]].mul(2.5)),
            (ip.scale(("post", 1), factors, neuron=[3, 7]), lambda x: x[..., [3, 7]] * factors),
            (ip.zero(("post", 1), neuron=[3, 7]), lambda x: x[..., [3, 7]] * 0),
            (
                ip.clamp(("post", 1), max=most, neuron=[3, 7]),
                lambda x: x[..., [3, 7]].clamp(max=most),
            ),
            (ip.fill(("post", 1), 5.0, neuron=[3, 7]), lambda x: x[..., [3, 7]] * 0 + 5),
        ):

            def raw(_: Any, args: Any, change: Any = change) -> Any:
                value = args[0].clone()
                value[..., [3, 7]] = change(value)
                return (value,)

            edited = model.run_with_hooks(tokens, hooks=[edit])
            handle = part.register_forward_pre_hook(raw)
            expected = module(tokens).logits
            handle.remove()
            assert not torch.equal(expected, module(tokens).logits)
            torch.testing.assert_close(edited, expected, rtol=1e-4, atol=1e-5)
