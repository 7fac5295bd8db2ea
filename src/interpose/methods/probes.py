"""Linear probes: what can be read off a site by a linear map, on examples that it was not fitted on.

With features z standardised by the training examples, W and b minimise

    ridge:     mean |W z + b - y|^2 + strength |W|^2         (y: a number, or one column for each class)
    logistic:  mean -log softmax(W z + b)[y] + strength/2 |W|^2

and ``difference_of_means`` takes the class whose mean is nearest. Ridge and means need only sums over examples
(z'z, z'y), which add up batch by batch in float64. The control task (Hewitt and Liang 2019) is the same with labels
dealt at random to types of inputs: what a probe reaches there it has by memorising. Selectivity is the difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.batches import batches_to_read
from interpose.methods.layers import sites_in
from interpose.methods.linear_fits import Affine, Data, Task, fitted, measures, predicted
from interpose.models.selection import Some
from interpose.progress import ShowProgress, tracked
from interpose.results.result import shown

_KINDS = ("ridge", "logistic", "difference_of_means")
_EVIDENCE = (
    "Evidence that the labels can be read off linearly, on inputs that were held out and better than by memorising "
    "(selectivity); not that the model uses what is read: for that, edit along the direction and look at its answers."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Probe(ip.Result):
    """A fitted probe of one layer: ``probe(values)`` reads values [..., unit].

    ```python
    found.best.save("probe.safetensors")
    ip.Probe.load("probe.safetensors").direction
    ```

    Attributes:
        site: where it reads.
        layer: in which layer.
        head: in which head; None for sites without heads.
        kind: how it was fitted.
        weight: [row, unit]: one row for numbers and for two classes, else one for each class.
        bias: [row].
        classes: the labels; None for numbers.
    """

    FORMER: ClassVar[tuple[str, ...]] = ("interpose.probe",)

    site: str
    layer: int
    head: int | None
    kind: str
    weight: Tensor
    bias: Tensor
    classes: list[Any] | None

    def __call__(self, values: Tensor) -> Tensor:
        """The number it reads, [...]; of two classes above 0 for the second; of more, scores [..., class]."""
        wide = values.to(torch.float32 if values.device.type == "mps" else torch.float64)
        scores = wide @ self.weight.to(wide).mT + self.bias.to(wide)
        return scores[..., 0] if len(self.weight) == 1 else scores

    def predict(self, values: Tensor) -> Tensor:
        """The number of the class of each value, an index into ``classes``; numbers as they are read."""
        scores = self(values)
        if self.classes is None:
            return scores
        return (scores > 0).long() if len(self.weight) == 1 else scores.argmax(-1)

    @property
    def direction(self) -> Tensor:
        """Along which what is read grows, [unit], or [class, unit] of more than two classes.

        For ``ip.add`` and ``ip.project_out`` at the same site. By ``difference_of_means`` it is that difference: added
        to a value of the first class, it moves it to the second.
        """
        return self.weight[0] if len(self.weight) == 1 else self.weight

    def fires(self, above: float = 0.0) -> ip.when:
        """The condition that what it reads is above a number, for ``when=`` of edits; of two classes, the second's.

        Args:
            above: from where on it fires.
        """
        if len(self.weight) != 1:
            raise ValueError(
                f"it reads {len(self.weight)} numbers: make an ip.when of one of them."
            )
        place: dict[str, Any] = {"site": self.site, "layer": self.layer, "head": self.head}
        return ip.when(self.direction, bias=float(self.bias), above=above, **place)

    @property
    def title(self) -> str:
        """What it reads, and where."""
        what = "a number" if self.classes is None else f"{len(self.classes)} classes"
        head = "" if self.head is None else f", head {self.head}"
        return f"Probe of {what} at {self.site}, layer {self.layer}{head}, fitted by {self.kind}"

    def records(self) -> Iterator[dict[str, Any]]:
        """Every weight as a dictionary: its row, its unit, its value."""
        for row, weights in enumerate(self.weight.tolist()):
            for unit, value in enumerate(weights):
                yield {"row": row, "unit": unit, "value": value}

    def cells(self) -> list[list[str]]:
        """The largest weights as they are printed."""
        return [list(map(shown, record.values())) for record in self.top(10)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ProbeScores(ip.Scores):
    """How well labels are read on held-out examples, [measure, layer], and the probes.

    Attributes:
        weights: of the probes that were fitted on all examples, [layer, row, unit].
        biases: [layer, row].
        classes: the labels in order; None for numbers.
        predictions: of each example when it was held out, [layer, example]: indices into ``classes``, or numbers.
        folds: in which fold each example was held out, [example].
        place: site, head and kind of the probes.
    """

    weights: Tensor
    biases: Tensor
    classes: list[Any] | None
    predictions: Tensor
    folds: Tensor
    place: dict[str, Any]

    @property
    def probes(self) -> dict[int, Probe]:
        """The probe of each layer, fitted on all examples."""
        parts = zip(self.axes["layer"], self.weights, self.biases)
        return {
            layer: Probe(layer=layer, weight=weight, bias=bias, classes=self.classes, **self.place)
            for layer, weight, bias in parts
        }

    @property
    def best(self) -> Probe:
        """The probe of the layer that reads best (accuracy or r2); of equal ones the first."""
        return self.probes[self.axes["layer"][int(self.values[0].argmax())]]


def probe(
    model: ip.TransformerModel,
    texts: Any,
    labels: Sequence[Any] | Tensor,
    *,
    site: str = "resid_post",
    layer: Some = None,
    pos: int | str | Sequence[int] = -1,
    head: int | None = None,
    kind: str = "ridge",
    groups: Sequence[Any] | None = None,
    types: Sequence[Any] | None = None,
    folds: int = 5,
    strength: float = 0.01,
    control: bool = True,
    stream: bool = False,
    seed: int = 0,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> ProbeScores:
    """How well a label of each text can be read at each layer, on held-out texts, and the fitted probes.

    ```python
    found = ip.probe(model, texts, labels, groups=subjects)
    found.at(measure="accuracy", layer=3), found.at(measure="selectivity", layer=3)
    model.run_with_hooks(text, hooks=[ip.project_out("resid_post", found.probes[3].direction, layer=3)])
    ```

    Args:
        model: a model of transformers, in eval mode.
        texts: several, or tokens; or a store (`ip.open_store`), whose rows are read instead of running the model.
        labels: one for each. Floats are numbers; texts, truth values and whole numbers are classes.
        site: a kind of site.
        layer: which; by default all that have the site.
        pos: which position: a number, one for each text, or a text (its last token, where it last occurs).
        head: for sites with heads, which.
        kind: ``ridge``, ``logistic`` or ``difference_of_means``.
        groups: what each example belongs to; no group is both trained on and held out. By default equal texts (read
            at the same position) are a group.
        types: what the control task deals labels to; by default the groups. It is scored on folds that mix types,
            where memorising pays.
        folds: how many; each example is held out once.
        strength: of the penalty on weights.
        control: whether to do the control task.
        stream: keep sums instead of features, and run all texts again to score them: for data that does not fit.
        seed: of folds and control labels.
        batch_size: how many texts run together.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind is {', '.join(map(repr, _KINDS))}; got {kind!r}.")
    if stream and kind == "logistic":
        raise ValueError("a logistic probe needs all features at once: kind='ridge' can stream.")
    batches = batches_to_read(model, texts, batch_size=batch_size, prepend_bos=prepend_bos)
    layers = list(sites_in(model, site, layer, repr(site)))
    target, classes = _target(labels, batches[0].total, kind)
    pos = _positions(batches, pos)
    drawn = torch.Generator("cpu").manual_seed(seed)
    together = _members(_inputs(batches, pos) if groups is None else groups, len(target), "groups")
    tasks = [_task(target, classes, together, folds, drawn)]
    _check_classes(tasks[0])
    if control:
        kinds = together if types is None else _members(types, len(target), "types")
        tasks.append(_task(_dealt(target, kinds, drawn), classes, None, folds, drawn))

    def read() -> Iterable[tuple[Tensor, Tensor]]:
        for batch in tracked(batches, progress):
            numbers = torch.tensor(batch.numbers, device="cpu")
            yield numbers, vectors_at(model, batch, site, layers, pos, head)

    kept = [] if stream else list(read())
    data: Data = read if stream else lambda: kept
    fits = fitted(data, tasks, kind, strength)
    predictions = predicted(data, tasks, fits)
    protocol: dict[str, Any] = {"examples": len(target)}
    protocol |= {"groups": None if groups is None else int(together.max()) + 1, "folds": folds}
    forwards = 0 if batches[0].rows is not None else len(batches) * (1 + stream)
    protocol |= {"strength": strength, "seed": seed, "forwards": forwards}
    place = {"site": site, "head": head, "kind": kind}
    return _result(tasks, fits[0][-1], predictions, layers, place, protocol)


