"""`ip.path_patching`: what a head tells others directly (Wang et al. 2022).

Activation patching of a head measures all that follows from it. Here only direct paths from a sender to the receivers
count, for every other head is held at its clean value:

    run 1: clean text, sender's z := corrupt, every other z := clean; keep the receivers' q, k or v
    run 2: clean text, receivers' q, k or v := those of run 1, everything else live
    effect(sender) = metric(run 2) - metric(clean)

MLPs on the way are recomputed (``live``), so paths through them count as direct, or held at their clean values too.
To the logits, run 1 alone is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.batches import floor_of, work_of
from interpose.methods.layers import heads_of
from interpose.progress import Progress, ShowProgress

_EVIDENCE = (
    "Evidence for what a sender hands to these receivers past all other heads; not for its whole effect, which may go "
    "through heads in between, nor for what happens on other texts: held values are those of the clean text."
)
Head = tuple[int, int]
Receiver = tuple[int, int, str]


@torch.no_grad()
def path_patching(
    model: ip.TransformerModel,
    clean: Any,
    corrupt: Any,
    *,
    metric: Any,
    senders: Sequence[Head] | None = None,
    receivers: str | Sequence[Receiver] = "logits",
    mlps: str = "live",
    batch_size: int = 16,
    max_rows: int | None = None,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> ip.Scores:
    """How far the metric moves when receivers hear a head's value from the corrupted text, and nobody else does.

    ```python
    model = ip.load("pocket")
    clean = "When Mary and John went to the store, John gave a drink to"
    corrupt = "When Mary and John went to the store, Mary gave a drink to"
    lead = ip.metrics.logit_difference(" Mary", " John")
    ip.path_patching(model, clean, corrupt, metric=lead).top(3)                       # straight to the logits
    ip.path_patching(model, clean, corrupt, metric=lead, receivers=[(6, 0, "v"), (6, 4, "v")]).top(3)
    ```

    The result is [layer, head] of all senders, or one axis of those that were named (``"5.1"``). Senders in the last
    receiver's layer or behind it are exact zeros, and are not run.

    Args:
        model: a causal model of transformers whose blocks all have attention, in eval mode.
        clean: a text, several, or tokens [batch, pos].
        corrupt: the texts to compare with, token by token.
        metric: one of `ip.metrics`, or a function of logits that gives a number for each example.
        senders: heads as (layer, head); by default all.
        receivers: ``logits``, or heads as (layer, head, ``q``, ``k`` or ``v``). With grouped queries, heads of ``k``
            and ``v`` are key-value heads.
        mlps: ``live`` or ``frozen``: whether MLPs on the way are recomputed or held at their clean values.
        batch_size: how many pairs run together, at most.
        max_rows: how many rows (pairs times senders) run together, at most; by default as many as fit in memory.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    if mlps not in ("live", "frozen"):
        raise ValueError(f"mlps is 'live' or 'frozen'; got {mlps!r}.")
    if corrupt is None:
        raise ValueError("path patching needs a second text: corrupt=...")
    layers, count = _layers(model), heads_of(model)
    everyone = [(layer, head) for layer in layers for head in range(count)]
    wanted = everyone if senders is None else _senders(model, senders)
    hearing = [] if receivers == "logits" else _hearing(model, receivers)
    end = max((layer for layer, _, _ in hearing), default=len(layers))
    batches = ip.batches(model, clean, corrupt, batch_size=batch_size, prepend_bos=prepend_bos)
    each = torch.full((len(wanted), batches[0].total), torch.nan, device="cpu")
    each[[number for number, (layer, _) in enumerate(wanted) if layer >= end]] = 0.0
    ends = torch.zeros(2, batches[0].total, device="cpu")
    speaking = [number for number, (layer, _) in enumerate(wanted) if layer < end]
    done: list[_Paths] = []
    with Progress(progress, len(speaking) * batches[0].total, "path", keeps=True) as advance:
        for batch in batches:
            paths = _Paths(model, batch, metric, hearing, mlps == "frozen", end)
            done.append(paths)
            for number, effect in paths.effects([wanted[number] for number in speaking], max_rows):
                each[speaking[number], list(batch.numbers)] = effect.cpu()
                advance.step(len(batch))
            ends[:, list(batch.numbers)] = torch.stack(paths.ends).cpu()
    axes: dict[str, list[Any]] = {"head": [f"{layer}.{head}" for layer, head in wanted]}
    if senders is None:
        axes = {"layer": list(layers), "head": list(range(count))}
        each = each.unflatten(0, (len(layers), count))
    whole = [tokens for paths in done for tokens in (paths.batch.clean, paths.batch.corrupt)]
    noise_floor = floor_of([paths.runs[-1] for paths in done], advance)
    found = ip.Scores.averaged(
        each,
        title=f"Path patching: heads to {'heads' if hearing else 'the logits'}",
        axes=axes,
        unit="change of the metric",
        protocol={
            "metric": ip.metrics.label(metric),
            "receivers": _written(hearing),
            "mlps": mlps,
            "clean": float(ends[0].mean()),
            "corrupt": float(ends[1].mean()),
            **work_of([runs for paths in done for runs in paths.runs], *whole),
        },
        evidence=_EVIDENCE,
        noise_floor=noise_floor,
    )
    return advance.whole(found)


