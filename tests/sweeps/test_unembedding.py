"""Metrics need few logits; whoever else looks at the unembedding still finds all of it there."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.models.transformer import TransformerModel
from tests.sweeps import oracle
from tests.sweeps.oracle import LENGTH

pytestmark = pytest.mark.bits

METRIC = ip.metrics.logit_difference(20, 33)


def sweep(model: Any, clean: Any, corrupt: Any = None, **options: Any) -> ip.SweepResult:
    return ip.sweep(model, clean, corrupt, **{"metric": METRIC, "progress": False, **options})


@functools.cache
def gpt2() -> TransformerModel:
    return TransformerModel(oracle.build("gpt2"))


def lead(model: TransformerModel, tokens: Tensor) -> Tensor:
    logits = oracle.logits(model.module, tokens)[:, -1]
    return logits[:, 20] - logits[:, 33]


@pytest.mark.parametrize(
    "site", ["unembed.hook_in", "unembed.hook_out", "lm_head", "lm_head.input"]
)
def test_positions_of_the_unembedding_are_those_of_the_text(site: str) -> None:
    model, (clean, corrupt) = gpt2(), oracle.pair()
    places = [0, LENGTH - 2, LENGTH - 1]
    ends = [lead(model, tokens) for tokens in (clean, corrupt)]
    options: dict[str, Any] = {"site": [site], "over": ("site", "pos"), "pos": places}
    patched = sweep(model, clean, corrupt, **options).each[0, 0]
    assert oracle.near(model.module, patched, torch.stack([ends[1], ends[1], ends[0]]))
    zeroed = sweep(model, clean, edit=ip.zero, **options).each[0, 0]
    assert oracle.near(model.module, zeroed, torch.stack([ends[0], ends[0], 0 * ends[0]]))
    assert float(ends[0].abs().min()) > 1e-2


@pytest.mark.parametrize(
    ("edit", "moved"),
    [
        (ip.add("unembed.hook_out", torch.arange(99.0)), -13.0),
        (ip.add("unembed.hook_out", 5.0, neuron=1), 0.0),  # not the second of the two that are measured
        (ip.add("unembed.hook_out", 5.0, neuron=20), 5.0),
        (ip.add("unembed.hook_out", 5.0, neuron=20, pos=0), 0.0),
    ],
)  # fmt: skip
def test_hooks_of_others_see_all_logits(edit: Any, moved: float) -> None:
    model, ends = gpt2(), oracle.pair()
    plain = sweep(model, *ends)
    with model.hooks([edit]):
        found = sweep(model, *ends)
    for name in ("each", "clean", "corrupt"):
        wanted = getattr(plain, name) + moved
        assert oracle.near(model.module, getattr(found, name), wanted), name


def test_hooks_of_torch_on_the_unembedding_see_all_logits() -> None:
    model, ends = TransformerModel(oracle.build("gpt2")), oracle.pair()
    plain, seen = sweep(model, *ends), set()

    def ramp(module: Any, args: Any, output: Tensor) -> Tensor:
        seen.add(output.shape[1:])
        return output + torch.arange(99.0)

    handle = model.module.lm_head.register_forward_hook(ramp)
    found = sweep(model, *ends)
    handle.remove()
    assert {shape[-1] for shape in seen} == {99}
    assert oracle.near(model.module, found.each, plain.each - 13)


def test_somebody_who_looks_only_later_changes_nothing() -> None:
    """Another thread may put a hook there at any time: how many logits there are is decided once."""
    model, ends = TransformerModel(oracle.build("gpt2")), oracle.pair()
    wanted, handles = sweep(model, *ends, max_rows=4), []

    def look(done: int, total: int) -> None:
        handles.append(model.module.lm_head.register_forward_hook(lambda *_: None))

    found = sweep(model, *ends, max_rows=4, progress=look)
    for handle in handles:
        handle.remove()
    assert len(handles) > 2
    assert torch.equal(found.each, wanted.each)
