"""Compiled models: hooks fire, nothing is recompiled, and compiled code runs again afterwards."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import interpose as ip

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    # Dynamo looks at .grad of whatever it is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compilations():
    """A backend that counts how often something is compiled, and how often compiled code runs."""

    class Counter:
        compiled = 0
        ran = 0

        def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]):
            self.compiled += 1

            def run(*args):
                self.ran += 1
                return graph.forward(*args)

            return run

    return Counter()


def styles(net: Net, backend) -> dict[str, tuple[nn.Module, object]]:
    """The module to wrap, and what to call, in each way of compiling."""
    return {
        "torch.compile(module)": lambda: (lambda c: (c, c))(torch.compile(net, backend=backend)),
        "module.compile()": lambda: (net.compile(backend=backend), (net, net))[1],
        "a compiled function": lambda: (net, torch.compile(lambda x: net(x), backend=backend)),
        "a compiled part": lambda: (
            setattr(net, "fc2", torch.compile(net.fc2, backend=backend)),
            (net, net),
        )[1],
    }


@pytest.mark.parametrize("style", styles(Net(), None))
def test_hooks_fire_on_a_model_that_was_compiled_before(style: str, compilations) -> None:
    net, x = Net(), torch.randn(2, 4)
    inner = net.fc2
    wrapped, call = styles(net, compilations)[style]()
    bare = call(x)
    compiled, ran = compilations.compiled, compilations.ran
    assert compiled >= 1
    model = ip.wrap(wrapped)
    assert {"fc1", "fc2", "output"} == set(model.sites)

    right = inner(torch.tanh(net.fc1(x) * 0))
    with model.hooks([("fc1", lambda value, hook: value * 0)]):
        hooked = call(x)
    assert torch.equal(hooked, right)
    assert not torch.equal(hooked, bare)
    _, cache = model.run_with_cache(x)
    assert list(cache) == ["fc1", "fc2", "output"]
    assert torch.equal(cache["fc1"], net.fc1(x))

    handle = model.add_hook("fc2", lambda value, hook: value * 0)
    assert not call(x).any()
    handle.remove()
    assert torch.equal(call(x), bare)
    assert compilations.compiled == compiled
    assert compilations.ran == ran + 1


def test_plain_torch_hooks_are_ignored_by_compiled_code(compilations) -> None:
    """The trap that the tests above avoid; when this fails, the detour through eager can go."""
    net, x = Net(), torch.randn(2, 4)
    compiled = torch.compile(net, backend=compilations)
    bare = compiled(x)
    net.fc1.register_forward_hook(lambda m, a, out: out * 0)
    assert torch.equal(compiled(x), bare)


def test_an_unhooked_model_still_compiles_whole(compilations) -> None:
    net, x = Net(), torch.randn(2, 4)
    ip.wrap(net).run_with_cache(x)
    compiled = torch.compile(net, backend=compilations, fullgraph=True)
    assert torch.equal(compiled(x), net(x))
    assert (compilations.compiled, compilations.ran) == (1, 1)


def test_scopes_in_two_threads_share_the_stance(compilations) -> None:
    net, x = Net(), torch.randn(2, 4)
    compiled = torch.compile(net, backend=compilations)
    compiled(x)
    model, inside, leave, seen = ip.wrap(compiled), threading.Event(), threading.Event(), []

    def other() -> None:
        with model.hooks([("fc1", lambda value, hook: seen.append("other"))]):
            inside.set()
            leave.wait()
            compiled(x)

    thread = threading.Thread(target=other)
    with model.hooks([("fc1", lambda value, hook: seen.append("main"))]):
        thread.start()
        inside.wait()
        compiled(x)
    leave.set()
    thread.join()
    assert seen == ["main", "other"]
    ran = compilations.ran
    compiled(x)
    assert compilations.ran == ran + 1


# Dynamo says at length why it leaves a hooked module alone.
@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.parametrize("lasting", [False, True])
def test_hooks_fire_when_the_model_is_compiled_for_the_first_time(
    lasting: bool, compilations
) -> None:
    net, x = Net(), torch.randn(2, 4)
    model, compiled = ip.wrap(net), torch.compile(net, backend=compilations)
    right = net.fc2(torch.tanh(net.fc1(x) * 0))
    edit = ("fc1", lambda value, hook: value * 0)
    if lasting:
        handle = model.add_hook(*edit)
        assert torch.equal(compiled(x), right)
        handle.remove()
    else:
        with model.hooks([edit]):
            assert torch.equal(compiled(x), right)
    assert torch.equal(compiled(x), net(x))


def test_a_hooked_model_cannot_be_compiled_whole_or_exported() -> None:
    net, x = Net(), torch.randn(2, 4)
    with ip.wrap(net).hooks([("fc1", lambda value, hook: value * 0)]):
        net(x)
        with pytest.raises(Exception, match="cannot be compiled whole or exported"):
            torch.export.export(net, (x,))
