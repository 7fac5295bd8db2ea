"""Metrics: what is measured of a run's logits, one number for each example.

Each is a small frozen dataclass. ``bind`` looks tokens up for some examples, and gives a function of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.errors import Unsupported
from interpose.files.schema import ANYTHING, Field, MapOf, record_of, shown
from interpose.models.running.forward import next_token_loss
from interpose.sweeps.narrowing import Filled

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

Word = str | int
"""A token, as a string or an id."""
Words = Word | Sequence[Word]
"""One token for all examples, or one for each."""
Measure = Callable[[Tensor, Tensor], Tensor]
"""From logits [row, kept, d_vocab] and the rows' examples [row] to numbers [row]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """What a metric may look at besides logits.

    Attributes:
        model: for its tokenizer.
        tokens: of the run that is changed, [example, pos].
        numbers: the place of each in the whole dataset.
        total: how many examples the dataset has.
        columns: the tokens whose logits were computed, in order; None for all.
        filled: makes all logits of those that were computed, for functions; None where all were.
        clean: logits of the clean run, [example, kept, d_vocab or column].
        mask: [example, pos], 0 where there is padding; None if there is none.
    """

    model: TransformerModel
    tokens: Tensor
    numbers: Sequence[int]
    total: int
    columns: Tensor | None = None
    filled: Filled | None = None
    clean: Tensor | None = None
    mask: Tensor | None = None


_KINDS: dict[str, type[Metric]] = {}


@dataclass(frozen=True, slots=True, repr=False)
class Metric:
    """What is measured at one position.

    Args:
        pos: which position's logits; the last by default.
    """

    pos: int = field(default=-1, kw_only=True)

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__] = cls

    def __repr__(self) -> str:
        said = [(option, getattr(self, option.name)) for option in fields(self)]
        said.sort(key=lambda pair: bool(pair[0].kw_only))
        parts = [
            _shown(value) if option.default is MISSING else f"{option.name}={value!r}"
            for option, value in said
            if option.default is MISSING or value != option.default
        ]
        return f"{type(self).__name__}({', '.join(parts)})"

    def to_dict(self) -> dict[str, Any]:
        """Itself as data that JSON takes."""
        said = {option.name: _plain(getattr(self, option.name)) for option in fields(self)}
        usual = {option.name: option.default for option in fields(self)}
        return {
            "type": type(self).__name__,
            **{name: value for name, value in said.items() if value != usual[name]},
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Metric:
        """What `to_dict` wrote."""
        return metric_of(data, Field("this dictionary"))

    def to_python(self) -> str:
        """An expression that makes the same again, with interpose imported as ``ip``."""
        self.to_dict()  # or why not
        if type(self).__module__ != __name__:
            raise ValueError(f"{self!r} is defined in {type(self).__module__}, not in ip.metrics.")
        return f"ip.metrics.{self!r}"

    @property
    def keep(self) -> int | None:
        """How many logits from the end are needed; None for all."""
        return -self.pos if self.pos < 0 else None

    @property
    def by_batch(self) -> bool:
        """Whether it must see the examples of a cell together, and alone."""
        return False

    def words(self) -> tuple[Words, ...] | None:
        """The tokens whose logits it looks at; None for all."""
        return None

    def looked_at(self, examples: Examples) -> Tensor | None:
        """Those tokens' ids, for some examples."""
        words = self.words()
        if words is None:
            return None
        return torch.cat([self._ids(some, examples, "a metric") for some in words])

    def bind(self, examples: Examples) -> Measure:
        """The function that measures logits of these examples."""
        raise NotImplementedError

    def _places(self, words: Words, examples: Examples, what: str) -> Tensor:
        """Where the logit of each example's token is among those that were computed."""
        ids = self._ids(words, examples, what)
        return ids if examples.columns is None else torch.searchsorted(examples.columns, ids)

    def _ids(self, words: Words, examples: Examples, what: str) -> Tensor:
        """The token of each example."""
        single = isinstance(words, (str, int)) or getattr(words, "ndim", 1) == 0
        listed = [words] * examples.total if single else list(words)  # type: ignore[arg-type]
        if len(listed) != examples.total:
            raise ValueError(
                f"{what} has {len(listed)} tokens for {examples.total} examples: give one for each, or one for all."
            )
        chosen = [listed[number] for number in examples.numbers]
        ends = examples.tokens[:, : self.pos + 1 or None]
        lookup = examples.model.to_answer
        ids = [
            lookup(word, row) if isinstance(word, str) else int(word)  # type: ignore[arg-type]
            for word, row in zip(chosen, ends)
        ]
        _must_be_tokens(ids, examples.model, what)
        return torch.tensor(ids, device=examples.tokens.device)

    def _there(self, logits: Tensor) -> Tensor:
        """The logits at the position, in float32, [row, d_vocab]."""
        if logits.ndim != 3:
            raise Unsupported(
                f"{self!r} looks at logits [batch, pos, d_vocab] of tokens, and the model gives {list(logits.shape)}: "
                "it predicts no tokens. Give a function of what it gives, one number for each row: "
                "metric=lambda logits: logits[:, 1]."
            )
        return logits[:, self.pos].float()


