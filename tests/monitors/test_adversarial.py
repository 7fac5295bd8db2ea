import pytest
import torch
import torch.nn.functional as F
from torch import nn

import interpose as ip
from interpose.monitors.adversarial import adversarial, shift


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )


X = torch.randn(32, 10, generator=torch.Generator().manual_seed(1))
Y = torch.arange(32) % 3


def loss(output):
    return F.cross_entropy(output, Y)


@pytest.mark.parametrize("site", ["input", "0", "1", "2"])
def test_the_loss_grows_more_than_by_random_steps_of_the_same_size(site):
    model, step = ip.wrap(net()), 0.02
    worse = adversarial(model, X, site=site, loss=loss, step=step)
    assert worse.delta.abs().max() == pytest.approx(step)
    before = loss(model(X)).item()
    grown = loss(model.run_with_hooks(X, hooks=[worse])).item() - before
    generator = torch.Generator().manual_seed(2)
    signs = torch.randint(0, 2, (20, *worse.delta.shape), generator=generator) * 2.0 - 1.0
    by_chance = [
        abs(loss(model.run_with_hooks(X, hooks=[shift(site, step * sign)])).item() - before)
        for sign in signs
    ]
    assert grown > 5 * max(by_chance)


def test_it_is_the_sign_of_the_raw_gradient_at_the_site():
    module = net()
    hidden = module[:2](X).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(module[2:](hidden)), hidden)
    worse = adversarial(ip.wrap(module), X, site="1", loss=loss, step=0.5)
    assert torch.equal(worse.delta, 0.5 * gradient.sign())
    shifted = ip.wrap(module).run_with_hooks(X, hooks=[worse])
    assert torch.equal(shifted, module[2:](hidden.detach() + worse.delta))
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_negative_step_makes_the_loss_smaller():
    model = ip.wrap(net())
    better = adversarial(model, X, site="1", loss=loss, step=-0.02)
    assert loss(model.run_with_hooks(X, hooks=[better])) < loss(model(X))


def test_a_frozen_model_works_too():
    module = net().requires_grad_(False)
    worse = adversarial(ip.wrap(module), X, site="1", loss=loss, step=0.02)
    assert loss(ip.wrap(module).run_with_hooks(X, hooks=[worse])) > loss(module(X))


def test_other_inputs_are_refused_instead_of_broadcast():
    model = ip.wrap(net())
    worse = adversarial(model, X, site="1", loss=loss, step=0.1)
    with pytest.raises(ip.EditShapeError) as caught:
        model.run_with_hooks(X[:1], hooks=[worse])
    assert str(caught.value) == (
        f"hook '{worse.id}' adds (32, 64) at '1'; the value is (1, 64). "
        "Run it on inputs of the shape it was made with."
    )


def test_several_calls_of_a_module_are_ambiguous():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Linear(3, 3)

        def forward(self, x):
            return self.cell(self.cell(x))

    model, x = ip.wrap(Loop()), torch.randn(2, 3)
    with pytest.raises(ip.AmbiguousSite):
        adversarial(model, x, site="cell", loss=torch.sum, step=0.1)
    second = adversarial(model, x, site="cell#1", loss=torch.sum, step=0.1)
    assert torch.equal(second.delta, torch.full((2, 3), 0.1))
