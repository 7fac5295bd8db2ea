"""What methods cost as texts grow longer: ``python -m benchmarks.context [lengths...]``.

A 4-layer GPT-2 of width 128 with random weights, one thread. For each length: CPU seconds of a method over those of a
forward pass of one such text without gradients (medians of interleaved rounds), and the most bytes that its tensors
hold at once over the forward's. A method that grows as the forward does has the same ratio in every column.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

import interpose as ip
from tests.peak import peak_of

LENGTHS = (64, 256, 1024, 2048)
LIMIT = 60.0
"""CPU seconds after which a method is not tried at a greater length."""


def methods(model: Any, length: int) -> dict[str, Callable[[], Any]]:
    """Every method on texts of a length, as it is without options where it can be."""
    torch.manual_seed(length)
    clean = torch.randint(1000, (1, length))
    corrupt = clean.clone()
    corrupt[0, length // 2] = (corrupt[0, length // 2] + 1) % 1000
    several = torch.randint(1000, (4, length))
    metric = ip.metrics.logit_difference(5, 7)
    pair, quiet = (model, clean, corrupt), {"progress": False}
    site = ("resid_post", 2)
    return {
        "ip.ablation, heads": lambda: ip.ablation(model, clean, metric=metric, **quiet),
        "ip.activation_patching, the stream at one layer and 8 positions": lambda: ip.sweep(
            *pair, over="pos", layer=2, pos=list(range(length // 2, length // 2 + 8)), metric=metric, **quiet
        ),
        "ip.activation_patching, heads": lambda: ip.activation_patching(
            *pair, metric=metric, family="attn_head_out_all_pos", **quiet
        ),
        "ip.activation_statistics": lambda: ip.activation_statistics(model, clean, site, **quiet),
        "ip.alignment_search, one step, 4 texts": lambda: ip.alignment_search(
            model, several, several.flip(0), answer=[5, 7, 9, 11], layer=1, steps=1, held_out=[3],
            placebo=False, **quiet
        ),
        "ip.attention_knockout, one edge a layer": lambda: ip.attention_knockout(
            model, clean, metric=metric, query=-1, key=1, **quiet
        ),
        "ip.attention_patterns, one layer": lambda: ip.attention_patterns(model, clean, layer=1),
        "ip.attribution_patching, heads x positions": lambda: ip.attribution_patching(*pair, metric=metric),
        "ip.causal_tracing, one layer, 2 positions, 4 samples": lambda: ip.causal_tracing(
            model, clean, subject=[1], answer=5, samples=4, layer=[1], pos=[1, -1], **quiet
        ),
        "ip.compare_prompts": lambda: ip.compare_prompts(*pair, answer=5),
        "ip.direct_logit_attribution by head": lambda: ip.direct_logit_attribution(
            model, clean, answer=5, by="head"
        ),
        "ip.edge_attribution, all edges": lambda: ip.edge_attribution(*pair, metric=metric),
        "ip.function_vector, 4 texts": lambda: ip.function_vector(model, several, head=[(1, 0)]),
        "ip.gradient_times_activation, the stream": lambda: ip.gradient_times_activation(
            model, clean, metric=metric
        ),
        "ip.head_scores": lambda: ip.head_scores(model, "previous", texts=clean),
        "ip.integrated_gradients, 4 steps": lambda: ip.integrated_gradients(
            model, clean, metric=metric, steps=4
        ),
        "ip.logit_lens, logits of 2 tokens": lambda: ip.logit_lens(
            model, clean, logits_of=[5, 7], **quiet
        ),
        "ip.logit_lens, last position": lambda: ip.logit_lens(model, clean, pos=-1, **quiet),
        "ip.max_activating, all neurons of a layer": lambda: ip.max_activating(
            model, clean, layer=1, **quiet
        ),
        "ip.measure, an edit": lambda: ip.measure(model, clean, metric, edits=[ip.zero("z", layer=1)]),
        "ip.patchscope": lambda: ip.patchscope(model, clean, clean[:, :16], into_pos=1, answer=5),
        "ip.path_patching, heads to the logits": lambda: ip.path_patching(*pair, metric=metric, **quiet),
        "ip.probe, 4 texts": lambda: ip.probe(
            model, several, [0, 1, 0, 1], layer=[1], folds=2, control=False
        ),
        "ip.run_variants, 4 edits": lambda: ip.run_variants(
            model, clean, [ip.Variant([ip.zero("z", layer=1, head=h)]) for h in range(4)], metric=metric,
            **quiet
        ).measured(),
        "ip.saliency": lambda: ip.saliency(model, clean, metric=metric),
        "ip.stream, one site": lambda: sum(len(b.tokens) for b in ip.stream(model, clean, site)),
        "ip.TunedLens.fit, one step": lambda: ip.TunedLens.fit(model, clean, steps=1, **quiet),
    }  # fmt: skip


def timed(run: Callable[[], Any]) -> float:
    """CPU seconds that a run takes, which other work on the machine does not lengthen."""
    start = time.process_time()
    run()
    return time.process_time() - start


def main(lengths: tuple[int, ...] = LENGTHS, rounds: int = 2) -> None:
    """Print a row for each method."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=4, n_head=4, n_embd=128, vocab_size=1000, n_positions=max(lengths),
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    module = transformers.GPT2LMHeadModel(config).eval().requires_grad_(False)
    model = ip.wrap(module)
    len(model.sites)
    rows: dict[str, list[str]] = {}
    late: set[str] = set()
    for length in lengths:
        text = torch.randint(1000, (1, length))

        @torch.no_grad()
        def forward(text: Tensor = text) -> Any:
            return module(text)

        forward()
        bytes_of_one = peak_of(forward)
        for name, run in methods(model, length).items():
            if name in late:
                rows[name].append("")
                continue
            start = time.process_time()
            most = peak_of(run) / bytes_of_one
            if time.process_time() - start > LIMIT:
                late.add(name)
            took = [
                timed(run) / statistics.median(timed(forward) for _ in range(3))
                for _ in range(rounds)
            ]
            rows.setdefault(name, []).append(f"{statistics.median(took):.1f}, {most:.1f}")
    print("| | " + " | ".join(f"{length} tokens" for length in lengths) + " |")
    print("|---" * (len(lengths) + 1) + "|")
    for name, cells in rows.items():
        called, *more = name.split(" ", 1)
        rest = f" {more[0]}" if more else ""
        print(f"| `{called.rstrip(',')}`{',' * called.endswith(',')}{rest} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or LENGTHS)
