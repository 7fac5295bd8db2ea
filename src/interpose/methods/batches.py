"""`ip.batches`: texts as tokens, in batches of one length, with metrics that know whose answer is whose."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.errors import NothingSelected, Unsupported
from interpose.models.running.rows import must_read_text as must_read_text
from interpose.models.running.rows import tokens_of
from interpose.models.selection import entries, missing_text, spans_of
from interpose.sweeps import prompts
from interpose.sweeps.metrics import Examples, Metric, Words, as_metric, logit
from interpose.sweeps.reference import wanted_logits
from interpose.sweeps.variants import VariantRuns

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Examples that run together, all of one length, so that none is padded.

    Attributes:
        model: whose tokens these are.
        clean: tokens, [example, pos].
        corrupt: tokens of the texts to compare with, [example, pos]; None if there are none.
        numbers: the place of each example in the dataset.
        total: how many examples the dataset has.
        first: the first position at which the two differ; 0 if there is nothing to compare.
    """

    model: TransformerModel
    clean: Tensor
    corrupt: Tensor | None
    numbers: tuple[int, ...]
    total: int
    first: int

    def __len__(self) -> int:
        return len(self.numbers)

    def measure(
        self, metric: Metric | Callable[[Tensor], Any], clean_logits: Tensor | None = None
    ) -> Callable[[Tensor], Tensor]:
        """A metric of these examples: from logits [example, pos, d_vocab] to [example], with gradients.

        Args:
            metric: one of `ip.metrics`, or a function of logits.
            clean_logits: of the clean run, for metrics that compare with it (`ip.metrics.kl`).
        """
        examples = Examples(
            model=self.model,
            tokens=self.clean,
            numbers=self.numbers,
            total=self.total,
            clean=clean_logits,
        )
        bound = as_metric(metric).bind(examples)
        rows = torch.arange(len(self), device=self.clean.device)
        return lambda logits: bound(logits, rows)

    def last_logits(self, metric: Metric | Callable[[Tensor], Any]) -> dict[str, Any]:
        """What asks a module for no more logits than a metric needs: ``model(tokens, **batch.last_logits(metric))``."""
        return wanted_logits(self.model, as_metric(metric).keep)

    def positions(self, where: int | str | Sequence[int] | Sequence[str]) -> list[list[int]]:
        """Where something is in each clean text, ascending.

        Args:
            where: positions (negative from the end), or texts of one or more whole tokens, with or without the space
                in front, wherever they are.
        """
        wanted: list[Any] = [where] if isinstance(where, (int, str)) else list(where)
        length, found = self.clean.shape[1], []
        for example, row in enumerate(self.clean.tolist()):
            places: set[int] = set()
            for one in wanted:
                if isinstance(one, str):
                    places |= self._places_of(one, row, self.numbers[example])
                else:
                    places |= set(entries(one, length, "pos", f"text {self.numbers[example]}"))
            found.append(sorted(places))
        return found

    def _places_of(self, text: str, row: list[int], number: int) -> set[int]:
        pieces = [self.model.to_single_str_token(token) for token in row]
        found = spans_of(text, pieces, row, self.model._ids([text], special=False)[0])
        if not found:
            raise NothingSelected(missing_text(text, f"text {number}", pieces))
        return {place for span in found for place in span}

    def ids(self, words: Words) -> Tensor:
        """A token for each of these examples, [example].

        Args:
            words: one token for all examples of the dataset, or one for each, as strings or ids.
        """
        examples = Examples(
            model=self.model, tokens=self.clean, numbers=self.numbers, total=self.total
        )
        found = logit(words).looked_at(examples)
        assert found is not None
        return found

    @property
    def str_tokens(self) -> list[str] | None:
        """The tokens of the clean text, where it is the only one of the dataset and there is a tokenizer."""
        if self.total > 1 or self.model._tokenizer_or_none() is None:
            return None
        return [self.model.to_single_str_token(token) for token in self.clean[0].tolist()]


def batches(
    model: TransformerModel,
    clean: Any,
    corrupt: Any = None,
    *,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
) -> list[Batch]:
    """Texts, or pairs of them, as tokens in batches of one length: the shortest first.

    ```python
    for batch in ip.batches(model, clean, corrupt):
        lead = batch.measure(ip.metrics.logit_difference(" Mary", " John"))
        print(lead(model(batch.clean)) - lead(model(batch.corrupt)))
    ```

    Args:
        model: a model of transformers, in eval mode.
        clean: a text, several, tokens [pos] or [batch, pos] as a tensor or lists, or what a tokenizer returns. Padding
            is taken off.
        corrupt: the texts to compare with, token by token; pairs of different lengths are refused.
        batch_size: how many examples run together, at most.
        prepend_bos: as in ``to_tokens``, for texts.
    """
    must_read_text(model)
    if getattr(model, "training", False):
        raise Unsupported(
            "the model is in training mode, where dropout makes every run another one. Call model.eval() first."
        )
    made = prompts.batches(
        model, clean, corrupt, size=batch_size, prepend_bos=prepend_bos, align=None
    )
    total = sum(len(part.numbers) for part in made)
    return [
        Batch(
            model=model,
            clean=tokens_of(part.clean),
            corrupt=None if part.corrupt is None else tokens_of(part.corrupt),
            numbers=part.numbers,
            total=total,
            first=part.first,
        )
        for part in made
    ]


def rows_of(model: TransformerModel, texts: Any, prepend_bos: bool | None = None) -> list[Tensor]:
    """The tokens of each text, [pos], in the order they were given, none padded.

    Args:
        model: a model of transformers, in eval mode.
        texts: as in `batches`.
        prepend_bos: as in ``to_tokens``, for texts.
    """
    made = batches(model, texts, prepend_bos=prepend_bos)
    found = {number: row for part in made for number, row in zip(part.numbers, part.clean)}
    return [found[number] for number in range(len(found))]


def work_of(runs: Sequence[VariantRuns], *others: Tensor) -> dict[str, Any]:
    """What the protocol of a result says of variants that were run, and of the tokens of other forwards."""
    tally = functools.reduce(operator.add, (one.tally for one in runs))
    for tokens in others:
        tally.add(1, tokens.numel() * runs[0].layers)
    return tally.protocol
