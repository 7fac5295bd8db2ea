"""How fast autoencoders are trained: tokens a second of ours, beside plain PyTorch with the same arithmetic.

    python -m benchmarks.sae_training [--latents N] [--width N] [--k N] [--batch N] [--dtype bfloat16]

Each step has the same parts everywhere: encode, the k largest, decode, the squared error, gradients, gradients along
decoder rows taken off, clipping, Adam on float32 weights, norms of rows, and a count of what fired. "plain" makes codes
dense and multiplies matrices, as one writes it first; "plain, gathered" decodes with `embedding_bag`. Rounds are
interleaved; medians. Defaults are large on a GPU, small on a CPU. It takes less than a minute.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import interpose as ip
from interpose.sae.codes import bags
from interpose.sae.training.learner import Learner

Step = Callable[[Tensor], None]


class Plain:
    """The same step as one writes it."""

    def __init__(self, sae: ip.TopKSAE, dtype: torch.dtype, gathered: bool) -> None:
        self.sae, self.dtype, self.gathered = sae, dtype, gathered
        self.optimizer = torch.optim.Adam(sae.parameters(), lr=1e-4, fused=True)
        self.since = torch.zeros(sae.d_sae, dtype=torch.long, device=sae.W_dec.device)
        with torch.no_grad():
            sae.W_dec.div_(sae.W_dec.norm(dim=-1, keepdim=True))
            sae.W_enc.copy_(sae.W_dec.T)

    def step(self, x: Tensor) -> None:
        """Learn from a batch."""
        sae = self.sae
        x = x.to(self.dtype)
        W_enc, W_dec, b_enc, b_dec = (
            one.to(self.dtype) for one in (sae.W_enc, sae.W_dec, sae.b_enc, sae.b_dec)
        )
        pre = torch.addmm(b_enc, x - b_dec, W_enc)
        values, indices = pre.topk(sae.k, dim=-1, sorted=False)
        values = values.relu()
        if self.gathered:
            starts = torch.arange(0, indices.numel() + 1, sae.k, device=x.device)
            out = bags(W_dec, indices.flatten(), starts, values.flatten())
        else:
            out = torch.zeros_like(pre).scatter(-1, indices, values) @ W_dec
        loss = (out + b_dec - x).float().pow(2).sum(-1).mean()
        loss.backward()
        with torch.no_grad():
            rows = sae.W_dec
            assert rows.grad is not None
            rows.grad -= (rows.grad * rows).sum(-1, keepdim=True) * rows
            torch.nn.utils.clip_grad_norm_(sae.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            rows /= rows.norm(dim=-1, keepdim=True)
            fired = torch.zeros_like(self.since)
            fired.index_add_(0, indices.flatten(), (values.flatten() != 0).long())
            self.since = torch.where(fired > 0, 0, self.since + len(x))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    cuda = torch.cuda.is_available()
    parser.add_argument("--width", type=int, default=4096 if cuda else 256)
    parser.add_argument("--latents", type=int, default=65536 if cuda else 4096)
    parser.add_argument("--k", type=int, default=64 if cuda else 16)
    parser.add_argument("--batch", type=int, default=8192 if cuda else 512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    asked = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = getattr(torch, asked.dtype)
    x = vectors(asked.batch, asked.width, device)
    first = ip.TopKSAE(asked.width, asked.latents, k=asked.k).to(device)
    ways = {}
    for name in ("ours", "plain", "plain, gathered"):
        sae = copy.deepcopy(first)
        ways[name] = ours(sae, dtype, x) if name == "ours" else Plain(sae, dtype, "," in name).step
    del first
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    most = dict.fromkeys(ways, 0)
    for number in range(asked.rounds + 1):
        for name, step in ways.items():
            took, peak = timed(step, x, asked.steps, device)
            if number:  # the first is to warm up
                seconds[name].append(took)
                most[name] = max(most[name], peak)
    where = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"TopK, {asked.width} -> {asked.latents} latents, k {asked.k}, {asked.dtype}, {asked.batch} vectors a step; "
        f"{where}"
    )
    plain = statistics.median(seconds["plain"])
    for name, took in seconds.items():
        median = statistics.median(took)
        peak = f", {most[name] / 2**30:.2f} GiB above what is kept" if cuda else ""
        print(
            f"{name:16} {asked.batch / median:12,.0f} tokens/s, {plain / median:.2f} of plain"
            f" ({min(took) * 1e3:.1f} to {max(took) * 1e3:.1f} ms a step{peak})"
        )


def vectors(count: int, width: int, device: torch.device) -> Tensor:
    """Sums of some of many directions, so that latents fire at different rates."""
    drawn = torch.Generator().manual_seed(0)
    rows = torch.randn(1024, width, generator=drawn).to(device)
    often = torch.rand(1024, generator=drawn).pow(4)
    some = (torch.rand(count, 1024, generator=drawn) < often).float().to(device)
    return some @ rows + torch.randn(count, width, generator=drawn).to(device)


def ours(sae: ip.TopKSAE, dtype: torch.dtype, x: Tensor) -> Step:
    """The step that `ip.train_sae` takes, with all that it counts."""
    learner = Learner(sae, ip.SAERecipe(learning_rate=1e-4), steps=10**6, dtype=dtype, seed=0)
    learner.begin(x, x, len(x))
    done = iter(range(10**6))

    def step(x: Tensor) -> None:
        learner.step(x, x, next(done))

    return step


def timed(step: Step, x: Tensor, steps: int, device: torch.device) -> tuple[float, int]:
    """Seconds of a step, and bytes that it takes above what is kept."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(steps):
            step(x)
        return (time.perf_counter() - start) / steps, 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    for _ in range(steps):
        step(x)
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    return took / steps, torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
