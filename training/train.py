"""Train the pocket model: `python -m training.train`. One command, seeded; a second call goes on where the first ended.

A batch depends on the seed and the step alone, so an interrupted training that is taken up again sees the same batches.
Half the steps have short rows, so that many documents start where a user's prompt starts; some rows are random tokens
said again and again, with no loss on the first saying, which nothing can predict.
"""

import argparse
import json
import math
import os
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from training import corpus, tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a training is: the same settings and seed give the same model, up to the machine's arithmetic."""

    seed: int = 0
    documents: int = 6_000_000
    steps: int = 12_000
    batch_tokens: int = 32_768
    learning_rate: float = 1.5e-3
    warm_up: int = 400
    weight_decay: float = 0.1
    layers: int = 7
    heads: int = 6
    width: int = 192
    context: int = 256
    random_rows: float = 0.15

    def rows(self, step: int) -> tuple[int, int]:
        """How many rows a step has, and how long they are."""
        length = self.context if step % 2 else self.context // 4
        return max(1, self.batch_tokens // length), length

    def rate(self, step: int) -> float:
        """The learning rate: a warm-up, then half a cosine down to nothing."""
        done = max(0, step - self.warm_up) / max(1, self.steps - self.warm_up)
        return (
            self.learning_rate
            * min(1.0, (step + 1) / self.warm_up)
            * (1 + math.cos(math.pi * done))
            / 2
        )


def build(settings: Settings, vocabulary: int) -> GPT2LMHeadModel:
    """A GPT-2 of the size asked for, freshly initialised."""
    torch.manual_seed(settings.seed)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=settings.context,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


class Batches:
    """Rows of the corpus and of repeated random tokens, with what the loss counts."""

    def __init__(self, tokens: Tensor, vocabulary: int, settings: Settings) -> None:
        self.tokens = tokens
        self.vocabulary = vocabulary
        self.settings = settings
        ends = torch.nonzero(tokens == 0).flatten()
        self.starts = ends[
            ends < len(tokens) - settings.context - 2
        ]  # an end of text, then a document

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels of one step, each [rows, length]; labels are already shifted."""
        rows, length = self.settings.rows(step)
        device = self.tokens.device
        rng = torch.Generator(device).manual_seed(self.settings.seed * 1_000_003 + step)

        def draw(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=rng, device=device)

        # Half the rows start with the end-of-text token, half with the document itself.
        first = self.starts[draw(0, len(self.starts), rows)] + draw(0, 2, rows)
        text = self.tokens[first[:, None] + torch.arange(length + 1, device=device)].long()

        period = draw(4, length // 2, rows, 1)
        place = torch.arange(length + 1, device=device).expand(rows, -1)
        said = draw(1, self.vocabulary, rows, length)
        again = said.gather(1, place % period)
        is_random = torch.rand(rows, 1, generator=rng, device=device) < self.settings.random_rows
        start = draw(0, 2, rows, 1)  # half of them after an end of text
        shifted = again.gather(1, (place - start).clamp(min=0))
        shifted = torch.where((place == 0) & (start == 1), 0, shifted)

        row = torch.where(is_random, shifted, text)
        label = row[:, 1:].masked_fill(is_random & (place[:, 1:] <= period + start), -100)
        return row[:, :-1], label


@dataclass(slots=True)
class Training:
    """A model being trained, with what is needed to stop and go on."""

    settings: Settings
    folder: Path
    model: GPT2LMHeadModel
    batches: Batches
    step: int = 0
    seconds: float = 0.0

    def run(self, *, save_every: int = 2_000, until: int | None = None) -> None:
        """Train to the end, or to a step."""
        device = self.batches.tokens.device
        cuda = device.type == "cuda"
        decayed = [weight for weight in self.model.parameters() if weight.ndim > 1]
        others = [weight for weight in self.model.parameters() if weight.ndim <= 1]
        groups = [
            {"params": decayed, "weight_decay": self.settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=cuda)
        self._take_up(optimizer)
        loss_of = torch.compile(self._loss, dynamic=False) if cuda else self._loss
        last = self.settings.steps if until is None else until
        began = time.monotonic() - self.seconds
        shown = tqdm(total=self.settings.steps, initial=self.step, desc="training", unit="step")
        while self.step < last:
            for group in optimizer.param_groups:
                group["lr"] = self.settings.rate(self.step)
            row, label = self.batches(self.step)
            with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
                loss = loss_of(row, label)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.step += 1
            shown.update()
            if self.step % 100 == 0:
                shown.set_postfix(loss=f"{loss.item():.4f}")
            if self.step % save_every == 0 or self.step == last:
                self.seconds = time.monotonic() - began
                self._save(optimizer)
        shown.close()

    def _loss(self, row: Tensor, label: Tensor) -> Tensor:
        logits = self.model(row, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), label.flatten())

    def _take_up(self, optimizer: torch.optim.Optimizer) -> None:
        """Go on from the folder's checkpoint, if it is of the same training."""
        kept = self.folder / "checkpoint.pt"
        if not kept.exists():
            return
        state = torch.load(kept, map_location=self.batches.tokens.device, weights_only=True)
        if state["settings"] != asdict(self.settings):
            raise SystemExit(
                f"{kept} is of another training: {state['settings']}. Give another --out, or remove it."
            )
        self.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]

    def _save(self, optimizer: torch.optim.Optimizer) -> None:
        state = {
            "settings": asdict(self.settings),
            "model": self.model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        partly = self.folder / "checkpoint.partly.pt"
        torch.save(state, partly)
        partly.replace(self.folder / "checkpoint.pt")


def export(model: GPT2LMHeadModel, folder: Path) -> None:
    """Write the model's folder: weights as float16, and a config that loads them as float32."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    weights = {
        name: weight.detach().cpu().half().contiguous()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def train(settings: Settings, folder: Path, *, device: str, workers: int) -> Path:
    """Make the text, the tokenizer and the model; the finished model's folder."""
    finished = folder / "model"
    finished.mkdir(parents=True, exist_ok=True)
    if not (finished / "tokenizer.json").exists():
        # One tokenizer for every seed, so that models of different seeds share their vocabulary.
        built = tokenizer.build(corpus.documents("tokenizer", 100_000))
        tokenizer.save(built, finished, context=settings.context)
    vocabulary = len(json.loads((finished / "tokenizer.json").read_text())["model"]["vocab"])
    row = corpus.corpus(
        folder,
        finished / "tokenizer.json",
        seed=settings.seed,
        count=settings.documents,
        workers=workers,
    )
    tokens = torch.from_numpy(row.astype("int16")).to(device)
    model = build(settings, vocabulary).to(device).train()
    if device != "cpu":
        torch.set_float32_matmul_precision("high")
    training = Training(settings, folder, model, Batches(tokens, vocabulary, settings))
    training.run()
    export(model, finished)
    print(f"{training.step} steps in {training.seconds:.0f} s of training: {finished}")  # noqa: T201
    return finished


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    defaults = Settings()
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--documents", type=int, default=defaults.documents)
    parser.add_argument("--out", type=Path, default=Path("build/pocket"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--install", type=Path, help="copy the finished model here")
    args = parser.parse_args()
    settings = Settings(seed=args.seed, steps=args.steps, documents=args.documents)
    finished = train(settings, args.out, device=args.device, workers=args.workers)
    if args.install:
        shutil.copytree(finished, args.install, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
