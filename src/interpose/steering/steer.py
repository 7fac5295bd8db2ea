"""`steer`: which layer and which strength, found on a validation set with what it does to other text.

Each layer and strength is a variant of the run as it is, and all of them run together (see `ip.run_variants`).

    effect = mean over texts of metric(steered) - metric(as it is)
    damage = mean over other texts of loss(steered) - loss(as it is), or the divergence of the prediction at their ends

Chosen is the largest effect of those whose damage is bounded; of equal ones the smallest damage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.files.schema import Instance, Kind
from interpose.methods.batches import work_of
from interpose.models.selection import Some, entries
from interpose.progress import Progress, ShowProgress
from interpose.render.html import html_table
from interpose.render.labelled import Labelled
from interpose.render.text import table
from interpose.results.result import number
from interpose.steering.curve_picture import curve_picture
from interpose.steering.vector import SteeringVector

Maker = Callable[[int, float], Any]
"""From a layer and a strength to an edit, or several."""
_MEASURES = ("effect", "right", "damage")
_DAMAGES = ("loss", "kl")
_EVIDENCE = (
    "Evidence that this vector moves these answers by so much, at this cost on the other texts; not for texts of other "
    "kinds, nor that nothing else changes. The choice was made on these texts: measure it once more on new ones."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SteeringCurve(ip.Scores):
    """What each layer and strength does, [measure, layer, strength]: effect, share of right answers, damage.

    Attributes:
        vector: what steers.
        how: the kind of edit: ``add`` or ``add_keeping_norm``; ``given`` for a function of one's own.
        where: the other words of the edits, such as ``phase``.
        most_damage: how much damage a choice may do.
        baseline: effect's metric and the share of right answers without steering.
    """

    vector: SteeringVector
    how: str
    where: dict[str, Any]
    most_damage: float
    baseline: dict[str, float]

    def __post_init__(self) -> None:
        ip.Scores.__post_init__(self)
        if self.values.ndim != 3 or self.axes.get("measure") != list(_MEASURES):
            raise ValueError(f"values are [measure, layer, strength], of the measures {_MEASURES}.")
        if self.how not in ("add", "add_keeping_norm", "given"):
            raise ValueError(f"how is 'add', 'add_keeping_norm' or 'given'; got {self.how!r}.")

    @classmethod
    def kinds(cls) -> dict[str, Kind]:
        """What a file may hold in parts whose annotations do not say it."""
        return {"vector": Instance(SteeringVector, "a SteeringVector")}

    @property
    def chosen(self) -> dict[str, Any] | None:
        """Layer and strength of the largest effect whose damage is bounded; None if there is no such."""
        effect, damage = self.values[0], self.values[2]
        fine = (damage <= self.most_damage) & (effect > 0)
        if not bool(fine.any()):
            return None
        most = effect.masked_fill(~fine, -torch.inf)
        best = (most == most.max()).nonzero().tolist()
        layer, strength = min(best, key=lambda place: float(damage[tuple(place)]))
        return {"layer": self.axes["layer"][layer], "strength": self.axes["strength"][strength]}

    @property
    def edit(self) -> ip.Edit:
        """The edit of the chosen layer and strength."""
        if self.chosen is None:
            raise ValueError(
                f"no layer and strength has an effect with a damage of {self.most_damage} or less: {self._best()}. "
                "Give a larger most_damage, other strengths, or another vector."
            )
        if self.how == "given":
            raise ValueError(
                "the edits were made by a function of one's own: call it with .chosen."
            )
        made: ip.Edit = getattr(self.vector, self.how)(**_called(self.chosen), **self.where)
        return made

    def _best(self) -> str:
        at = int(self.values[0].argmax())
        layer, strength = divmod(at, len(self.axes["strength"]))
        said = {"layer": self.axes["layer"][layer], "strength": self.axes["strength"][strength]}
        effect, damage = (
            float(self.values[0, layer, strength]),
            float(self.values[2, layer, strength]),
        )
        return (
            f"the largest effect, {number(effect)}, is at layer {said['layer']}, strength {number(said['strength'])}, "
            f"with a damage of {number(damage)}"
        )

    def lines(self) -> list[str]:
        """How it was measured, and what is chosen and why."""
        if self.chosen is None:
            return [*ip.Scores.lines(self), f"nothing is chosen: {self._best()}"]
        effect, right, damage = (float(self.pick(measure=m).at(**self.chosen)) for m in _MEASURES)
        right_before = self.baseline.get("right", float("nan"))
        rose = "" if right != right else f", right answers from {right_before:.1%} to {right:.1%}"
        said = (
            f"chosen: layer {self.chosen['layer']}, strength {number(self.chosen['strength'])}: effect {number(effect)}"
            f"{rose}, damage {number(damage)}. It is the largest effect of those with a damage of "
            f"{number(self.most_damage)} or less"
        )
        return [*ip.Scores.lines(self), said]

    def mark(self, layer: Any, strength: Any) -> str:
        """What is to be said of a layer and strength: chosen, too much damage, no effect."""
        if self.chosen == {"layer": layer, "strength": strength}:
            return "chosen"
        place = {"layer": layer, "strength": strength}
        if not self.at(measure="damage", **place) <= self.most_damage:
            return "too much damage"
        return "" if self.at(measure="effect", **place) > 0 else "no effect"

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Each layer and strength as a table has it, the largest effect first."""
        found = []
        for place, layer in enumerate(self.axes["layer"]):
            for at, strength in enumerate(self.axes["strength"]):
                effect, right, damage = self.values[:, place, at].tolist()
                share = "-" if right != right else f"{right:.1%}"
                cells = [str(layer), number(strength), f"{effect:.3f}", share, f"{damage:.3f}"]
                found.append(
                    (-effect if effect == effect else 0.0, [*cells, self.mark(layer, strength)])
                )
        found.sort(key=lambda row: row[0])
        found.sort(key=lambda row: row[1][-1] != "chosen")
        return ["layer", "strength", "effect", "right", "damage", ""], [cells for _, cells in found]

    def text_body(self, high: int) -> str:
        """The table.

        Args:
            high: how many lines there are for it.
        """
        return "\n" + table(*self.rows(), most=high - 3)

    def html_body(self) -> str:
        """The curves, the table and the heat maps."""
        maps = "".join(
            f"<p><b>{measure}</b></p>{self._of(measure).html()}" for measure in _MEASURES
        )
        return f"{self.svg('')}{html_table(*self.rows(), title='Each layer and strength')}{maps}"

    def _of(self, measure: str) -> Labelled:
        place = _MEASURES.index(measure)
        labels = {name: list(map(str, self.axes[name])) for name in ("layer", "strength")}
        return Labelled(values=self.values[place], labels=labels, what=measure)

    def svg(self, title: str | None = None) -> str:
        """Effect against damage, a line for each layer."""
        return curve_picture(self, self.title if title is None else title)


