"""What semantic sites cost, interleaved with the bare forward, medians of ratios.

    python benchmarks/transformers_cost.py            # CPU, one thread: 124M on 128 tokens, and a python-bound one
    python benchmarks/transformers_cost.py --device   # accelerator: 8B-shaped bf16 model, 8 x 512 tokens

Random weights. Compare ratios, not times.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import interpose as ip


def cases(module: torch.nn.Module, ids: torch.Tensor) -> dict[str, Callable[[], object]]:
    model = ip.wrap(module)
    start = time.perf_counter()
    names = list(model.sites)
    print(f"  discovery: {time.perf_counter() - start:.2f} s, {len(names)} sites")
    found: dict[str, Callable[[], object]] = {
        "bare": lambda: module(input_ids=ids, use_cache=False),
        "idle": lambda: model(input_ids=ids, use_cache=False),
        "every resid_post": lambda: model.run_with_cache(
            input_ids=ids, use_cache=False, names_filter="blocks.*.hook_resid_post"
        ),
        "all primary sites": lambda: model.run_with_cache(input_ids=ids, use_cache=False),
        "one pattern": lambda: model.run_with_cache(
            input_ids=ids, use_cache=False, names_filter=[("pattern", 0)]
        ),
    }
    if ids.device.type != "cpu":
        del found["all primary sites"]  # patterns of 32 layers do not fit
    return found


def compare(module: torch.nn.Module, ids: torch.Tensor, repeats: int) -> None:
    """Print the median ratio of each case to the bare run beside it."""
    wait = torch.accelerator.synchronize if ids.device.type != "cpu" else lambda: None
    runs = cases(module, ids)
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    bare_times = []
    with torch.no_grad():
        for run in runs.values():
            run()
        for _ in range(repeats):
            for name, run in runs.items():
                pair = []
                for timed in (runs["bare"], run):
                    wait()
                    start = time.perf_counter()
                    timed()
                    wait()
                    pair.append(time.perf_counter() - start)
                bare_times.append(pair[0])
                ratios[name].append(pair[1] / pair[0])
    print(f"  bare: {statistics.median(bare_times) * 1e3:.1f} ms")
    for name, found in ratios.items():
        quarters = statistics.quantiles(found, n=4)
        print(
            f"  {name:20} {statistics.median(found):.3f}x   ({quarters[0]:.3f} to {quarters[2]:.3f})"
        )


def on_cpu() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("GPT-2 small, 128 tokens, one thread")
    small = GPT2LMHeadModel(GPT2Config()).eval()
    compare(small, torch.randint(0, 50000, (1, 128)), 15)
    print("24 layers of width 64, 16 tokens, one thread")
    config = GPT2Config(
        n_layer=24, n_embd=64, n_head=4, vocab_size=1000, bos_token_id=0, eos_token_id=0
    )
    compare(GPT2LMHeadModel(config).eval(), torch.randint(0, 1000, (1, 16)), 100)


def on_device() -> None:
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        module = LlamaForCausalLM(config).eval()
        ids = torch.randint(0, 32000, (8, 512))
    print(f"8B-shaped llama, bf16, 8 x 512 tokens, {module.config._attn_implementation}")
    compare(module, ids, 20)


if __name__ == "__main__":
    on_device() if "--device" in sys.argv else on_cpu()
