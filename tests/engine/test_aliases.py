"""One tensor that stands in several places of a call stays one tensor, unless an edit makes them differ.

Modules ask for it: ``nn.MultiheadAttention`` multiplies once where query, key and value are one
tensor, and three times, with other bits, where they are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from tests.devices import no_device_mode

pytestmark = pytest.mark.bits

ROLES = ("query", "key", "value")
NAMES = [f"inner.input.{role}" for role in ROLES]


class Roles(nn.Module):
    """Uses each argument differently, and notes which of them were one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, query: Tensor, key: Tensor, *, value: Tensor) -> Tensor:
        self.seen.append((query is key, key is value))
        return 2 * query.sin() + 3 * key.cos() + 5 * value.square()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.inner = Roles()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc(x)
        return self.inner(hidden, hidden, value=hidden)


@pytest.fixture
def module() -> Outer:
    return Outer()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4)


def add_zero(value: Tensor, hook: ip.HookPoint) -> None:
    value.add_(0)


def leave(value: Tensor, hook: ip.HookPoint) -> Tensor:
    return value


def torch_clones(module: nn.Module, args: Any, kwargs: Any) -> Any:
    query, key = args
    assert query is key is kwargs["value"]  # as a hook of torch would see it
    copy = query.clone()
    return (copy, copy), {"value": copy}


def torch_adds_zero(module: nn.Module, args: Any, kwargs: Any) -> None:
    args[0].add_(0)


def everywhere(name: str) -> bool:
    return name == "inner.input"


SAME_EVERYWHERE: dict[str, list[Any]] = {
    "clones": [(everywhere, torch.clone)],
    "in place": [(everywhere, add_zero)],
    "twice": [(everywhere, torch.clone), (everywhere, add_zero)],
    "by name": [(name, torch.clone) for name in NAMES],
    "by name, twice": [(name, edit) for name in NAMES for edit in (torch.clone, add_zero)],
    "another value": [(everywhere, lambda value, hook: value + value)],
    "of torch": [("inner", ip.torch_hook(torch_clones, pre=True))],
    "of torch, in place": [("inner", ip.torch_hook(torch_adds_zero, pre=True))],
}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("hooks", SAME_EVERYWHERE.values(), ids=SAME_EVERYWHERE)
def test_the_same_edit_of_all_arguments_keeps_one_tensor(
    module: Outer, x: Tensor, hooks: list[Any], grad: bool
) -> None:
    with torch.set_grad_enabled(grad):
        ip.wrap(module).run_with_hooks(x, fwd_hooks=hooks)
    assert module.inner.seen == [(True, True)]


def raw(module: Outer, x: Tensor, change: Callable[[Tensor, str], Tensor]) -> Tensor:
    """What torch gives when each argument is replaced by what a function makes of it."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        query, key = (change(arg, role) for arg, role in zip(args, ROLES))
        return (query, key), {"value": change(kwargs["value"], "value")}

    handle = module.inner.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        return module(x)
    finally:
        handle.remove()


@pytest.mark.parametrize("role", ROLES)
def test_an_edit_of_one_argument_reaches_it_alone(module: Outer, x: Tensor, role: str) -> None:
    model = ip.wrap(module)
    got = model.run_with_hooks(x, fwd_hooks=[(f"inner.input.{role}", lambda v, hook: v * 2)])
    expected = raw(module, x, lambda value, at: value * 2 if at == role else value)
    assert torch.equal(got, expected)
    assert (got - module(x)).abs().max() > 0.1


def test_a_copy_of_one_argument_is_another_tensor(module: Outer, x: Tensor) -> None:
    ip.wrap(module).run_with_hooks(x, fwd_hooks=[("inner.input.key", torch.clone)])
    assert module.inner.seen == [(False, False)]
    ip.wrap(module).run_with_hooks(x, fwd_hooks=[(name, torch.clone) for name in NAMES[:2]])
    assert module.inner.seen[1:] == [(True, False)]


def test_edits_that_look_at_the_name_reach_each_argument(module: Outer, x: Tensor) -> None:
    factors = {"query": 2.0, "key": 2.0, "value": 3.0}

    def scale(value: Tensor, hook: ip.HookPoint) -> Tensor:
        return value * factors[hook.name.split(".")[-1]]

    with torch.no_grad():
        got = ip.wrap(module).run_with_hooks(x, fwd_hooks=[(everywhere, scale)])
        assert module.inner.seen == [(True, False)]
        assert torch.equal(got, raw(module, x, lambda value, at: value * factors[at]))


def gradients(loss: Tensor, of: list[Tensor]) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, of, allow_unused=True))


EQUAL_NOW: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "added": lambda value, own, role: value + own,
    "multiplied": lambda value, own, role: value * (1 + own),
    "masked where there is nothing": lambda value, own, role: value * (own + (role != "key")),
    "cut off at one": lambda value, own, role: value.detach() if role == "key" else value.clone(),
    "a function of its own": lambda value, own, role: Scaled.apply(value, ROLES.index(role)),
}


class Scaled(torch.autograd.Function):
    """The same value, with a gradient that depends on who asks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


