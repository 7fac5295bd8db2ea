"""What metrics say of logits: in float32 where those of a few tokens are there so, and as the model itself has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from interpose.sweeps.metrics import Examples, Measure, Metric


def precisions(logits: Tensor, columns: Tensor | None, own: torch.dtype) -> list[Tensor]:
    """Logits by each precision in which they are there: those that are shown, then the model's own.

    Args:
        logits: [..., d_vocab or column], with twice as many columns where `answers.only` made both.
        columns: the tokens whose logits were computed; None for all.
        own: the dtype that the unembedding computes in.
    """
    if columns is None or logits.shape[-1] == len(columns):
        return [logits]
    theirs, finer = logits.chunk(2, -1)
    return [finer, theirs.to(own)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The metrics of some examples.

    Attributes:
        metrics: what is measured.
        measures: each metric for these examples, by each precision of logits.
        columns: the tokens whose logits are computed; None for all.
        own: the dtype that the unembedding computes in.
        batch: how many examples there are.
    """

    metrics: Sequence[Metric]
    measures: Sequence[Sequence[Measure]]
    columns: Tensor | None
    own: torch.dtype
    batch: int

    @staticmethod
    def of(metrics: Sequence[Metric], examples: Examples, own: torch.dtype) -> Measurement:
        """Metrics of examples whose clean logits are there."""
        assert examples.clean is not None
        clean = precisions(examples.clean, examples.columns, own)
        return Measurement(
            metrics=metrics,
            measures=[
                [one.bind(replace(examples, clean=each)) for one in metrics] for each in clean
            ],
            columns=examples.columns,
            own=own,
            batch=len(examples.tokens),
        )

    def __call__(self, logits: Tensor, blur: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """What metrics say of the rows of some cells, [precision, metric, cell, example].

        Args:
            logits: [cell and example, kept, d_vocab or column].
            blur: what is done to the model's own before they are read.
        """
        parts = precisions(logits, self.columns, self.own)
        if blur is not None:
            parts[-1] = blur(parts[-1])
        found = [
            torch.stack([self._measured(*pair, part) for pair in zip(self.metrics, measures)])
            for part, measures in zip(parts, self.measures)
        ]
        each: Tensor = torch.stack(found).float().unflatten(-1, (-1, self.batch))
        return each

    def _measured(self, metric: Metric, measure: Measure, logits: Tensor) -> Tensor:
        rows = torch.arange(len(logits), device=logits.device) % self.batch
        if not metric.by_batch:
            return measure(logits, rows)
        parts = zip(logits.split(self.batch), rows.split(self.batch))
        return torch.cat([measure(*part) for part in parts])
