"""What a hook function gets and gives, the forms hooks come in, and their order."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import interpose as ip


@pytest.fixture
def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4)


def edited(net: nn.Sequential, x: Tensor) -> Tensor:
    """What the model gives when the Tanh's output is doubled, by hand."""
    return net[2](net[1](net[0](x)) * 2)


def by_return(value: Tensor, hook: ip.HookPoint) -> Tensor:
    return value * 2


def in_place(value: Tensor, hook: ip.HookPoint) -> Tensor:
    value *= 2
    return value


def in_place_without_return(value: Tensor, hook: ip.HookPoint) -> None:
    value.mul_(2)


def by_setting_data(value: Tensor, hook: ip.HookPoint) -> None:
    value.data = value.data * 2


WAYS = [by_return, in_place, in_place_without_return, by_setting_data]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_writing_an_edit_gives_the_same(way, net: nn.Sequential, x: Tensor) -> None:
    right = edited(net, x)
    assert not torch.equal(right, net(x))
    model = ip.wrap(net)
    assert torch.equal(model.run_with_hooks(x, fwd_hooks=[("1", way)]), right)
    with torch.inference_mode():
        assert torch.equal(model.run_with_hooks(x, fwd_hooks=[("1", way)]), right)


def test_a_function_that_leaves_the_value_alone_changes_nothing(
    net: nn.Sequential, x: Tensor
) -> None:
    kept = {}
    with torch.no_grad():
        output = ip.wrap(net).run_with_hooks(
            x, fwd_hooks=[("1", lambda value, hook: kept.update({hook.name: value}))]
        )
        assert torch.equal(output, net(x))
        assert torch.equal(kept["1"], net[1](net[0](x)))


