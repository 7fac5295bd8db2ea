"""Activation checkpointing repeats forwards inside the backward pass: edits must repeat, captures must not."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import interpose as ip

BOTH_KINDS = pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])


class Net(nn.Module):
    """Two checkpointed layers; ``plain`` turns checkpointing off, for comparison."""

    def __init__(self, reentrant: bool, plain: bool = False, times: int = 1) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.act = nn.Tanh()
        self.outer = nn.Linear(4, 4)
        self.reentrant = reentrant
        self.plain = plain
        self.times = times

    def part(self, x: Tensor) -> Tensor:
        return self.outer(self.act(self.inner(x)))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = (
                self.part(x)
                if self.plain
                else checkpoint(self.part, x, use_reentrant=self.reentrant)
            )
        return x.pow(2).sum()


def twins(reentrant: bool, times: int = 1) -> tuple[Net, Net, Tensor]:
    torch.manual_seed(1)
    net = Net(reentrant, times=times)
    plain = Net(reentrant, plain=True, times=times)
    plain.load_state_dict(net.state_dict())
    return net, plain, torch.randn(3, 4)


def gradients(net: Net, x: Tensor, **hooks: list) -> list[Tensor]:
    net.zero_grad()
    x = x.clone().requires_grad_()
    with ip.wrap(net).hooks(**hooks):
        ip.wrap(net)(x).backward()
    return [x.grad, *(p.grad.clone() for p in net.parameters())]


def all_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@BOTH_KINDS
@pytest.mark.parametrize("site", ["inner", "act", "outer.input"])
def test_edits_are_repeated_so_gradients_are_those_without_checkpointing(
    reentrant: bool, site: str
) -> None:
    net, plain, x = twins(reentrant)
    edit = [(site, lambda value, hook: value * 3)]
    right = gradients(plain, x, fwd_hooks=edit)
    assert not all_equal(right, gradients(plain, x, fwd_hooks=[(site, lambda value, hook: None)]))
    assert all_equal(gradients(net, x, fwd_hooks=edit), right)


@BOTH_KINDS
def test_a_gradient_hook_fires_once_with_the_right_gradient(reentrant: bool) -> None:
    net, plain, x = twins(reentrant)
    found: list[Tensor] = []
    right: list[Tensor] = []
    gradients(net, x, bwd_hooks=[("inner", lambda grad, hook: found.append(grad))])
    gradients(plain, x, bwd_hooks=[("inner", lambda grad, hook: right.append(grad))])
    assert len(found) == len(right) == 1
    assert torch.equal(found[0], right[0])


@BOTH_KINDS
def test_a_replaced_gradient_flows_on(reentrant: bool) -> None:
    net, plain, x = twins(reentrant)
    hooks = [("inner", lambda grad, hook: grad * 2)]
    assert all_equal(gradients(net, x, bwd_hooks=hooks), gradients(plain, x, bwd_hooks=hooks))


@BOTH_KINDS
def test_training_steps_in_one_scope_each_have_their_gradients(reentrant: bool) -> None:
    net, plain, x = twins(reentrant)

    def steps(module: Net) -> list[Tensor]:
        found: list[Tensor] = []
        model = ip.wrap(module)
        hooks = {
            "fwd_hooks": [("act", lambda value, hook: value * 2)],
            "bwd_hooks": [("inner", lambda grad, hook: found.append(grad))],
        }
        with model.hooks(**hooks):
            for turn in range(3):
                model((x * (turn + 1)).requires_grad_()).backward()
        return found

    found, right = steps(net), steps(plain)
    assert len(found) == len(right) == 3
    assert all_equal(found, right)


@BOTH_KINDS
def test_values_are_captured_once(reentrant: bool) -> None:
    net, plain, x = twins(reentrant)
    seen: list[int] = []

    class Count(ip.Detector):
        def read(self, value: Tensor, hook: ip.HookPoint) -> None:
            seen.append(1)

    model = ip.wrap(net)
    output, cache = model.run_with_cache(x.requires_grad_(), names_filter=["inner", "act"])
    output.backward()
    _, right = ip.wrap(plain).run_with_cache(x, names_filter=["inner", "act"])
    assert list(cache) == ["inner", "act"]
    assert torch.equal(cache["act"], right["act"])


def test_gradients_can_be_cached_under_non_reentrant_checkpointing() -> None:
    net, plain, x = twins(reentrant=False)
    _, cache = ip.wrap(net).run_with_cache(x, names_filter=["inner", "outer"], incl_bwd=True)
    _, right = ip.wrap(plain).run_with_cache(x, names_filter=["inner", "outer"], incl_bwd=True)
    assert torch.equal(cache.grad["inner"], right.grad["inner"])
    assert torch.equal(cache.grad["outer"], right.grad["outer"])


def test_a_frozen_checkpointed_model_has_gradients_too() -> None:
    net, plain, x = twins(reentrant=False)
    for module in (net, plain):
        for parameter in module.parameters():
            parameter.requires_grad_(False)
    # The first site is outside the checkpoint, so that autograd has something to recompute for.
    sites = ["inner.input", "inner", "act"]
    _, cache = ip.wrap(net).run_with_cache(x, names_filter=sites, incl_bwd=True)
    _, right = ip.wrap(plain).run_with_cache(x, names_filter=sites, incl_bwd=True)
    assert all(torch.equal(cache.grad[site], right.grad[site]) for site in sites)


@BOTH_KINDS
@pytest.mark.parametrize("constant", [False, True])
def test_a_backward_pass_that_leaves_the_scope_of_an_edit_raises(
    reentrant: bool, constant: bool
) -> None:
    net, _, x = twins(reentrant)
    model = ip.wrap(net)
    edit = (
        (lambda value, hook: torch.ones_like(value))
        if constant
        else (lambda value, hook: value * 3)
    )
    with model.hooks([("inner", edit)]):
        loss = model(x.requires_grad_())
    with pytest.raises(ip.GradientError, match="Call backward\\(\\) inside the with block"):
        loss.backward()
    loss = model.run_with_hooks(x, fwd_hooks=[("inner", edit)])
    with pytest.raises(ip.GradientError, match="under activation checkpointing"):
        loss.backward()
    handle = model.add_hook("inner", edit)
    loss = model(x)
    handle.remove()
    with pytest.raises(ip.GradientError, match="under activation checkpointing"):
        loss.backward()


@BOTH_KINDS
def test_an_edit_outside_the_checkpoint_may_leave_its_scope(reentrant: bool) -> None:
    net, plain, x = twins(reentrant)
    grads = []
    for module in (net, plain):
        model, data = ip.wrap(module), x.clone().requires_grad_()
        with model.hooks([("input", lambda value, hook: value * 2)]):
            loss = model(data)
        loss.backward()
        grads.append(data.grad)
    assert torch.equal(*grads)


@BOTH_KINDS
def test_all_calls_of_a_repeated_module_can_be_edited_but_not_one_of_them(reentrant: bool) -> None:
    net, plain, x = twins(reentrant, times=3)
    edit = [("inner", lambda value, hook: value * 2)]
    assert all_equal(gradients(net, x, fwd_hooks=edit), gradients(plain, x, fwd_hooks=edit))
    with pytest.raises(ip.GradientError, match="which call is being recomputed cannot be known"):
        gradients(net, x, fwd_hooks=[("inner#1", lambda value, hook: value * 2)])


@BOTH_KINDS
def test_noise_is_the_same_when_repeated(reentrant: bool) -> None:
    for seed in (None, 5):
        net, plain, x = twins(reentrant)
        torch.manual_seed(3)
        found = gradients(net, x, hooks=[ip.noise("inner", 1.0, seed=seed)])
        torch.manual_seed(3)
        assert all_equal(found, gradients(plain, x, hooks=[ip.noise("inner", 1.0, seed=seed)]))


@BOTH_KINDS
def test_a_skip_is_repeated_and_may_not_leave_its_scope(reentrant: bool) -> None:
    net, plain, x = twins(reentrant)
    hooks = {"hooks": [ip.skip("inner", lambda value: value * 2)]}
    right = gradients_or_none(plain, x, **hooks)
    assert all_equal(gradients_or_none(net, x, **hooks), right)
    loss = ip.wrap(net).run_with_hooks(x.clone().requires_grad_(), **hooks)
    with pytest.raises(ip.GradientError, match="under activation checkpointing"):
        loss.backward()


def gradients_or_none(net: Net, x: Tensor, **hooks: list) -> list[Tensor]:
    net.zero_grad()
    x = x.clone().requires_grad_()
    with ip.wrap(net).hooks(**hooks):
        net(x).backward()
    return [x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


@BOTH_KINDS
def test_an_edit_that_would_not_be_repeated_here_raises(reentrant: bool) -> None:
    net, _, x = twins(reentrant)
    model, data = ip.wrap(net), x.clone().requires_grad_()
    handle = model.register(ip.scale("inner", 3.0))
    loss = model(data)
    handle.disable()
    with pytest.raises(ip.GradientError, match="under activation checkpointing"):
        loss.backward()
    handle.remove()

    caught: list[BaseException] = []

    def backward(loss: Tensor) -> None:
        try:
            loss.backward()
        except ip.GradientError as error:
            caught.append(error)

    with model.hooks([ip.scale("inner", 3.0)]):
        thread = threading.Thread(target=backward, args=(model(data),))
        thread.start()
        thread.join()
    # On CUDA the recomputation has a thread of its own and is given to the one scope that is open.
    assert len(caught) == (x.device.type == "cpu")


def test_a_gradient_hook_fires_in_steps_with_and_without_checkpointing() -> None:
    net, _, x = twins(reentrant=True)
    model, seen = ip.wrap(net), []
    handle = model.add_hook("inner", lambda grad, hook: seen.append(grad), dir="bwd")
    for plain in (True, False, True, False):
        net.plain = plain
        model(x.clone().requires_grad_()).backward()
    handle.remove()
    assert len(seen) == 4
    assert all(torch.equal(seen[0], grad) for grad in seen)
