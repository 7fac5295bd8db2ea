"""Two prompts of one length, component by component: what of the model's inside tells them apart?

For what each component adds to the stream at a position, x in one prompt and y in the other:

    relative difference = |x - y| / |x|,    cosine = x . y / |x| |y|

and, given an answer, the difference of what x and y write for it (direct logit attribution). Those add up to the
difference of the logit between the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.precision import wide
from interpose.progress import ShowProgress, tracked
from interpose.render.html import Markup, bar, html_table
from interpose.render.labelled import Labelled
from interpose.render.text import table

_EVIDENCE = (
    "Evidence for where the two prompts are told apart, and by how much. Not evidence that a difference matters for "
    "the answer: patching (ip.activation_patching) tests that. Attribution is what is written straight to the logits."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class PromptComparison(ip.Scores):
    """What differs: `values` are relative differences, [*axes].

    Attributes:
        cosine: how alike the directions are, from -1 to 1, [*axes].
        attribution: what each component writes for the answer in the first prompt, less that in the second, at the
            position of the logits, [component] or [layer, head]; None without an answer.
        rest: the same of the parts that are not on the axes, by name.
        total: the logit, or the difference of two, in the first prompt less that in the second: the sum of both.
    """

    cosine: Tensor
    attribution: Tensor | None = None
    rest: dict[str, float] = field(default_factory=dict)
    total: float | None = None

    def columns(self) -> dict[str, Sequence[Any]]:
        """What there is of every place, by name: also how alike the directions are."""
        return {**ip.Scores.columns(self), "cosine": self.cosine.flatten().tolist()}

    def drawings(self) -> dict[str, Labelled]:
        """Each quantity with its labels, by its name."""
        labels = self.labels
        plain = {name: entries for name, entries in labels.items() if name != "pos"}
        found = {
            "relative difference": Labelled(values=self.values, labels=labels),
            "1 - cosine": Labelled(values=1 - self.cosine, labels=labels),
        }
        if self.attribution is not None:
            found["attribution"] = Labelled(values=self.attribution, labels=plain)
        return found

    def lines(self) -> list[str]:
        """What is said above the numbers: also what attributions add up to."""
        if self.attribution is None or self.total is None:
            return ip.Scores.lines(self)
        sums = {"shown": float(self.attribution.sum()), **self.rest}
        said = " + ".join(f"{value:z.3f} ({name})" for name, value in sums.items())
        return [*ip.Scores.lines(self), f"attribution: {self.total:z.3f} = {said}"]

    def text_body(self, high: int) -> str:
        """A line for each component with all quantities, or a grid of each.

        Args:
            high: how many lines there are for it.
        """
        if list(self.axes) != ["component"]:
            return ip.Scores.text_body(self, high)
        columns = [drawn.values.tolist() for drawn in self.drawings().values()]
        rows = [
            (name, *(f"{value:.3f}" for value in row))
            for name, *row in zip(self.labels["component"], *columns)
        ]
        return "\n" + table(("component", *self.drawings()), rows, most=high - 3)

    def html_body(self) -> str:
        """A table with a bar for each quantity, or a heat map of each."""
        if list(self.axes) != ["component"]:
            return ip.Scores.html_body(self)
        columns = [_bars(drawn) for drawn in self.drawings().values()]
        return html_table(
            ("component", *self.drawings()), list(zip(self.labels["component"], *columns))
        )


@torch.no_grad()
def compare_prompts(
    model: ip.TransformerModel,
    clean: Any,
    corrupt: Any,
    *,
    answer: Any = None,
    instead: Any = None,
    by: str = "component",
    pos: int | None = -1,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> PromptComparison:
    """Which components tell two prompts apart: relative differences, cosines, and differences of logit attribution.

    ```python
    a, b = "The Eiffel Tower is in", "The Trevi Fountain is in"
    found = ip.compare_prompts(model, a, b, answer=" Paris", instead=" Rome")
    found.top(3)  # the largest relative differences
    found.attribution.sum() + sum(found.rest.values())  # is found.total
    ```

    Args:
        model: a causal language model.
        clean: a text, several, or tokens [batch, pos].
        corrupt: the texts to compare with, each as long as its partner; numbers are means over pairs.
        answer: a token whose direct logit attribution is compared too; one for all pairs, or one for each.
        instead: a token whose logit is subtracted from the answer's, likewise.
        by: ``component`` (embeddings, attention and MLP of each layer), or ``head``.
        pos: the position where they are compared, negative ones from the end; None for each position, along an axis
            of its own, with the attribution at the last.
        batch_size: how many pairs run together, at most.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    _check(clean, corrupt, answer, instead, by, pos)
    options: dict[str, Any] = {"batch_size": batch_size, "prepend_bos": prepend_bos}
    found = ip.batches(model, clean, corrupt, **options)
    lengths = sorted({batch.clean.shape[1] for batch in found})
    if pos is None and len(lengths) > 1:
        raise ValueError(
            f"the pairs have {' and '.join(map(str, lengths))} tokens, so that their positions differ: give pos=-1, or "
            "pairs of one length."
        )
    differences, cosines = [], []
    names: list[Any] = []
    for batch in tracked(found, progress):
        where = None if pos is None else [batch.positions(pos)[0][0]]
        mine, other = (_added(model, tokens, by, where) for tokens in (batch.clean, batch.corrupt))
        names = list(mine)
        for name in mine:
            difference, cosine = _compared(mine[name], other[name])
            differences.append(difference)  # [example, (head,) pos]
            cosines.append(cosine)
    values, cosine = (_mean(some, len(names)) for some in (differences, cosines))
    axes: dict[str, list[Any]] = {"component": names}
    if by == "head":
        axes = {"layer": names, "head": list(range(values.shape[1]))}
    if pos is None:
        axes["pos"] = list(range(lengths[0]))
    else:
        values, cosine = values[..., 0], cosine[..., 0]
    parts: dict[str, Any] = {}
    if answer is not None:
        at = {"by": by, "pos": -1 if pos is None else pos, **options}
        parts = _attributions(model, clean, corrupt, answer, instead, axes, at)
    return PromptComparison(
        title=f"Two prompts compared by {by}",
        values=values,
        axes=axes,
        unit="relative difference",
        protocol={
            "pairs": found[0].total,
            "pos": "each" if pos is None else pos,
            **({} if answer is None else {"answer": repr(answer)}),
            **({} if instead is None else {"instead": repr(instead)}),
            "forwards": (2 if answer is None else 4) * len(found),
        },
        evidence=_EVIDENCE,
        tokens=found[0].str_tokens,
        cosine=cosine,
        **parts,
    )


