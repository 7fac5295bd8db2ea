"""Promise 3: a gradient at a site is d(loss)/d(that value), over all its paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from tests.bounds import assert_near

pytestmark = pytest.mark.bits


class Residual(nn.Module):
    """The value of `norm` is also the skip path; `inner` works in place on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 3)
        self.norm = nn.Identity()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return (x + self.inner(self.norm(x))).pow(2).sum()


@pytest.fixture
def net() -> Residual:
    return Residual()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 3)


def leaf_gradients(net: Residual, x: Tensor) -> dict[str, Tensor]:
    """By hand: each value in turn as a fresh leaf."""
    found = {}
    embedded = net.embed(x).detach()

    def tail(skip: Tensor, normed: Tensor) -> Tensor:
        return (skip + torch.relu(net.inner[0](normed))).pow(2).sum()

    leaf = embedded.clone().requires_grad_()
    found["embed"] = torch.autograd.grad(tail(leaf, leaf), leaf)[0]
    leaf = embedded.clone().requires_grad_()
    found["norm"] = torch.autograd.grad(tail(embedded, leaf), leaf)[0]
    leaf = net.inner[0](embedded).detach().requires_grad_()
    found["inner.0"] = torch.autograd.grad((embedded + torch.relu(leaf)).pow(2).sum(), leaf)[0]
    return found


@pytest.mark.parametrize("frozen", [False, True])
def test_cached_gradients_are_those_of_a_fresh_leaf(net: Residual, x: Tensor, frozen: bool) -> None:
    net.requires_grad_(not frozen)
    right = leaf_gradients(net, x)
    assert not torch.allclose(right["embed"], right["norm"])
    sites = list(right)
    _, cache = ip.wrap(net).run_with_cache(x, names_filter=sites, incl_bwd=True)
    for site in sites:
        assert_near(cache.grad[site], right[site])
        assert_near(cache[f"{site}_grad"], right[site])
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("frozen", [False, True])
def test_an_inputs_gradient_is_that_of_its_own_path(net: Residual, x: Tensor, frozen: bool) -> None:
    net.requires_grad_(not frozen)
    right = leaf_gradients(net, x)
    output, cache = ip.wrap(net).run_with_cache(
        x, names_filter=["norm.input", "inner.1.input"], incl_bwd=True
    )
    assert_near(cache.grad["norm.input"], right["norm"])
    assert_near(cache.grad["inner.1.input"], right["inner.0"])
    assert_near(output, net(x))


def test_gradient_hooks_get_the_gradient_after_edits_and_may_replace_it(
    net: Residual, x: Tensor
) -> None:
    seen: dict[str, Tensor] = {}

    def look(grad: Tensor, hook: ip.HookPoint) -> None:
        seen[hook.name] = grad

    def double(grad: Tensor, hook: ip.HookPoint) -> tuple[Tensor]:
        return (grad * 2,)

    def halve_in_place(grad: Tensor, hook: ip.HookPoint) -> None:
        grad.div_(4)

    model = ip.wrap(net)
    hooks = [("embed", look), ("embed", double), ("embed", halve_in_place)]
    model.run_with_hooks(x, bwd_hooks=hooks).backward()
    right = leaf_gradients(net, x)["embed"]
    assert_near(seen["embed"], right)
    assert_near(net.embed.bias.grad, (right * 2 / 4).sum(0))
    _, cache = model.run_with_cache(x, names_filter="embed", incl_bwd=True, bwd_hooks=hooks)
    assert_near(cache.grad["embed"], right * 2 / 4)


