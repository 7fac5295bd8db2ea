"""Promise 6, with threads: scopes belong to the thread that opened them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from tests.leftovers import hooks_on


@pytest.fixture
def rapid_switching() -> Iterator[None]:
    """Switch threads as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    torch.set_num_threads(1)
    yield
    sys.setswitchinterval(before)


def in_threads(*jobs: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_three_threads_on_one_model_never_see_each_others_hooks(rapid_switching: None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
    model, x = ip.wrap(net), torch.randn(2, 3)
    before = hooks_on(net)
    values = [x]
    for part in net:
        values.append(part(values[-1]).detach())

    def expected(site: int, factor: float) -> Tensor:
        value = values[site + 1] * factor
        for part in list(net)[site + 1 :]:
            value = part(value)
        return value.detach()

    def worker(site: int, factor: float) -> Callable[[], None]:
        right = expected(site, factor)
        assert not torch.equal(right, values[-1])

        def job() -> None:
            for turn in range(400):
                hooks = [(str(site), lambda value, hook: value * factor)]
                with torch.no_grad():
                    if turn % 2:
                        output, cache = model.run_with_cache(
                            x, names_filter=str(site), fwd_hooks=hooks
                        )
                        assert torch.equal(cache[str(site)], values[site + 1] * factor)
                    else:
                        with model.hooks(hooks):
                            output = net(x)
                assert torch.equal(output, right)

        return job

    def bare() -> None:
        for _ in range(800):
            with torch.no_grad():
                assert torch.equal(net(x), values[-1])

    in_threads(worker(0, 2.0), worker(0, 3.0), worker(2, 5.0), bare)
    assert hooks_on(net) == before


def test_gradients_in_threads_belong_to_their_run(rapid_switching: None) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    model = ip.wrap(net)

    def job(seed: int) -> Callable[[], None]:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        hidden = net[0](x).requires_grad_()
        (right,) = torch.autograd.grad(net[2](torch.tanh(hidden)).sum(), hidden)

        def run() -> None:
            for _ in range(150):
                _, cache = model.run_with_cache(x, names_filter="0", incl_bwd=Tensor.sum)
                assert torch.equal(cache.grad["0"], right)

        return run

    in_threads(job(1), job(2), job(3))


def test_hooks_of_the_model_hold_for_all_threads() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    model, seen = ip.wrap(net), []
    handle = model.add_hook("0", lambda value, hook: seen.append(threading.get_ident()))
    in_threads(lambda: net(torch.ones(1, 3)))
    handle.remove()
    assert len(seen) == 1
    assert seen[0] != threading.get_ident()


def test_a_thread_has_no_scope_and_the_error_says_so() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    with (
        pytest.raises(ip.NeverFired, match=r"run ip.in_scope\(function\) in the thread"),
        ip.wrap(net).hooks([("0", torch.zeros_like)]),
    ):
        in_threads(lambda: net(torch.ones(1, 3)))


def test_a_scope_can_be_taken_along_into_threads() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    model = ip.wrap(net)
    with model.hooks([("0", torch.zeros_like)]), ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(ip.in_scope(net), [torch.ones(1, 3)] * 16))
    assert all(not output.any() for output in outputs)
    assert net(torch.ones(1, 3)).any()


def test_adding_and_removing_model_hooks_while_others_run(rapid_switching: None) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model, x = ip.wrap(net), torch.randn(2, 3)
    before, bare = hooks_on(net), net(x).detach()

    def add_and_remove() -> None:
        for _ in range(300):
            model.add_hook("0", lambda value, hook: None).remove()

    def run() -> None:
        for _ in range(600):
            assert torch.equal(net(x), bare)

    in_threads(add_and_remove, run, run)
    assert hooks_on(net) == before