def _check(a: Any, b: Any, answer: Any, instead: Any, by: str, pos: int | None) -> None:
    if by not in ("component", "head"):
        raise ValueError(f"by is 'component' or 'head'; got {by!r}.")
    if answer is None and instead is not None:
        raise ValueError("instead is subtracted from an answer: give answer=... too.")
    if a is None or b is None:
        raise ValueError(
            "two prompts are compared: give clean and corrupt, each as long as its partner."
        )
    if pos is not None and not isinstance(pos, int):
        raise TypeError(f"pos is one position, a number, or None for each; got {pos!r}.")


def _added(
    model: ip.TransformerModel, tokens: Any, by: str, where: list[int] | None
) -> dict[Any, Tensor]:
    """What each component adds to the stream, [example, pos, d_model], or each head, [example, pos, head, d_model]."""
    sites: dict[Any, str] = {"embeddings": "blocks.0.hook_resid_pre"}
    if by == "head":
        sites = {model.sites[name].layer: name for name in model.sites.select("result")}
    else:
        sites |= {f"{b.kind} {b.layer}": b.site for b in model.stream.branches}
    _, cache = model.run_with_cache(
        tokens, names_filter=list(sites.values()), pos_slice=where, return_type=None
    )
    return {name: wide(cache[site]) for name, site in sites.items()}


def _compared(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Relative difference and cosine of two values [example, pos, (head,) d_model], each [example, (head,) pos]."""
    apart = (x - y).norm(dim=-1)
    relative = (apart / x.norm(dim=-1)).where(apart > 0, 0.0)
    cosine = torch.cosine_similarity(x, y, dim=-1).where(apart > 0, 1.0)
    return relative.movedim(1, -1).cpu(), cosine.movedim(1, -1).cpu()


def _mean(some: list[Tensor], names: int) -> Tensor:
    """The mean over examples, [name, (head,) pos], of values that come name by name in each batch."""
    return torch.stack([torch.cat(some[start::names]).mean(0) for start in range(names)])


def _attributions(
    model: ip.TransformerModel,
    a: Any,
    b: Any,
    answer: Any,
    instead: Any,
    axes: dict[str, list[Any]],
    at: dict[str, Any],
) -> dict[str, Any]:
    """The difference of the attributions of two prompts."""
    mine, other = (
        ip.direct_logit_attribution(model, text, answer=answer, instead=instead, **at)
        for text in (a, b)
    )
    change = mine.values - other.values
    if "component" in axes:
        embeddings = [at for at, name in enumerate(mine.axes["component"]) if "embed" in name]
        first = change[embeddings].sum(0, keepdim=True)
        change = torch.cat([first, change[len(embeddings) :]])
    return {
        "attribution": change,
        "rest": {name: value - other.rest[name] for name, value in mine.rest.items()},
        "total": mine.total - other.total,
    }


def _bars(drawn: Labelled) -> list[Markup]:
    """A bar with its number for each value, red up and blue down."""
    most = drawn.most or 1.0
    return [
        bar(abs(value) / most, f"{value:.3f}", colour="#d6604d" if value >= 0 else "#4393c3")
        for value in drawn.values.tolist()
    ]
