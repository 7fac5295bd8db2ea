"""`ip.attribution_patching`: what patching would do at every place at once, estimated from one gradient.

Patching puts a value of one run into another, a run for each place. To first order that moves the metric by

    estimate(place) = (a_other - a_here) . d metric / d a_here

so that two forward passes and a backward pass are enough for all heads, neurons and positions. The estimate is as good
as the model is straight between the two values. With ``rule="relp"`` the backward pass follows `ip.relp`, which agrees
with real patching better; ``verify=k`` really patches the strongest places and shows how far to trust the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.gradient_attribution import ByLayer, sites_by_layer
from interpose.models.selection import Some
from interpose.progress import ShowProgress, tracked
from interpose.render.html import html_table
from interpose.render.text import table
from interpose.results.result import shown

_EVIDENCE = (
    "Evidence, to first order, for how far patching a place would move the metric: a list of places to patch really "
    "(verify=k), not an effect measured; it misses what saturates, and places that make up for each other."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class AttributionPatching(ip.Scores):
    """Estimates of effects, and the real ones where they were asked for.

    Attributes:
        each: the estimate of every example, [*axes, example]; ``values`` is their mean.
        clean: the metric of the clean run, the mean over examples.
        corrupt: of the corrupted run.
        patch: whose values were put into the other run.
        verified: for each place that was really patched: its entries, ``estimate``, ``effect``, and ``agrees``, whether
            the two have one sign and are within a factor of two.
        correlation: of estimates and effects over those places (Pearson); None for fewer than three.
    """

    each: Tensor
    clean: float
    corrupt: float
    patch: str
    verified: list[dict[str, Any]]
    correlation: float | None = None

    @property
    def normalised(self) -> Tensor:
        """The estimates as shares of the whole way from the changed run to the other: 1 is all of it."""
        way = self.clean - self.corrupt
        return self.values / (way if self.patch == "clean" else -way)

    def lines(self) -> list[str]:
        """What is said above the numbers, and how many places agree with patching."""
        said = ip.Scores.lines(self)
        if self.verified:
            right = sum(place["agrees"] for place in self.verified)
            few = (
                self.correlation is None or len(self.verified) < 10
            )  # of the strongest it says little
            how = "" if few else f", correlation {self.correlation:.3f}"
            said.append(f"really patched: {len(self.verified)} places, {right} agree{how}")
        return said

    def text_body(self, high: int) -> str:
        """As every score, and the places that were really patched.

        Args:
            high: how many lines there are for it.
        """
        if not self.verified:
            return ip.Scores.text_body(self, high)
        rows = table(*self._verified(), most=10)
        return f"{ip.Scores.text_body(self, high - len(rows.splitlines()) - 1)}\n\n{rows}"

    def html_body(self) -> str:
        """As every score, and a table of the places that were really patched."""
        found = ip.Scores.html_body(self)
        if not self.verified:
            return found
        return found + html_table(*self._verified(), title="The strongest places, really patched")

    def _verified(self) -> tuple[list[str], list[list[str]]]:
        names = list(self.verified[0])
        rows = [[shown(place[name]) for name in names] for place in self.verified]
        return names, rows


def attribution_patching(
    model: ip.TransformerModel,
    clean: Any,
    corrupt: Any,
    *,
    metric: Any,
    site: str | Sequence[str] = "z",
    over: str | Sequence[str] | None = None,
    rule: str | Sequence[str] = "relp",
    patch: str = "clean",
    layer: Some = None,
    verify: int = 0,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> AttributionPatching:
    """How far patching would move a metric, estimated for every place at once.

    ```python
    model = ip.load("pocket")
    clean = "When Mary and John went to the store, John gave a drink to"
    corrupt = "When Mary and John went to the store, Mary gave a drink to"
    lead = ip.metrics.logit_difference(" Mary", " John")
    found = ip.attribution_patching(model, clean, corrupt, metric=lead, verify=10)
    found.values                     # [layer, head, pos]
    found.verified                   # the ten strongest, with what patching really does
    ```

    Args:
        model: a model of transformers, in eval mode.
        clean: a text, several, or tokens [batch, pos].
        corrupt: the texts to compare with, token by token.
        metric: one of `ip.metrics`, or a function of logits that gives a number for each example.
        site: a kind of site (``z``, ``resid_pre``, ``attn_out``, ``mlp_out``, ``q``, ``post``, ...); several with
            ``over=("site", ...)``.
        over: the axes of the result, of ``site``, ``layer``, ``head``, ``neuron`` and ``pos``; the others are added up.
            By default layers and positions, and heads where the site has them.
        rule: ``relp``, ``gradient`` for the plain gradient, or the rules that `ip.relp` is to follow.
        patch: whose values are put into the other run: ``clean`` or ``corrupt``.
        layer: which; by default all that have the site.
        verify: how many of the strongest places to patch really, a forward pass each.
        batch_size: how many examples run together, at most.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    _check(clean, corrupt, metric, patch, verify)
    here, there = (corrupt, clean) if patch == "clean" else (clean, corrupt)
    kinds = [site] if isinstance(site, str) else list(site)
    sites = sites_by_layer(model, kinds, layer)
    hooks = _hooks(model, rule, kinds)
    options: dict[str, Any] = {"batch_size": batch_size, "prepend_bos": prepend_bos}
    found = ip.gradient_times_activation(
        model,
        here,
        baseline=there,
        metric=metric,
        site=kinds,
        over=_usual(sites) if over is None else over,
        hooks=hooks,
        layer=layer,
        progress=False if verify else progress,
        **options,
    )
    assert found.baseline is not None
    each = 0.0 - found.each  # the other run's values less this one's
    pairs = ip.batches(model, here, there, **options)
    verified = _verified(model, pairs, metric, sites, found, verify, progress)
    here_measured, there_measured = float(found.measured.mean()), float(found.baseline.mean())
    return AttributionPatching.averaged(
        each,
        title=f"{ip.metrics.label(metric)}: what patching {', '.join(kinds)} would do, estimated (patch={patch!r})",
        axes=found.axes,
        unit="metric",
        protocol=_protocol(found, rule, patch, hooks, len(pairs) * len(verified)),
        evidence=_EVIDENCE,
        tokens=ip.batches(model, clean, corrupt, **options)[0].str_tokens,
        each=each,
        clean=there_measured if patch == "clean" else here_measured,
        corrupt=here_measured if patch == "clean" else there_measured,
        patch=patch,
        verified=verified,
        correlation=_correlation(verified),
    )


