"""Run a model over a dataset with hooks on it: no gradients, evaluation mode, a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from interpose.engine.hooks import Hook
from interpose.engine.model import Model

Forward = Callable[[Model, Any], Any]
"""How to run a batch: ``lambda model, batch: model(batch["image"])``."""


def run_batches(
    model: Model,
    loader: Iterable[Any],
    hooks: Iterable[Hook],
    *,
    forward: Forward | None = None,
    progress: bool = True,
) -> None:
    """Run every batch with hooks live; each module is put back in the mode it was in.

    Args:
        model: the model.
        loader: batches: a DataLoader or any iterable. Of a tuple the first element is the input; a
            dictionary is passed as keywords. Tensors go to the model's device.
        hooks: what is live meanwhile.
        forward: how to run a batch instead.
        progress: show a bar, where there is a terminal or a notebook.
    """
    from tqdm.auto import tqdm

    batches = tqdm(loader, desc="batches", disable=None if progress else True)
    with torch.no_grad(), _evaluating(model), model.hooks(list(hooks)):
        for batch in batches:
            (forward or _forward)(model, batch)


def _forward(model: Model, batch: Any) -> None:
    def there(value: Any) -> Any:
        return value.to(model.device) if isinstance(value, Tensor) else value

    if isinstance(batch, Mapping):
        model(**{name: there(value) for name, value in batch.items()})
    elif isinstance(batch, (tuple, list)) and not isinstance(batch[0], str):
        model(there(batch[0]))
    else:
        model(there(batch))


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    before = {module: module.training for module in model.module.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