def _result(
    tasks: Sequence[Task],
    fit: Affine,
    predictions: Sequence[Tensor],
    layers: list[int],
    place: dict[str, Any],
    protocol: dict[str, Any],
) -> ProbeScores:
    scores = measures(tasks[0], predictions[0])
    if len(tasks) > 1:
        scores["control"] = next(iter(measures(tasks[1], predictions[1]).values()))
        # Below what a constant reads, a control says no more than that it reads nothing.
        scores["selectivity"] = next(iter(scores.values())) - scores["control"].clamp(min=0)
    kind = place["kind"].replace("_", " ")
    return ProbeScores(
        title=f"What {kind} probes read at {place['site']}, on held-out examples",
        values=torch.stack(list(scores.values())),
        axes={"measure": list(scores), "layer": layers},
        unit="share of variance" if tasks[0].classes is None else "share of examples",
        protocol={name: value for name, value in protocol.items() if value is not None},
        evidence=_EVIDENCE,
        weights=fit[0].cpu(),
        biases=fit[1].cpu(),
        classes=tasks[0].classes,
        predictions=predictions[0],
        folds=tasks[0].fold_of,
        place=place,
    )


# Examples and labels.


def vectors_at(
    model: ip.TransformerModel,
    batch: ip.Batch,
    site: str,
    layers: Sequence[int],
    pos: Any,
    head: int | None,
) -> Tensor:
    """What a batch has at the position, [layer, example, unit], from one run.

    Args:
        model: the model.
        batch: of `ip.batches`, or of a store.
        site: a kind of site.
        layers: which.
        pos: a number, one for each example of the dataset, a text (its last token), or a slice: the mean of these.
        head: for sites with heads, which.
    """
    if not isinstance(pos, (int, str, slice)):
        places = torch.tensor([pos[number] for number in batch.numbers], device=batch.clean.device)
        pos = torch.arange(batch.clean.shape[1], device=batch.clean.device) == places[:, None]
    there = ip.at(
        site,
        layer=list(layers),
        pos=pos,
        head=head,
        occurrence="last" if isinstance(pos, str) else "all",
    )
    cache = batch.read(there)
    point = model.hook_dict[next(iter(cache))]
    axes = point.axes
    if point.pos_axis != 1 or len(axes) != (3 if head is None else 4):
        raise ValueError(
            f"probes read one vector at a position; {site!r} is {list(axes)}. "
            f"{'Say which head: head=0.' if axes[2:3] == ('head',) else 'Choose another site.'}"
        )
    values = (cache[site, layer] for layer in layers)  # [example, pos, (head,) unit]
    several = isinstance(pos, slice)
    found = torch.stack([(v.mean(1) if several else v[:, -1]).flatten(1) for v in values])
    return found.cpu() if found.device.type == "mps" else found  # where there is no float64