def _check(clean: Any, corrupt: Any, metric: Any, patch: str, verify: int) -> None:
    if clean is None or corrupt is None:
        raise ValueError(
            "patching needs two texts, clean and corrupt. For what one alone owes to its values, see "
            "ip.gradient_times_activation."
        )
    if patch not in ("clean", "corrupt"):
        raise ValueError(f"patch is 'clean' or 'corrupt'; got {patch!r}.")
    if patch == "corrupt" and isinstance(metric, ip.metrics.kl):
        raise ValueError(
            "kl is least in the clean run, so its gradient is zero there: use patch='clean'."
        )
    if verify < 0:
        raise ValueError(f"verify is how many places to patch really, 0 or more; got {verify}.")


def _protocol(found: Any, rule: Any, patch: str, hooks: Any, patched: int) -> dict[str, Any]:
    """How the estimates were made; the places that were patched took a run each, and one for their values."""
    ran = dict(found.protocol)
    extra = patched + ran["backwards"] if patched else 0
    left = getattr(hooks, "left", [])
    return {
        "metric": ran["metric"],
        "patch": patch,
        "rule": rule if isinstance(rule, str) else list(rule),
        **({"with_their_true_gradient": left} if left else {}),
        "examples": ran["examples"],
        "forwards": ran["forwards"] + extra,
        "backwards": ran["backwards"],
    }


def _hooks(
    model: ip.TransformerModel, rule: str | Sequence[str], kinds: Sequence[str]
) -> list[Any]:
    """What the run with gradients is hooked with."""
    if rule == "gradient":
        return []
    if inside := {"pre", "pre_linear"} & set(kinds):
        raise ValueError(
            f"the rules of RelP go past {sorted(inside)[0]!r}, which has no gradient under them: take 'post', or "
            "rule='gradient'."
        )
    if isinstance(rule, str) and rule != "relp":
        raise ValueError(
            f"rule is 'relp', 'gradient', or a list of rules for ip.relp; got {rule!r}."
        )
    return ip.relp(model) if rule == "relp" else ip.relp(model, rules=rule)


def _usual(sites: dict[str, ByLayer]) -> tuple[str, ...]:
    """The axes that all of these sites have, but for single features."""
    rows = [entry for row in sites.values() for entry in row.items()]
    words = ["site"] if len(sites) > 1 else []
    words += ["layer"] if all(layer is not None for layer, _ in rows) else []
    words += [word for word in ("head", "pos") if all(word in axes for _, (_, axes) in rows)]
    return tuple(words)


@torch.no_grad()
def _verified(
    model: ip.TransformerModel,
    pairs: Sequence[Any],
    metric: Any,
    sites: dict[str, ByLayer],
    found: Any,
    count: int,
    progress: ShowProgress,
) -> list[dict[str, Any]]:
    """The strongest places, each with its estimate and what patching it really does."""
    places = [place for place in found.top(count) if place["value"]]
    first, *_ = sites
    layers = list(sites[first])
    names = {kind: row[None][0] if None in row else kind for kind, row in sites.items()}
    effects = torch.zeros(len(places), len(found.measured), device="cpu")
    for pair in tracked(pairs if places else [], progress):
        numbers = list(pair.numbers)
        logits, values = model.run_with_cache(pair.corrupt, names_filter=list(names.values()))
        measure = pair.measure(metric, logits)
        for at, place in enumerate(places):
            words = {
                word: place[word] for word in ("layer", "head", "neuron", "pos") if word in place
            }
            if layers != [None]:
                words.setdefault("layer", layers)  # added up, if they are no axis
            edit = ip.patch(names[place.get("site", first)], values, **words)
            patched = measure(model.run_with_hooks(pair.clean, hooks=[edit]))
            effects[at, numbers] = patched.float().cpu() - found.measured[numbers]
    made = []
    for place, effect in zip(places, effects.mean(-1).tolist()):
        entries = {name: entry for name, entry in place.items() if name in found.axes}
        estimate = 0.0 - place["value"]
        agrees = abs(estimate - effect) <= max(abs(estimate), abs(effect)) / 2
        made.append({**entries, "estimate": estimate, "effect": effect, "agrees": agrees})
    return made


def _correlation(verified: Sequence[dict[str, Any]]) -> float | None:
    if len(verified) < 3:
        return None
    both = torch.tensor([[place["estimate"], place["effect"]] for place in verified])
    return float(torch.corrcoef(both.T)[0, 1])