def steer(
    model: ip.TransformerModel,
    vector: SteeringVector,
    texts: Any,
    *,
    other: Any,
    answer: Any = None,
    metric: Any = None,
    strength: Sequence[float] = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0),
    layer: Some = None,
    how: str | Maker = "add",
    where: dict[str, Any] | None = None,
    damage: str = "loss",
    most_damage: float = 0.1,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
    max_rows: int | None = None,
    progress: ShowProgress = True,
) -> SteeringCurve:
    """Try every layer and strength of a steering vector, and choose by effect and damage.

    ```python
    curve = ip.steer(model, vector, questions, answer=answers, other=other_texts)
    print(curve.chosen)
    with model.hooks([curve.edit]):
        model.generate(text)
    ```

    Args:
        model: a model of transformers, in eval mode.
        vector: what steers.
        texts: a validation set, of any lengths.
        other: texts that steering should leave alone: they say what damage is.
        answer: the answers that are wanted, one token for all texts or one for each; measured is their probability.
        metric: what to raise instead: one of `ip.metrics`, or a function of logits.
        strength: which strengths to try; negative ones steer away.
        layer: which of the vector's layers; by default all of them, one at a time.
        how: ``add``, ``add_keeping_norm``, or a function ``how(layer, strength)`` that gives an edit or several.
        where: other words of the edits, such as ``{"pos": -1}``. With ``damage="loss"`` other texts are steered at all
            positions all the same, as they have no prompt.
        damage: ``loss``, by how much the loss on the other texts grows; ``kl``, how far the prediction at their ends
            moves. Both in nats.
        most_damage: how much of it a choice may do.
        batch_size: how many texts run together.
        prepend_bos: as in ``to_tokens``, for texts.
        max_rows: as in `ip.run_variants`.
        progress: as in `ip.sweep`.
    """
    _check(answer, metric, damage, how)
    vector.must_be_of(model)
    layers = vector.layers if layer is None else _layers(vector, layer, model)
    strengths = [float(one) for one in strength]
    if not strengths or len(set(strengths)) != len(strengths) or 0.0 in strengths:
        raise ValueError(f"strengths are several, each once, and none is 0; got {strengths}.")
    words = dict(where or {})
    make = _maker(vector, how, words)
    places = [(one, by) for one in layers for by in strengths]
    steered = [_several(make(*place)) for place in places]
    wide = {
        name: value for name, value in words.items() if name not in ("pos", "phase", "occurrence")
    }
    free = steered if damage == "kl" else [_several(_maker(vector, how, wide)(*p)) for p in places]
    raised = ip.metrics.probability(answer) if metric is None else metric
    read = ip.batches(model, texts, batch_size=batch_size, prepend_bos=prepend_bos)
    apart = ip.batches(model, other, batch_size=batch_size, prepend_bos=prepend_bos)
    total = len(places) * (read[0].total + apart[0].total)
    options: dict[str, Any] = {"max_rows": max_rows}
    with Progress(progress, total, "run") as bar, torch.no_grad():
        options["progress"] = bar
        effects = _Measured(read, steered, raised, answer).run(model, options)
        cost = ip.metrics.loss() if damage == "loss" else ip.metrics.kl()
        damages = _Measured(apart, free, cost, None).run(model, options)
    measured = {
        "metric": "probability of the answers" if metric is None else ip.metrics.label(metric),
        "damage": "loss" if damage == "loss" else "divergence at the end",
    }
    about: dict[str, Any] = {"how": how if isinstance(how, str) else "given", "where": words}
    found = _numbers(effects, damages, (len(layers), len(strengths)))
    return SteeringCurve(
        title=f"What a steering vector at {vector.site} does, by layer and strength",
        axes={"measure": list(_MEASURES), "layer": layers, "strength": strengths},
        unit="of the metric, share of texts, nats",
        protocol={
            **measured,
            "texts": read[0].total,
            "other_texts": apart[0].total,
            **work_of([*effects.runs, *damages.runs]),
        },
        evidence=_EVIDENCE,
        vector=vector,
        most_damage=float(most_damage),
        **found,
        **about,
    )


