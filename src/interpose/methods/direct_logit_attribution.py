"""Direct logit attribution: how much each component writes for an answer, straight to the logits.

The last residual stream is a sum of what every component wrote, and a logit reads it through the final norm along the
answer's column of the unembedding. With the norm's scale as it was in this run, that is linear:

    logit = sum over components of (component . direction) + biases,    direction = norm weight * W_U[:, answer] / scale

so the parts add up to the logit. What heads and neurons write goes the same way through a norm or a multiplier that
their block has before it adds to the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.layers import Layers, chosen_layers
from interpose.precision import wide
from interpose.progress import ShowProgress, tracked
from interpose.render.labelled import Labelled

_WAYS = ("component", "layer", "head", "neuron")
_UNITS = {"head": "attn", "neuron": "mlp"}
_FIRST = "blocks.0.hook_resid_pre"
_EVIDENCE = (
    "Evidence for what components write on the answer's direction themselves. Not for their whole effect: what they do "
    "through later components is counted there, and without one of them others may make up for it (backup heads)."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DirectLogitAttribution(ip.Scores):
    """The parts of a logit, or of the difference of two: `values` and `rest` add up to `total`.

    Attributes:
        rest: the parts that are not on the axes, by name; the last is the remainder, which is rounding.
        total: the logit, or the difference, as the model has it; the mean over texts.
        each: the parts of every text, [*axes, example]; ``values`` is their mean.
        totals: the logit of each text, [example].
    """

    rest: dict[str, float] = field(default_factory=dict)
    total: float = 0.0
    each: Tensor | None = None
    totals: Tensor | None = None

    def lines(self) -> list[str]:
        """What is said above the numbers: also what they add up to."""
        sums = {"shown": float(self.values.sum()), **self.rest}
        said = " + ".join(f"{value:z.3f} ({name})" for name, value in sums.items())
        return [*ip.Scores.lines(self), f"{self.total:z.3f} = {said}"]

    def view(self) -> Labelled:
        """Neurons are too many to draw: their sums by layer."""
        if "neuron" not in self.axes:
            return ip.Scores.view(self)
        labels = {"layer": self.labels["layer"]}
        return Labelled(values=self.values.sum(-1), labels=labels, what="all neurons")

    def text_body(self, high: int) -> str:
        """As every score, and the strongest neurons.

        Args:
            high: how many lines there are for it.
        """
        if "neuron" not in self.axes:
            return ip.Scores.text_body(self, high)
        best = [f"  {r['layer']}.{r['neuron']}: {r['value']:.3f}" for r in self.top(10)]
        above = ip.Scores.text_body(self, high - len(best) - 2)
        return "\n".join([above, "", "the strongest neurons:", *best])


@torch.no_grad()
def direct_logit_attribution(
    model: ip.TransformerModel,
    texts: Any,
    *,
    answer: Any,
    instead: Any = None,
    by: str = "component",
    pos: int = -1,
    layer: Layers = None,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> DirectLogitAttribution:
    """The parts of an answer's logit, or of its lead over another: by component, layer, head or neuron.

    ```python
    prompt = "When Mary and John went to the store, John gave a drink to"
    parts = ip.direct_logit_attribution(model, prompt, answer=" Mary", instead=" John", by="head")
    parts.top(5)
    parts.values.sum() + sum(parts.rest.values())  # is parts.total
    ```

    Args:
        model: a causal language model whose stream is a sum.
        texts: a text, several, or tokens [batch, pos]; values are means over texts.
        answer: the token whose logit is taken apart; one for all texts, or one for each.
        instead: a token whose logit is subtracted, likewise.
        by: ``component`` (embeddings, attention and MLP of each layer), ``layer``, ``head`` or ``neuron``.
        pos: the position whose logits are meant, negative ones from the end.
        layer: which layers are shown; what the others write is one part, ``other layers``.
        batch_size: how many texts run together, at most.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    if by not in _WAYS:
        raise ValueError(f"by is {', '.join(map(repr, _WAYS))}; got {by!r}.")
    if not isinstance(pos, int):
        raise TypeError(f"pos is one position, a number, negative from the end; got {pos!r}.")
    count = len(model.blocks)
    shown = sorted(chosen_layers(layer, range(count), count, "the model's stream"))
    found = ip.batches(model, texts, batch_size=batch_size, prepend_bos=prepend_bos)
    runs = [
        _taken_apart(model, batch, answer, instead, by, pos, shown)
        for batch in tracked(found, progress)
    ]
    order = torch.tensor([number for batch in found for number in batch.numbers]).argsort()
    each = torch.cat([run.values for run in runs])[order].movedim(0, -1)  # [*axes, example]
    totals = torch.cat([run.total for run in runs])[order]
    names = runs[0].rest
    of = repr(answer) if instead is None else f"{answer!r} over {instead!r}"
    return DirectLogitAttribution.averaged(
        each,
        title=f"Direct logit attribution by {by}: {of if len(of) < 60 else 'an answer for each text'}",
        axes=runs[0].axes,
        unit=runs[0].unit,
        protocol={"by": by, "pos": pos, "texts": len(totals), "forwards": len(found)},
        evidence=_EVIDENCE,
        rest={name: float(torch.cat([run.rest[name] for run in runs]).mean()) for name in names},
        total=float(totals.mean()),
        each=each,
        totals=totals,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Apart:
    """The parts of some texts' logits: values [example, *axes], the rest and the total [example]."""

    values: Tensor
    axes: dict[str, list[Any]]
    rest: dict[str, Tensor]
    total: Tensor
    unit: str


def _taken_apart(
    model: ip.TransformerModel,
    batch: ip.Batch,
    answer: Any,
    instead: Any,
    by: str,
    pos: int,
    shown: list[int],
) -> _Apart:
    """The parts of one batch, proven to add up."""
    stream, end = model.stream, model.stream.end
    branches = stream.branches
    if by in _UNITS:
        there = {branch.layer for branch in branches if branch.kind == _UNITS[by] and branch.units}
        shown = [layer for layer in shown if layer in there]
        if not shown:
            raise ip.Unsupported(
                f"no layer of these has {_UNITS[by]}.hook_{'z' if by == 'head' else 'post'}, so there are no {by}s: "
                "by='component'."
            )
    last = f"blocks.{len(model.blocks) - 1}.hook_resid_post"
    names = [*stream.embeddings, _FIRST, last, "unembed.hook_in", "unembed.hook_out"]
    names += [branch.site for branch in branches] + [end.scale_site] * bool(end.scale_site)
    for branch in branches:
        names += branch.sites if branch.kind == _UNITS.get(by) and branch.layer in shown else []
    # From the end, as the model may be asked for the last logits alone.
    place = batch.positions(pos)[0][0] - batch.clean.shape[1]
    logits, cache = model.run_with_cache(
        batch.clean,
        names_filter=names,
        pos_slice=[place],
        **batch.last_logits(ip.metrics.logit(0, pos=place)),
    )
    seen = {name: wide(value[:, 0]) for name, value in cache.items()}  # [example, ...]
    ids = [batch.ids(answer), *([] if instead is None else [batch.ids(instead)])]
    # What is done to logits behind the unembedding has no parts, unless it is a multiplier.
    times, unit = stream.logit_multiplier, "logits"
    read = wide(logits[:, place])
    if times is None:
        unit = f"logits {'before the soft cap' if stream.soft_cap else 'as they are unembedded'}"
        times, read = 1.0, seen["unembed.hook_out"]
    total = _lead(read.gather(-1, torch.stack(ids, -1)).unbind(-1))
    columns = times * _lead([wide(model.W_U.T[some]) for some in ids])
    direction = end.before(columns, end.scale_in(seen))
    ends = {
        "bias of the final norm": (columns * end.summand).sum(-1),
        "bias of the unembedding": times * _lead([wide(model.b_U[some]) for some in ids]),
    }
    values, axes, rest = _parts(stream, branches, seen, direction, by, shown)
    rest |= ends
    rest["remainder"] = total - values.flatten(1).sum(-1) - sum(rest.values())
    exact = cache[last].dtype.itemsize >= 4
    size = values.flatten(1).abs().sum(-1) + sum(part.abs() for part in rest.values()) + 1
    if bool((rest["remainder"].abs() > (1e-4 if exact else 3e-2) * size).any()):
        worst = int((rest["remainder"].abs() / size).argmax())
        raise ip.Unsupported(
            f"the parts do not add up: {float((total - rest['remainder'])[worst]):.4f} instead of "
            f"{float(total[worst]):.4f}, so the last stream of this model is not the sum of what its components "
            "add, or is not read through a norm and the unembedding alone."
        )
    rest = {name: part.cpu() for name, part in rest.items()}
    return _Apart(values=values.cpu(), axes=axes, rest=rest, total=total.cpu(), unit=unit)


def _parts(
    stream: ip.Stream,
    branches: Sequence[ip.Branch],
    seen: dict[str, Tensor],
    direction: Tensor,
    by: str,
    shown: list[int],
) -> tuple[Tensor, dict[str, list[Any]], dict[str, Tensor]]:
    """What is written along the direction: values [example, *axes], the axes, and the rest by name."""
    first = {"embeddings": _FIRST}
    if stream.embedding_multiplier == 1:  # else more is done to them: a scale, a norm
        first = {name[5:]: name for name in stream.embeddings}
    rest = {name: _dot(seen[site], direction) for name, site in first.items()}
    added = {(b.layer, b.kind): _dot(seen[b.site], direction) for b in branches}
    nothing = torch.zeros_like(direction[:, 0])
    left = [part for (layer, _), part in added.items() if layer not in shown]
    others = {"other layers": sum(left, nothing)} if left else {}
    if by == "component":
        parts = rest | {f"{kind} {i}": part for (i, kind), part in added.items() if i in shown}
        return torch.stack(list(parts.values()), -1), {"component": list(parts)}, others
    if by == "layer":
        each = [[part for (i, _), part in added.items() if i == layer] for layer in shown]
        values = torch.stack([sum(parts, nothing) for parts in each], -1)
        return values, {"layer": shown}, rest | others
    mine = (b for b in branches if b.kind == _UNITS[by] and b.layer in shown)
    pieces = [branch.along(seen, direction) for branch in mine]
    sizes = {piece.shape[-1] for piece, _ in pieces}
    if len(sizes) > 1:
        raise ValueError(
            f"layers have {sorted(sizes)} {by}s: give layer=[...] that have as many as each other."
        )
    rest[f"bias of {_UNITS[by]}"] = sum((bias for _, bias in pieces), nothing)
    beside = [part for (i, kind), part in added.items() if i in shown and kind != _UNITS[by]]
    rest["mlp" if by == "head" else "attn"] = sum(beside, nothing)
    values = torch.stack([piece for piece, _ in pieces], 1)
    return values, {"layer": shown, by: list(range(values.shape[-1]))}, rest | others


def _lead(of: Sequence[Tensor]) -> Tensor:
    """The answer's, less the other one's if there is one."""
    return of[0] if len(of) == 1 else of[0] - of[1]


def _dot(written: Tensor, direction: Tensor) -> Tensor:
    return (written * direction).sum(-1)
