"""What steering costs a generation, as ratios of tokens per second to transformers' own `generate`, interleaved.

Run: OMP_NUM_THREADS=1 python benchmarks/steering.py  (--device cuda --dtype bfloat16 on a GPU)

The model has GPT-2 small's shape and random weights. Each round generates plainly, then steered in each way, in another
order every time; what is printed is the median over rounds of the ratio to the plain run beside it, with the quarters,
by the clock and by the processor's time, which other processes do not add to.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import interpose as ip


def built(device: str, dtype: torch.dtype) -> Any:
    """GPT-2 small with random weights."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config()).eval().to(device, dtype)


def ways(model: ip.TransformerModel) -> dict[str, list[Any]]:
    """What is steered, by name."""
    layers, width = model.cfg.n_layers, model.cfg.d_model
    rows = {layer: torch.randn(width) for layer in range(layers)}
    vector = ip.SteeringVector.of(rows)
    fires = vector.fires(layer=6, above=0.0)
    return {
        "one layer": [vector.add(layer=6)],
        "all layers": [vector.add()],
        "one layer, generated tokens": [vector.add(layer=6, phase="generated")],
        "all layers, generated tokens": [vector.add(phase="generated")],
        "one layer, keeping norms": [vector.add_keeping_norm(layer=6)],
        "one layer, where it fires": [vector.add(layer=6, when=fires)],
        "three vectors at all layers": [vector.add(), vector.add(), vector.add()],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--ways", type=int, default=7, help="only the first so many")
    asked = parser.parse_args()
    module = built(asked.device, getattr(torch, asked.dtype))
    model = ip.wrap(module)
    tokens = torch.randint(1000, (asked.batch, 16), device=asked.device)
    options = {"max_new_tokens": asked.tokens, "min_new_tokens": asked.tokens, "do_sample": False}

    def plain() -> Any:
        mask = torch.ones_like(tokens)
        return module.generate(tokens, attention_mask=mask, pad_token_id=0, **options)

    def steered(edits: list[Any]) -> Any:
        with model.hooks(edits):
            return model.generate(tokens, pad_token_id=0, **options)

    def timed(run: Callable[[], Any]) -> tuple[float, float]:
        wall, own = time.perf_counter(), time.process_time()
        run()
        if asked.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - wall, time.process_time() - own

    runs = dict(list(ways(model).items())[: asked.ways])
    with torch.no_grad():
        for edits in runs.values():
            steered(edits)
        plain()
        ratios: dict[str, list[list[float]]] = {name: [[], []] for name in runs}
        for number in range(asked.rounds):
            order = random.Random(number).sample(list(runs), len(runs))
            for name in order:
                pair = [plain, partial(steered, runs[name])]
                first = number % 2
                one, two = timed(pair[first]), timed(pair[1 - first])
                base, other = (two, one) if first else (one, two)
                for kept, a, b in zip(ratios[name], base, other):
                    kept.append(a / b)
    print(
        f"{asked.tokens} tokens, batch {asked.batch}, {asked.device}, {asked.dtype}, {asked.rounds} rounds"
    )
    print(f"{'tokens per second, of plain generate':<38}{'by the clock':<26}by the processor")
    for name, kinds in ratios.items():
        shown = []
        for some in kinds:
            low, middle, high = statistics.quantiles(some, n=4)
            shown.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
        print(f"{name:<38}{shown[0]:<26}{shown[1]}")


if __name__ == "__main__":
    main()