def _check(answer: Any, metric: Any, damage: str, how: Any) -> None:
    """Refuse what does not go together."""
    if (answer is None) == (metric is None):
        raise ValueError("say what steering should raise: answer=... or metric=...")
    if damage not in _DAMAGES:
        raise ValueError(f"damage is 'loss' or 'kl'; got {damage!r}.")
    if isinstance(how, str) and how not in ("add", "add_keeping_norm"):
        raise ValueError(f"how is 'add', 'add_keeping_norm' or a function; got {how!r}.")


def _numbers(effects: _Measured, damages: _Measured, shape: tuple[int, int]) -> dict[str, Any]:
    """The numbers of a curve, with their errors."""
    gain = effects.mean - effects.base
    unknown = torch.full_like(gain, torch.nan)
    values = torch.stack([gain, effects.right, damages.mean - damages.base])
    errors = torch.stack([effects.error, unknown, damages.error])
    return {
        "values": values.reshape(3, *shape),
        "errors": errors.reshape(3, *shape),
        "baseline": {
            "metric": effects.base,
            "right": effects.base_right,
            "damage": damages.base,
        },
    }


class _Measured:
    """A metric of every variant over all batches: its mean, and the share of texts with the likeliest token right."""

    def __init__(
        self, batches: Sequence[ip.Batch], edits: Sequence[Any], metric: Any, answer: Any
    ) -> None:
        self.batches, self.edits, self.metric, self.answer = batches, edits, metric, answer
        self.runs: list[ip.VariantRuns] = []
        self.mean = self.right = self.error = torch.empty(0)
        self.base = self.base_right = float("nan")

    def run(self, model: ip.TransformerModel, options: dict[str, Any]) -> _Measured:
        """Run all of it."""
        each: list[Tensor] = []
        rights: list[Tensor] = []
        for batch in self.batches:
            variants = [ip.Variant(edits) for edits in self.edits]
            runs = ip.run_variants(model, batch, variants, metric=self.metric, **options)
            wanted = None if self.answer is None else batch.ids(self.answer)
            found = torch.empty(len(variants) + 1, len(batch))
            right = torch.full_like(found, torch.nan)
            for one in (runs.base, *runs):
                found[one.number + 1] = one.measured.float().cpu()
                if wanted is not None:
                    right[one.number + 1] = (one.logits[:, -1].argmax(-1) == wanted).float().cpu()
            each.append(found)
            rights.append(right)
            self.runs.append(runs)
        measured, correct = torch.cat(each, 1).double(), torch.cat(rights, 1).double()
        if not bool(torch.isfinite(measured[0]).all()):
            raise ip.NonFinite("without steering the metric is not a finite number on some texts.")
        self.base, self.base_right = float(measured[0].mean()), float(correct[0].mean())
        self.mean, self.right = measured[1:].mean(1), correct[1:].mean(1)
        moved = measured[1:] - measured[0]
        count = moved.shape[1]
        self.error = (
            moved.std(1) / count**0.5 if count > 1 else torch.full_like(self.mean, torch.nan)
        )
        return self


def _maker(vector: SteeringVector, how: str | Maker, words: dict[str, Any]) -> Maker:
    if not isinstance(how, str):
        return how
    return lambda layer, strength: getattr(vector, how)(strength, layer=layer, **words)


def _called(chosen: dict[str, Any]) -> dict[str, Any]:
    return {"layer": chosen["layer"], "strength": chosen["strength"]}


def _several(made: Any) -> list[Any]:
    return list(made) if isinstance(made, (list, tuple)) else [made]


def _layers(vector: SteeringVector, layer: Some, model: ip.TransformerModel) -> list[int]:
    found = sorted(entries(layer, model.cfg.n_layers or 1, "layer", "the model"))
    for one in found:
        vector[one]
    return found