def test_the_gradient_is_at_the_edited_value(x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    _, cache = ip.wrap(net).run_with_cache(
        x, names_filter="0", incl_bwd=Tensor.sum, fwd_hooks=[("0", lambda value, hook: value * 3)]
    )
    value = (net[0](x) * 3).detach().requires_grad_()
    assert torch.equal(cache.grad["0"], torch.autograd.grad(value.tanh().sum(), value)[0])


def test_backward_hooks_of_a_with_block_end_with_it(net: Residual, x: Tensor) -> None:
    model, seen = ip.wrap(net), []
    hooks = [("embed", lambda grad, hook: seen.append(grad))]
    with model.hooks(bwd_hooks=hooks):
        loss = model(x)
        loss.backward(retain_graph=True)
    loss.backward()
    assert len(seen) == 1
    with (
        pytest.raises(ip.NeverFired, match=r"Call backward\(\) inside the with block"),
        model.hooks(bwd_hooks=hooks),
    ):
        model(x)


def test_gradients_that_cannot_be_had_say_why(net: Residual, x: Tensor) -> None:
    model = ip.wrap(net)
    hook = [("embed", lambda grad, hook: None)]
    with (
        torch.no_grad(),
        pytest.raises(ip.NeverFired, match=r"gradients are off here \(torch.no_grad"),
    ):
        model.run_with_hooks(x, bwd_hooks=hook)
    with pytest.raises(ip.GradientError, match=r"the model returned a tensor of shape \(4, 3\)"):
        ip.wrap(net.embed).run_with_cache(x, incl_bwd=True)
    with pytest.raises(ValueError, match="use stop=True or incl_bwd, not both"):
        model.run_with_cache(x, stop=True, incl_bwd=True)
    tokens = ip.wrap(nn.Sequential(nn.Identity(), nn.Embedding(5, 2)))
    with pytest.raises(ip.GradientError, match=r"'0' is torch.int64: only floating point"):
        tokens.run_with_cache(torch.tensor([1]), names_filter="0", incl_bwd=Tensor.sum)


def test_a_site_the_loss_does_not_depend_on_is_an_error_when_named() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.other(x)

    model, x = ip.wrap(TwoHeads()), torch.randn(2, 3)
    with pytest.raises(ip.NeverFired, match="the gradient cache at 'other' never fired"):
        model.run_with_cache(x, names_filter=["one", "other"], incl_bwd=lambda out: out[0].sum())
    _, cache = model.run_with_cache(x, incl_bwd=lambda out: out[0].sum())
    assert list(cache.grad) == ["output[0]", "one"]


def test_live_values_are_part_of_the_graph(net: Residual, x: Tensor) -> None:
    loss, cache = ip.wrap(net).run_with_cache(x, names_filter=["embed", "inner"], detach=False)
    (grad,) = torch.autograd.grad(loss, cache["embed"], retain_graph=True)
    assert torch.equal(grad, leaf_gradients(net, x)["embed"])
    cache["inner"].pow(2).sum().backward()
    assert net.inner[0].weight.grad.any()


def test_outer_gradient_hooks_fire_in_an_inner_cached_backward(net: Residual, x: Tensor) -> None:
    model, seen = ip.wrap(net), []
    with model.hooks(bwd_hooks=[("embed", lambda grad, hook: seen.append(grad))]):
        model.run_with_cache(x, names_filter="inner", incl_bwd=True)
    assert torch.equal(seen[0], leaf_gradients(net, x)["embed"])


def test_every_call_of_a_module_has_its_own_gradient() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(torch.tanh(self.cell(x))).sum()

    net, x = Twice(), torch.randn(2, 3)
    _, cache = ip.wrap(net).run_with_cache(x, names_filter="cell", incl_bwd=True)
    first = net.cell(x).detach().requires_grad_()
    (right,) = torch.autograd.grad(net.cell(torch.tanh(first)).sum(), first)
    assert list(cache) == ["cell#0", "cell#1", "cell#1_grad", "cell#0_grad"]
    assert torch.equal(cache.grad["cell#0"], right)
    assert torch.equal(cache.grad["cell#1"], torch.ones(2, 3))
    assert [grad.shape for grad in cache.grad.calls("cell")] == [(2, 3), (2, 3)]


def test_second_derivatives_pass_through(x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x.requires_grad_()
    with ip.wrap(net).hooks(
        [("0", lambda value, hook: value * 2)], bwd_hooks=[("0", lambda g, hook: g * 3)]
    ):
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.pow(2).sum(), x)

    other = x.detach().clone().requires_grad_()
    value = net[0](other) * 2
    value.register_hook(lambda g: g * 3)
    (right,) = torch.autograd.grad(value.tanh().sum(), other, create_graph=True)
    assert torch.equal(grad, right)
    assert torch.equal(second, torch.autograd.grad(right.pow(2).sum(), other)[0])


def test_the_same_tensor_at_two_sites_has_its_gradient_at_each() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh()))
    seen: dict[str, Tensor] = {}

    def look(grad: Tensor, hook: ip.HookPoint) -> None:
        seen[hook.name] = grad

    hooks = [("1.0", lambda grad, hook: grad * 2), ("1.0", look), ("1", look), ("output", look)]
    output = ip.wrap(net).run_with_hooks(torch.randn(2, 3), bwd_hooks=hooks)
    output.sum().backward()
    assert torch.equal(seen["output"], torch.ones(2, 3))
    assert torch.equal(seen["1"], torch.ones(2, 3))
    assert torch.equal(seen["1.0"], torch.full((2, 3), 2.0))


