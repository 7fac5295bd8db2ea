"""What methods cost in forward passes: ``python -m benchmarks.methods [length] [rounds]``.

GPT-2 small's shape with random weights, one pair of texts, one thread. A round times a plain forward without gradients
and each method, in turn; printed are medians of the ratios. Where a method runs two texts, a forward is of one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import interpose as ip


def timed(run: Callable[[], Any]) -> float:
    """Seconds that a run takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main(length: int = 32, rounds: int = 11) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval().requires_grad_(False)
    model = ip.wrap(module)
    clean, corrupt = torch.randint(1000, (2, 1, length))
    metric = ip.metrics.logit_difference(5, 7)
    pair = (model, clean, corrupt)
    last = [length - 1]
    methods: dict[str, Callable[[], Any]] = {
        "logit lens, all layers, last position": lambda: ip.logit_lens(model, clean, pos=last),
        "logit lens, all layers and positions, logits of two answers": lambda: ip.logit_lens(
            model, clean, logits_of=[5, 7]
        ),
        "logit lens, all layers and positions": lambda: ip.logit_lens(model, clean),
        "direct logit attribution by head": lambda: ip.direct_logit_attribution(
            model, clean, answer=5, instead=7, by="head"
        ),
        "attribution patching, heads x positions, gradient": lambda: ip.attribution_patching(
            *pair, metric=metric, rule="gradient"
        ),
        "attribution patching, heads x positions, relp": lambda: ip.attribution_patching(
            *pair, metric=metric, rule="relp"
        ),
        "edge attribution, all edges": lambda: ip.edge_attribution(*pair, metric=metric),
    }

    streams = torch.randn(model.cfg.n_layers, length, model.cfg.d_model)

    @torch.no_grad()
    def forward() -> Any:
        return module(clean)

    @torch.no_grad()
    def unembeddings() -> None:
        """What the logit lens of all layers and positions needs besides: a layer at a time."""
        for stream in streams:
            module.lm_head(stream)

    methods["  of which unembeddings"] = unembeddings

    for run in (forward, *methods.values()):
        run()  # warm
    ratios: dict[str, list[float]] = {name: [] for name in methods}
    plain = []
    for _ in range(rounds):
        plain.append(timed(forward))
        for name, run in methods.items():
            here = statistics.median(timed(forward) for _ in range(2))
            ratios[name].append(timed(run) / here)
    print(f"one forward of {length} tokens: {statistics.median(plain) * 1e3:.0f} ms")
    for name, found in ratios.items():
        print(f"{statistics.median(found):6.2f} forwards  {name}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
