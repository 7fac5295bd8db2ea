"""Max-activating examples: the same places as all activations kept, sorted by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

import interpose as ip
from interpose.methods.max_activating import MaxActivating, max_activating
from tests.leftovers import same_state, state_of
from tests.models import tiny
from tests.models.texts import speaking
from tests.pages import loads_nothing
from tests.sweeps.oracle import blocks

LAST = {  # whose input the neurons are
    "gpt2": "mlp.c_proj",
    "llama": "mlp.down_proj",
    "gemma2": "mlp.down_proj",
    "gpt_neox": "mlp.dense_4h_to_h",
    "opt": "fc2",  # ReLU: most values are exactly zero
}
TEXTS = [
    "The capital of <b>France</b> is",
    "The dogs near the car",
    "The war lasted from 1743 to 17",
]


def rows(count: int = 9, seed: int = 3) -> list[list[int]]:
    """Texts of different lengths."""
    draw = torch.Generator("cpu").manual_seed(seed)
    lengths = torch.randint(3, 8, (count,), generator=draw, device="cpu").tolist()
    return [torch.randint(10, 60, (n,), generator=draw, device="cpu").tolist() for n in lengths]


def kept(module: Any, part: torch.nn.Module, texts: list[list[int]]) -> list[torch.Tensor]:
    """The input of a module for each text by itself, [pos, unit]."""
    found: list[torch.Tensor] = []
    handle = part.register_forward_pre_hook(lambda _, args: found.append(args[0].detach().clone()))
    with torch.no_grad():
        for text in texts:
            module(torch.tensor([text]))
    handle.remove()
    return [value.reshape(len(text), -1) for value, text in zip(found, texts)]


def sorted_places(
    values: list[torch.Tensor], unit: int, sign: int, k: int, first: int
) -> list[Any]:
    """(value, text, pos) of the best k, in plain Python."""
    every = [
        (float(value[pos, unit]), number, pos)
        for number, value in enumerate(values)
        for pos in range(first, len(value))
    ]
    return sorted(every, key=lambda place: (-sign * place[0], place[1], place[2]))[:k]


@pytest.mark.parametrize("name", LAST)
@pytest.mark.parametrize(("sign", "skip_first"), [(1, False), (-1, True)])
def test_places_are_those_of_all_activations_sorted_by_hand(
    name: str, sign: int, skip_first: bool
) -> None:
    module, texts = tiny.build(name), rows()
    values = kept(module, blocks(module)[1].get_submodule(LAST[name]), texts)
    model = ip.wrap(module)
    found = max_activating(
        model, texts, layer=1, k=6, context=2, sign=sign, skip_first=skip_first, batch_size=1,
        progress=False,
    )  # fmt: skip
    assert found.values.shape == (values[0].shape[1], 6)
    for row, unit in enumerate(found.axes["unit"]):
        expected = sorted_places(values, unit, sign, 6, int(skip_first))
        places = zip(
            found.values[row].tolist(), found.texts[row].tolist(), found.positions[row].tolist()
        )
        assert list(places) == expected
    together = max_activating(
        model, texts, layer=1, k=6, sign=sign, skip_first=skip_first, progress=False
    )
    torch.testing.assert_close(together.values, found.values, rtol=1e-4, atol=1e-5)


def test_equal_values_come_in_the_order_of_the_data() -> None:
    module, texts = tiny.build("opt"), rows(12)
    values = torch.cat(kept(module, blocks(module)[0].fc2, texts))
    assert (values == 0).float().mean() > 0.2  # there are ties
    found = max_activating(ip.wrap(module), texts, layer=0, k=5, sign=-1, progress=False)
    dead = [unit for unit in range(values.shape[1]) if int((values[:, unit] == 0).sum()) >= 5]
    assert len(dead) > 5
    for unit in dead:
        row = found.axes["unit"].index(unit)
        expected = sorted_places(list(kept_by_text(values, texts)), unit, -1, 5, 0)
        assert [
            (0.0, *p) for p in zip(found.texts[row].tolist(), found.positions[row].tolist())
        ] == expected


def kept_by_text(values: torch.Tensor, texts: list[list[int]]) -> tuple[torch.Tensor, ...]:
    return values.split([len(text) for text in texts])


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_results_of_two_shards_merge_to_that_of_all_data(cut: int) -> None:
    model, texts = ip.wrap(tiny.build("opt")), rows()
    options: Any = {"layer": 1, "k": 7, "context": 3, "batch_size": 1, "progress": False}
    whole = max_activating(model, texts, **options)
    merged = max_activating(model, texts[:cut], **options).merge(
        max_activating(model, texts[cut:], **options)
    )
    for name in ("values", "texts", "positions", "windows", "activations"):
        assert torch.equal(
            getattr(merged, name).nan_to_num(-9), getattr(whole, name).nan_to_num(-9)
        ), name
    assert (merged.protocol, merged.count, merged.words) == (
        whole.protocol,
        whole.count,
        whole.words,
    )
    other = max_activating(model, texts, **{**options, "layer": 0})
    with pytest.raises(ValueError, match="different searches do not merge: layer is 1 and 0"):
        whole.merge(other)


def test_windows_have_the_text_around_and_the_values_there() -> None:
    module, texts = tiny.build("llama"), rows()
    values = kept(module, blocks(module)[1].mlp.down_proj, texts)
    found = max_activating(
        ip.wrap(module), texts, layer=1, neuron=[5, 2], k=4, context=3, batch_size=1, progress=False
    )
    for row, unit in enumerate([5, 2]):
        for rank in range(4):
            text, pos = int(found.texts[row, rank]), int(found.positions[row, rank])
            for at in range(-3, 4):
                token = int(found.windows[row, rank, at + 3])
                value = float(found.activations[row, rank, at + 3])
                if 0 <= pos + at < len(texts[text]):
                    assert token == texts[text][pos + at]
                    assert value == float(values[text][pos + at, unit])
                else:
                    assert token == -1
                    assert math.isnan(value)


def test_directions_are_projected_on() -> None:
    module, texts = tiny.build("gpt2"), rows()
    model = ip.wrap(module)
    direction = torch.randn(2, model.cfg.d_model)
    found = max_activating(
        model,
        texts,
        site="resid_pre",
        layer=1,
        direction=direction,
        k=3,
        batch_size=1,
        progress=False,
    )
    values = kept(module, blocks(module)[1], texts)
    for row in range(2):
        expected = sorted_places([value @ direction.T for value in values], row, 1, 3, 0)
        torch.testing.assert_close(
            found.values[row], torch.tensor([place[0] for place in expected])
        )
        assert [(t, p) for _, t, p in expected] == list(
            zip(found.texts[row].tolist(), found.positions[row].tolist())
        )
    one = max_activating(
        model,
        texts,
        site="resid_pre",
        layer=1,
        direction=direction[1],
        k=3,
        batch_size=1,
        progress=False,
    )
    assert torch.equal(one.texts[0], found.texts[1])
    size = model.cfg.d_head
    head = max_activating(
        model,
        texts,
        site="z",
        layer=1,
        head=2,
        direction=torch.eye(size)[:2],
        k=3,
        batch_size=1,
        progress=False,
    )
    z = kept(module, blocks(module)[1].attn.c_proj, texts)
    assert head.values[1].tolist() == [p[0] for p in sorted_places(z, 2 * size + 1, 1, 3, 0)]


def test_places_that_the_data_does_not_fill_are_empty() -> None:
    found = max_activating(
        ip.wrap(tiny.build("gpt2")),
        [[11, 12]],
        layer=0,
        neuron=[0],
        k=5,
        skip_first=True,
        progress=False,
    )
    assert found.texts.tolist() == [[0, -1, -1, -1, -1]]
    assert found.values.isnan().tolist() == [[False, True, True, True, True]]
    assert len(found.examples(0)) == 1
    assert "nan" not in found.html()


def test_padding_is_not_counted() -> None:
    model = speaking("gpt2")
    alone = max_activating(model, TEXTS, layer=1, k=50, neuron=[4, 9], progress=False)
    assert alone.protocol["tokens"] == sum(len(model.to_tokens(text)[0]) for text in TEXTS)
    padded = model.to_tokens(TEXTS, padding_side="left")
    assert (model.prepare(padded)["attention_mask"] == 0).any()
    found = max_activating(model, padded, layer=1, k=50, neuron=[4, 9], progress=False)
    torch.testing.assert_close(
        found.values.nan_to_num(0), alone.values.nan_to_num(0), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(found.windows >= 0, alone.windows >= 0)


def test_texts_may_be_an_iterator_and_are_read_once() -> None:
    model = ip.load("pocket")
    before = state_of(model.module)
    found = max_activating(
        model, iter(TEXTS * 12), layer=2, neuron=[1], k=3, batch_size=1, progress=False
    )
    assert same_state(before, state_of(model.module))
    assert found.count == 36
    listed = max_activating(
        model, TEXTS * 12, layer=2, neuron=[1], k=3, batch_size=1, progress=False
    )
    assert torch.equal(found.texts, listed.texts)


def test_the_page_is_escaped_and_loads_nothing(tmp_path: Any) -> None:
    found = ip.max_activating(
        ip.load("pocket"), TEXTS, layer=2, neuron=[1, 7], k=8, context=20, progress=False
    )
    html = found.save(tmp_path / "x.html").read_text()
    loads_nothing(html)
    assert "<b>France" not in html
    assert "&lt;" in html
    assert "outline:1px" in html
    data = json.loads(json.dumps(found.to_dict()))
    again = MaxActivating.from_dict(data)
    assert torch.equal(again.windows, found.windows)
    assert again.words == found.words
    assert again.examples(7) == found.examples(7)
    assert repr(again) == repr(found)


def test_wrong_arguments_are_refused_with_what_is_there() -> None:
    model = ip.wrap(tiny.build("gpt2"))
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"site": "z"}, ValueError, "Say which head: head=0"),
        ({"site": "pattern"}, ValueError, "Choose another site"),
        ({"neuron": [9999]}, IndexError, "neuron 9999 is not there"),
        ({"direction": torch.ones(3)}, ValueError, r"direction is \[3\]"),
        ({"neuron": [0], "direction": torch.ones(3)}, ValueError, "not both"),
        ({"k": 0}, ValueError, "k at least 1"),
        ({"sign": 2}, ValueError, "sign is 1 or -1"),
    ]
    for options, kind, message in cases:
        with pytest.raises(kind, match=message):
            max_activating(model, [[11, 12]], layer=0, progress=False, **options)
    with pytest.raises(ValueError, match="there are no texts"):
        max_activating(model, [], layer=0, progress=False)
    model.module.train()
    with pytest.raises(ip.Unsupported, match="training mode"):
        max_activating(model, [[11, 12]], layer=0, progress=False)


def test_units_may_be_an_array_and_not_nothing() -> None:
    model = ip.wrap(tiny.build("gpt2"))
    one, other = (
        max_activating(model, rows(), layer=0, neuron=units, k=2, progress=False)
        for units in ([3, 1], torch.tensor([3, 1]).numpy())
    )
    assert one.axes == other.axes
    assert torch.equal(one.values, other.values)
    with pytest.raises(ValueError, match="neuron is empty"):
        max_activating(model, rows(), layer=0, neuron=[], progress=False)