class Tower(nn.Module):
    """Records what its blocks return by hooks of its own, and goes on with the last but one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.head = nn.Linear(3, 3)
        self.hidden: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: self.hidden.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.hidden.clear()
        self.blocks(x)
        return self.head(self.hidden[1]).pow(2).sum() + self.hidden[0].sum()


@pytest.mark.parametrize("frozen", [False, True])
def test_what_hooks_of_the_model_record_has_its_part_in_the_gradient(
    x: Tensor, frozen: bool
) -> None:
    tower = Tower().requires_grad_(not frozen)
    first = tower.blocks[0](x).detach().requires_grad_()
    second = first.tanh()
    loss = tower.head(second).pow(2).sum() + first.sum()
    right = torch.autograd.grad(loss, [first, second])
    model, sites = ip.wrap(tower), ["blocks.0", "blocks.1"]
    output, cache = model.run_with_cache(x, names_filter=sites, incl_bwd=True)
    assert torch.equal(output, loss)
    for site, grad in zip(sites, right):
        assert torch.equal(cache.grad[site], grad), site
    # Nothing comes of the last block, and its gradient is still asked for in vain.
    with pytest.raises(ip.NeverFired, match="The loss does not depend on it"):
        model.run_with_cache(x, names_filter="blocks.2", incl_bwd=True)
    seen: list[Tensor] = []
    look = model.hooks(bwd_hooks=[("blocks.1", lambda grad, hook: seen.append(grad.clone()))])
    with look, model.hooks(bwd_hooks=[("blocks.1", lambda grad, hook: grad * 0)]):
        _, cache = model.run_with_cache(x, names_filter="blocks.0", incl_bwd=True)
    assert torch.equal(seen[0], right[1])
    assert torch.equal(cache.grad["blocks.0"], torch.ones(4, 3))


def tripled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 3


def tripled_in_place(module: nn.Module, args: Any, output: Tensor) -> None:
    output.mul_(3)


def with_its_input(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return args[0] + output


@pytest.mark.parametrize("change", [tripled, tripled_in_place, with_its_input])
def test_the_gradient_is_that_of_the_value_that_is_kept_after_hooks_of_others(
    x: Tensor, change: Any
) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    net[1].register_forward_hook(change)
    model = ip.wrap(net)
    _, cache = model.run_with_cache(x, names_filter="1", incl_bwd=lambda out: out.pow(2).sum())
    leaf = cache["1"].clone().requires_grad_()
    assert torch.equal(cache["1"], net[:2](x))
    assert not torch.allclose(leaf, nn.functional.linear(net[0](x), net[1].weight, net[1].bias))
    right = torch.autograd.grad(net[2](leaf).pow(2).sum(), leaf)[0]
    assert torch.equal(cache.grad["1"], right)


class Passing(nn.Module):
    """One module that returns what it is given, called on its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        once = self.same(self.fc(x))
        twice = self.same(once)
        return (once * twice).sum() + twice.pow(2).sum()


@pytest.mark.parametrize("frozen", [False, True])
def test_each_call_of_a_module_that_returns_its_input_has_its_own_gradient(
    x: Tensor, frozen: bool
) -> None:
    net = Passing().requires_grad_(not frozen)
    _, cache = ip.wrap(net).run_with_cache(x, names_filter="same", incl_bwd=True)
    value = net.fc(x)
    assert torch.allclose(cache.grad["same#1"], 3 * value)
    assert torch.allclose(cache.grad["same#0"], 4 * value)