def _target(labels: Any, total: int, kind: str) -> tuple[Tensor, list[Any] | None]:
    """Labels as indices into sorted classes, or as numbers."""
    listed = _plain(labels)
    if len(listed) != total:
        raise ValueError(f"{len(listed)} labels for {total} texts: give one for each.")
    classes = sorted(set(listed), key=lambda label: (type(label).__name__, label))
    if len(classes) < 2:
        raise ValueError(f"all labels are {classes[0]!r}: there is nothing to tell apart.")
    if any(isinstance(label, float) for label in listed):
        if kind != "ridge":
            raise ValueError(f"{kind} probes tell classes apart; for numbers use kind='ridge'.")
        if not all(math.isfinite(label) for label in listed):
            raise ValueError("labels that are numbers are finite: leave out texts without one.")
        return torch.tensor(listed, dtype=torch.float64, device="cpu"), None
    return torch.tensor([classes.index(label) for label in listed], device="cpu"), classes


def _plain(given: Iterable[Any]) -> list[Any]:
    """What is given as Python has it: two tensors, or numbers of NumPy, that say the same are the same then."""
    return [one.item() if hasattr(one, "item") else one for one in given]


def _members(given: Sequence[Any], total: int, what: str) -> Tensor:
    """Which group each example is of, [example], counted from 0."""
    if len(given) != total:
        raise ValueError(f"{len(given)} {what} for {total} texts: give one for each.")
    known: dict[Any, int] = {}
    return torch.tensor([known.setdefault(one, len(known)) for one in _plain(given)], device="cpu")


