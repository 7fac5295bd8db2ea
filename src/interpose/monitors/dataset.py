"""Run a model over a dataset with hooks on it: no gradients, evaluation mode, a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from interpose.engine.hooks import Hook
from interpose.engine.model import Model
from interpose.models.running import masks
from interpose.models.running.rows import as_arguments
from interpose.models.transformer import TransformerModel
from interpose.progress import Progress, ShowProgress, count
from interpose.sweeps import prompts

Forward = Callable[[Model, Any], Any]
"""How to run a batch: ``lambda model, batch: model(batch["image"])``."""


def run_batches(
    model: Model,
    loader: Iterable[Any],
    hooks: Iterable[Hook],
    *,
    forward: Forward | None = None,
    progress: ShowProgress = True,
) -> None:
    """Run every batch with hooks live; each module is put back in the mode it was in.

    Args:
        model: the model.
        loader: batches: a DataLoader or any iterable. Of a tuple the first element is the input; a
            dictionary is passed as keywords. Tensors go to the model's device. To a model of transformers also texts,
            tokens, or what a tokenizer returns, by themselves.
        hooks: what is live meanwhile.
        forward: how to run a batch instead.
        progress: as in `ip.sweep`.
    """
    batches = _batches(model, loader)
    with (
        torch.no_grad(),
        _evaluating(model),
        model.hooks(list(hooks)),
        Progress(progress, count(batches), "batch") as bar,
    ):
        for batch in batches:
            (forward or _forward)(model, batch)
            bar.step()


def _batches(model: Model, loader: Iterable[Any]) -> Iterable[Any]:
    """Batches; of texts or tokens that are given by themselves, batches of one length."""
    texts = isinstance(loader, (str, Mapping)) or (
        isinstance(loader, Tensor) and not loader.is_floating_point()
    )
    if not texts or not isinstance(model, TransformerModel):
        return loader
    return [
        part.clean
        for part in prompts.batches(model, loader, None, size=16, prepend_bos=None, align=None)
    ]


def _forward(model: Any, batch: Any) -> None:
    def there(value: Any) -> Any:
        return masks.moved(value, model.device) if isinstance(value, Tensor) else value

    listed, reads = isinstance(batch, (tuple, list)), hasattr(model, "to_tokens")
    if reads and listed and _is_tokens(batch):
        batch = {"input_ids": batch}
    if isinstance(batch, Mapping):
        given = {name: there(value) for name, value in batch.items()}
        model(**(_with_positions(model, given) if reads else given))
    elif listed and not isinstance(batch[0], str):
        model(there(batch[0]))
    else:
        model(there(batch))


def _with_positions(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the module takes for a padded batch, so that each text has the values that it has alone."""
    made = as_arguments(model, given)
    tokens, mask = made.get("input_ids"), made.get("attention_mask")
    if tokens is None or tokens.ndim != 2 or "position_ids" in made:
        return made
    mask = model.mask_of(tokens) if mask is None else mask
    fits = mask is not None and mask.shape == tokens.shape
    return {**made, **model._with_mask(tokens, mask)} if fits else made


def _is_tokens(batch: Sequence[Any]) -> bool:
    """Whether a list is tokens of one or several texts, and no tuple of which the first is the input."""
    first = batch[0] if isinstance(batch[0], (list, tuple)) else batch
    return all(isinstance(token, int) for token in first)


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    before = {module: module.training for module in model.module.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
