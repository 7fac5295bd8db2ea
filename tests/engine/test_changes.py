"""Any module that changes after its first use: names, counts and hooks that stay are those of the module as it is."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from interpose.engine.stamp import Stamp

X = torch.ones(2, 4)


def net() -> nn.Sequential:
    parts = {"first": nn.Linear(4, 4), "act": nn.ReLU(), "last": nn.Linear(4, 4)}
    return nn.Sequential(OrderedDict(parts))


class Packed(Tensor):
    """A tensor of another kind."""


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))


@pytest.mark.parametrize("kind", ["add_hook", "hooks", "record", "gradient", "skip"])
def test_hooks_follow_a_part_that_is_replaced(kind: str) -> None:
    module = net()
    model, seen = ip.wrap(module), []
    new = nn.Linear(4, 4)

    def look(value: Tensor, hook: Any) -> None:
        seen.append(value.detach().clone())

    def change() -> None:
        model(X).sum().backward()
        module.first = new
        model(X).sum().backward()

    if kind == "add_hook":
        handle = model.add_hook("first", look)
        change()
        handle.remove()
    elif kind == "hooks":
        with model.hooks(fwd_hooks=[("first", look)]):
            change()
    elif kind == "gradient":
        with model.hooks(bwd_hooks=[("first", look)]):
            change()
        assert [tuple(grad.shape) for grad in seen] == [(2, 4)] * 2
        return
    elif kind == "skip":
        with model.hooks([ip.skip("first", torch.full((2, 4), 3.0))]):
            change()
            seen += [model.run_with_cache(X)[1]["first"]] * 2
        assert torch.equal(seen[0], torch.full((2, 4), 3.0))
        return
    else:
        with model.record("first") as cache:
            change()
        seen += cache.calls("first")
    assert len(seen) == 2
    assert torch.equal(seen[1], new(X))
    assert not torch.allclose(seen[0], seen[1])
    assert not new._forward_hooks
    assert not new._forward_pre_hooks


def test_the_order_of_hooks_that_stay_is_kept() -> None:
    module = net()
    model = ip.wrap(module)
    order: list[str] = []
    for name in "abc":
        model.add_hook("first", lambda value, hook, name=name: order.append(name))
    model(X)
    module.first = nn.Linear(4, 4)
    model(X)
    assert "".join(order) == "abcabc"
    model.reset_hooks()


def test_a_run_stops_where_the_last_call_is_now() -> None:
    """How often a part is called was learned from the module as it was."""
    module = nn.Sequential(OrderedDict(body=nn.Sequential(nn.Linear(4, 4)), last=nn.Linear(4, 4)))
    model, inner = ip.wrap(module), module.body[0]
    for _ in range(2):
        _, cache = model.run_with_cache(X, names_filter="body", stop=True)
    module.body = Twice(inner)
    _, cache = model.run_with_cache(X, names_filter="body.inner", stop=True)
    assert torch.equal(cache["body.inner#1"], inner(inner(X)))
    assert model.sites["body.inner"].calls == 2


def test_shapes_that_were_seen_are_those_of_the_part_that_is_there() -> None:
    model = ip.wrap(net())
    model.run_with_cache(X)
    assert model.sites["last"].shape == (2, 4)
    model.module.last = nn.Linear(4, 7)
    assert model.sites["last"].shape is None
    model.run_with_cache(X)
    assert model.sites["last"].shape == (2, 7)


def changed(module: nn.Module) -> dict[str, Any]:
    """Ways to change a module, each of which a stamp must notice."""
    return {
        "a part": lambda: setattr(module, "act", nn.Tanh()),
        "one part more": lambda: module.append(nn.ReLU()),
        "a part in what had none": lambda: module.first.add_module("inner", nn.ReLU()),
        "one part less": lambda: delattr(module, "act"),
        "one parameter more": lambda: module.first.register_parameter("scale", nn.Parameter(X)),
        "the order": lambda: (
            module._modules.move_to_end("act")
            if isinstance(module._modules, OrderedDict)
            else module._modules.update(act=module._modules.pop("act"))
        ),
        "a shape": lambda: setattr(module.first.weight, "data", torch.zeros(9, 4)),
        "a dtype": lambda: module.half(),
        "no parameter": lambda: module.first.register_parameter("bias", None),
        "a parameter of another class": lambda: setattr(
            module.first, "weight", nn.Parameter(torch.zeros(4, 4).as_subclass(Packed))
        ),
        "a class": lambda: setattr(module.first, "__class__", nn.Bilinear),
        "a forward": lambda: setattr(module, "forward", lambda x: x),
    }


@pytest.mark.parametrize("what", list(changed(net())))
def test_a_stamp_notices(what: str) -> None:
    module = net()
    stamp = Stamp(module)
    assert stamp.holds()
    assert stamp.holds_for()
    changed(module)[what]()
    assert not (stamp.holds() and stamp.holds_for())
    now = Stamp(module)
    assert now.holds()
    assert now.holds_for()


def test_a_stamp_holds_through_what_changes_nothing_it_rests_on() -> None:
    module = net()
    stamp = Stamp(module)
    module.train()
    module.first.weight.data.mul_(2)
    module.load_state_dict(net().state_dict())
    module.register_forward_hook(lambda *_: None)
    module.first.weight = nn.Parameter(torch.zeros(4, 4))  # another of its kind
    assert stamp.holds()
    assert stamp.holds()
    model = ip.wrap(module)
    with model.hooks([ip.skip("first", lambda x: x)]):
        assert "forward" in vars(module.first)
        assert stamp.holds()
        model(X)
    assert stamp.holds()


def test_a_stamp_keeps_no_weights_alive_and_parts_until_the_next_run() -> None:
    module = net()
    model = ip.wrap(module)
    model.run_with_cache(X)
    part, weight = weakref.ref(module.first), weakref.ref(module.last.weight)
    module.first = nn.Linear(4, 4)
    module.last.weight = nn.Parameter(torch.zeros(4, 4))
    gc.collect()
    assert weight() is None
    model.run_with_cache(X)
    gc.collect()
    assert part() is None
    last = weakref.ref(module.last)
    module.last = nn.Linear(4, 2)
    model.forget()
    gc.collect()
    assert last() is None


def test_a_part_that_a_leaf_is_given_is_followed() -> None:
    """As adapters are that are put into the linear map that they adapt, and later exchanged."""

    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + sum(part(x) for part in self.children())

    module = nn.Sequential(OrderedDict(first=Adapted(4, 4), last=nn.Linear(4, 4)))
    model = ip.wrap(module)
    model.run_with_cache(X, names_filter="last")
    for _ in range(2):
        module.first.inner = nn.Linear(4, 4)
        _, cache = model.run_with_cache(X, names_filter="first.inner")
        assert torch.equal(cache["first.inner"], module.first.inner(X))


def test_a_run_compares_the_parameters_of_the_parts_it_asks_for() -> None:
    """All the others are for those who look at weights."""
    model = ip.wrap(net())
    model.run_with_cache(X)
    first = model.changes
    model.module.last.weight.data = torch.ones(2, 4)
    model.module.last.bias.data = torch.ones(2)
    model.run_with_cache(X, names_filter="first")
    assert model.changes == first
    model.run_with_cache(X, names_filter="last")
    assert model.changes == first + 1
    model.module.last.half()
    model.sites  # noqa: B018
    assert model.changes == first + 2
