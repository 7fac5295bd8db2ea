"""How fast sweeps are: ``python -m benchmarks.sweeps [small] [heads] [ioi] [functions] [large] [lens]``.

Random models of real shapes; a ratio is measured in one process, a sweep and some single cells in turn, medians. One
cell is a forward of the module with a hook of torch's. ``lens`` needs TransformerLens 4.3 in the environment, and
compares with its `get_act_patch_resid_pre`.
"""

from __future__ import annotations

import copy
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import interpose as ip
from interpose.sweeps import metrics
from interpose.sweeps.sweep import sweep

CUDA = torch.cuda.is_available()


def gpt2() -> ip.TransformerModel:
    """GPT-2 small's shape, 124M parameters."""
    return _wrapped(transformers.GPT2LMHeadModel(transformers.GPT2Config()))


def llama() -> ip.TransformerModel:
    """Llama 3 8B's shape, in bfloat16."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return _wrapped(transformers.LlamaForCausalLM(config))
    finally:
        torch.set_default_dtype(torch.float32)


def _wrapped(module: Any) -> ip.TransformerModel:
    model = ip.wrap(module.to("cuda" if CUDA else "cpu").eval().requires_grad_(False))
    assert isinstance(model, ip.TransformerModel)
    return model


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that a run takes, and its result."""
    if CUDA:
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def compare(
    label: str, model: Any, length: int, first: int, rounds: int, singles: int, **options: Any
) -> None:
    """Time a sweep against single cells, in turn."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(1000, (1, length), generator=generator)
    corrupt = clean.clone()
    corrupt[:, first:] = torch.randint(1000, (1, length - first), generator=generator)
    shared: dict[str, Any] = {
        "metric": metrics.logit_difference(5, 7),
        "progress": False,
        **options,
    }
    block = model.anatomy.towers[0].blocks[model.cfg.n_layers // 2].module
    tokens = corrupt.to(model.device)

    def fast() -> Any:
        return sweep(model, clean, corrupt, **shared)

    @torch.no_grad()
    def slow() -> Any:
        """One forward with a hook of torch's, as one would write it by hand."""
        handle = block.register_forward_pre_hook(_nothing)
        try:
            return float(model.module(tokens).logits[0, -1, :8].sum())
        finally:
            handle.remove()

    fast(), slow()  # warm
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    _, result = timed(fast)
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if CUDA else ""
    cells = result.each[0].numel()
    ratios, quick, single = [], [], []
    for _ in range(rounds):
        seconds, result = timed(fast)
        single += [timed(slow)[0] for _ in range(singles)]
        quick.append(seconds)
        ratios.append(statistics.median(single[-singles:]) * cells / seconds)
    print(
        f"{label}: {statistics.median(ratios):.1f}x  (sweep {statistics.median(quick):.3f} s, one cell "
        f"{statistics.median(single) * 1e3:.1f} ms x {cells}{peak})\n    {result.tally}"
    )


def _nothing(module: Any, args: Any) -> None:
    """A hook that only costs its call."""


def against_transformer_lens(model: Any, rounds: int) -> None:
    """Time the 12 x 32 grid against TransformerLens's own, in turn, and compare the numbers."""
    from transformer_lens import patching
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    module = copy.deepcopy(model.module)
    bridge = build_bridge_from_module(module, "GPT2LMHeadModel", hf_config=module.config)
    generator = torch.Generator().manual_seed(0)
    clean, corrupt = torch.randint(1000, (2, 1, 32), generator=generator)

    def fast() -> Any:
        metric = metrics.logit_difference(5, 7)
        return sweep(model, clean, corrupt, metric=metric, progress=False).values

    @torch.no_grad()
    def slow() -> Any:
        _, cache = bridge.run_with_cache(clean)
        metric = lambda logits: logits[0, -1, 5] - logits[0, -1, 7]  # noqa: E731
        return patching.get_act_patch_resid_pre(bridge, corrupt, cache, metric)

    fast()
    ratios = []
    for _ in range(rounds):
        quick, mine = timed(fast)
        long, theirs = timed(slow)
        ratios.append(long / quick)
        print(f"    {long:.1f} s against {quick:.2f} s: {ratios[-1]:.1f}x", flush=True)
    apart = float((mine - theirs.cpu()).abs().max())
    print(
        f"124M, 12 x 32 grid against TransformerLens: {statistics.median(ratios):.1f}x; largest difference {apart:.1e}"
    )


def functions(model: Any, rounds: int) -> None:
    """Time functions of logits as metrics against one of ours, in turn."""
    clean, corrupt = torch.randint(1000, (2, 1, 32), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {
        "logit_difference(5, 7)": metrics.logit_difference(5, 7),
        "logits[:, -1, 5] - logits[:, -1, 7]": lambda x: x[:, -1, 5] - x[:, -1, 7],
        "logits[:, -1].log_softmax(-1)[:, 5]": lambda x: x[:, -1].log_softmax(-1)[:, 5],
    }
    found: dict[str, list[float]] = {name: [] for name in asked}
    for number in range(rounds + 1):
        for name, metric in asked.items():
            run = functools.partial(sweep, model, clean, corrupt, metric=metric, progress=False)
            seconds, _ = timed(run)
            found[name] += [seconds] if number else []  # the first warms
    first, *others = found.values()
    for name, seconds in zip(list(asked)[1:], others):
        ratio = statistics.median(one / two for one, two in zip(seconds, first))
        print(f"124M, 12 x 32 grid, {name} against {next(iter(asked))}: {ratio:.2f}x the time")


def main(asked: list[str]) -> None:
    """Run what is asked for, by default everything this machine can."""
    threads = torch.get_num_threads()
    print(f"{'CUDA' if CUDA else f'CPU, {threads} threads'}, torch {torch.__version__}")
    wanted = asked or ["small", "heads", "ioi", *(["large"] if CUDA else [])]
    counts = (9, 25) if CUDA else (5, 7)
    heads = {"site": "z", "over": ("layer", "head")}
    model = gpt2() if set(wanted) - {"large"} else None
    if "small" in wanted:
        compare("124M, 12 x 32 grid", model, 32, 0, *counts)
    if "ioi" in wanted:
        compare("124M, IOI grid 12 x 15, first difference at 10", model, 15, 10, *counts)
    if "heads" in wanted:
        compare("124M, heads 12 x 12, 15 positions, first at 10", model, 15, 10, *counts, **heads)
        compare("124M, heads 12 x 12, 32 positions, first at 0", model, 32, 0, *counts, **heads)
    if "functions" in wanted:
        functions(model, counts[0])
    if "lens" in wanted:
        against_transformer_lens(model, 3)
    if "large" in wanted:
        compare("8B bf16, 32 x 32 grid", llama(), 32, 0, *counts)


if __name__ == "__main__":
    main(sys.argv[1:])
