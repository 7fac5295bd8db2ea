"""`model.sites` and `model.scan`: what is there, with shapes, and no trace of the probe."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from tests.leftovers import same_state, state_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(self.norm(x))


class Net(nn.Module):
    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(depth))
        self.rnn = nn.GRU(4, 3)
        self.shared = self.blocks[0].fc
        self.drop = nn.Dropout(0.5)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(()))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.steps += 1
        random.random()
        np.random.rand()
        for block in self.blocks:
            x = block(x)
        self.last = x
        return self.rnn(self.drop(x))


def test_sites_print_as_a_folded_tree_with_shapes_after_a_scan() -> None:
    model = ip.wrap(Net())
    assert repr(model.sites).splitlines() == [
        "Sites of Net: 41   (shapes after a run or model.scan(inputs))",
        "site         module       value",
        "output       Net",
        "  blocks     ModuleList",
        "    0 .. 11  12 x Block",
        "      norm   BatchNorm1d",
        "      fc     Linear",
        "  rnn        GRU",
        "  shared     Linear",
        "  drop       Dropout",
        "  unused     Linear",
    ]
    sites = model.scan(torch.randn(5, 4))
    assert "0 .. 11  12 x Block   (5, 4) float32" in repr(sites)
    assert ".output[0] (5, 3) float32, .output[1] (1, 3) float32" in repr(sites)
    assert re.search(r"unused +Linear +never called", repr(sites))
    assert "<td" in sites._repr_html_()


def test_a_site_knows_its_shape_dtype_calls_and_aliases() -> None:
    model = ip.wrap(Net(depth=2))
    sites = model.scan(torch.randn(5, 4))
    site = sites["blocks.0.fc"]
    assert (site.shape, site.dtype, site.calls) == ((5, 4), torch.float32, 1)
    assert site.aliases == ("shared",)
    assert sites["shared"].canonical == "blocks.0.fc"
    assert sites["blocks.1.norm.input"].shape == (5, 4)
    assert sites["rnn.output[1]"].shape == (1, 3)
    assert [name for name in sites if name.startswith(("rnn", "output"))] == [
        "output[0]",
        "output[1]",
        "rnn.output[0]",
        "rnn.output[1]",
    ]
    assert list(sites.select("blocks.*.fc")) == ["blocks.0.fc", "blocks.1.fc"]
    assert list(sites.select(re.compile("norm$"))) == ["blocks.0.norm", "blocks.1.norm"]
    assert list(sites.select(lambda name: name == "drop")) == ["drop"]
    assert "blocks.1.fc  Linear  (5, 4) float32" in repr(sites.select("blocks.*.fc"))


def test_shapes_are_known_after_a_first_run_too() -> None:
    model = ip.wrap(Net(depth=1))
    model.run_with_cache(torch.randn(3, 4), names_filter="blocks.0.fc")
    assert model.sites["blocks.0.fc"].shape == (3, 4)
    assert model.sites["drop"].shape is None


@pytest.mark.parametrize("training", [True, False])
def test_a_scan_leaves_no_trace(training: bool) -> None:
    net, x = Net(), torch.randn(5, 4)
    net.train(training)
    before = state_of(net), random.getstate(), np.random.get_state()[1].copy()
    ip.wrap(net).scan(x)
    assert same_state(before[0], state_of(net))
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()
    assert net.last is None


def test_a_scan_does_no_arithmetic_where_it_can() -> None:
    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1 << 16, 1 << 16, device="meta")

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    sites = ip.wrap(Huge()).scan(torch.empty(1 << 20, 1 << 16, device="meta"))
    assert sites["fc"].shape == (1 << 20, 1 << 16)


def test_a_model_that_branches_on_values_is_scanned_by_running_it() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Linear(2, 3), nn.Linear(2, 5)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.large(x) if x.sum() > 0 else self.small(x)

    net = Branch()
    sites = ip.wrap(net).scan(torch.ones(1, 2))
    assert sites["large"].shape == (1, 5)
    assert sites["small"].calls == 0
    assert net.calls == 0


def test_a_changed_module_tree_is_seen() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model, x = ip.wrap(net), torch.randn(1, 2)
    model.run_with_cache(x, names_filter="1")
    net[1] = nn.Tanh()
    _, cache = model.run_with_cache(x, names_filter="1")
    assert torch.equal(cache["1"], torch.tanh(net[0](x)))
    net.append(nn.Linear(2, 4))
    assert model.run_with_cache(x, names_filter="2")[1]["2"].shape == (1, 4)
