"""Edits that only act where something fires, and adding that keeps lengths: against loops over positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from tests.edits.models import LAYERS, block_of, built, ids, wrapped

pytestmark = pytest.mark.bits

D = 12


def value(*shape: int) -> Tensor:
    drawn = torch.Generator().manual_seed(len(shape))
    return 3 * torch.randn(*shape or (4, 5, D), dtype=torch.float64, generator=drawn)


def edited(x: Tensor, *edits: ip.Edit) -> Tensor:
    made = nn.Sequential(nn.Identity(), nn.Identity()).double()
    return ip.wrap(made).run_with_hooks(x, hooks=list(edits))


def test_where_a_condition_does_not_hold_the_value_stays_to_the_last_bit() -> None:
    x, direction, vector = value(), value(D), value(D)
    asked = ip.when(direction, above=2.0, bias=-1.0)
    found = edited(x, ip.add("0", vector, when=asked, strength=0.7))
    seen = set()
    for row in range(4):
        for pos in range(5):
            fires = sum(a * b for a, b in zip(x[row, pos].tolist(), direction.tolist())) - 1 > 2
            seen.add(fires)
            if fires:
                assert torch.allclose(found[row, pos], x[row, pos] + 0.7 * vector, atol=1e-12)
            else:
                assert torch.equal(found[row, pos], x[row, pos])
    assert seen == {True, False}


def test_units_fire_alone_and_between_bounds() -> None:
    x = value()
    cases: list[tuple[Any, Tensor]] = [
        (ip.when(neuron=3, above=1.0), x[..., 3] > 1),
        (ip.when(neuron=[3, -1], above=1.0), (x[..., 3] > 1) | (x[..., -1] > 1)),
        (ip.when(neuron=3, above=-2.0, below=2.0), (x[..., 3] > -2) & (x[..., 3] < 2)),
        (ip.when({"0": torch.ones(D)}, below=0.0), x.sum(-1) < 0),
    ]
    for asked, fires in cases:
        assert 0 < fires.sum() < fires.numel()
        found = edited(x, ip.zero("0", when=asked))
        assert torch.equal(found, torch.where(fires[..., None], 0, x))
        one = edited(x, ip.zero("0", when=asked, rows=1, pos=[0, 2, 4]))
        chosen = torch.zeros_like(fires)
        chosen[1, [0, 2, 4]] = True
        assert torch.equal(one, torch.where((fires & chosen)[..., None], 0, x))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_condition_is_looked_at_where_it_says_in_the_same_pass(kind: str) -> None:
    module, model, tokens = built(kind), wrapped(kind), ids()
    _, cache = model.run_with_cache(tokens, names_filter=[("resid_post", 0), ("z", 1)])
    width = model.cfg.d_model
    direction, vector = torch.randn(width), 3 * torch.randn(width)
    scores = cache["resid_post", 0] @ direction
    bound = float(scores.median())
    z = cache["z", 1][:, :, 1, 2]
    for asked, fires in (
        (ip.when(direction, above=bound, site="resid_post", layer=0), scores > bound),
        (ip.when(site="z", layer=1, head=1, neuron=2, above=float(z.median())), z > z.median()),
    ):
        assert 0 < fires.sum() < fires.numel()

        def raw(_: nn.Module, __: Any, out: Any, fires: Tensor = fires) -> Any:
            hidden = out[0] if isinstance(out, tuple) else out
            new = torch.where(fires[..., None], hidden + vector, hidden)
            return (new, *out[1:]) if isinstance(out, tuple) else new

        handle = block_of(module, LAYERS - 1).register_forward_hook(raw)
        expected = module(tokens).logits
        handle.remove()
        edit = ip.add("resid_post", vector, layer=LAYERS - 1, when=asked)
        found = model.run_with_hooks(tokens, hooks=[edit])
        assert not torch.allclose(expected, module(tokens).logits, atol=1e-3)
        torch.testing.assert_close(found, expected)
        # Several such edits, each with a condition of its own, do not take each other's.
        other = ip.add("resid_post", vector, layer=LAYERS - 1, when=ip.when(direction, above=1e9))
        both = model.run_with_hooks(tokens, hooks=[other, edit, other])
        torch.testing.assert_close(both, expected)


def test_while_text_is_generated_each_pass_has_its_own_positions() -> None:
    model, tokens = wrapped("llama"), ids(1, 5)
    direction, vector = torch.randn(model.cfg.d_model), 4 * torch.randn(model.cfg.d_model)
    edit = ip.add("resid_post", vector, layer=1, when=ip.when(
        direction, above=0.0, site="resid_post", layer=0
    ))  # fmt: skip
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    made = []
    for cached in (True, False):
        with model.hooks([edit]):
            made.append(model.generate(tokens, use_cache=cached, **asked))
    assert torch.equal(*made)
    step = model.run_with_hooks(made[0][:, :-1], hooks=[edit])[0, -1].argmax()
    assert int(step) == int(made[0][0, -1])


def test_a_condition_that_cannot_be_known_is_refused() -> None:
    model, tokens = wrapped("llama"), ids()
    late = ip.when(neuron=0, above=0.0, site="resid_post", layer=2)
    edit = ip.zero("mlp_out", layer=1, when=late)
    with pytest.raises(ip.EditError, match=r"not known yet where 'blocks\.1\.hook_mlp_out'"):
        model.run_with_hooks(tokens, hooks=[edit])
    elsewhere = ip.zero("mlp_out", layer=1, when=ip.when(
        neuron=0, above=0.0, site="resid_post", layer=0
    ))  # fmt: skip
    with pytest.raises(ip.EditError, match=r"in ip\.sweep, of the edited value alone"):
        ip.sweep(
            model, tokens, edit=lambda site, **_: elsewhere, site="mlp_out", layer=1, over="layer",
            metric=ip.metrics.logit(5), progress=False,
        )  # fmt: skip
    runs = ip.run_variants(model, tokens, [ip.Variant([elsewhere])], metric=ip.metrics.logit(5))
    assert (runs.tally.plan, runs.tally.why[:10]) == ("one per cell", "zero('mlp_")
    alone = model.run_with_hooks(tokens, hooks=[elsewhere])[:, -1, 5]
    torch.testing.assert_close(runs.measured()[0], alone)
    assert not torch.allclose(alone, runs.base.measured, atol=1e-4)
    with pytest.raises(ip.EditShapeError, match="direction of shape"):
        edited(value(), ip.zero("0", when=ip.when(torch.ones(3), above=0.0)))
    for wrong, said in (
        (lambda: ip.when(torch.ones(3)), "say above, below"),
        (lambda: ip.when(above=1.0), "say what fires"),
        (lambda: ip.when(torch.ones(3), neuron=1, above=0.0), "neuron says nothing"),
        (lambda: ip.when(torch.ones(3), layer=1, above=0.0), "a layer goes with a site"),
        (lambda: ip.zero("0", when=torch.ones(3)), r"when is an ip\.when"),
    ):
        with pytest.raises(TypeError, match=said):
            wrong()


def test_conditions_are_right_in_many_variants_together() -> None:
    model, tokens = wrapped("llama"), ids()
    direction = torch.randn(model.cfg.d_model)
    edits = [
        ip.zero("resid_post", layer=1, when=ip.when(direction, above=bound))
        for bound in (-1.0, 0.0, 1.0)
    ]
    metric = ip.metrics.logit(5)
    found = ip.run_variants(
        model, tokens, [ip.Variant([edit]) for edit in edits], metric=metric, progress=False
    ).measured()
    for edit, measured in zip(edits, found):
        alone = model.run_with_hooks(tokens, hooks=[edit])[:, -1, 5]
        torch.testing.assert_close(measured, alone, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found[0], found[2], atol=1e-3)


def test_conditions_are_saved_loaded_printed_and_written_as_python(tmp_path: Path) -> None:
    asked = ip.when(torch.arange(D) - 4.0, above=0.5, bias=0.25)
    there = ip.when(site="resid_post", layer=2, neuron=[1, 4], below=-1.0)
    edits = [
        ip.add("0", 2.0, when=asked),
        ip.scale("z", 0.5, layer=1, when=there),
        ip.add_keeping_norm("0", torch.ones(D), strength=2.0, when=asked),
    ]
    ip.save_edits(tmp_path / "edits", edits)
    again = ip.load_edits(tmp_path / "edits")
    assert [repr(edit) for edit in again] == [repr(edit) for edit in edits]
    tensors: dict[str, Tensor] = {}
    written = [
        eval(edit.to_python(tensors), {"ip": ip, "torch": torch, "tensors": tensors})
        for edit in edits
    ]
    x = value()
    for others in (again, written):
        for place in (0, 2):
            assert torch.equal(edited(x, others[place]), edited(x, edits[place]))
        assert others[1].when.neuron == [1, 4]
        assert others[1].when.where is not None
    assert repr(edits[1]) == (
        "scale('z', 0.5, layer=1, when=when(below=-1.0, site='resid_post', layer=2, neuron=[1, 4]))"
    )
    data = edits[0].to_dict()
    data["when"] = {"condition": {"type": "add", "site": "0", "value": 1.0}}
    with pytest.raises(ip.FileError):
        ip.Edit.from_dict(data)


def test_adding_turns_a_value_and_keeps_its_length_at_any_strength() -> None:
    x, vector = value(), value(D)
    x[0, 0] = 0
    for strength in (None, 0.0, 0.5, 3.0, torch.tensor([0.0, 1.0, 2.0, -4.0])):
        found = edited(x, ip.add_keeping_norm("0", vector, strength=strength))
        for row in range(4):
            by = 1.0 if strength is None else float(torch.as_tensor(strength).expand(4)[row])
            for pos in range(5):
                moved = x[row, pos] + by * vector
                expected = moved / moved.norm() * x[row, pos].norm() if moved.norm() else moved
                assert torch.allclose(found[row, pos], expected, atol=1e-12)
    x[1, 1] = -vector
    found = edited(x, ip.add_keeping_norm("0", vector))
    assert torch.equal(found[1, 1], x[1, 1])  # added to, it would point nowhere
    assert torch.isfinite(found).all()
    half = edited(x.bfloat16(), ip.add_keeping_norm("0", vector.bfloat16()))
    assert half.dtype == torch.bfloat16


def test_gradients_of_conditional_and_of_turning_edits_are_true() -> None:
    x = value(2, 3, D).requires_grad_()
    vector = value(D).requires_grad_()
    asked = ip.when(value(D), above=0.0)

    def turned(x: Tensor, vector: Tensor) -> Tensor:
        return edited(x, ip.add_keeping_norm("0", vector, strength=0.8, when=asked))

    assert torch.autograd.gradcheck(turned, (x, vector))