@dataclass(frozen=True, slots=True, repr=False)
class logit(Metric):
    """The logit of a token: ``logit(" Paris")``."""

    answer: Words

    def words(self) -> tuple[Words, ...]:
        """The answer alone."""
        return (self.answer,)

    def bind(self, examples: Examples) -> Measure:
        """The logit of each row's answer."""
        ids = self._places(self.answer, examples, "answer")
        return lambda logits, rows: _pick(self._there(logits), ids[rows])


@dataclass(frozen=True, slots=True, repr=False)
class logit_difference(Metric):
    """How far one token's logit is above another's: ``logit_difference(" Mary", " John")``."""

    answer: Words
    instead: Words

    def words(self) -> tuple[Words, ...]:
        """The two."""
        return (self.answer, self.instead)

    def bind(self, examples: Examples) -> Measure:
        """The difference of each row's two tokens."""
        ids = self._places(self.answer, examples, "answer")
        others = self._places(self.instead, examples, "instead")

        def measure(logits: Tensor, rows: Tensor) -> Tensor:
            there = self._there(logits)
            return _pick(there, ids[rows]) - _pick(there, others[rows])

        return measure


@dataclass(frozen=True, slots=True, repr=False)
class probability(Metric):
    """The probability of a token, or its logarithm."""

    answer: Words
    log: bool = field(default=False, kw_only=True)

    def bind(self, examples: Examples) -> Measure:
        """The probability of each row's answer."""
        ids = self._ids(self.answer, examples, "answer")

        def measure(logits: Tensor, rows: Tensor) -> Tensor:
            found = _pick(self._there(logits).log_softmax(-1), ids[rows])
            return found if self.log else found.exp()

        return measure


@dataclass(frozen=True, slots=True, repr=False)
class rank(Metric):
    """How many tokens are likelier than the answer: 0 for the first choice."""

    answer: Words

    def bind(self, examples: Examples) -> Measure:
        """The rank of each row's answer."""
        ids = self._ids(self.answer, examples, "answer")

        def measure(logits: Tensor, rows: Tensor) -> Tensor:
            there = self._there(logits)
            return (there > _pick(there, ids[rows])[:, None]).sum(-1).float()

        return measure


@dataclass(frozen=True, slots=True, repr=False)
class loss(Metric):
    """The mean cross-entropy of the text's own next tokens."""

    def __post_init__(self) -> None:
        _must_be_whole(self)

    @property
    def keep(self) -> int | None:
        """All of them."""
        return None

    def bind(self, examples: Examples) -> Measure:
        """The loss of each row's text."""
        lengths = (
            [examples.tokens.shape[1]] if examples.mask is None else examples.mask.sum(-1).tolist()
        )
        if min(lengths) < 2:
            raise ValueError("a loss of next tokens needs texts of at least two tokens; one has 1.")

        def measure(logits: Tensor, rows: Tensor) -> Tensor:
            tokens = examples.tokens[rows].to(logits.device)
            mask = None if examples.mask is None else examples.mask[rows].to(logits.device)
            each = next_token_loss(logits, tokens, mask, per_token=True)
            count = each.shape[1] if mask is None else (mask[:, 1:] * mask[:, :-1]).sum(-1)
            return each.sum(-1) / count

        return measure


@dataclass(frozen=True, slots=True, repr=False)
class kl(Metric):
    """How far the prediction is from the clean run's: the Kullback-Leibler divergence of it from clean."""

    def bind(self, examples: Examples) -> Measure:
        """The divergence of each row."""
        assert examples.clean is not None
        clean = examples.clean[:, self.pos].float().log_softmax(-1)

        def measure(logits: Tensor, rows: Tensor) -> Tensor:
            there = self._there(logits).log_softmax(-1)
            return (clean[rows].exp() * (clean[rows] - there)).sum(-1)

        return measure


