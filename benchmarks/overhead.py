"""What hooks cost: each way of reading or editing, interleaved with the bare forward, one thread, medians.

    python benchmarks/overhead.py [repeats]

The model is a 12-layer GPT-2 of width 64 with random weights on 16 tokens: about 4 ms of mostly
Python, so overhead has nowhere to hide. Compare ratios, not times.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import interpose as ip


def cases(module: torch.nn.Module, ids: torch.Tensor) -> dict[str, Callable[[], object]]:
    model = ip.Model(module)  # the engine alone, with module paths
    blocks = [f"transformer.h.{i}" for i in range(12)]

    def by_hand() -> object:
        kept = {}
        handles = [
            module.get_submodule(name).register_forward_hook(
                lambda _m, _a, out, name=name: kept.__setitem__(name, out.detach().clone())
            )
            for name in blocks
        ]
        try:
            return module(ids)
        finally:
            for handle in handles:
                handle.remove()

    return {
        "bare forward": lambda: module(ids),
        "wrapped, nothing hooked": lambda: model(ids),
        "12 reads, hooks by hand": by_hand,
        "12 reads": lambda: model.run_with_cache(ids, names_filter=blocks),
        "12 reads by glob": lambda: model.run_with_cache(ids, names_filter="transformer.h.*"),
        "12 reads, stop after the 6th": lambda: model.run_with_cache(
            ids, names_filter=blocks[:6], stop=True
        ),
        "1 edit": lambda: model.run_with_hooks(ids, fwd_hooks=[(blocks[5], lambda v: v * 0.5)]),
        "every module read": lambda: model.run_with_cache(ids),
    }


def measure(run: Callable[[], object], bare: Callable[[], object], repeats: int) -> float:
    """Median over pairs of (this run / the bare run next to it), each after an untimed bare run."""
    ratios = []
    for _ in range(repeats):
        pair = []
        for timed in (bare, run):
            bare()
            start = time.perf_counter()
            timed()
            pair.append(time.perf_counter() - start)
        ratios.append(pair[1] / pair[0])
    return statistics.median(ratios)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=12,
        n_embd=64,
        n_head=4,
        vocab_size=512,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    module = GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 512, (1, 16))
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    print(f"torch {torch.__version__}, 1 thread, {repeats} pairs each")
    with torch.no_grad():
        runs = cases(module, ids)
        bare = runs["bare forward"]
        for run in runs.values():
            measure(run, bare, 10)
        for name, run in runs.items():
            print(f"{name:<32}{measure(run, bare, repeats):6.3f}x")


if __name__ == "__main__":
    main()
