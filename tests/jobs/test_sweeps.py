"""Sweeps in batches that others run: what comes of it is what one process gives."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import interpose as ip
from interpose.jobs.ray_actor import packed, unpacked
from interpose.sweeps import sweep as sweeping
from tests.bounds import assert_near
from tests.sweeps import oracle

METRIC = {
    "lead": ip.metrics.logit_difference(20, 33),
    "mean": lambda logits: logits[:, -1].mean(-1),
}


def same(found: ip.SweepResult, wanted: ip.SweepResult) -> None:
    """The same places, counts and draws, and numbers as near as rounding leaves them."""
    assert found.axes == wanted.axes
    assert found.tally == wanted.tally
    assert len(list(found.records())) == len(list(wanted.records()))
    assert {name: type(one) for name, one in found.to_dict().items()} == {
        name: type(one) for name, one in wanted.to_dict().items()
    }
    for name in ("each", "clean", "corrupt", "noise"):
        assert_near(getattr(found, name), getattr(wanted, name), wanted.clean)
    for ours, theirs in zip(found.interval(seed=3), wanted.interval(seed=3)):
        assert_near(ours, theirs, wanted.clean)


def through_bytes(job: Any, *, engine: str, workers: Any, step: Any) -> None:
    """As a cluster does it: a copy of the job, and copies of shards, come as bytes, in another order."""
    copy = unpacked(packed(job), {})
    assert copy.parts == ()
    with copy.worker() as worker:
        for shard in reversed(list(job.shards())):
            made = worker.make(unpacked(packed(shard), {}), step)
            job.accept(shard, pickle.loads(pickle.dumps(made)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batches_that_others_ran_in_any_order_give_the_same_result(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ip.wrap(oracle.build("gpt2").to(dtype))
    clean, corrupt = oracle.pair(5)
    options: dict[str, Any] = {
        "metric": METRIC, "over": ("layer", "pos"), "batch_size": 2, "max_rows": 8, "progress": False,
    }  # fmt: skip
    wanted = ip.sweep(model, clean, corrupt, **options)
    assert (dtype == torch.bfloat16) == bool(wanted.noise.numel() and wanted.noise.abs().max() > 0)
    assert float(wanted.each.std()) > 0.01
    monkeypatch.setattr(sweeping, "run", through_bytes)
    same(ip.sweep(model, clean, corrupt, **options), wanted)


def test_texts_that_end_as_padding_would_are_the_same_texts_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ip.load("pocket")
    clean = ["The Eiffel Tower is in", "The cat sat on the"]
    corrupt = ["The old Eiffel Tower is in", "The cat and the dog sat on the"]
    options: dict[str, Any] = {
        "metric": ip.metrics.logit(" Paris"), "over": "layer", "align": "end", "progress": False,
        "batch_size": 1,
    }  # fmt: skip
    wanted = ip.sweep(model, clean, corrupt, **options)
    monkeypatch.setattr(sweeping, "run", through_bytes)
    same(ip.sweep(model, clean, corrupt, **options), wanted)
    alone = [ip.sweep(model, *pair, **options).each for pair in zip(clean, corrupt)]
    assert_near(torch.cat(alone, -1), wanted.each)


def test_a_sweep_on_others_refuses_what_would_not_be_the_same_there() -> None:
    model = ip.wrap(oracle.build("gpt2"))
    clean, corrupt = oracle.pair(1)
    options: dict[str, Any] = {"metric": METRIC["lead"], "progress": False}
    with pytest.raises(ValueError, match=r"engine is 'local' or 'ray'; got 'spark'"):
        ip.sweep(model, clean, corrupt, engine="spark", **options)
    with pytest.raises(ValueError, match="a local job runs in this process"):
        ip.sweep(model, clean, corrupt, workers=2, **options)
    with pytest.raises(ValueError, match="at least 1; got 0"):
        ip.sweep(model, clean, corrupt, engine="ray", workers=0, **options)
    handle = model.register(ip.zero("mlp_out", layer=0))
    with pytest.raises(ip.Unsupported, match=r"others run it. Take them off; edit=..."):
        ip.sweep(model, clean, corrupt, engine="ray", **options)
    handle.remove()
