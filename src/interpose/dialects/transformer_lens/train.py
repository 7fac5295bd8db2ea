"""Training a small model on a dataset: the loop that TransformerLens has, and checkpoints to go on from.

The order of the data and every random number of a step depend on the seed and the step alone, so a training that
was stopped and taken up again ends with the same bits as one that was not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from interpose.dialects.transformer_lens import checkpoints
from interpose.dialects.transformer_lens.utilities.optional import needs

OPTIMIZERS = ("Adam", "AdamW", "SGD")


@dataclass
class HookedTransformerTrainConfig:
    """What a training is.

    Args:
        num_epochs: how often to go through the dataset.
        batch_size: how many rows a step takes.
        lr: the learning rate.
        seed: the same seed gives the same order of the data.
        momentum: of SGD.
        max_grad_norm: gradients are scaled down to this norm, all together.
        weight_decay: with Adam and AdamW it is decoupled, as AdamW does it; none by default.
        optimizer_name: ``Adam``, ``AdamW`` or ``SGD``.
        device: where to train; where the model is by default.
        warmup_steps: over how many steps the learning rate grows; the first of them has rate 0.
        save_every: after how many steps to write a checkpoint, ``step_N.pt`` in ``save_dir``.
        save_dir: the folder for them.
        wandb: whether to log to Weights and Biases; needs the wandb package.
        wandb_project_name: ``easy-transformer`` by default.
        print_every: after how many steps the progress bar shows the loss; None for no bar.
        max_steps: an epoch ends after so many steps.
    """

    num_epochs: int
    batch_size: int
    lr: float = 1e-3
    seed: int = 0
    momentum: float = 0.0
    max_grad_norm: float | None = None
    weight_decay: float | None = None
    optimizer_name: str = "Adam"
    device: Any = None
    warmup_steps: int = 0
    save_every: int | None = None
    save_dir: Any = None
    wandb: bool = False
    wandb_project_name: str | None = None
    print_every: int | None = 50
    max_steps: int | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise a ValueError if this is no training."""
        if self.optimizer_name not in OPTIMIZERS:
            raise ValueError(
                f"no optimizer {self.optimizer_name!r}: optimizer_name is one of {', '.join(OPTIMIZERS)}."
            )
        for name in ("num_epochs", "batch_size", "save_every", "print_every", "max_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: give at least 1.")
        if self.save_every is not None and self.save_dir is None:
            raise ValueError(f"save_every={self.save_every}, but no save_dir to save in: give one.")


def train(
    model: Any,
    config: HookedTransformerTrainConfig,
    dataset: Any,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    *,
    resume_from: str | os.PathLike[str] | None = None,
) -> Any:
    """Train a model in place, and give it back.

    ```python
    config = HookedTransformerTrainConfig(num_epochs=10, batch_size=64, lr=3e-3, max_grad_norm=1.0)
    train(model, config, TensorDataset(x, y), lambda model, batch: cross_entropy(model(batch[0])[:, -1], batch[1]))
    ```

    Args:
        model: a `HookedTransformer`, or any module with a ``loss_fn``.
        config: the settings.
        dataset: has a length and gives its rows by number. Without a ``loss_fn`` each row is a mapping with
            ``tokens``, and the loss is the model's own.
        loss_fn: from the model and a batch of rows, as torch's `DataLoader` joins them, to the loss.
        resume_from: a checkpoint, or the folder of a training's checkpoints for the last of them. The numbers
            are those of a training that was never stopped.
    """
    config.validate()
    if len(dataset) == 0:
        raise ValueError("the dataset has no rows to train on.")
    settings = checkpoints.settings_of(config, len(dataset))
    log = _wandb_log(settings) if config.wandb else None
    if config.device is not None:
        model.to(config.device)
    model.train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        raise ValueError("no weight of the model has requires_grad, so there is nothing to train.")
    device, loss_of = weights[0].device, loss_fn or _own_loss
    optimizer = _optimizer(config, weights)
    each = min(math.ceil(len(dataset) / config.batch_size), config.max_steps or len(dataset))
    first, last = 0, each * config.num_epochs
    if resume_from is not None:
        first = checkpoints.load(Path(resume_from), model, optimizer, settings)
    batches = _batches(dataset, config, range(first, last), each, device)
    shown = tqdm(total=last, initial=first, unit="step", disable=config.print_every is None)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), shown:
        for step, batch in enumerate(batches, start=first):
            if config.warmup_steps > 0:
                for group in optimizer.param_groups:
                    group["lr"] = config.lr * min(1.0, step / config.warmup_steps)
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            if config.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm)
            optimizer.step()
            shown.update()
            done = step + 1
            if config.print_every is not None and done % config.print_every == 0:
                shown.set_postfix(loss=f"{loss.item():.4f}")
            if log is not None:
                samples = min((step % each + 1) * config.batch_size, len(dataset))
                log({"train_loss": loss.item(), "samples": samples, "epoch": step // each + 1})
            if config.save_every is not None and done % config.save_every == 0:
                checkpoints.save(Path(config.save_dir), done, model, optimizer, settings)
    optimizer.zero_grad()
    return model


def _optimizer(config: HookedTransformerTrainConfig, weights: list[Tensor]) -> Any:
    if config.optimizer_name == "SGD":
        decay = config.weight_decay or 0.0
        return torch.optim.SGD(weights, config.lr, config.momentum, weight_decay=decay)
    if config.weight_decay is None:
        return torch.optim.Adam(weights, config.lr)
    return torch.optim.AdamW(weights, config.lr, weight_decay=config.weight_decay)


def _batches(
    dataset: Any, config: HookedTransformerTrainConfig, steps: range, each: int, device: Any
) -> Iterator[Any]:
    """The batches of some steps; ``each`` of them are an epoch."""
    loader: Iterator[Any] = iter(())
    for step in steps:
        if step == steps.start or step % each == 0:
            rng = torch.Generator("cpu").manual_seed(config.seed * 1_000_003 + step // each)
            order = torch.randperm(len(dataset), generator=rng, device="cpu")
            batches = [rows.tolist() for rows in order.split(config.batch_size)]
            loader = iter(DataLoader(dataset, batch_sampler=batches[step % each :], generator=rng))
        # Rows that are drawn, dropout and the like: the same numbers in this step of every run.
        torch.default_generator.manual_seed(config.seed * 1_000_003 + step)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(config.seed * 1_000_003 + step)
        yield _moved(next(loader), device)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    return [_moved(value, device) for value in batch] if isinstance(batch, (list, tuple)) else batch


def _own_loss(model: Any, batch: Any) -> Any:
    if not isinstance(batch, Mapping) or "tokens" not in batch:
        names = f" with {', '.join(batch)}" if isinstance(batch, Mapping) else ""
        raise TypeError(
            f"a batch of this dataset is a {type(batch).__name__}{names}, not a mapping with 'tokens': "
            "give loss_fn, from the model and a batch to the loss."
        )
    return model(batch["tokens"], return_type="loss")


def _wandb_log(settings: dict[str, Any]) -> Any:
    wandb = needs("wandb", "train with wandb=True")
    wandb.init(project=settings["wandb_project_name"] or "easy-transformer", config=settings)
    return wandb.log
