"""The cache: a mapping in execution order, any name accepted, only what was asked for kept."""

from __future__ import annotations

import pickle
import re
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import interpose as ip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 6)
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.cell = nn.Linear(5, 5)
        self.same = self.cell
        self.never = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.fc1(x))
        for _ in range(3):
            hidden = torch.tanh(self.cell(hidden))
        return hidden


@pytest.fixture
def model() -> ip.Model:
    return ip.wrap(Net())


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 7, 4)


def test_everything_is_kept_in_execution_order(model: ip.Model, x: Tensor) -> None:
    output, cache = model.run_with_cache(x)
    assert list(cache) == [
        "fc1",
        "lstm.output[0]",
        "lstm.output[1][0]",
        "lstm.output[1][1]",
        "cell#0",
        "cell#1",
        "cell#2",
        "output",
    ]
    assert len(cache) == 8
    assert torch.equal(cache["output"], output)
    assert cache["lstm.output[1][0]"].shape == (1, 2, 5)


def test_any_name_of_a_site_is_accepted(model: ip.Model, x: Tensor) -> None:
    _, cache = model.run_with_cache(x, names_filter=["fc1.output", "same#1", "lstm.output[0]"])
    assert list(cache) == ["fc1.output", "lstm.output[0]", "same#1"]
    assert cache["fc1"] is cache["fc1.output"]
    assert cache["cell#1"] is cache["same#1"]
    assert cache["cell#1.output"] is cache["same#1"]
    assert "fc1" in cache
    assert "cell#0" not in cache
    assert 3 not in cache


def test_a_recording_takes_the_names_that_a_run_takes(model: ip.Model, x: Tensor) -> None:
    wanted = ["fc1.output", "cell#1", "lstm.output[0]"]
    _, cache = model.run_with_cache(x, names_filter=wanted)
    with model.record(wanted) as recorded:
        model(x)
    assert list(recorded) == list(cache)
    for name in (*wanted, "fc1", "same#1", "same#1.output"):
        assert torch.equal(recorded[name], cache[name])
    assert "cell#0" not in recorded


def test_aliases_share_one_copy(model: ip.Model, x: Tensor) -> None:
    _, cache = model.run_with_cache(x, names_filter=["fc1", "fc1.output"])
    assert len(cache) == 2
    assert cache["fc1"] is cache["fc1.output"]
    assert cache.nbytes == 2 * 7 * 6 * 4


def test_a_module_called_several_times_must_be_asked_by_call(model: ip.Model, x: Tensor) -> None:
    _, cache = model.run_with_cache(x, names_filter="cell")
    assert "cell" in cache
    assert [value.shape for value in cache.calls("cell")] == [(2, 7, 5)] * 3
    assert torch.equal(cache.calls("same")[2], cache["cell#2"])
    with pytest.raises(ip.AmbiguousSite) as caught:
        _ = cache["cell"]
    assert str(caught.value) == (
        "'cell' was called 3 times; say which call: 'cell#0', 'cell#1', 'cell#2', "
        "or take them all with cache.calls('cell')."
    )


def test_a_missing_name_says_what_is_there(model: ip.Model, x: Tensor) -> None:
    _, cache = model.run_with_cache(x, names_filter="fc1")
    with pytest.raises(ip.SiteNotFound) as caught:
        _ = cache["fc2"]
    assert str(caught.value) == (
        "'fc2' is not in this cache. A run keeps what its names_filter says.\n  It has: 'fc1'."
    )
    with pytest.raises(ip.SiteNotFound, match="Gradients are kept with incl_bwd=True"):
        _ = cache["fc1_grad"]
    with pytest.raises(TypeError, match="indexed by site names such as 'fc1'; got int: 3"):
        _ = cache[3]  # type: ignore[index]


def test_filters_of_every_kind(model: ip.Model, x: Tensor) -> None:
    def names(wanted: object) -> list[str]:
        return list(model.run_with_cache(x, names_filter=wanted)[1])

    assert names("fc1") == ["fc1"]
    assert names(("fc1", "output")) == ["fc1", "output"]
    assert set(names({"fc1", "output"})) == {"fc1", "output"}
    assert names("fc?") == ["fc1"]
    assert names("**.input") == [
        "fc1.input",
        "lstm.input",
        "cell#0.input",
        "cell#1.input",
        "cell#2.input",
    ]
    assert names(re.compile("^fc|^out")) == ["fc1", "output"]
    assert names(lambda name: name.startswith("f")) == ["fc1"]
    assert names(lambda name: name == "fc1.input") == ["fc1.input"]
    assert names(model.sites["fc1"]) == ["fc1"]
    assert names(["fc*", "output"]) == ["fc1", "output"]


