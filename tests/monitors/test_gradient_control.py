import pytest
import torch
from torch import nn

import interpose as ip
from interpose.monitors.gradient_control import clip_grad, noise_grad, scale_grad


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def trained_grads(change, *, hook=None):
    """Parameter gradients with a raw tensor hook at the Tanh's output, or with one of ours."""
    module = net()
    if hook is None:
        module[1].register_forward_hook(lambda _, args, out: out.register_hook(change) and None)
        module(X).square().sum().backward()
    else:
        model = ip.wrap(module)
        with model.hooks([hook]):
            model(X).square().sum().backward()
    return [parameter.grad for parameter in module.parameters()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right))


UNTOUCHED = trained_grads(lambda grad: grad)


def test_clipping_shortens_a_long_gradient_to_the_norm_asked_for():
    norms = []

    def clip(grad):
        norms.append(float(grad.norm()))
        return grad * (0.5 / grad.norm())

    expected = trained_grads(clip)
    assert norms[0] > 1.0
    found = trained_grads(None, hook=clip_grad("1", 0.5))
    for ours, raw in zip(found, expected):
        torch.testing.assert_close(ours, raw)
    assert not torch.allclose(found[0], UNTOUCHED[0])
    assert torch.equal(found[2], UNTOUCHED[2])  # the layer after the site


def test_clipping_leaves_a_short_gradient_bit_for_bit():
    assert same(trained_grads(None, hook=clip_grad("1", 1e6)), UNTOUCHED)


def test_clipping_takes_the_norm_of_half_precision_gradients_without_overflow():
    seen = []
    model = ip.wrap(nn.Sequential(nn.Identity()))
    x = torch.ones(100, 100, dtype=torch.float16, requires_grad=True)
    hooks = [clip_grad("0", 50.0), ("0.input", lambda grad, hook: seen.append(grad))]
    with model.hooks(hooks[:1], bwd_hooks=hooks[1:]):
        (model(x) * 300.0).sum().backward()
    assert float(seen[0].float().norm()) == pytest.approx(50.0, rel=1e-3)


def test_a_zero_gradient_stays_zero():
    model = ip.wrap(net())
    with model.hooks([clip_grad("1", 1.0)]):
        (model(X) * 0).sum().backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_scaling_multiplies_what_flows_on():
    found = trained_grads(None, hook=scale_grad("1", -2.0))
    assert same(found, trained_grads(lambda grad: grad * -2.0))
    assert torch.equal(found[0], UNTOUCHED[0] * -2.0)


def test_noise_has_the_size_asked_for_and_repeats_with_a_seed():
    model, state = ip.wrap(nn.Sequential(nn.Identity())), torch.get_rng_state()

    def gradient(hook):
        x = torch.zeros(200, 100, requires_grad=True)
        with model.hooks([hook]):
            model(x).sum().backward()
        return x.grad - 1.0

    hook = noise_grad("0", 0.3, seed=7)
    first, second = gradient(hook), gradient(hook)
    assert float(first.std()) == pytest.approx(0.3, rel=0.02)
    assert abs(float(first.mean())) < 0.01
    assert not torch.equal(first, second)
    assert torch.equal(gradient(noise_grad("0", 0.3, seed=7)), first)
    assert not torch.equal(gradient(noise_grad("0", 0.3, seed=8)), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_without_a_seed_comes_from_torch():
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        module = net()
        torch.manual_seed(5)
        with ip.wrap(module).hooks([noise_grad("1", 1.0)]):
            module(X).sum().backward()
        found.append([parameter.grad for parameter in module.parameters()])
    assert same(*found)
    assert not same(found[0], UNTOUCHED)


def test_they_are_plain_data():
    assert repr(clip_grad("fc1", 1.0)) == "clip_grad('fc1', 1.0)"
    assert scale_grad("fc1", 2.0) == scale_grad("fc1", 2.0)
    assert noise_grad("fc1", 0.1).seed is None
    hook = clip_grad("1", 1e-6)
    hook.disable()
    assert same(trained_grads(None, hook=hook), UNTOUCHED)


def test_senseless_numbers_are_refused():
    with pytest.raises(ValueError, match=r"^max_norm must be above 0; got 0.$"):
        clip_grad("1", 0)
    with pytest.raises(ValueError, match=r"^std must be 0 or above; got -1.$"):
        noise_grad("1", -1)


def test_a_training_loop_stays_within_the_norm():
    module, sizes = net(), []
    model = ip.wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    watch = [("1", lambda grad, hook: sizes.append(float(grad.norm())))]
    with model.hooks([clip_grad("1", 0.2)], bwd_hooks=watch):
        for _ in range(5):
            optimizer.zero_grad()
            (100 * model(X).square().mean()).backward()
            optimizer.step()
    assert len(sizes) == 5
    assert max(sizes) <= 0.2 * (1 + 1e-5)