@dataclass(frozen=True, slots=True, repr=False)
class function(Metric):
    """Any function of logits [batch, pos, d_vocab] that returns a number for each example, [batch]."""

    of: Callable[[Tensor], Any]
    last: int | None = field(default=None, kw_only=True)
    """How many logits from the end it looks at; None for all."""

    def __post_init__(self) -> None:
        _must_be_whole(self)
        if self.last is not None and self.last < 1:
            raise ValueError(f"last is at least 1, or None for all logits; got {self.last}.")

    def to_dict(self) -> dict[str, Any]:
        """Refused: it is code."""
        raise ValueError(
            f"{self!r} is a function, and code is not saved. One of ip.metrics, or a subclass of one, can be."
        )

    @property
    def keep(self) -> int | None:
        """As many as it looks at."""
        return self.last

    @property
    def by_batch(self) -> bool:
        """It knows nothing of rows."""
        return True

    @property
    def is_open(self) -> bool:
        """Whether it is not said what it looks at."""
        return self.last is None

    def bind(self, examples: Examples) -> Measure:
        """The function itself, called with logits of its own; what it returns must fit."""
        fill = examples.filled if self.is_open else None

        def measure(logits: Tensor, rows: Tensor) -> Tensor:
            seen = logits if self.last is None else logits[:, -self.last :]
            if fill is not None:
                seen = fill(seen)
            elif not seen.requires_grad:
                seen = seen.clone()
            found = torch.as_tensor(self.of(seen)).float()
            found = found.clone() if fill is not None else found
            if found.shape == () and len(rows) == 1:
                found = found[None]
            if found.shape != rows.shape:
                raise ValueError(
                    f"a metric returns one number for each example, shape ({len(rows)},); this one returned "
                    f"shape {tuple(found.shape)}."
                )
            return found.to(logits.device)

        return measure


def _must_be_tokens(ids: Sequence[int], model: TransformerModel, what: str) -> None:
    """Refuse numbers that are no tokens; the model is looked at only where its config leaves a doubt."""
    config = getattr(model.module, "config", None)
    if min(ids) >= 0 and max(ids) < (getattr(config, "vocab_size", None) or 0):
        return
    count = model.cfg.d_vocab
    wrong = next(
        (token for token in ids if not 0 <= token < (token + 1 if count is None else count)), None
    )
    if wrong is not None and count is not None:
        raise ValueError(f"{what} has token {wrong}, and the model tokens 0 to {count - 1}.")


def _must_be_whole(metric: Metric) -> None:
    """Refuse a position for what looks at several."""
    if metric.pos != -1:
        raise ValueError(
            f"{type(metric).__name__} looks at several positions, so pos means nothing."
        )


def metric_of(data: Any, field: Field) -> Metric:
    """What `Metric.to_dict` wrote.

    Args:
        data: what was written.
        field: what errors call it.
    """
    words = MapOf(ANYTHING)(data, field)
    name = words.pop("type", None)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None or kind is function:
        known = ", ".join(sorted(set(_KINDS) - {"function"}))
        raise field.of("type").says(
            f"is {shown(name)}, and no metric is called so. There are: {known}."
        )
    read = record_of(kind)(words, field)
    try:
        return kind(**read)
    except (TypeError, ValueError) as error:
        raise field.says(f"makes no {name}: {error}") from error


def all_looked_at(metrics: Sequence[Metric], examples: Examples) -> Tensor | None:
    """The tokens that some metrics look at, in order; None if one looks at all."""
    found = [metric.looked_at(examples) for metric in metrics]
    if any(ids is None for ids in found):
        return None
    together: Tensor = torch.cat([ids for ids in found if ids is not None]).unique()
    return together


def kept_by(metrics: Sequence[Metric]) -> int | None:
    """How many logits from the end some metrics need; None for all."""
    kept = [metric.keep for metric in metrics]
    return None if None in kept else max(count for count in kept if count is not None)


def as_metric(given: Metric | Callable[[Tensor], Any]) -> Metric:
    """A metric, or a function as one."""
    if isinstance(given, Metric):
        return given
    if not callable(given):
        raise TypeError(f"a metric is one of ip.metrics, or a function of logits; got {given!r}")
    return function(given)


def label(metric: Metric | Callable[[Tensor], Any]) -> str:
    """A metric in a few words, for titles: of many tokens the first three, of a function its name."""
    if not isinstance(metric, Metric):
        return str(getattr(metric, "__name__", type(metric).__name__))
    if isinstance(metric, function):
        return label(metric.of)
    shown = {}
    for option in fields(metric):
        value = _plain(getattr(metric, option.name)) if option.default is MISSING else None
        if isinstance(value, list) and len(value) > 4:
            shown[repr(value)] = f"{repr(value[:3])[:-1]}, ... {len(value)} in all]"
    text = repr(metric)
    for whole, short in shown.items():
        text = text.replace(whole, short)
    return text


def _plain(value: Any) -> Any:
    """Tokens as JSON has them: strings and numbers, in lists."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if hasattr(value, "__len__") and getattr(value, "ndim", 1) != 0:
        return [_plain(word) for word in value]
    return int(value)


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(_plain(value))


def _pick(there: Tensor, ids: Tensor) -> Tensor:
    return there.gather(-1, ids[:, None])[:, 0]