def _positions(batches: Sequence[ip.Batch], pos: Any) -> Any:
    """A position for each text as numbers from the front; a number or a text, for all of them, as it is."""
    if isinstance(pos, (int, str)):
        return pos
    total, found = batches[0].total, [int(place) for place in pos]
    if len(found) != total:
        raise ValueError(f"{len(found)} positions for {total} texts: give one for each.")
    for number, row in _rows(batches):
        if not -len(row) <= found[number] < len(row):
            raise IndexError(f"position {found[number]} of text {number}, with {len(row)} tokens.")
        found[number] %= len(row)
    return found


def _inputs(batches: Sequence[ip.Batch], pos: Any) -> list[Any]:
    """What each example is read of: its tokens, and where each has a position of its own, that too."""
    rows = dict(_rows(batches))
    own = not isinstance(pos, (int, str))
    return [(*rows[number], "at", pos[number] if own else pos) for number in range(len(rows))]


def _rows(batches: Sequence[ip.Batch]) -> Iterable[tuple[int, list[int]]]:
    return (pair for batch in batches for pair in zip(batch.numbers, batch.clean.tolist()))


def _first_of(members: Tensor) -> Tensor:
    """The number of the first example of each group."""
    count = int(members.max()) + 1
    first = torch.full((count,), len(members), device="cpu")
    return first.scatter_reduce(0, members, torch.arange(len(members), device="cpu"), "amin")


def _task(
    target: Tensor,
    classes: list[Any] | None,
    groups: Tensor | None,
    folds: int,
    drawn: torch.Generator,
) -> Task:
    """Groups in random order, sorted by their first label, dealt to the folds like cards."""
    groups = torch.arange(len(target), device="cpu") if groups is None else groups
    first = target[_first_of(groups)]
    if not 2 <= folds <= len(first):
        raise ValueError(f"folds={folds} with {len(first)} groups of examples: use 2 to as many.")
    order = torch.randperm(len(first), generator=drawn, device="cpu")
    order = order[first[order].sort(stable=True).indices]
    dealt = torch.empty_like(order)
    dealt[order] = torch.arange(len(order), device="cpu") % folds
    return Task(target=target, classes=classes, fold_of=dealt[groups], folds=folds)


def _check_classes(task: Task) -> None:
    """Each must be among those that are trained on, whichever fold is held out."""
    for fold in range(task.folds if task.classes else 0):
        seen = set(task.target[task.fold_of != fold].tolist())
        for number, label in enumerate(task.classes or ()):
            if number not in seen:
                raise ValueError(
                    f"all examples of class {label!r} are held out together, in fold {fold}. "
                    "A class needs examples in at least two groups."
                )


def _dealt(target: Tensor, members: Tensor, drawn: torch.Generator) -> Tensor:
    """The control task's labels: as they are distributed, dealt at random to types."""
    count, total = int(members.max()) + 1, len(target)
    some = target.sort().values[torch.arange(count, device="cpu") * total // count]
    return some[torch.randperm(count, generator=drawn, device="cpu")][members]
