"""What the methods that run variants have in common: they end with what is done, and take short texts and 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import interpose as ip
from tests.bounds import assert_near
from tests.sweeps import oracle

LEAD = ip.metrics.logit_difference(11, 42)
METHODS: dict[str, Callable[..., Any]] = {
    "causal_tracing": lambda m, a, _, **w: ip.causal_tracing(
        m, a[:1], subject=[0], metric=LEAD, samples=2, site="mlp_out", **w
    ),
    "attention_knockout": lambda m, a, _, **w: ip.attention_knockout(
        m, a, metric=LEAD, query=-1, over=("layer", "key"), key=range(max(1, a.shape[1] - 1)), **w
    ),
    "path_patching": lambda m, a, b, **w: ip.path_patching(m, a, b, metric=LEAD, **w),
    "patchscope": lambda m, a, b, **w: ip.patchscope(
        m, a[:1], b[:1], metric=LEAD, into_layer="all", **w
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_what_is_done_stays_when_a_method_is_ended(name: str) -> None:
    model, pair = ip.wrap(oracle.build("llama")), oracle.pair(2, 6, 2)
    whole, calls = METHODS[name](model, *pair, progress=False), []

    def stop(done: int, total: int | None) -> bool:
        calls.append((done, total))
        return len(calls) < 4

    with pytest.raises(ip.Cancelled, match="What is done is the error's result") as caught:
        METHODS[name](model, *pair, progress=stop, max_rows=4)
    found = caught.value.result.values
    done = ~found.isnan()
    assert done.any()
    assert not done.all()
    assert found.shape == whole.values.shape
    assert_near(found[done], whole.values[done], oracle.some_logits(model.module))
    assert whole.protocol["plan"].startswith("wavefront, ")


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"attention_knockout"}))
def test_texts_of_one_token(name: str) -> None:
    model = ip.wrap(oracle.build("gpt2"))
    clean, corrupt = oracle.pair(2, 2, 0)
    found = METHODS[name](model, clean[:, :1], corrupt[:, :1])
    assert found.values.isfinite().all()
    assert found.values.abs().max() > 1e-4


@pytest.mark.parametrize("name", METHODS)
def test_in_16_bits_and_in_inference_mode(name: str) -> None:
    module = oracle.build("gpt2").to(torch.bfloat16)
    wide = ip.wrap(oracle.build("gpt2").to(torch.bfloat16).float())
    pair = oracle.pair(2, 6, 2)
    with torch.inference_mode():
        found = METHODS[name](ip.wrap(module), *pair)
        wanted = METHODS[name](wide, *pair)
    assert found.values.dtype == torch.float32
    assert_near(found.values, wanted.values, oracle.some_logits(module))