class _Paths:
    """Some pairs of texts, and what follows when senders speak to receivers."""

    def __init__(
        self,
        model: ip.TransformerModel,
        batch: Any,
        metric: Any,
        hearing: list[Receiver],
        frozen: bool,
        end: int,
    ) -> None:
        self.model, self.batch, self.metric = model, batch, metric
        self.hearing, self.end = hearing, end
        self.mlps = [point.layer() for point in _points(model, "hook_mlp_out")] if frozen else []
        names = ["z", *["mlp_out"] * frozen]
        _, self.clean = model.run_with_cache(batch.clean, names_filter=names, return_type=None)
        last = batch.last_logits(metric)
        self.logits, self.corrupt = model.run_with_cache(batch.corrupt, names_filter="z", **last)
        self.ends: list[Tensor] = []
        self.runs: list[ip.VariantRuns] = []

    def effects(
        self, senders: Sequence[Head], max_rows: int | None
    ) -> Iterator[tuple[int, Tensor]]:
        """How far the metric moves from the clean run, [example], by the number of each sender."""
        variants = [self._speaking(*one) for one in senders]
        if self.hearing and senders:
            kinds = list(dict.fromkeys((kind, layer) for layer, _, kind in self.hearing))
            heard = self._run(variants, max_rows, names_filter=kinds, return_type=None)
            told = {run.number: self._told(senders[run.number][0], run.cache) for run in heard}
            variants = [told[number] for number in range(len(senders))]
        runs = self._run(variants, max_rows, metric=self.metric, return_type=None)
        corrupt = self.batch.measure(self.metric, runs.base.logits)(self.logits)
        self.ends = [runs.base.measured, corrupt]
        for run in runs:
            yield run.number, run.measured - runs.base.measured

    def _run(
        self, variants: list[ip.Variant], max_rows: int | None, **wanted: Any
    ) -> ip.VariantRuns:
        options = {"max_rows": max_rows, "progress": False, **wanted}
        self.runs.append(ip.run_variants(self.model, self.batch, variants, **options))
        return self.runs[-1]

    def _speaking(self, layer: int, head: int) -> ip.Variant:
        """Run 1: a sender at its corrupted value, every head behind it at its clean one."""

        def speak(value: Tensor, hook: Any) -> None:
            value[:, :, head] = self.corrupt["z", hook.layer()][:, :, head]

        def hold(value: Tensor, hook: Any) -> None:
            value.copy_(self.clean["z" if "head" in hook.axes else "mlp_out", hook.layer()])

        held = [("z", n) for n in range(layer + 1, self.end)]
        held += [("mlp_out", n) for n in self.mlps if layer <= n < self.end]
        return ip.Variant([(("z", layer), speak), *((site, hold) for site in held)])

    def _told(self, sender: int, heard: ip.Cache) -> ip.Variant:
        """Run 2: receivers behind a sender get what they heard in run 1; the others hear nothing new."""

        def telling(layer: int, head: int, kind: str) -> Any:
            new = heard[kind, layer][:, :, head].clone()

            def tell(value: Tensor, hook: Any) -> None:  # noqa: ARG001
                value[:, :, head] = new

            return (kind, layer), tell

        return ip.Variant([telling(*one) for one in self.hearing if one[0] > sender])


def _points(model: ip.TransformerModel, kind: str) -> list[Any]:
    """The hook points of a kind, of those blocks that have it."""
    names = [f"blocks.{layer}.{kind}" for layer in range(len(model.blocks))]
    return [model.hook_dict[name] for name in names if name in model.sites]


def _layers(model: ip.TransformerModel) -> range:
    """All blocks, which must all have heads: what else carries values from place to place could not be held."""
    there = {point.layer() for point in _points(model, "attn.hook_z")}
    layers = range(len(model.blocks))
    for layer in layers:
        if layer not in there:
            name = f"blocks.{layer}.attn.hook_z"
            why = model.sites.absent.get(name, "it has no attention")
            raise ip.Unsupported(
                f"path patching holds every head at its clean value, and block {layer} has no {name!r}: {why}."
            )
    return layers


def _known(model: ip.TransformerModel, heads: Sequence[Head], kind: str = "z") -> list[Head]:
    """Heads that there are, negative layers counted from the end."""
    layers = len(model.blocks)
    count = heads_of(model, kind)
    for layer, head in heads:
        if not (-layers <= layer < layers and 0 <= head < count):
            what = "key-value heads" if kind in ("k", "v") else "heads"
            raise IndexError(
                f"no head {layer}.{head}: layers are 0 to {layers - 1}, {what} 0 to {count - 1}."
            )
    return [(layer % layers, head) for layer, head in heads]


def _senders(model: ip.TransformerModel, senders: Sequence[Head]) -> list[Head]:
    if not senders or any(not isinstance(one, (tuple, list)) or len(one) != 2 for one in senders):
        raise ValueError(f"senders are heads as (layer, head): [(5, 1), (5, 3)]; got {senders!r}.")
    return _known(model, senders)


def _hearing(model: ip.TransformerModel, receivers: str | Sequence[Receiver]) -> list[Receiver]:
    found: list[Receiver] = []
    for one in receivers:
        if not isinstance(one, (tuple, list)) or len(one) != 3 or one[2] not in ("q", "k", "v"):
            raise ValueError(
                f"receivers are 'logits', or heads with what they read: [(5, 1, 'q'), (5, 3, 'v')]; got {receivers!r}."
            )
        ((layer, head),) = _known(model, [(one[0], one[1])], one[2])
        found.append((layer, head, one[2]))
    if not found:
        raise ValueError("receivers is empty: give 'logits', or heads as (layer, head, 'q').")
    return found


def _written(hearing: list[Receiver]) -> Any:
    return [f"{layer}.{head} {kind}" for layer, head, kind in hearing] or "logits"
