"""What a harvest costs beside bare forwards, and a gather beside raw memory maps: interleaved, medians.

python -m benchmarks.harvest           # a model of GPT-2 small's shape, on the CPU, one thread
python -m benchmarks.harvest --gpu     # one of Llama 8B's shape in bfloat16, in less than 100 seconds altogether
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import interpose as ip
from interpose.store.vectors import Positions, Vectors

BEGUN = time.perf_counter()
GPU_SECONDS = 78.0
"""When the last round of ``--gpu`` has to be over, after everything is imported."""


def small() -> Any:
    torch.set_num_threads(1)
    return GPT2LMHeadModel(GPT2Config()).eval()


def large(device: str, **sizes: int) -> Any:
    """A model of Llama 8B's shape, whose weights are drawn where they stay."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    config.update(sizes)
    with torch.device(device):
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


def interleaved(
    calls: dict[str, Callable[[], Any]], rounds: int, until: float | None = None
) -> dict[str, float]:
    """The median time of each, taken in turn; with a time of the clock, as many rounds as end before it."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    longest = 0.0
    for done in range(rounds):
        start = time.perf_counter()
        if until is not None and done and start + longest > until:
            break
        for name, call in calls.items():
            times[name].append(timed(call))
        longest = max(longest, time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


@contextmanager
def to_the_end() -> Iterator[None]:
    """Harvests do not stop after their last site."""
    kind, run = ip.TransformerModel, ip.TransformerModel.run_with_cache

    def whole(self: Any, *args: Any, **words: Any) -> Any:
        return run(self, *args, **{**words, "stop": False})

    with mock.patch.object(kind, "run_with_cache", whole):
        yield


class Harvests:
    """One model and some texts, which are run and harvested."""

    def __init__(self, module: Any, rows: int, length: int, batch: int) -> None:
        self.module = module
        self.model: Any = ip.wrap(module)
        self.layers = module.config.num_hidden_layers
        self.texts = torch.randint(0, module.config.vocab_size, (rows, length))
        self.on_device = self.texts.to(self.model.device)
        self.batch = batch
        self.folder = Path(tempfile.mkdtemp())

    def bare(self, part: Any, rows: int | None = None) -> None:
        """Forward passes of all texts, or the first, by the whole model or a part of it."""
        with torch.inference_mode():
            for some in self.on_device[:rows].split(self.batch):
                part(some, use_cache=False)

    def harvest(self, layer: int, rows: int | None = None) -> None:
        """The same texts harvested, at the stream after a layer."""
        shutil.rmtree(self.folder / "s", ignore_errors=True)
        tokens = self.batch * self.texts.shape[1]
        ip.harvest(
            self.model, self.texts[:rows], ("resid_post", layer), store=self.folder / "s", batch_tokens=tokens,
            progress=False,
        )  # fmt: skip

    def harvest_to_the_end(self, layer: int, rows: int | None = None) -> None:
        """As `harvest`, with the whole of each forward pass."""
        with to_the_end():
            self.harvest(layer, rows)

    def calls(self, rows: int | None = None) -> dict[str, Callable[[], Any]]:
        """What is measured, by name."""
        last, middle = self.layers - 1, self.layers // 2
        return {
            "bare forward": lambda: self.bare(self.module, rows),
            "bare, without the unembedding": lambda: self.bare(self.module.base_model, rows),
            "harvest, last layer": lambda: self.harvest(last, rows),
            "harvest, middle layer": lambda: self.harvest(middle, rows),
            "harvest, middle layer, whole forwards": lambda: self.harvest_to_the_end(middle, rows),
        }

    def report(self, found: dict[str, float]) -> None:
        """Print how long each took."""
        tokens = self.texts.numel()
        for name, seconds in found.items():
            share = found["bare forward"] / seconds
            print(
                f"{name:40} {seconds:8.3f} s {tokens / seconds:12,.0f} tokens/s {share:7.3f}x of bare"
            )
        shutil.rmtree(self.folder)


def on_cpu(rows: int, rounds: int) -> None:
    texts = Harvests(small(), rows, 128, 16)
    interleaved(texts.calls(16), 1)
    texts.report(interleaved(texts.calls(), rounds))


def on_gpu(device: str, rows: int, rounds: int, length: int = 512, **sizes: int) -> None:
    """As many rounds as there is time for; building the model and the first use of everything come before."""
    texts = Harvests(large(device, **sizes), rows, length, 16)
    print(f"the model is there after {time.perf_counter() - BEGUN:.0f} s")
    rings = pinned_rings(texts)
    interleaved(texts.calls(texts.batch), 1)
    alone = timed(texts.calls(1)["harvest, last layer"])
    calls = texts.calls() | {
        "all resid_post to pinned memory": all_pinned(texts, rings),
        "plain pinned copies of all layers": pinned_copies(texts, rings),
    }
    print(f"rounds begin after {time.perf_counter() - BEGUN:.0f} s")
    found = interleaved(calls, rounds, BEGUN + GPU_SECONDS)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    slower = max(found["bare forward"], found["plain pinned copies of all layers"])
    texts.report(found)
    print(
        f"a harvest of one text: {alone:.2f} s (hashing the weights, the store's files)\n"
        f"all resid_post: {slower / found['all resid_post to pinned memory']:.3f}x of the slower of bare and copies; "
        f"{time.perf_counter() - BEGUN:.0f} s altogether, on {name}"
    )


def pinned_rings(texts: Harvests) -> list[torch.Tensor]:
    """Two buffers of pinned memory, each for a batch at all layers."""
    count, width = texts.batch * texts.texts.shape[1], texts.module.config.hidden_size
    pinned = texts.model.device.type == "cuda"
    shape = (texts.layers, count, width)
    return [torch.empty(shape, dtype=torch.bfloat16, pin_memory=pinned) for _ in range(2)]


def pinned_copies(texts: Harvests, rings: list[torch.Tensor]) -> Callable[[], None]:
    """As many bytes as all layers have, from the device to pinned memory, and nothing else."""
    values = torch.randn(rings[0].shape[1:], device=texts.model.device).bfloat16()

    def copy() -> None:
        for number, _ in enumerate(texts.on_device.split(texts.batch)):
            for layer in range(texts.layers):
                rings[number % 2][layer].copy_(values, non_blocking=True)

    return copy


def all_pinned(texts: Harvests, rings: list[torch.Tensor]) -> Callable[[], None]:
    """What a harvest of all layers does, but for the disk: pinned memory, and a stream of its own."""
    vectors = Vectors(texts.model, "blocks.*.hook_resid_post")
    cuda = texts.model.device.type == "cuda"
    side = torch.cuda.Stream() if cuda else None
    rows = texts.texts.tolist()

    def run() -> None:
        events: list[Any] = [None, None]
        for number, at in enumerate(range(0, len(rows), texts.batch)):
            ring = number % 2
            if events[ring] is not None:
                events[ring].synchronize()
            made = vectors.read(rows[at : at + texts.batch], Positions())
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side) if side is not None else torch.no_grad():
                for layer, values in enumerate(made.values()):
                    if side is not None:
                        values.record_stream(side)
                    rings[ring][layer].copy_(values, non_blocking=True)
                events[ring] = None if side is None else side.record_event()

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
    parser.add_argument("--gpu", action="store_true", help="a model of Llama 8B's shape on a GPU")
    parser.add_argument("--small", action="store_true", help="try what --gpu does, on a CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, help="how many texts, of 128 tokens or 512 on a GPU")
    given = parser.parse_args()
    if given.gpu:
        on_gpu("cuda", given.rows or 192, given.rounds)
    elif given.small:
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        }
        on_gpu("cpu", given.rows or 64, given.rounds, 32, num_key_value_heads=2, **sizes)
    else:
        on_cpu(given.rows or 64, given.rounds)
        gathers(131_072, 1024, 20)


if __name__ == "__main__":
    main()
