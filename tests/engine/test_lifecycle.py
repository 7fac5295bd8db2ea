"""Promises 1 and 6: the module is untouched, and hooks end with their scope, whatever happens."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from interpose.taps import tap
from interpose.taps.context import current
from tests.leftovers import hooks_on, same_state, state_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.act = nn.ReLU(inplace=True)
        self.fc2 = nn.Linear(8, 3)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.fc1(x))
        if self.fails:
            raise ValueError("the model failed")
        return self.fc2(hidden)


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 4)


def remember_output(value: Tensor, hook: ip.HookPoint, model: ip.Model, x: Tensor) -> None:
    hook.ctx["last"] = model.module(x)


def double(value: Tensor, hook: ip.HookPoint) -> Tensor:
    return value * 2


def test_wrapping_changes_nothing(net: Net, x: Tensor) -> None:
    before, expected = state_of(net), net(x)
    model = ip.wrap(net)
    assert model.module is net
    assert same_state(before, state_of(net))
    assert torch.equal(model(x), expected)


def test_nothing_is_left_after_runs_of_every_kind(net: Net, x: Tensor) -> None:
    before = state_of(net)
    model = ip.wrap(net)
    model.run_with_cache(x)
    model.run_with_cache(x, names_filter="fc1", stop=True)
    model.run_with_cache(x, names_filter="fc1", stop=True)
    model.run_with_cache(x, incl_bwd=Tensor.sum)
    model.run_with_hooks(x, hooks=[("fc1", double), ip.skip("act", lambda x: x)])
    with model.hooks([("fc1.input", double)], bwd_hooks=[("fc2", double)]):
        model(x).sum().backward()
    net.zero_grad(set_to_none=True)
    handle = model.add_hook("fc1", double)
    handle.remove()
    handle.remove()
    model.scan(x)
    assert same_state(before, state_of(net))


@pytest.mark.parametrize("error", [ValueError("in the hook"), KeyboardInterrupt(), SystemExit(3)])
def test_hooks_are_removed_when_a_hook_raises(net: Net, x: Tensor, error: BaseException) -> None:
    def fail(value: Tensor, hook: ip.HookPoint) -> None:
        raise error

    before = hooks_on(net)
    with pytest.raises(type(error)) as caught:
        ip.wrap(net).run_with_hooks(x, fwd_hooks=[("fc1", double), ("fc2", fail)])
    assert caught.value is error
    assert any("'fail'" in note and "'fc2'" in note for note in caught.value.__notes__)
    assert hooks_on(net) == before


def test_hooks_are_removed_when_the_model_raises(net: Net, x: Tensor) -> None:
    before, model = hooks_on(net), ip.wrap(net)
    net.fails = True
    with pytest.raises(ValueError, match="the model failed"):
        model.run_with_cache(x)
    with pytest.raises(ValueError, match="the model failed"), model.hooks([("fc1", double)]):
        model(x)
    net.fails = False
    assert hooks_on(net) == before
    assert current().scopes == ()


def test_a_wrong_name_in_a_list_leaves_no_hook_of_the_right_ones(net: Net, x: Tensor) -> None:
    before = hooks_on(net)
    with pytest.raises(ip.SiteNotFound):
        ip.wrap(net).run_with_hooks(x, fwd_hooks=[("fc1", double), ("fc3", double)])
    with pytest.raises(ip.SiteNotFound):
        ip.wrap(net).add_hook(["fc1", "nothing"], double)
    assert hooks_on(net) == before


def test_a_failure_half_way_into_a_scope_leaves_nothing(net: Net, x: Tensor) -> None:
    net.scripted = torch.jit.script(nn.Linear(3, 3))
    before, model = hooks_on(net), ip.wrap(net)
    with pytest.raises(ip.Unsupported, match="TorchScript"):
        model.run_with_hooks(x, fwd_hooks=[("fc1", double), ("scripted", double)])
    with pytest.raises(ip.Unsupported, match="TorchScript"):
        model.add_hook(["fc1", "scripted"], double)
    assert hooks_on(net) == before
    assert model.list_hooks() == []


def test_scopes_nest_and_end_in_any_order(net: Net, x: Tensor) -> None:
    model, seen = ip.wrap(net), []

    def note(name: str):
        return lambda value, hook: seen.append(name)

    outer, inner = model.hooks([("fc1", note("outer"))]), model.hooks([("fc1", note("inner"))])
    outer.__enter__()
    inner.__enter__()
    model(x)
    outer.__exit__(None, None, None)
    model(x)
    inner.__exit__(None, None, None)
    model(x)
    assert seen == ["outer", "inner", "inner"]


def test_hooks_in_scope_fire_when_other_code_calls_the_module(net: Net, x: Tensor) -> None:
    model, seen = ip.wrap(net), []
    with model.hooks([("fc1", lambda value, hook: seen.append(hook.name))]):
        net(x)
        nn.Sequential(net)(x)
    assert seen == ["fc1", "fc1"]


def test_foreign_hooks_are_kept_and_still_fire(net: Net, x: Tensor) -> None:
    log = []
    net.fc1.register_forward_hook(lambda m, a, out: log.append("old"))
    before, model = hooks_on(net), ip.wrap(net)
    with model.hooks([("fc1", lambda value, hook: log.append("ours"))]):
        late = net.fc1.register_forward_hook(lambda m, a, out: log.append("new"))
        model(x)
    assert log == ["ours", "old", "new"]
    model(x)
    assert log[3:] == ["old", "new"]
    late.remove()
    assert hooks_on(net) == before


def test_the_cache_reads_after_foreign_hooks(net: Net, x: Tensor) -> None:
    net.fc1.register_forward_hook(lambda m, a, out: out + 1)
    _, cache = ip.wrap(net).run_with_cache(x, names_filter="fc1")
    assert torch.equal(cache["fc1"], nn.functional.linear(x, net.fc1.weight, net.fc1.bias) + 1)


def test_copies_and_pickles_made_during_a_scope_are_plain_modules(net: Net, x: Tensor) -> None:
    expected = net(x)
    model = ip.wrap(net)
    scope = model.hooks([("fc1", double), ("fc2.input", double), ip.skip("act", lambda x: x)])
    with scope:
        assert not torch.equal(model(x), expected)
        deep = copy.deepcopy(net)
        pickled = pickle.dumps(net)
        file = io.BytesIO()
        torch.save(net, file)
        state = {key: value.clone() for key, value in net.state_dict().items()}
        # While the scope is open, the copies are outside it.
        assert torch.equal(deep(x), expected)
        assert torch.equal(pickle.loads(pickled)(x), expected)
    assert b"interpose" not in pickled
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)
    assert all(torch.equal(value, net.state_dict()[key]) for key, value in state.items())
    assert deep.act is not net.act


def test_a_wrapped_model_copies_and_pickles_without_its_hooks(net: Net, x: Tensor) -> None:
    model = ip.wrap(net)
    model.add_hook("fc1", double)
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    model.reset_hooks()
    assert twin.module is not net
    assert torch.equal(twin(x), net(x))
    assert torch.equal(again(x), net(x))


def test_no_cycle_keeps_a_model_alive(x: Tensor) -> None:
    net = Net()
    model = ip.wrap(net)
    model.run_with_cache(x)
    model.run_with_hooks(x, hooks=[("fc1", double), ip.zero("fc2")])
    _, cache = model.run_with_cache(x, incl_bwd=Tensor.sum)
    model.add_hook("fc1", functools.partial(remember_output, model=model, x=x))
    with model.hooks([("fc1", double)]):
        model(x)
    alive = weakref.ref(net)
    del net, model
    gc.collect()
    assert alive() is None
    assert cache["fc1"].shape == (2, 8)


def test_a_run_leaves_no_garbage_that_needs_the_collector(net: Net, x: Tensor) -> None:
    model = ip.wrap(net)
    model.run_with_cache(x, names_filter="fc1")
    gc.collect()
    gc.disable()
    try:
        _, cache = model.run_with_cache(x, names_filter="fc1")
        kept = weakref.ref(cache["fc1"])
        del cache
        assert kept() is None
    finally:
        gc.enable()


def test_what_a_hook_calls_in_the_model_is_not_hooked(net: Net, x: Tensor) -> None:
    model, calls = ip.wrap(net), []

    def look(value: Tensor, hook: ip.HookPoint) -> None:
        calls.append(hook.name)
        hook.module(x)
        model(x)
        _, cache = model.run_with_cache(x, names_filter="fc1")
        assert torch.equal(cache["fc1"], net.fc1(x))

    model.run_with_hooks(x, fwd_hooks=[("fc1", look)])
    handle = model.add_hook("fc1", look)
    model(x)
    handle.remove()
    assert calls == ["fc1", "fc1"]


def test_data_parallel_is_refused(net: Net) -> None:
    with pytest.raises(ip.Unsupported, match=r"data_parallel\.module"):
        ip.wrap(nn.DataParallel(net.to("cuda" if torch.cuda.is_available() else "cpu")))
    with pytest.raises(ip.Unsupported, match="DataParallel"):
        ip.wrap(nn.Sequential(nn.DataParallel(net)))


def test_a_replica_of_a_hooked_module_is_refused(net: Net, x: Tensor) -> None:
    # What DataParallel does on several devices: a shallow copy that shares the hook dictionaries.
    with (
        pytest.raises(ip.Unsupported, match="replicas run in threads"),
        ip.wrap(net).hooks([("fc1.input", double)]),
    ):
        net.fc1._replicate_for_data_parallel()(x)


def test_scripted_models_are_refused_and_scripted_parts_are_named(net: Net, x: Tensor) -> None:
    with pytest.raises(ip.Unsupported, match="TorchScript"):
        ip.wrap(torch.jit.script(nn.Linear(4, 4)))
    mixed = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    model = ip.wrap(mixed)
    assert model.run_with_cache(x, names_filter="0")[1]["0"].shape == (2, 4)
    with pytest.raises(ip.Unsupported, match="Hook the module that calls it"):
        model.run_with_cache(x, names_filter="1")


def test_only_modules_can_be_wrapped(net: Net) -> None:
    with pytest.raises(TypeError, match="got int"):
        ip.wrap(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="wrapped already"):
        ip.wrap(ip.wrap(net))  # type: ignore[arg-type]


def test_the_wrapper_passes_what_the_module_has(net: Net, x: Tensor) -> None:
    model = ip.wrap(net)
    assert model.eval() is model
    assert not net.training
    assert model.train() is model
    assert net.training
    assert next(iter(model.parameters())) is net.fc1.weight
    assert model.state_dict().keys() == net.state_dict().keys()
    assert model.to(torch.float64) is model
    assert net.fc1.weight.dtype == torch.float64
    assert model.device == torch.device("cpu")
    assert model.fc1 is net.fc1
    with pytest.raises(AttributeError, match="neither Model nor Net has 'nothing'"):
        _ = model.nothing


def test_parts_called_on_their_own_leave_no_graph_behind(net: Net, x: Tensor) -> None:
    model, alive = ip.wrap(net), []
    model.add_hook("fc1", lambda grad, hook: None, dir="bwd")
    model.add_hook("output", lambda grad, hook: None, dir="bwd")
    for _ in range(5):
        data = x.clone().requires_grad_()
        net.fc1(data).sum().backward()
        net(data).sum().backward()
        alive.append(weakref.ref(data))
        del data
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5
    model.reset_hooks()


def test_gradient_hooks_at_several_sites_leave_no_graph_behind(net: Net, x: Tensor) -> None:
    model, alive = ip.wrap(net), []
    for name in ("fc1", "fc2", "output"):
        model.add_hook(name, lambda grad, hook: None, dir="bwd")
    for _ in range(5):
        data = x.clone().requires_grad_()
        net(data).sum().backward()
        alive.append(weakref.ref(data))
        del data
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5
    model.reset_hooks()


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.fc(x)
        return x if depth == 0 else self(x, depth - 1)


def test_a_root_that_calls_itself_is_one_forward_pass(x: Tensor) -> None:
    model, calls = ip.wrap(Recursive()), []
    model.add_hook("fc", lambda value, hook: calls.append(hook.call))
    model(x)
    assert calls == [0, 1, 2]
    _, cache = model.run_with_cache(x, names_filter=["fc", "output"])
    model.reset_hooks()
    assert [name for name in cache if name.startswith("fc")] == ["fc#0", "fc#1", "fc#2"]
    assert [name for name in cache if "output" in name] == ["output#0", "output#1", "output#2"]


def test_a_forward_that_calls_another_model_keeps_its_count(x: Tensor) -> None:
    other = ip.wrap(nn.Linear(4, 4))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.cell(x)
            other.run_with_cache(x)
            return self.cell(x)

    model, calls = ip.wrap(Outer()), []
    model.add_hook("cell", lambda value, hook: calls.append(hook.call))
    model(x)
    model.reset_hooks()
    assert calls == [0, 1]


def test_calls_are_counted_from_zero_after_a_forward_that_raised(net: Net, x: Tensor) -> None:
    model, calls = ip.wrap(net), []
    with model.hooks([("fc1#0", lambda value, hook: calls.append(hook.call))]):
        net.fails = True
        for _ in range(2):
            with pytest.raises(ValueError, match="the model failed"):
                model(x)
        net.fails = False
        model(x)
    assert calls == [0, 0, 0]


class Interrupted(nn.Module):
    """Writes to its argument in place, and may raise after that."""

    fails = True

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        if self.fails:
            raise ValueError("interrupted")
        return x


@pytest.mark.parametrize("lasting", [False, True])
def test_a_call_that_raised_writes_to_nobodys_tensors_later(lasting: bool) -> None:
    net = nn.Sequential(Interrupted())
    model, first, second = ip.wrap(net), torch.ones(3), torch.ones(3)
    edit = ("0.input", lambda value, hook: value + 1)
    scope = model.hooks([edit]) if not lasting else contextlib.nullcontext()
    handle = model.add_hook(*edit) if lasting else None
    with scope:
        with pytest.raises(ValueError, match="interrupted"):
            model(first)
        net[0].fails = False
        assert torch.equal(model(second), torch.full((3,), 4.0))
    if handle is not None:
        handle.remove()
    assert torch.equal(first, torch.ones(3))
    assert torch.equal(second, torch.full((3,), 4.0))
    assert vars(tap._LENT) == {}
