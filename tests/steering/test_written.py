"""Edits as weights: the copy without hooks gives what the model gives with them, or it is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import interpose as ip
from tests.edits.models import ids
from tests.models import tiny

pytestmark = pytest.mark.bits


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    return ip.wrap(tiny.build(kind, layers=3).eval().double().requires_grad_(False))


def vector_of(model: Any, *layers: int) -> ip.SteeringVector:
    drawn = torch.Generator().manual_seed(1)
    rows = {layer: torch.randn(model.cfg.d_model, generator=drawn).double() for layer in layers}
    return ip.SteeringVector.of(rows)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gptj", "bloom"])
def test_the_copy_computes_what_the_edited_model_does(kind: str) -> None:
    model, tokens = model_of(kind), ids()
    vector = vector_of(model, 1, 2)
    before = {name: weight.clone() for name, weight in model.module.state_dict().items()}
    plain = model(tokens)
    asked: list[Any] = [
        [vector.add(2.0)],
        [ip.project_out("mlp_out", vector[1], layer=2)],
        [
            ip.scale("attn_out", 0.25, layer=[0, 2]),
            ip.add("mlp_out", vector[2], layer=0, strength=3.0),
        ],
    ]
    if kind != "bloom":  # a norm stands behind its embeddings
        asked.append([vector.remove_from(model, 2)])
    for edits in asked:
        made = ip.written(model, edits)
        expected = model.run_with_hooks(tokens, hooks=edits)
        assert (expected - plain).abs().max() > 1e-2
        torch.testing.assert_close(made(tokens), expected, atol=1e-10, rtol=1e-10)
        assert made.module is not model.module
    assert all(
        torch.equal(before[name], weight) for name, weight in model.module.state_dict().items()
    )
    assert torch.equal(model(tokens), plain)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_nothing_can_write_a_direction_that_was_removed(kind: str) -> None:
    model, tokens = model_of(kind), ids()
    vector = vector_of(model, 1)
    unit = vector[1] / vector[1].norm()
    made = ip.written(model, vector.remove_from(model, 1))
    for one, most in ((model, 1e-1), (made, 1e-12)):
        _, cache = one.run_with_cache(tokens, names_filter="blocks.*.hook_resid_*")
        sizes = [float((value @ unit).abs().max()) for value in cache.values()]
        assert len(sizes) == 9
        assert (min(sizes) > most) if one is model else (max(sizes) < most)
    # The unembedding, which was tied to the embedding, still reads what it read.
    torch.testing.assert_close(made.W_U, model.W_U)
    hooked = model.run_with_hooks(tokens, hooks=[vector.remove_from(model, 1)])
    torch.testing.assert_close(made(tokens), hooked, atol=1e-10, rtol=1e-10)


def test_a_copy_is_saved_by_transformers_if_it_can_load_it(tmp_path: Path) -> None:
    model, tokens = model_of("gpt2"), ids()
    made = ip.written(model, vector_of(model, 1).add(2.0))
    made.module.save_pretrained(tmp_path / "gpt2")
    again = type(made.module).from_pretrained(tmp_path / "gpt2", dtype=torch.float64)
    torch.testing.assert_close(again.eval()(tokens).logits, made(tokens))
    other = model_of("llama")  # its maps have no biases
    with_bias = ip.written(other, vector_of(other, 1).add(2.0))
    with pytest.raises(ip.Unsupported, match="transformers would leave out"):
        with_bias.module.save_pretrained(tmp_path / "llama")


def test_what_weights_cannot_do_is_refused_with_the_reason() -> None:
    model = model_of("llama")
    vector = vector_of(model, 1)
    rows = vector.add(torch.tensor([1.0, 2.0, 3.0]))
    cases: list[tuple[Any, str]] = [
        (vector.add(phase="generated"), "weights are the same everywhere"),
        (vector.add(pos=-1), "weights are the same everywhere"),
        (vector.add(when=vector.fires(layer=1, above=0.0)), "has a condition"),
        (rows, "a strength for each row"),
        (vector.add_keeping_norm(), "is not linear"),
        (vector.project_out(), "is not what one map writes"),
        (ip.add("z", 1.0, layer=1), "is not what one map writes"),
        (ip.project_out("mlp_out", vector[1], layer=1, mean=vector[1]), "counts from a mean"),
    ]
    for edit, said in cases:
        with pytest.raises(ip.Unsupported, match=said):
            ip.written(model, edit)
    with pytest.raises(ValueError, match="give one edit or more"):
        ip.written(model, [])


@pytest.mark.parametrize("kind", ["gemma2", "olmo2"])
def test_a_norm_behind_the_maps_is_refused(kind: str) -> None:
    model = model_of(kind)
    for edit in (vector_of(model, 1).add(2.0), vector_of(model, 1).remove_from(model, 1)):
        with pytest.raises(ip.Unsupported, match="a norm stands between"):
            ip.written(model, edit)


def test_a_mixture_of_experts_is_refused() -> None:
    torch.manual_seed(0)
    model = ip.wrap(tiny.build("mixtral", layers=2).eval())
    vector = ip.SteeringVector.of(torch.ones(model.cfg.d_model), layer=1)
    with pytest.raises(ip.Unsupported, match="mixture of experts"):
        ip.written(model, vector.add(2.0))


def test_a_copy_that_is_not_the_same_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from interpose.steering import written

    model = model_of("gpt2")
    monkeypatch.setattr(written, "add_to_bias", lambda endpoint, summand: None)
    with pytest.raises(
        ip.Unsupported, match="would not be the same: on a probe the outputs differ by"
    ):
        ip.written(model, vector_of(model, 1).add(2.0))
