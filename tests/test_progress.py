"""Long work tells how far it is, and can be ended, wherever it is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import interpose as ip
from interpose.progress import Progress, tracked
from tests.models import tiny

TEXTS = [[11, 12, 13, 14], [15, 16, 17, 18], [21, 22, 23, 24, 25]]
OTHERS = [[31, 12, 13, 14], [35, 16, 17, 18], [31, 22, 23, 24, 25]]
METRIC = ip.metrics.logit(20)
CALLS: dict[str, Any] = {
    "saliency": lambda model, **o: ip.saliency(model, TEXTS, metric=METRIC, over="layer", site="resid_pre", **o),
    "integrated_gradients": lambda model, **o: ip.integrated_gradients(
        model, TEXTS, metric=METRIC, site="resid_pre", over="layer", steps=2, layer=[0], **o
    ),
    "edge_attribution": lambda model, **o: ip.edge_attribution(model, TEXTS, OTHERS, metric=METRIC, **o),
    "logit_lens": lambda model, **o: ip.logit_lens(model, TEXTS, pos=-1, **o),
    "compare_prompts": lambda model, **o: ip.compare_prompts(model, TEXTS, OTHERS, **o),
    "attribution_patching": lambda model, **o: ip.attribution_patching(
        model, TEXTS, OTHERS, metric=METRIC, over=("layer", "head"), verify=2, **o
    ),
    "head_scores": lambda model, **o: ip.head_scores(model, "previous", texts=TEXTS, **o),
    "measure": lambda model, **o: ip.measure(model, TEXTS, METRIC, **o),
    "max_activating": lambda model, **o: ip.max_activating(model, TEXTS, layer=0, k=1, **o),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_text_is_counted_once_and_the_work_can_be_ended(call: Any) -> None:
    model = ip.wrap(tiny.build("gpt2"))
    told: list[tuple[int, int]] = []
    call(model, progress=lambda *far: told.append(far))
    assert told[-1] == (3, 3)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    with pytest.raises(ip.Cancelled, match=r"^ended after text \d of 3\.$"):
        call(model, progress=lambda *_: False)
    call(model)  # and nothing is left of it


def test_a_search_counts_the_steps_of_all_places() -> None:
    model, told = ip.wrap(tiny.build("gpt2")), []
    ip.alignment_search(
        model, TEXTS[:2] * 3, OTHERS[:2] * 3, answer=[20, 21] * 3, layer=[0, 1], steps=3,
        progress=lambda *far: told.append(far),
    )  # fmt: skip
    assert told == [
        (done, 12) for done in range(1, 13)
    ]  # of two layers, and as many of the placebo


def test_a_stream_has_no_whole() -> None:
    model, told = ip.wrap(tiny.build("gpt2")), []
    batches = (torch.tensor([row]) for row in TEXTS)
    ip.activation_statistics(
        model, batches, "blocks.0.hook_resid_pre", progress=lambda *far: told.append(far)
    )
    assert told == [(1, None), (2, None), (3, None)]


def test_a_bar_is_closed_when_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interpose.progress.has_screen", lambda: True)
    progress = Progress(True, 3)
    with pytest.raises(RuntimeError), progress:
        raise RuntimeError
    assert progress._bar.disable  # tqdm's own word for closed
    assert list(tracked([[1], [2, 3]], False)) == [[1], [2, 3]]
