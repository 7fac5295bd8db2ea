"""What a harvest costs beside bare forwards, and a gather beside raw memory maps: interleaved, medians.

python -m benchmarks.harvest                 # a model of GPT-2 small's shape, on the CPU, one thread
python -m benchmarks.harvest --device cuda   # one of Llama 8B's shape in bfloat16
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import interpose as ip
from interpose.store.vectors import Positions, Vectors


def small() -> Any:
    torch.set_num_threads(1)
    return GPT2LMHeadModel(GPT2Config()).eval()


def large() -> Any:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


def timed(call: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median time of each, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call))
    return {name: statistics.median(found) for name, found in times.items()}


def harvests(device: str, rows: int, length: int, batch: int, rounds: int, only: str) -> None:
    module = large() if device == "cuda" else small()
    model = ip.wrap(module)
    layers = module.config.num_hidden_layers
    texts = torch.randint(0, 50000, (rows, length), device=device)
    folder = Path(tempfile.mkdtemp())

    def bare(part: Any) -> None:
        with torch.inference_mode():
            for at in range(0, rows, batch):
                part(texts[at : at + batch], use_cache=False)

    def harvest(site: Any) -> None:
        shutil.rmtree(folder / "s", ignore_errors=True)
        ip.harvest(
            model, texts, site, store=folder / "s", batch_tokens=batch * length, progress=False
        )

    calls: dict[str, Callable[[], Any]] = {
        "bare forward": lambda: bare(module),
        "bare, without the unembedding": lambda: bare(module.base_model),
        "harvest, last layer": lambda: harvest(("resid_post", layers - 1)),
        "harvest, middle layer": lambda: harvest(("resid_post", layers // 2)),
    }
    if device == "cuda":
        calls["plain pinned copies of all layers"] = pinned_copies(layers, texts, batch)
        calls["all resid_post to pinned memory"] = all_pinned(model, layers, texts, batch)
    chosen = {name: call for name, call in calls.items() if name == "bare forward" or only in name}
    found = interleaved(chosen, rounds)
    for name, seconds in found.items():
        rate, share = rows * length / seconds, found["bare forward"] / seconds
        print(f"{name:36} {seconds:8.3f} s {rate:12,.0f} tokens/s {share:7.3f}x of bare")
    shutil.rmtree(folder)


def pinned_copies(layers: int, texts: torch.Tensor, batch: int) -> Callable[[], None]:
    """As many bytes as all layers have, from the device to pinned memory, and nothing else."""
    count = batch * texts.shape[1]
    values = torch.randn(count, 4096, device="cuda", dtype=torch.bfloat16)
    target = torch.empty(layers, count, 4096, dtype=torch.bfloat16, pin_memory=True)

    def copy() -> None:
        for _ in range(0, len(texts), batch):
            for layer in range(layers):
                target[layer].copy_(values, non_blocking=True)

    return copy


def all_pinned(model: Any, layers: int, texts: torch.Tensor, batch: int) -> Callable[[], None]:
    """What a harvest of all layers does, but for the disk: two rings of pinned memory, and a stream of their own."""
    vectors = Vectors(model, "blocks.*.hook_resid_post")
    count = batch * texts.shape[1]
    rings = [
        torch.empty(layers, count, 4096, dtype=torch.bfloat16, pin_memory=True) for _ in range(2)
    ]
    events: list[Any] = [None, None]
    side = torch.cuda.Stream()
    rows = texts.tolist()

    def run() -> None:
        for number, at in enumerate(range(0, len(rows), batch)):
            ring = number % 2
            if events[ring] is not None:
                events[ring].synchronize()
            made = vectors.read(rows[at : at + batch], Positions())
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for layer, values in enumerate(made.values()):
                    values.record_stream(side)
                    rings[ring][layer].copy_(values, non_blocking=True)
                events[ring] = side.record_event()

    return run


def gathers(tokens: int, width: int, rounds: int) -> None:
    """8,192 random vectors out of a store of several segments, and out of numpy's memory maps of the same files."""
    folder = Path(tempfile.mkdtemp())
    config = GPT2Config(n_layer=1, n_embd=width, n_head=8, vocab_size=100)
    model = ip.wrap(GPT2LMHeadModel(config).eval())
    texts = torch.randint(0, 100, (tokens // 128, 128))
    store = ip.harvest(
        model, texts, ("resid_post", 0), store=folder / "s", segment_texts=len(texts) // 4, progress=False
    )  # fmt: skip
    name = "blocks.0.hook_resid_post"
    rows, pos = torch.randint(0, len(store), (8192,)), torch.randint(0, 128, (8192,))
    maps = []
    for segment in store.segments:
        path = next(path for path in segment.folder.iterdir() if "resid_post" in path.name)
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
        shape = (segment.commit.vectors, width)
        maps.append(np.memmap(path, np.float32, "r", start, shape))
    size, flat = len(maps[0]), (rows * 128 + pos).numpy()

    def raw() -> Any:
        found = np.empty((len(flat), width), np.float32)
        for number, held in enumerate(maps):
            mine = np.nonzero(flat // size == number)[0]
            found[mine] = held[flat[mine] % size]
        return found

    assert np.array_equal(raw(), store.gather(name, rows, pos).numpy())
    found = interleaved({"raw": raw, "store": lambda: store.gather(name, rows, pos)}, rounds)
    print(
        f"gather of 8,192 vectors of {width} float32 from {tokens:,}: {found['store'] * 1e3:.2f} ms, raw memory maps "
        f"{found['raw'] * 1e3:.2f} ms: {found['raw'] / found['store']:.2f}x"
    )
    shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--only", default="", help="measure what has this word in its name")
    given = parser.parse_args()
    if given.device == "cuda":
        harvests("cuda", 4 * given.rows, 512, 32, given.rounds, given.only)
    else:
        harvests("cpu", given.rows, 128, 16, given.rounds, given.only)
    gathers(131_072, 1024, 20)


if __name__ == "__main__":
    main()