def test_what_a_user_returns_is_never_changed_by_the_model(x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    patch = torch.full((3, 4), -1.0)
    output = ip.wrap(net).run_with_hooks(x, fwd_hooks=[("0", lambda value, hook: patch)])
    assert not output.any()
    assert torch.equal(patch, torch.full((3, 4), -1.0))


def test_an_expanded_tensor_may_be_returned_where_the_model_works_in_place(x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    row = torch.tensor([1.0, -1.0, 2.0, -2.0])
    output = ip.wrap(net).run_with_hooks(x, fwd_hooks=[("0", lambda value, hook: row.expand(3, 4))])
    assert torch.equal(output, row.relu().expand(3, 4))


class Holder:
    def method(self, value: Tensor, hook: ip.HookPoint) -> Tensor:
        return value * 2

    def __call__(self, value: Tensor, hook: ip.HookPoint) -> Tensor:
        return value * 2


def with_factor(value: Tensor, hook: ip.HookPoint, factor: float) -> Tensor:
    return value * factor


def factor_in_the_middle(value: Tensor, factor: float, hook: ip.HookPoint) -> Tensor:
    return value * factor


def keyword_only(value: Tensor, *, hook: ip.HookPoint) -> Tensor:
    return value * 2


def any_arguments(*args) -> Tensor:
    return args[0] * 2


@pytest.mark.parametrize(
    "function",
    [
        lambda v, h: v * 2,
        lambda v: v * 2,
        functools.partial(with_factor, factor=2),
        functools.partial(factor_in_the_middle, factor=2),
        keyword_only,
        any_arguments,
        Holder().method,
        Holder(),
        functools.partial(torch.mul, 2),
    ],
)
def test_functions_of_every_signature_are_called_right(
    function, net: nn.Sequential, x: Tensor
) -> None:
    output = ip.wrap(net).run_with_hooks(x, fwd_hooks=[("1", function)])
    assert torch.equal(output, edited(net, x))


def test_hooks_run_in_registration_order_and_the_cache_reads_last(
    net: nn.Sequential, x: Tensor
) -> None:
    model, order = ip.wrap(net), []

    def step(name: str):
        def run(value: Tensor, hook: ip.HookPoint) -> Tensor:
            order.append(name)
            return value * 2 + 1

        return run

    model.add_hook("0", step("model"))
    with model.hooks([("0", step("outer"))]):
        model.add_hook("0", step("late"))
        model.add_hook("0", step("first"), prepend=True)
        _, cache = model.run_with_cache(x, names_filter="0", fwd_hooks=[("0", step("run"))])
    model.reset_hooks()
    assert order == ["first", "model", "outer", "late", "run"]
    value = net[0](x)
    for _ in order:
        value = value * 2 + 1
    assert torch.equal(cache["0"], value)


def test_permanent_hooks_and_levels_are_removed_as_asked(net: nn.Sequential, x: Tensor) -> None:
    model = ip.wrap(net)
    fired: list[str] = []

    def note(name: str):
        return lambda value, hook: fired.append(name)

    model.add_hook("0", note("plain"))
    model.add_perma_hook("0", note("permanent"))
    model.add_hook("0", note("level 1"), level=1)
    model.add_hook("0", lambda grad, hook: fired.append("backward"), dir="bwd")

    def ran() -> list[str]:
        fired.clear()
        model(x).sum().backward()
        return list(fired)

    assert ran() == ["plain", "permanent", "level 1", "backward"]
    model.remove_all_hook_fns(level=1)
    assert ran() == ["plain", "permanent", "backward"]
    model.remove_all_hook_fns("bwd")
    assert ran() == ["plain", "permanent"]
    point = model.hook_dict["0"]
    assert [handle.is_permanent for handle in point.fwd_hooks] == [False, True]
    model.reset_hooks()
    assert ran() == ["permanent"]
    assert point.has_hooks()
    point.remove_hooks(including_permanent=True)
    assert not point.has_hooks()
    assert ran() == []


def test_a_hook_point_offers_what_it_says(net: nn.Sequential, x: Tensor) -> None:
    model, seen = ip.wrap(net), []

    def look(value: Tensor, hook: ip.HookPoint) -> None:
        hook.ctx["sum"] = hook.ctx.get("sum", 0) + 1
        seen.append((hook.name, hook.layer(), hook.call, hook.module))

    model.run_with_hooks(x, fwd_hooks=[("1.output", look)])
    model.run_with_hooks(x, fwd_hooks=[("1", look)])
    assert seen == [("1.output", 1, 0, net[1]), ("1", 1, 0, net[1])]
    assert model.hook_dict["1"].ctx == {"sum": 2}
    model.clear_contexts()
    assert model.hook_dict["1"].ctx == {}
    right = edited(net, x)
    handle = model.hook_dict["1"].add_hook(by_return)
    assert repr(model.hook_dict["1"]) == "HookPoint('1', 1 fwd, 0 bwd)"
    assert torch.equal(model(x), right)
    handle.remove()
    with pytest.raises(ValueError, match="'output' has no layer number"):
        model.hook_dict["output"].layer()


def test_hook_dict_lists_canonical_names_and_takes_any(net: nn.Sequential) -> None:
    points = ip.wrap(net).hook_dict
    assert list(points) == ["output", "0", "1", "2"]
    assert len(points) == 4
    assert points["1.input"].name == "1.input"
    assert "1.output" in points
    assert "nothing" not in points


class Largest(ip.Detector):
    def __init__(self, sites: object = None) -> None:
        super().__init__(sites)
        self.found: dict[str, float] = {}

    def read(self, value: Tensor, hook: ip.HookPoint) -> None:
        self.found[hook.name] = value.max().item()


class Both(ip.Controller):
    def change(self, value: Tensor, hook: ip.HookPoint) -> Tensor:
        return value * 2

    def change_grad(self, grad: Tensor, hook: ip.HookPoint) -> Tensor:
        return grad * 0


def test_detectors_and_controllers_run_and_can_be_switched_off(
    net: nn.Sequential, x: Tensor
) -> None:
    model = ip.wrap(net)
    largest, both = Largest("*"), Both("1")
    with model.hooks([largest, both]):
        output = model(x)
        output.sum().backward()
    assert torch.equal(output, edited(net, x))
    assert list(largest.found) == ["0", "1", "2"]
    assert largest.found["0"] == net[0](x).max().item()
    assert not net[0].weight.grad.any()
    assert net[2].weight.grad.any()

    bare, right = net(x), edited(net, x)
    handle = model.register(both)
    assert handle.id == both.id
    assert both.id.startswith("Both-")
    assert torch.equal(model(x), right)
    model.disable(both.id)
    assert not both.enabled
    assert torch.equal(model(x), bare)
    handle.enable()
    assert torch.equal(model(x), right)
    assert handle.fired == 2
    assert model.list_hooks() == [handle]
    with pytest.raises(ValueError, match="on this model already"):
        model.register(both)
    model.unregister(both.id)
    assert model.list_hooks() == []
    with pytest.raises(KeyError, match="no hook 'Both-1' on this model"):
        model.enable("Both-1")


def test_a_disabled_hook_in_a_scope_is_not_an_error(net: nn.Sequential, x: Tensor) -> None:
    both = Both("1")
    both.disable()
    assert torch.equal(ip.wrap(net).run_with_hooks(x, hooks=[both]), net(x))


def test_a_detector_may_not_change_anything(net: nn.Sequential, x: Tensor) -> None:
    class Writes(ip.Detector):
        def read(self, value: Tensor, hook: ip.HookPoint) -> None:
            value.zero_()

    class Returns(ip.Detector):
        def read(self, value: Tensor, hook: ip.HookPoint) -> Tensor:  # type: ignore[override]
            return value * 2

    class Idle(ip.Detector):
        pass

    model = ip.wrap(net)
    for kind in (Writes, Returns):
        with pytest.raises(TypeError, match="Detectors change nothing; use a Controller"):
            model.run_with_hooks(x, hooks=[kind("1")])
    with pytest.raises(TypeError, match=r"Idle does nothing yet: define read\(self, value, hook\)"):
        model.run_with_hooks(x, hooks=[Idle("1")])


def test_torch_hooks_run_with_torchs_arguments(net: nn.Sequential, x: Tensor) -> None:
    def forward(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        assert module is net[1]
        assert len(args) == 1
        return output * 2

    def with_kwargs(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
        output.mul_(2)

    def before(module: nn.Module, args: tuple) -> Tensor:
        return args[0] * 2

    def before_with_kwargs(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        assert kwargs == {}
        return (args[0] * 2,), kwargs

    model = ip.wrap(net)
    for hook in (forward, with_kwargs):
        output = model.run_with_hooks(x, fwd_hooks=[("1", ip.torch_hook(hook))])
        assert torch.equal(output, edited(net, x))
    for hook in (before, before_with_kwargs):
        adapted = ip.torch_hook(hook, pre=True)
        assert torch.equal(model.run_with_hooks(x, fwd_hooks=[("2", adapted)]), edited(net, x))


def test_a_torch_hook_must_keep_the_container() -> None:
    lstm = nn.LSTM(3, 5, batch_first=True)
    x = torch.randn(2, 4, 3)
    model = ip.wrap(lstm)

    def double(module: nn.Module, args: tuple, output: tuple) -> tuple:
        return output[0] * 2, output[1]

    output, _ = model.run_with_hooks(x, fwd_hooks=[("output", ip.torch_hook(double))])
    assert torch.equal(output, lstm(x)[0] * 2)
    with pytest.raises(ip.EditShapeError, match="Return the same container with the same tensors"):
        model.run_with_hooks(x, fwd_hooks=[("output", ip.torch_hook(lambda m, a, out: out[0]))])


def test_a_module_can_be_skipped(net: nn.Sequential, x: Tensor) -> None:
    model, ran = ip.wrap(net), []
    net[1].register_forward_hook(lambda m, a, out: ran.append(tuple(out.shape)))
    original = net[1].forward
    net[1].forward = lambda value: ran.append("forward") or original(value)
    replacement = torch.ones(3, 4)
    output, cache = model.run_with_cache(x, names_filter="1", hooks=[ip.skip("1", replacement)])
    assert torch.equal(output, net[2](replacement))
    assert torch.equal(cache["1"], replacement)
    assert ran == [(3, 4)]
    assert torch.equal(
        model.run_with_hooks(x, hooks=[ip.skip("1", lambda value: value)]), net[2](net[0](x))
    )
    assert net[1].forward is not original
    nested = ip.wrap(nn.Sequential(net))
    with pytest.raises(ip.NeverFired):
        nested.run_with_hooks(
            x, hooks=[ip.skip("0", torch.ones(3, 2)), ip.skip("0.1", replacement)]
        )


def test_hooks_that_are_none_are_refused(net: nn.Sequential, x: Tensor) -> None:
    model = ip.wrap(net)
    for wrong in ("0", ("0",), ("0", 3), 7):
        with pytest.raises(TypeError, match="a hook is a pair"):
            model.run_with_hooks(x, hooks=[wrong])
    with pytest.raises(ValueError, match="dir is 'fwd' or 'bwd'; got 'forward'"):
        model.add_hook("0", by_return, dir="forward")
    with pytest.raises(TypeError, match="a site filter is None, a name"):
        model.run_with_cache(x, names_filter=3)


@pytest.mark.parametrize(
    ("edit", "by_hand"),
    [
        (ip.zero("0"), lambda v: v * 0),
        (ip.zero("0", at=(slice(None), 1)), lambda v: v * torch.tensor([1.0, 0, 1, 1])),
        (ip.fill("0", 2.0), lambda v: torch.full_like(v, 2)),
        (ip.fill("0", torch.arange(4.0)), lambda v: torch.arange(4.0).expand_as(v)),
        (ip.add("0", torch.ones(4, dtype=torch.float64)), lambda v: v + 1),
        (ip.scale("0", -0.5), lambda v: v * -0.5),
        (ip.scale("0", 3, at=(..., slice(0, 2))), lambda v: v * torch.tensor([3.0, 3, 1, 1])),
    ],
    ids=["zero", "zero_at", "fill", "fill_tensor", "add", "scale", "scale_at"],
)
def test_edits_do_what_they_say(edit: ip.Edit, by_hand, net: nn.Sequential, x: Tensor) -> None:
    right = net[2](net[1](by_hand(net[0](x))))
    assert not torch.equal(right, net(x))
    assert torch.equal(ip.wrap(net).run_with_hooks(x, hooks=[edit]), right)


def test_seeded_noise_repeats_and_differs_by_site(net: nn.Sequential, x: Tensor) -> None:
    model = ip.wrap(net)

    def noise_at(site: str, seed: int | None) -> Tensor:
        _, clean = model.run_with_cache(x, names_filter=site)
        _, noisy = model.run_with_cache(
            x, names_filter=site, hooks=[ip.noise(site, 2.0, seed=seed)]
        )
        return noisy[site] - clean[site]

    first = noise_at("0", 7)
    state = torch.get_rng_state()
    assert torch.equal(noise_at("0", 7), first)
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(noise_at("0", 8), first)
    assert not torch.equal(noise_at("1", 7), first)
    assert not torch.equal(noise_at("0", None), noise_at("0", None))
    assert 1.0 < noise_at("0", 7).std() < 3.0


def test_an_edit_that_selects_nothing_is_refused(net: nn.Sequential, x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"selects nothing of '0', which is \(3, 4\)"):
        ip.wrap(net).run_with_hooks(x, hooks=[ip.zero("0", at=(slice(5, 9),))])


class Sum(nn.Module):
    """Takes arguments in every way, by a receiver that is not called self."""

    def forward(this, x: Tensor, *more: Tensor, scale: float = 1.0) -> Tensor:
        return (x + sum(more)) * scale


def test_arguments_are_named_whatever_the_receiver_is_called() -> None:
    model = ip.wrap(nn.Sequential(Sum()))
    x = torch.arange(3.0)
    _, cache = model.run_with_cache(x, names_filter="0.input.x")
    assert torch.equal(cache["0.input.x"], x)


def test_torch_pre_hooks_get_the_arguments_as_torch_gives_them() -> None:
    module = Sum()
    model, x = ip.wrap(module), torch.arange(3.0)
    seen = []

    def plain(module: nn.Module, args: tuple) -> tuple:
        seen.append(args)
        return (args[0] * 2, *args[1:])

    def with_kwargs(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        args[1].zero_()
        return args, {**kwargs, "scale": 10.0}

    output = model.run_with_hooks(
        x, x, x, scale=0.5, fwd_hooks=[("input", ip.torch_hook(plain, pre=True))]
    )
    assert torch.equal(output, (x * 2 + x + x) * 0.5)
    assert [len(args) for args in seen] == [3]
    output = model.run_with_hooks(
        x, x + 1, x, scale=0.5, fwd_hooks=[("input", ip.torch_hook(with_kwargs, pre=True))]
    )
    assert torch.equal(output, (x + x) * 10)
    with pytest.raises(ip.EditShapeError, match="the module takes a dict"):
        model.run_with_hooks(
            x, x, fwd_hooks=[("input", ip.torch_hook(lambda m, args: args[:1], pre=True))]
        )


def test_skip_takes_modules_and_their_containers(net: nn.Sequential, x: Tensor) -> None:
    model = ip.wrap(net)
    for wrong in ("1#0", "1.input", "1.output[0]"):
        with pytest.raises(ValueError, match=r"ip.skip takes modules, at all their calls"):
            model.run_with_hooks(x, hooks=[ip.skip(wrong, torch.ones(3, 4))])
    with pytest.raises(TypeError, match="unexpected keyword") as caught:
        ip.wrap(Sum()).run_with_hooks(x, scale=2.0, hooks=[ip.skip("output", lambda x: x)])
    assert "raised by skip('output') at site 'output'" in caught.value.__notes__[0]
    # What the replacement calls in the model is not skipped again.
    output = model.run_with_hooks(x, hooks=[ip.skip("1", lambda value: net[1](value) * 2)])
    assert torch.equal(output, edited(net, x))
    lstm = ip.wrap(nn.Sequential(nn.LSTM(4, 4)))
    lstm.scan(x)
    with pytest.raises(ip.EditShapeError, match="Give the same container"):
        lstm.run_with_hooks(x, hooks=[ip.skip("0", x)])


def test_hooks_in_both_directions_are_listed_and_removed_from_either(net: nn.Sequential) -> None:
    model = ip.wrap(net)
    model.register(Both("1"))
    point = model.hook_dict["1"]
    assert point.has_hooks("fwd")
    assert point.has_hooks("bwd")
    model.remove_all_hook_fns("fwd")
    assert not point.has_hooks()


def test_what_is_nearly_right_is_taken_or_explained(net: nn.Sequential, x: Tensor) -> None:
    model, right = ip.wrap(net), edited(net, x)
    for hooks in (("1", by_return), {"1": by_return}, [(net[1], by_return)]):
        assert torch.equal(model.run_with_hooks(x, fwd_hooks=hooks), right)
    assert torch.equal(model.run_with_hooks(x, hooks=ip.scale("1", 2)), right)
    with pytest.raises(TypeError, match=r"takes \(m, i, o\); .* wrap it: ip.torch_hook\(fn\)"):
        model.run_with_hooks(x, fwd_hooks=[("1", lambda m, i, o: o)])
    with pytest.raises(TypeError, match="no argument 'name_filter'; did you mean 'names_filter'"):
        model.run_with_cache(x, name_filter="1")
    with pytest.raises(TypeError, match="no argument 'fwd_hook'; did you mean 'fwd_hooks'"):
        model.run_with_hooks(x, fwd_hook=[])
    with pytest.raises(TypeError, match=r"reset_hooks takes no names; got '1'"):
        model.reset_hooks("1")
    with pytest.raises(ip.SiteNotFound, match="this Tanh is not a part of Sequential"):
        model.run_with_hooks(x, fwd_hooks=[(nn.Tanh(), by_return)])
    with pytest.raises(TypeError, match="an edit takes a number or a tensor; got list"):
        model.run_with_hooks(x, hooks=[ip.add("1", [1.0])])
    scope = model.hooks([("1", by_return)])
    with scope:
        model(x)
    with pytest.raises(RuntimeError, match="a scope is entered once"):
        scope.__enter__()
    assert repr(ip.add("1", torch.ones(4), at=(..., 2))) == "add('1', tensor(4,), at=(..., 2))"
    assert model.half() is model


def test_a_function_that_takes_any_keyword_gets_the_hook_point_by_keyword() -> None:
    model = ip.wrap(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    seen = []

    def only_keywords(value, **rest):
        seen.append(sorted(rest))

    def anything(*values, **rest):
        seen.append((len(values), sorted(rest)))

    pairs = [
        ("0", only_keywords),
        ("0", anything),
        ("0", functools.partial(only_keywords, extra=1)),
    ]
    model.run_with_hooks(torch.ones(1, 2), fwd_hooks=pairs)
    assert seen == [["hook"], (1, ["hook"]), ["extra", "hook"]]