@pytest.mark.parametrize("change", EQUAL_NOW.values(), ids=EQUAL_NOW)
def test_edits_that_are_equal_only_now_keep_gradients_of_their_own(
    module: Outer, x: Tensor, change: Callable[[Tensor, Tensor, str], Tensor]
) -> None:
    """Three parameters that are all zero: the values are equal, what they are for is not."""
    if change is EQUAL_NOW["masked where there is nothing"]:
        module.fc.weight.data.zero_()
        module.fc.bias.data.zero_()
    own = {role: torch.zeros(4, requires_grad=True) for role in ROLES}

    def edit(value: Tensor, hook: ip.HookPoint) -> Tensor:
        role = hook.name.split(".")[-1]
        return change(value, own[role], role)

    wanted = [*own.values(), module.fc.bias]
    got = ip.wrap(module).run_with_hooks(x, fwd_hooks=[(everywhere, edit)])
    expected = raw(module, x, lambda value, role: change(value, own[role], role))
    found = gradients(got.sum(), wanted)
    for one, other in zip(found, gradients(expected.sum(), wanted), strict=True):
        assert (one is None) == (other is None)
        torch.testing.assert_close(one, other)
    naive = raw(module, x, lambda value, role: change(value, own["query"], "query"))
    differences = zip(found, gradients(naive.sum(), wanted), strict=True)
    assert any(
        one is not None and (other is None or not torch.allclose(one, other))
        for one, other in differences
    ), "one tensor for all would have given the same"


def test_a_gradient_is_that_of_one_argument(module: Outer, x: Tensor) -> None:
    loss = {"incl_bwd": lambda out: out.sum()}
    _, together = ip.wrap(module).run_with_cache(x, names_filter=NAMES, **loss)
    hidden = module.fc(x).detach()
    by_hand = {"query": 2 * hidden.cos(), "key": -3 * hidden.sin(), "value": 10 * hidden}
    for role, name in zip(ROLES, NAMES):
        _, alone = ip.wrap(module).run_with_cache(x, names_filter=name, **loss)
        for cache in (alone, together):
            torch.testing.assert_close(cache.grad[name], by_hand[role])


class Doubles(nn.Module):
    """Writes to its first argument, which is the second one too."""

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        one.mul_(2)
        return one + other


class WritesToBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Doubles()

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 1
        return self.inner(hidden, hidden) + hidden


def test_a_module_that_writes_to_one_writes_to_both(x: Tensor) -> None:
    module = WritesToBoth()
    assert torch.equal(module(x), 6 * x)
    assert torch.equal(ip.wrap(module).run_with_hooks(x, fwd_hooks=[(everywhere, leave)]), 6 * x)
    assert torch.equal(
        ip.wrap(module).run_with_hooks(x, fwd_hooks=[(everywhere, torch.clone)]), 6 * x
    )


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        made = x * 2
        return made, {"again": made}


class TakesPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.were_one: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        first, others = self.pair(x)
        self.were_one.append(first is others["again"])
        return first + 3 * others["again"]


def test_outputs_that_are_one_tensor_stay_so(x: Tensor) -> None:
    module = TakesPair()
    model = ip.wrap(module)

    def of_torch(_: nn.Module, args: Any, output: Any) -> None:
        output[0].add_(1)  # so the other one too

    model.run_with_hooks(x, fwd_hooks=[(None, torch.clone)])
    got = model.run_with_hooks(x, fwd_hooks=[("pair", ip.torch_hook(of_torch))])
    assert torch.equal(got, 4 * (2 * x + 1))
    skipped = x * 7
    model.run_with_hooks(x, hooks=[ip.skip("pair", (skipped, {"again": skipped}))])
    assert module.were_one == [True, True, True]
    got = model.run_with_hooks(x, fwd_hooks=[("pair.output[0]", lambda value, hook: value * 5)])
    assert torch.equal(got, 5 * (2 * x) + 3 * (2 * x))


PATHS = {
    True: (torch.nn.functional, "_in_projection_packed"),
    False: (torch, "_native_multi_head_attention"),
}


@no_device_mode()
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_attention_of_torch_takes_the_path_it_took(
    x: Tensor, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path, not the bits, which are the same on some CPUs either way."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    taken: list[bool] = []
    where, name = PATHS[grad]
    original = getattr(where, name)

    def noted(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
        taken.append(query is key is value)
        return original(query, key, value, *rest)

    monkeypatch.setattr(where, name, noted)
    given, model = (x[None],) * 3, ip.wrap(attention)
    with torch.set_grad_enabled(grad):
        attention(*given)
        assert taken == [True]
        model.run_with_hooks(*given, fwd_hooks=[(lambda name: name == "input", torch.clone)])
    assert taken == [True, True]