def test_captures_are_copies_that_later_changes_do_not_touch() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    x = torch.randn(4, 3)
    _, cache = ip.wrap(net).run_with_cache(x, names_filter="0")
    assert cache["0"].min() < 0
    assert not cache["0"].requires_grad
    _, live = ip.wrap(net).run_with_cache(x, names_filter=["0", "1"], clone=False)
    assert torch.equal(live["1"], net(x))
    with pytest.raises(ip.StaleValue, match="Run again with clone=True"):
        _ = live["0"]


def test_only_what_was_asked_for_is_kept(model: ip.Model, x: Tensor) -> None:
    _, whole = model.run_with_cache(x, names_filter="fc1")
    _, part = model.run_with_cache(x, names_filter="fc1", pos_slice=-1)
    assert torch.equal(part["fc1"], whole["fc1"][:, -1:])
    assert part["fc1"].untyped_storage().nbytes() == 2 * 6 * 4
    for wanted in (slice(1, 3), [1, 2], torch.tensor([1, 2]), [-6, -5]):
        _, part = model.run_with_cache(x, names_filter="fc1", pos_slice=wanted)
        assert torch.equal(part["fc1"], whole["fc1"][:, 1:3])
    _, part = model.run_with_cache(
        x, names_filter="fc1", keep={0: 1, -1: [0, 5], 1: slice(None, 2)}
    )
    assert torch.equal(part["fc1"], whole["fc1"][1, :2][:, [0, 5]])
    _, part = model.run_with_cache(x, names_filter="fc1", keep=lambda value: value.mean(1))
    assert torch.equal(part["fc1"], whole["fc1"].mean(1))
    _, part = model.run_with_cache(x[:1], names_filter="fc1", remove_batch_dim=True)
    assert part["fc1"].shape == (7, 6)
    with pytest.raises(ValueError, match=r"a batch of one; 'fc1' is \(2, 7, 6\)"):
        model.run_with_cache(x, names_filter="fc1", remove_batch_dim=True)
    with pytest.raises(ValueError, match=r"'0' is \(2, 3\). Say which axis with keep="):
        ip.wrap(nn.Sequential(nn.Linear(4, 3))).run_with_cache(
            torch.ones(2, 4), names_filter="0", pos_slice=0
        )


def test_gradients_are_cut_the_same_way(model: ip.Model, x: Tensor) -> None:
    _, whole = model.run_with_cache(x, names_filter="fc1", incl_bwd=Tensor.sum)
    _, part = model.run_with_cache(x, names_filter="fc1", incl_bwd=Tensor.sum, pos_slice=[0, 3])
    assert torch.equal(part.grad["fc1"], whole.grad["fc1"][:, [0, 3]])


def test_a_cache_moves_saves_loads_and_pickles(model: ip.Model, x: Tensor, tmp_path: Path) -> None:
    _, cache = model.run_with_cache(
        x, names_filter=["fc1", "fc1.output", "cell", "lstm.output[0]"], incl_bwd=Tensor.sum
    )
    cache.save(tmp_path / "values.safetensors")
    for other in (
        ip.Cache.load(tmp_path / "values.safetensors"),
        pickle.loads(pickle.dumps(cache)),
        cache.to("cpu"),
        cache.detach(),
    ):
        assert list(other) == list(cache)
        assert all(torch.equal(other[name], cache[name]) for name in cache)
        assert torch.equal(other["same#1"], cache["cell#1"])
        assert torch.equal(other.grad["fc1"], cache.grad["fc1"])
        with pytest.raises(ip.AmbiguousSite):
            _ = other["cell"]
    assert (tmp_path / "values.safetensors").stat().st_size < cache.nbytes + 3000
    assert cache.to("meta")["fc1"].device.type == "meta"


def test_a_cache_prints_as_a_table(model: ip.Model, x: Tensor) -> None:
    _, cache = model.run_with_cache(x, names_filter=["fc1", "output"])
    assert repr(cache) == (
        "Cache of 2 values, 616 B on cpu\n"
        "site    shape      dtype    size\n"
        "fc1     (2, 7, 6)  float32  336 B\n"
        "output  (2, 7, 5)  float32  280 B"
    )
    assert "<td" in cache._repr_html_()
    deep = ip.wrap(nn.Sequential(*(nn.Linear(2, 2) for _ in range(100))))
    _, cache = deep.run_with_cache(torch.ones(1, 2))
    assert len(repr(cache).splitlines()) < 40
    assert "... 67 more ..." in repr(cache)


