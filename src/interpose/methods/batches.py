"""`ip.batches`: texts as tokens, in batches of one length, with metrics that know whose answer is whose."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.activations import ActivationRows
from interpose.edits.stored import read_stored
from interpose.engine.cache import Cache
from interpose.errors import NothingSelected, Unsupported
from interpose.models.running.rows import must_read_text as must_read_text
from interpose.models.running.rows import tokens_of
from interpose.models.selection import entries, missing_text, spans_of
from interpose.progress import Progress
from interpose.sweeps import noise, prompts
from interpose.sweeps.metrics import Examples, Metric, Words, as_metric, logit
from interpose.sweeps.reference import wanted_logits
from interpose.sweeps.variants import VariantRuns

if TYPE_CHECKING:
    from interpose.edits.selector import at
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
        rows: where `read` has values from, such as a store; None runs the model.
    """

    model: TransformerModel
    clean: Tensor
    corrupt: Tensor | None
    numbers: tuple[int, ...]
    total: int
    first: int
    rows: ActivationRows | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, where: at) -> Cache:
        """The values of the clean texts at a place, without gradients: of a run, or from where they are stored.

        Args:
            where: which sites, and which part of each value.
        """
        if self.rows is not None:
            return read_stored(self.rows, self.model, where, self.numbers, self.clean)
        with torch.no_grad():
            _, cache = self.model.run_with_cache(self.clean, names_filter=where, return_type=None)
        return cache

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
    _must_run(model)
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


def batches_to_read(
    model: TransformerModel,
    texts: Any,
    *,
    batch_size: int,
    prepend_bos: bool | None = None,
    runs: bool = False,
    among: range | None = None,
) -> list[Batch]:
    """As `batches`, also of a store, whose rows are the examples: for methods that look at values by `Batch.read`.

    Args:
        model: a model of transformers, in eval mode.
        texts: as in `batches`, or a store.
        batch_size: how many examples run together, at most.
        prepend_bos: as in ``to_tokens``, for texts.
        runs: whether the method runs the model besides, so that both must be of the model as it is.
        among: which rows of a store; by default all.
    """
    if not isinstance(texts, ActivationRows):
        return batches(model, texts, batch_size=batch_size, prepend_bos=prepend_bos)
    _must_run(model)
    if prepend_bos is not None:
        raise ValueError(
            "a store has tokens, and whether BOS is among them was decided when it was filled: leave prepend_bos out."
        )
    if batch_size < 1:
        raise ValueError(f"batch_size is at least 1; got {batch_size}")
    texts.must_be_of(model)
    if runs and texts.hooks:
        raise Unsupported(
            f"this store was filled while {', '.join(texts.hooks)} changed values, and this method also runs the model "
            "as it is. Harvest without hooks, or give the texts."
        )
    return [
        Batch(
            model=model,
            clean=torch.stack([texts.tokens_of(row) for row in some]).to(model.device),
            corrupt=None,
            numbers=tuple(some),
            total=len(texts),
            first=0,
            rows=texts,
        )
        for some in _of_one_length(texts, range(len(texts)) if among is None else among, batch_size)
    ]


def _of_one_length(rows: ActivationRows, among: range, size: int) -> list[list[int]]:
    """Which rows run together: the shortest first, as of texts."""
    if not len(among):
        raise ValueError("this store has no rows yet: ip.harvest(...) fills it.")
    lengths = rows.lengths()[among.start : among.stop]
    found = []
    for length in lengths.unique().tolist():
        same = ((lengths == length).nonzero()[:, 0] + among.start).tolist()
        found += [same[at : at + size] for at in range(0, len(same), size)]
    return found


def _must_run(model: TransformerModel) -> None:
    must_read_text(model)
    if getattr(model, "training", False):
        raise Unsupported(
            "the model is in training mode, where dropout makes every run another one. Call model.eval() first."
        )


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


def floor_of(runs: Sequence[VariantRuns], advance: Progress) -> float:
    """In 16 bits, how far rounding alone moves a metric's mean over the examples of all runs; 0 in 32 bits.

    Args:
        runs: of some examples each; all of them are done.
        advance: the job; of one that was ended it is not known, and infinite.
    """
    if runs[0].grain is None:
        return 0.0
    if advance.ended is not None:
        return math.inf
    return noise.floor(torch.cat([one.noise() for one in runs], dim=1))


def work_of(runs: Sequence[VariantRuns], *others: Tensor) -> dict[str, Any]:
    """What the protocol of a result says of variants that were run, and of the tokens of other forwards."""
    tally = functools.reduce(operator.add, (one.tally for one in runs))
    for tokens in others:
        tally.add(1, tokens.numel() * runs[0].layers)
    return tally.protocol
