"""Directions taken out, coordinates capped, exchanged and turned: by what must and must not change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from tests.edits.models import ids, wrapped

pytestmark = pytest.mark.bits

D = 12


def net() -> tuple[ip.Model, nn.Sequential]:
    made = nn.Sequential(nn.Identity(), nn.Identity()).double()
    return ip.wrap(made), made


def value() -> Tensor:
    return 3 * torch.randn(4, 5, D, dtype=torch.float64)


def edited(x: Tensor, edit: ip.Edit) -> Tensor:
    return net()[0].run_with_hooks(x, hooks=[edit])


def test_a_subspace_is_taken_out_and_the_rest_stays() -> None:
    x = value()
    for directions in (
        torch.randn(D),
        torch.randn(3, D),
        torch.cat([torch.eye(D)[:2], torch.eye(D)[:2] * 5]),  # of rank two
        1e-3 * torch.randn(2, D),
        torch.randn(D + 3, D),  # the whole space
    ):
        found = edited(x, ip.project_out("0", directions))
        rows = directions.reshape(-1, D).double()
        assert (x @ rows.mT).abs().max() > 1e-3
        assert ((found @ rows.mT).abs().max() / rows.norm()) < 1e-6
        gone = x - found
        # What was taken is in the span, and what was at right angles to it is still there.
        assert torch.allclose(gone @ torch.linalg.pinv(rows) @ rows, gone, atol=1e-6)
        assert torch.allclose(edited(found, ip.project_out("0", directions)), found, atol=1e-6)
    assert edited(x, ip.project_out("0", torch.randn(D + 3, D))).abs().max() < 1e-6
    direction, right = torch.eye(D)[0], torch.eye(D)[1:]
    found = edited(x, ip.project_out("0", direction))
    assert torch.equal(found @ right.double().mT, x @ right.double().mT)


def test_components_are_set_to_those_of_the_mean() -> None:
    x, mean, direction = value(), torch.randn(D).double(), torch.randn(D).double()
    found = edited(x, ip.project_out("0", direction, mean=mean))
    assert torch.allclose(found @ direction, (mean @ direction).expand(4, 5))
    assert torch.allclose(
        edited(mean.expand(4, 5, D), ip.project_out("0", direction, mean=mean)),
        mean.expand(4, 5, D),
    )


def test_a_coordinate_is_capped_and_nothing_else_moves() -> None:
    x, direction = value(), torch.randn(D).double()
    unit = direction / direction.norm()
    before = x @ unit
    for low, high in ((None, 0.5), (-0.3, None), (-2.0, 2.0)):
        found = edited(x, ip.project_cap("0", 7 * direction, low, high))
        expected = before.clamp(low, high)
        assert not torch.equal(expected, before)
        assert torch.allclose(found @ unit, expected)
        assert torch.allclose(
            found - (found @ unit)[..., None] * unit, x - before[..., None] * unit
        )
        inside = expected == before
        assert inside.any()
        assert torch.equal(found[inside], x[inside])
    mean = torch.randn(D).double()
    found = edited(x, ip.project_cap("0", direction, high=0.1, mean=mean))
    assert torch.allclose((found - mean) @ unit, ((x - mean) @ unit).clamp(max=0.1))


def test_rotations_are_orthonormal_whatever_an_optimizer_does() -> None:
    for k in (0, 1, 5, D):
        turn = ip.Rotation(D, k, seed=3)
        assert torch.allclose(turn.weight, turn.raw, atol=1e-5)  # signs too: nothing jumps
        with torch.no_grad():
            turn.raw.add_(torch.randn(k, D))
        assert torch.allclose(turn.weight @ turn.weight.mT, torch.eye(k), atol=1e-5)
        assert torch.equal(ip.Rotation(D, k, seed=3).raw, ip.Rotation(D, k, seed=3).raw)
    assert repr(ip.Rotation(D, 2)) == "Rotation(units=12, k=2)"
    with pytest.raises(ValueError, match="a space of 12 units has 0 to 12 directions; got 13"):
        ip.Rotation(D, 13)


def test_all_coordinates_are_a_patch_and_none_is_nothing() -> None:
    x, source = value(), value()
    turn = ip.Rotation(D)
    assert torch.allclose(edited(x, ip.rotate("0", turn, source)), source, atol=1e-5)
    assert torch.equal(edited(x, ip.rotate("0", turn, source, k=0)), x)
    assert torch.equal(edited(x, ip.rotate("0", ip.Rotation(D, 0), source)), x)
    for k in (1, 4):
        found = edited(x, ip.rotate("0", turn, source, k=k))
        rows = turn.weight.double()
        assert torch.allclose(found @ rows[:k].mT, source @ rows[:k].mT, atol=1e-5)
        assert torch.allclose(found @ rows[k:].mT, x @ rows[k:].mT, atol=1e-5)
        assert torch.allclose(
            found, edited(x, ip.rotate("0", rows[:k].detach(), source)), atol=1e-6
        )
    linear = nn.utils.parametrizations.orthogonal(nn.Linear(D, 3, bias=False).double())
    found = edited(x, ip.rotate("0", linear, source))
    assert torch.allclose(found @ linear.weight.mT, source @ linear.weight.mT)


def test_without_a_source_coordinates_are_turned() -> None:
    x = value()
    angle = torch.tensor(0.7, dtype=torch.float64)
    turn = torch.stack(
        [torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])]
    )
    plane = torch.eye(D, dtype=torch.float64)[[2, 7]]
    found = edited(x, ip.rotate("0", turn, subspace=plane))
    expected = x.clone()
    expected[..., 2] = angle.cos() * x[..., 2] - angle.sin() * x[..., 7]
    expected[..., 7] = angle.sin() * x[..., 2] + angle.cos() * x[..., 7]
    assert torch.allclose(found, expected)
    back = edited(found, ip.rotate("0", turn.mT, subspace=plane))
    assert torch.allclose(back, x)
    whole = ip.Rotation(D).double()
    assert torch.allclose(edited(x, ip.rotate("0", whole)), x @ whole.weight.mT)
    assert torch.allclose(edited(x, ip.rotate("0", whole)).norm(dim=-1), x.norm(dim=-1))
    with pytest.raises(ip.EditShapeError, match="Say which with subspace="):
        edited(x, ip.rotate("0", turn))


def test_gradients_of_a_rotation_are_those_of_finite_differences() -> None:
    turn = ip.Rotation(6, 2, seed=1).double()
    x, source = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    model = ip.wrap(nn.Sequential(nn.Identity(), nn.Tanh()))
    edit = ip.rotate("0", turn, source)
    assert [p is turn.raw for p in edit.parameters()] == [True]

    def loss() -> Tensor:
        return (model.run_with_hooks(x, hooks=[edit]) * torch.arange(6.0)).square().sum()

    (grad,) = torch.autograd.grad(loss(), turn.raw)
    assert grad.abs().max() > 1e-2
    numeric = torch.zeros_like(grad)
    with torch.no_grad():
        for place in range(grad.numel()):
            flat, step = turn.raw.view(-1), 1e-5
            flat[place] += step
            above = loss()
            flat[place] -= 2 * step
            numeric.view(-1)[place] = (above - loss()) / (2 * step)
            flat[place] += step
    assert torch.allclose(grad, numeric, rtol=1e-4, atol=1e-7)


def test_training_finds_the_direction_in_which_a_network_keeps_its_answer() -> None:
    torch.manual_seed(0)
    planted = nn.functional.normalize(torch.randn(D), dim=0)

    class Answer(nn.Module):
        """Reads one direction of a hidden value, and nothing else of it."""

        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(2 * (self.hidden(x) @ planted))

    model = ip.wrap(Answer())
    turn = ip.Rotation(D, 1, seed=5)
    assert (turn.weight @ planted).abs() < 0.6
    x, source = torch.randn(256, D), torch.randn(256, D)
    edit = ip.rotate("hidden", turn, source)
    optimizer = torch.optim.Adam(edit.parameters(), lr=0.05)
    target = model.module(source)
    for _ in range(150):
        optimizer.zero_grad()
        loss = (model.run_with_hooks(x, hooks=[edit]) - target).square().mean()
        loss.backward()
        optimizer.step()
    assert (turn.weight @ planted).abs() > 0.999
    assert loss < 1e-3


def test_one_head_loses_a_direction_and_the_others_keep_it() -> None:
    model, direction = wrapped("llama"), torch.randn(8)
    with torch.no_grad():
        _, plain = model.run_with_cache(ids(), names_filter=("z", 1))
        edit = ip.project_out("z", direction, layer=1, head=2, pos=slice(1, None))
        _, found = model.run_with_cache(ids(), names_filter=("z", 1), hooks=[edit])
    before, after = plain["z", 1] @ direction, found["z", 1] @ direction
    assert after[:, 1:, 2].abs().max() < 1e-5 < before[:, 1:, 2].abs().min()
    assert torch.equal(after[:, :, [0, 1, 3]], before[:, :, [0, 1, 3]])
    assert torch.equal(after[:, 0], before[:, 0])


def test_each_layer_has_a_direction_of_its_own() -> None:
    model = wrapped("gpt2")
    own = {f"blocks.{layer}.hook_resid_post": torch.randn(32) for layer in range(3)}
    with torch.no_grad():
        edits = [
            ip.project_out("resid_post", own),
            ip.add("attn_out", {("attn_out", 1): torch.ones(32)}, layer=1),
        ]
        _, found = model.run_with_cache(ids(), names_filter="resid_post", hooks=edits)
        for name, direction in own.items():
            assert (found[name] @ direction).abs().max() < 1e-3
            others = [other for other in own.values() if other is not direction]
            assert (found[name] @ others[0]).abs().max() > 1e-1
