"""`ip.measure`: what a metric says of each text, without edits and with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interpose.edits.edit import Edit
from interpose.edits.other_values import mean, resample
from interpose.errors import Unsupported
from interpose.models.running.text import is_text
from interpose.models.running.trial import first_tensor
from interpose.progress import ShowProgress, tracked
from interpose.render.labelled import Labelled
from interpose.results.result import Result, number
from interpose.results.scores import Scores
from interpose.sweeps.answers import others_look
from interpose.sweeps.metrics import Examples, Metric, as_metric, kept_by, label
from interpose.sweeps.prompts import Batch, batches
from interpose.sweeps.proof import others_listen
from interpose.sweeps.reference import no_cache, wanted_logits

if TYPE_CHECKING:
    from interpose.models.transformer import TransformerModel

_LONGEST = 60  # letters of a text in a table
_EVIDENCE = (
    "Evidence for what these edits, all together, do to the metric on these texts; not for what an edited place "
    "computes, nor for other texts."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Measured(Scores):
    """What metrics say of each text: `values` with all edits in force, if there are any, [metric, text].

    Attributes:
        inputs: the texts, or their tokens.
        metrics: names of the metrics.
        measured: the metrics as they were written.
        edits: the edits as they print.
        without: without edits, [metric, example].
        edited: with all of them, [metric, example]; None if there are none.
    """

    inputs: tuple[Any, ...]
    metrics: tuple[str, ...]
    measured: tuple[str, ...]
    edits: tuple[str, ...]
    without: Tensor
    edited: Tensor | None

    title: str = field(init=False)
    values: Tensor = field(init=False)
    axes: dict[str, list[Any]] = field(init=False)
    unit: str = field(init=False)
    evidence: str = field(init=False)

    def __post_init__(self) -> None:
        count = "1 text" if len(self.inputs) == 1 else f"{len(self.inputs)} texts"
        edits = f", without and with {', '.join(self.edits)}" if self.edits else ""
        made = {
            "title": f"{', '.join(self.measured)} of {count}{edits}",
            "values": self.without if self.edited is None else self.edited,
            "axes": {"metric": list(self.metrics), "text": list(self.inputs)},
            "unit": ", ".join(self.measured),
            "evidence": _EVIDENCE if self.edits else "",
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)
        Scores.__post_init__(self)

    @property
    def effect(self) -> Tensor:
        """How far the edits move each text's metric, [metric, example]."""
        return torch.zeros_like(self.without) if self.edited is None else self.edited - self.without

    @property
    def ranked(self) -> str:
        """Which number of a record says how strong it is."""
        return "value" if self.edited is None else "effect"

    def columns(self) -> dict[str, Sequence[Any]]:
        """What there is of each text, by name: with edits also the value without them, and how far they move it."""
        found = Scores.columns(self)
        if self.edited is not None:
            found |= {
                name: getattr(self, name).flatten().tolist() for name in ("without", "effect")
            }
        return found

    @property
    def labels(self) -> dict[str, list[str]]:
        """What metrics and texts are called; of a long text the end, where metrics look."""
        texts = [
            f"…{said[1 - _LONGEST :]}" if len(said := repr(one)) > _LONGEST else said
            for one in self.inputs
        ]
        return {"metric": list(self.metrics), "text": texts}

    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        columns = ("value",) if self.edited is None else ("without", "with", "effect")
        return ("text", *columns) if len(self.metrics) == 1 else ("metric", "text", *columns)

    def cells(self) -> list[tuple[str, ...]]:
        """A row for each text of each metric, and the mean of several."""
        parts = [self.without] if self.edited is None else [self.without, self.edited, self.effect]
        found: list[tuple[str, ...]] = []
        for at, name in enumerate(self.metrics):
            lines = list(zip(self.labels["text"], *(part[at].tolist() for part in parts)))
            if len(lines) > 1:
                lines.append(("mean", *(float(part[at].mean()) for part in parts)))
            first = () if len(self.metrics) == 1 else (name,)
            found += [(*first, text, *map(number, values)) for text, *values in lines]
        return found

    def view(self) -> Labelled:
        """The metric of each text, or how far edits move it, as a picture shows it."""
        labels, values = self.labels, self.without if self.edited is None else self.effect
        if len(self.metrics) == 1:
            labels, values = {"text": labels["text"]}, values[0]
        return Labelled(values=values, labels=labels, what=self.ranked)

    def lines(self) -> list[str]:
        """Nothing: the title says it all."""
        return []

    def text_body(self, high: int) -> str:
        """The table.

        Args:
            high: how many lines there are for it.
        """
        return Result.text_body(self, high)

    def html_body(self) -> str:
        """The table."""
        return Result.html_body(self)


