"""What comparing the stamp costs: 12 reads on a 12-layer GPT-2 of width 64, with it and without, interleaved, medians.

    python benchmarks/stamp_cost.py [repeats]

One thread. Compare ratios, not times.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import interpose as ip


def measure(name: str, model: ip.Model, sites: list[str], repeats: int) -> None:
    kind = type(model)
    compare = kind.refresh

    def seconds(refresh: Callable[[ip.Model], None]) -> float:
        kind.refresh = refresh  # type: ignore[method-assign]
        start = time.perf_counter()
        model.run_with_cache(ids, names_filter=sites)
        return time.perf_counter() - start

    ids = torch.randint(0, 512, (1, 16))
    ratios, alone, plain = [], [], []
    for number in range(repeats):
        ways = [compare, lambda _: None]
        order = (0, 1) if number % 2 else (1, 0)
        took = {way: seconds(ways[way]) for way in order}
        ratios.append(took[0] / took[1])
        plain.append(took[1])
        kind.refresh = compare  # type: ignore[method-assign]
        start = time.perf_counter()
        model.refresh()
        alone.append(time.perf_counter() - start)
    kind.refresh = compare  # type: ignore[method-assign]
    middle = statistics.median
    print(
        f"{name}: 12 reads {middle(plain) * 1e3:.2f} ms without it; with it {middle(ratios):.4f}x; the comparison "
        f"alone {middle(alone) * 1e6:.0f} us, {middle(alone) / middle(plain):.2%}"
    )


def main() -> None:
    torch.set_num_threads(1)
    sizes = {"n_layer": 12, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 64}
    module = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with torch.no_grad():
        for name, model, blocks in (
            ("module paths", ip.Model(module), "transformer.h.{}"),
            ("semantic sites", ip.wrap(module), "blocks.{}.hook_resid_post"),
        ):
            sites = [blocks.format(layer) for layer in range(12)]
            model.run_with_cache(torch.randint(0, 512, (1, 16)), names_filter=sites)
            measure(name, model, sites, repeats)


if __name__ == "__main__":
    main()