def test_a_run_stops_after_the_last_site_asked_for() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
            self.reached = 0

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                self.reached += 1
            return x

    net = Counted()
    model, x = ip.wrap(net), torch.randn(1, 2)
    # The first run is complete: it learns that the module is called once.
    output, first = model.run_with_cache(x, names_filter="layers.1", stop=True)
    assert (output, net.reached) == (None, 4)
    output, second = model.run_with_cache(x, names_filter="layers.1", stop=True)
    assert (output, net.reached) == (None, 5)
    assert torch.equal(first["layers.1"], second["layers.1"])
    # A call that was named needs no learning, and nobody else's hooks count as never fired.
    with model.hooks([("layers.3", torch.zeros_like), ("layers.0", lambda value, hook: None)]):
        model.run_with_cache(x, names_filter=["layers.0#0"], stop=True)
        assert net.reached == 5
        model(x)
    model.run_with_cache(
        x, names_filter="layers.0#0", stop=True, hooks=[("layers.3", torch.zeros_like)]
    )


def test_a_module_called_several_times_is_not_cut_short(model: ip.Model, x: Tensor) -> None:
    for _ in range(3):
        _, cache = model.run_with_cache(x, names_filter="cell", stop=True)
        assert len(cache.calls("cell")) == 3
    _, cache = model.run_with_cache(x, names_filter="cell#1", stop=True)
    assert list(cache) == ["cell#1"]


def test_a_stop_passes_through_code_that_catches_exceptions() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            self.closed = 0

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.layers(x)
            except Exception:
                return x
            finally:
                self.closed += 1

    net = Careful()
    model, x = ip.wrap(net), torch.randn(1, 2)
    model.scan(x)
    model.run_with_cache(x, names_filter="layers.0", stop=True)
    assert net.closed == 1
    # Two runs, one inside the other: each stops at its own site.
    with model.hooks(
        [
            (
                "layers.0",
                lambda value, hook: (
                    model.run_with_cache(x, names_filter="layers.0", stop=True) and None
                ),
            )
        ]
    ):
        assert model(x).shape == (1, 2)


def test_masks_are_masks_and_the_range_is_checked(model: ip.Model, x: Tensor) -> None:
    _, whole = model.run_with_cache(x, names_filter="fc1")
    mask = torch.tensor([True, False, False, True, False, False, True])
    _, part = model.run_with_cache(x, names_filter="fc1", keep={1: mask})
    assert torch.equal(part["fc1"], whole["fc1"][:, mask])
    with pytest.raises(IndexError):
        model.run_with_cache(x, names_filter="fc1", pos_slice=[10])


def test_a_tuple_is_never_guessed_at(model: ip.Model, x: Tensor) -> None:
    _, cache = model.run_with_cache(x)
    assert "lstm" not in cache
    with pytest.raises(
        ip.AmbiguousSite, match=r"'lstm' holds several tensors; say which one: 'lstm.output\[0\]'"
    ):
        _ = cache["lstm"]


def test_another_thread_on_the_same_module_does_not_confuse_the_numbers_of_calls() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            for turn in range(4):
                if turn == 2 and threading.current_thread() is threading.main_thread():
                    joined.set()
                    seen.wait()
                x = self.cell(x)
            return x

    joined, seen, done = threading.Event(), threading.Event(), threading.Event()
    model, x = ip.wrap(Loop()), torch.randn(2, 3)

    def other() -> None:
        joined.wait()
        with model.hooks([("cell", lambda value, hook: None)]):
            seen.set()
            done.wait()
            model.module(x)

    thread = threading.Thread(target=other)
    thread.start()
    _, cache = model.run_with_cache(x, names_filter="cell")
    done.set()
    thread.join()
    assert list(cache) == ["cell#0", "cell#1", "cell#2", "cell#3"]


class Odd(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.nested.nested_tensor([x, x[:1]]), x.to_sparse()


# Nested tensors are a prototype, says torch at length.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_and_sparse_values_can_be_kept_but_not_hooked() -> None:
    model, x = ip.wrap(nn.Sequential(Odd())), torch.eye(3)
    (nested, sparse), cache = model.run_with_cache(x)
    assert torch.equal(cache["0.output[0]"].values(), nested.values())
    assert torch.equal(cache["0.output[1]"].to_dense(), sparse.to_dense())
    for site in ("0.output[0]", "0.output[1]"):
        with pytest.raises(ip.Unsupported, match="is a sparse or nested tensor"):
            model.run_with_hooks(x, fwd_hooks=[(site, torch.clone)])