@torch.no_grad()
def measure(
    model: TransformerModel,
    inputs: Any,
    metric: Metric | Callable[[Tensor], Any] | Mapping[str, Any],
    *,
    edits: Sequence[Any] = (),
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
    batch_size: int = 16,
) -> Measured:
    """Measure each text, without edits and with them.

    ```python
    texts = ["The Eiffel Tower is in", "The Colosseum is in"]
    blind = ip.knockout([5, 6], query=-1, key=1)
    print(ip.measure(model, texts, ip.metrics.probability(" Paris"), edits=[blind]))
    ```

    Texts run in batches of one length, so that none is padded.

    Args:
        model: a model of transformers, in eval mode.
        inputs: a text, several, tokens [pos] or [batch, pos] as a tensor or lists, or what a tokenizer returns. Each is
            measured by itself, without its padding.
        metric: one of `ip.metrics`, a function of logits [batch, pos, d_vocab] that gives a number for each example,
            or several by name. `ip.metrics.kl` compares with the run without edits.
        edits: all in force at once.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
        batch_size: how many texts run together, at most; all of them where an edit speaks of rows.
    """
    if model.training:
        raise Unsupported(
            "runs with and without edits are to differ in the edits alone, but the model is in training mode. Call "
            "model.eval() first."
        )
    named = dict(metric) if isinstance(metric, Mapping) else {"metric": metric}
    metrics = {name: as_metric(given) for name, given in named.items()}
    if not metrics:
        raise ValueError("metric is an empty mapping; give at least one, by its name.")
    whole = any(map(speaks_of_rows, edits))
    inputs = inputs if isinstance(inputs, (str, Mapping, Tensor)) else list(inputs)
    size = 2**31 if whole else batch_size
    parts = batches(model, inputs, None, size=size, prepend_bos=prepend_bos, align=None)
    total = sum(len(part.numbers) for part in parts)
    if whole and len(parts) > 1:
        which = next(edit for edit in edits if speaks_of_rows(edit))
        lengths = f"{parts[0].length} to {parts[-1].length}"
        raise ValueError(
            f"{which!r} speaks of rows of the batch, and texts of {lengths} tokens do not run in one. "
            "Give texts of one length, or measure them one by one."
        )
    found = torch.zeros(2, len(metrics), total)
    for part in tracked(parts, progress, size=lambda part: len(part.numbers)):
        found[:, :, list(part.numbers)] = _measured(
            model, part, list(metrics.values()), edits, total
        )
    return Measured(
        inputs=_given(inputs, parts),
        metrics=tuple(metrics),
        measured=tuple(map(label, metrics.values())),
        edits=tuple(map(repr, edits)),
        without=found[0],
        edited=found[1] if edits else None,
    )


def _given(inputs: Any, parts: Sequence[Batch]) -> tuple[Any, ...]:
    """The texts, or the tokens of each without padding."""
    if is_text(inputs):
        return (inputs,) if isinstance(inputs, str) else tuple(inputs)
    rows = [pair for part in parts for pair in zip(part.numbers, part.clean["input_ids"].tolist())]
    return tuple(row for _, row in sorted(rows))


def _measured(
    model: TransformerModel,
    part: Batch,
    metrics: Sequence[Metric],
    edits: Sequence[Any],
    total: int,
) -> Tensor:
    """What metrics say of one batch, without edits and with them: [2, metric, example]."""
    keep = None if _sees_logits(model, edits) else kept_by(metrics)
    tokens = part.clean["input_ids"]
    examples = Examples(model=model, tokens=tokens, numbers=part.numbers, total=total)
    rows = torch.arange(len(tokens), device=tokens.device)

    def logits(hooks: Sequence[Any]) -> Tensor:
        extra: dict[str, Any] = {**part.clean, **wanted_logits(model, keep), **no_cache(model)}
        found = first_tensor(model.run_with_hooks(hooks=list(hooks), **extra))
        return found if keep is None else found[:, -keep:]

    plain = logits(())
    edited = logits(edits) if edits else plain
    examples = replace(examples, clean=plain, mask=part.clean.get("attention_mask"))
    measures = [metric.bind(examples) for metric in metrics]
    return torch.stack(
        [
            torch.stack([one(some, rows).float().cpu() for one in measures])
            for some in (plain, edited)
        ]
    )


def _sees_logits(model: TransformerModel, edits: Sequence[Any]) -> bool:
    """Whether others than metrics look at the unembedding, or may: then it has all positions."""
    if others_listen(model) or not all(isinstance(edit, Edit) for edit in edits):
        return True
    found = [site.canonical for edit in edits for site, _ in edit.where.select_in(model.tree)]
    return others_look(model, found)


_BY_ROW = {"strength": 1, "pos": 2, "key": 2, "source": 3, "value": 3, "by": 3, "min": 3, "max": 3}
"""Words of edits, and of how many axes their tensors are if the first is one of rows."""


def speaks_of_rows(edit: Any) -> bool:
    """Whether an edit means something else in another batch: by its rows, or values for each of them."""
    if not isinstance(edit, Edit):
        return False
    if isinstance(edit, mean):
        held = edit.mean  # of a cache the mean over rows is taken
        if held is None or (isinstance(held, Tensor) and held.ndim >= 3 and len(held) > 1):
            return True
    if isinstance(edit, resample):
        return True
    if any(where.rows is not None for where in (edit, *(edit.exclude or ()))):
        return True
    if edit.at is not ...:
        first = edit.at[0] if isinstance(edit.at, tuple) and edit.at else edit.at
        if first is not ... and not (isinstance(first, slice) and first == slice(None)):
            return True
    return any(
        isinstance(one, Tensor) and one.ndim >= fewest and len(one) > 1
        for name, fewest in _BY_ROW.items()
        for one in _held(vars(edit).get(name))
    )


def _held(given: Any) -> Iterable[Any]:
    return given.values() if isinstance(given, Mapping) else (given,)
