"""Direct logit attribution: how much each component writes for an answer, straight to the logits.

The last residual stream is a sum of what every component wrote, and a logit reads it through the final norm along the
answer's column of the unembedding. With the norm's scale as it was in this run, that is linear:

    logit = sum over components of (component . direction) + biases,    direction = norm weight * W_U[:, answer] / scale

so the parts add up to the logit. What heads and neurons write goes the same way through a norm or a multiplier that
their block has before it adds to the stream.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.layers import Layers, chosen_layers
from interpose.methods.norms import Norm
from interpose.render.labelled import Labelled

_WAYS = ("component", "layer", "head", "neuron")
_SITES = (
    r"hook_(pos_)?embed|blocks\.0\.hook_resid_pre|blocks\.\d+\.hook_(attn|mlp|mixer)_out"
    r"|(ln_final|blocks\.\d+\.ln[12]_post)\.hook_scale|unembed\.hook_(in|out)"
)
_INSIDE = {"head": r"|blocks\.\d+\.attn\.hook_z", "neuron": r"|blocks\.\d+\.mlp\.hook_post"}
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
    model: Any,
    text: Any,
    *,
    answer: Any,
    instead: Any = None,
    by: str = "component",
    pos: int = -1,
    layers: Layers = None,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
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
        text: a text, several, or tokens [batch, pos]; values are means over texts.
        answer: the token whose logit is taken apart; one for all texts, or one for each.
        instead: a token whose logit is subtracted, likewise.
        by: ``component`` (embeddings, attention and MLP of each layer), ``layer``, ``head`` or ``neuron``.
        pos: the position whose logits are meant, negative ones from the end.
        layers: which layers are shown; what the others write is one part, ``other layers``.
        batch_size: how many texts run together, at most.
        prepend_bos: as in ``to_tokens``, for texts.
    """
    if by not in _WAYS:
        raise ValueError(f"by is {', '.join(map(repr, _WAYS))}; got {by!r}.")
    if not isinstance(pos, int):
        raise TypeError(f"pos is one position, a number, negative from the end; got {pos!r}.")
    count = len(model.blocks)
    shown = sorted(chosen_layers(layers, range(count), count, "the model's stream"))
    found = ip.batches(model, text, batch_size=batch_size, prepend_bos=prepend_bos)
    runs = [_taken_apart(model, batch, answer, instead, by, pos, shown) for batch in found]
    order = torch.tensor([number for batch in found for number in batch.numbers]).argsort()
    each = torch.cat([run.values for run in runs])[order].movedim(0, -1)  # [*axes, example]
    totals = torch.cat([run.total for run in runs])[order]
    names = runs[0].rest
    of = repr(answer) if instead is None else f"{answer!r} over {instead!r}"
    return DirectLogitAttribution.averaged(
        each,
        title=f"Direct logit attribution by {by}: {of if len(of) < 60 else 'an answer for each text'}",
        axes=runs[0].axes,
        unit="logits before the soft cap" if runs[0].capped else "logits",
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
    capped: bool


def _taken_apart(
    model: Any, batch: ip.Batch, answer: Any, instead: Any, by: str, pos: int, shown: list[int]
) -> _Apart:
    """The parts of one batch, proven to add up."""
    # From the end, as the model may be asked for the last logits alone.
    place = batch.positions(pos)[0][0] - batch.clean.shape[1]
    last = f"blocks.{len(model.blocks) - 1}.hook_resid_post"
    logits, cache = model.run_with_cache(
        batch.clean,
        names_filter=[re.compile(_SITES + _INSIDE.get(by, "")), last],
        pos_slice=[place],
        **batch.last_logits(ip.metrics.logit(0, pos=place)),
    )
    seen = {name: value[:, 0].float() for name, value in cache.items()}  # [example, ...]
    ids = [batch.ids(answer), *([] if instead is None else [batch.ids(instead)])]
    plain, logits = seen["unembed.hook_out"], logits[:, place].float()
    exact = cache[last].dtype.itemsize >= 4
    times = _ratio(logits, plain, 1e-5 if exact else 1e-2)
    read = plain if times is None else logits  # a soft cap has no parts: the logits before it
    total = _lead(read.gather(-1, torch.stack(ids, -1)).unbind(-1))
    columns = _lead([model.W_U.T[some].float() for some in ids]) * (times or 1.0)
    norm = ("ln_final", getattr(model, "ln_final", None))
    direction, bias = _before(norm, seen, seen[last], seen["unembed.hook_in"], columns)
    ends = {
        "bias of the final norm": bias,
        "bias of the unembedding": (times or 1.0)
        * _lead([model.b_U[some].float() for some in ids]),
    }
    values, axes, rest = _parts(model, seen, direction, by, shown)
    rest |= ends
    rest["remainder"] = total - values.flatten(1).sum(-1) - sum(rest.values())
    size = values.flatten(1).abs().sum(-1) + sum(part.abs() for part in rest.values()) + 1
    if bool((rest["remainder"].abs() > (1e-4 if exact else 3e-2) * size).any()):
        worst = int((rest["remainder"].abs() / size).argmax())
        raise ip.Unsupported(
            f"the parts do not add up: {float((total - rest['remainder'])[worst]):.4f} instead of "
            f"{float(total[worst]):.4f}, so the last stream of this model is not the sum of what its components "
            "add, or is not read through a norm and the unembedding alone."
        )
    rest = {name: part.cpu() for name, part in rest.items()}
    return _Apart(
        values=values.cpu(), axes=axes, rest=rest, total=total.cpu(), capped=times is None
    )


def _parts(
    model: Any, seen: dict[str, Tensor], direction: Tensor, by: str, shown: list[int]
) -> tuple[Tensor, dict[str, list[Any]], dict[str, Tensor]]:
    """What is written along the direction: values [example, *axes], the axes, and the rest by name."""
    rest = {name: _dot(value, direction) for name, value in _embeddings(seen).items()}
    layers: list[dict[str, Tensor]] = [
        {
            kind: _dot(seen[name], direction)
            for kind in ("attn", "mixer", "mlp")
            if (name := f"blocks.{layer}.hook_{kind}_out") in seen
        }
        for layer in range(len(model.blocks))
    ]
    kind, site = ("attn", "attn.hook_z") if by == "head" else ("mlp", "mlp.hook_post")
    if by in _INSIDE:
        shown = [layer for layer in shown if f"blocks.{layer}.{site}" in seen]
        if not shown:
            raise ip.Unsupported(
                f"no layer of these has {site}, so there are no {by}s: by='component'."
            )
    nothing = torch.zeros(len(direction), device=direction.device)
    left = [part for i, parts in enumerate(layers) if i not in shown for part in parts.values()]
    others = {"other layers": sum(left, nothing)} if left else {}
    if by == "component":
        parts = rest | {f"{kind} {i}": part for i in shown for kind, part in layers[i].items()}
        return torch.stack(list(parts.values()), -1), {"component": list(parts)}, others
    if by == "layer":
        values = torch.stack([sum(layers[layer].values(), nothing) for layer in shown], -1)
        return values, {"layer": shown}, rest | others
    pieces = [_pieces(model, seen, layer, by, direction) for layer in shown]
    sizes = {piece.shape[-1] for piece, _ in pieces}
    if len(sizes) > 1:
        raise ValueError(
            f"layers have {sorted(sizes)} {by}s: give layers=[...] that have as many as each other."
        )
    rest[f"bias of {kind}"] = sum((bias for _, bias in pieces), nothing)
    beside = [part for i in shown for other, part in layers[i].items() if other != kind]
    rest["mlp" if by == "head" else "attn"] = sum(beside, nothing)
    values = torch.stack([piece for piece, _ in pieces], 1)
    return values, {"layer": shown, by: list(range(values.shape[-1]))}, rest | others


def _embeddings(seen: dict[str, Tensor]) -> dict[str, Tensor]:
    """Token and position embeddings; as one, where more is done to them (a scale, a norm)."""
    first = seen["blocks.0.hook_resid_pre"]
    apart = {name[5:]: seen[name] for name in ("hook_embed", "hook_pos_embed") if name in seen}
    summed = sum(apart.values(), torch.zeros_like(first))
    return apart if _ratio(first, summed) == 1.0 else {"embeddings": first}


def _pieces(
    model: Any, seen: dict[str, Tensor], layer: int, by: str, direction: Tensor
) -> tuple[Tensor, Tensor]:
    """What each head or neuron of a layer writes along the direction, [example, unit], and its bias, [example]."""
    block, at = model.blocks[layer], f"blocks.{layer}"
    if by == "head":
        part, units, weight = "attn", seen[f"{at}.attn.hook_z"], block.attn.W_O.float()
        bias, norm = block.attn.b_O.float(), "ln1_post"
    else:
        part, units, weight = (
            "mlp",
            seen[f"{at}.mlp.hook_post"][..., None],
            block.mlp.W_out.float()[:, None],
        )
        bias, norm = block.mlp.b_out.float(), "ln2_post"
    # units [example, unit, inside], weight [unit, inside, d_model]
    made = torch.einsum("eui,uim->em", units, weight) + bias
    behind = (f"{at}.{norm}", getattr(block, norm, None))
    inner, ends = _before(behind, seen, made, seen[f"{at}.hook_{part}_out"], direction)
    values = torch.einsum("eui,uim,em->eu", units, weight, inner)
    return values, inner @ bias + ends


def _before(
    norm: tuple[str, Any], seen: dict[str, Tensor], x: Tensor, y: Tensor, direction: Tensor
) -> tuple[Tensor, Tensor]:
    """A direction that reads y, before the norm and the multiplier that make y of x; and what it reads of the bias.

    Args:
        norm: its name, and itself.
        seen: with its scale, if there is one.
        x: what goes in, [example, d_model].
        y: what comes out, [example, d_model].
        direction: [example, d_model].
    """
    name, part = norm
    scale = seen.get(f"{name}.hook_scale")
    formula = Norm(torch.ones_like(x[0]), torch.zeros_like(x[0]), False)
    if scale is None:
        scale = torch.ones_like(x[:, :1])
    else:
        formula = Norm.of(part, x)
    times = _ratio(y, formula.straight(x) / scale * formula.factor + formula.summand)
    if times is None:
        raise ip.Unsupported(
            f"what is read behind {name!r} is not a norm of what goes in, with a scale that is known, times a number: "
            "it cannot be taken apart. What is not known of norms is in model.sites.absent."
        )
    inner = formula.straight(direction * formula.factor)
    return inner / scale * times, direction @ formula.summand * times


def _ratio(whole: Tensor, part: Tensor, room: float = 5e-3) -> float | None:
    """The number that makes one value of another, up to rounding; None if no number does."""
    size = float(part.square().sum())
    times = float((whole * part).sum()) / size if size else 1.0
    times = 1.0 if abs(times - 1) < room else times
    most = float(whole.abs().max())
    return times if torch.allclose(part * times, whole, rtol=room, atol=room * most) else None


def _lead(of: Sequence[Tensor]) -> Tensor:
    """The answer's, less the other one's if there is one."""
    return of[0] if len(of) == 1 else of[0] - of[1]


def _dot(written: Tensor, direction: Tensor) -> Tensor:
    return (written * direction).sum(-1)
