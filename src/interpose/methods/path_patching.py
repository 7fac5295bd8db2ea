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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import interpose as ip

_EVIDENCE = (
    "Evidence for what a sender hands to these receivers past all other heads; not for its whole effect, which may go "
    "through heads in between, nor for what happens on other texts: held values are those of the clean text."
)
Head = tuple[int, int]
Receiver = tuple[int, int, str]


@torch.no_grad()
def path_patching(
    model: Any,
    clean: Any,
    corrupt: Any,
    *,
    metric: Any,
    senders: Sequence[Head] | None = None,
    receivers: str | Sequence[Receiver] = "logits",
    mlps: str = "live",
    batch_size: int = 16,
    max_rows: int = 64,
    prepend_bos: bool | None = None,
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
        max_rows: how many rows (pairs times senders) run together, at most; the pairs of a sender always do.
        prepend_bos: as in ``to_tokens``, for texts.
    """
    if mlps not in ("live", "frozen"):
        raise ValueError(f"mlps is 'live' or 'frozen'; got {mlps!r}.")
    if corrupt is None:
        raise ValueError("path patching needs a second text: corrupt=...")
    layers, count = _layers(model), int(model.cfg.n_heads)
    everyone = [(layer, head) for layer in layers for head in range(count)]
    wanted = everyone if senders is None else _senders(model, senders)
    hearing = [] if receivers == "logits" else _hearing(model, receivers)
    end = max((layer for layer, _, _ in hearing), default=len(layers))
    batches = ip.batches(model, clean, corrupt, batch_size=batch_size, prepend_bos=prepend_bos)
    each = torch.zeros(len(wanted), batches[0].total, device="cpu")
    ends, forwards = torch.zeros(2, batches[0].total, device="cpu"), 0
    for batch in batches:
        paths = _Paths(model, batch, metric, hearing, mlps == "frozen", end)
        ends[:, list(batch.numbers)] = torch.stack(paths.ends).cpu()
        each[:, list(batch.numbers)] = paths.of_all(wanted, max(1, max_rows // len(batch))).cpu()
        forwards += paths.forwards
    axes: dict[str, list[Any]] = {"head": [f"{layer}.{head}" for layer, head in wanted]}
    if senders is None:
        axes = {"layer": list(layers), "head": list(range(count))}
        each = each.unflatten(0, (len(layers), count))
    said = {
        "metric": ip.metrics.label(metric),
        "receivers": _written(hearing),
        "mlps": mlps,
    }
    clean_metric, corrupt_metric = ends.mean(1).tolist()
    return ip.Scores.averaged(
        each,
        title=f"Path patching: heads to {'heads' if hearing else 'the logits'}",
        axes=axes,
        unit="change of the metric",
        protocol={**said, "clean": clean_metric, "corrupt": corrupt_metric, "forwards": forwards},
        evidence=_EVIDENCE,
    )


class _Paths:
    """The two runs of some pairs, and what follows when senders speak to receivers."""

    def __init__(
        self, model: Any, batch: Any, metric: Any, hearing: list[Receiver], frozen: bool, end: int
    ) -> None:
        self.model, self.batch, self.hearing, self.end = model, batch, hearing, end
        mlps = [point.layer() for point in _points(model, "hook_mlp_out")] if frozen else []
        self.held = [("z", n) for n in range(len(model.blocks))] + [("mlp_out", n) for n in mlps]
        self.last = batch.last_logits(metric)
        names = ["resid_pre", *self.held]
        logits, self.clean = model.run_with_cache(batch.clean, names_filter=names, **self.last)
        self.measure = batch.measure(metric, logits)
        other, self.corrupt = model.run_with_cache(batch.corrupt, names_filter="z", **self.last)
        self.ends = [self.measure(logits), self.measure(other)]
        self.forwards = 2

    def of_all(self, senders: Sequence[Head], size: int) -> Tensor:
        """The effect of every sender, [sender, example]; so many of them run together."""
        found = torch.zeros(len(senders), len(self.batch), device=self.ends[0].device)
        order = sorted((head, n) for n, head in enumerate(senders) if head[0] < self.end)
        for at in range(0, len(order), size):
            some = order[at : at + size]
            found[[n for _, n in some]] = self.effects([head for head, _ in some])
        return found

    def effects(self, senders: list[Head]) -> Tensor:
        """How far the metric moves from the clean run, for each sender: [sender, example]."""
        first, times = senders[0][0], len(senders)
        hooks = self._held(senders, first)
        hearing = [one for one in self.hearing if one[0] > first]  # the others hear nothing new
        if hearing:
            kinds = list(dict.fromkeys((kind, layer) for layer, _, kind in hearing))
            heard = self._run(first, times, hooks, keep=kinds)
            first, hooks = min(layer for layer, _, _ in hearing), _told(hearing, heard)
        logits = self._run(first, times, hooks)
        after = torch.stack([self.measure(part) for part in logits.split(len(self.batch))])
        found: Tensor = after - self.ends[0]
        return found

    def _held(self, senders: list[Head], first: int) -> list[Any]:
        """Hooks of run 1: every head at its clean value, but in the rows of a sender its corrupted one."""
        size = len(self.batch)

        def hold(value: Tensor, hook: Any) -> Tensor:  # [sender and example, pos, ...]
            kind = "z" if "head" in hook.axes else "mlp_out"
            held: Tensor = self.clean[kind, hook.layer()].repeat(
                len(senders), *[1] * (value.ndim - 1)
            )
            for number, (layer, head) in enumerate(senders):
                if kind == "z" and layer == hook.layer():
                    rows = slice(number * size, (number + 1) * size)
                    held[rows, :, head] = self.corrupt["z", layer][:, :, head]
            return held

        return [(site, hold) for site in self.held if first <= site[1] < self.end]

    def _run(self, layer: int, times: int, hooks: list[Any], keep: list[Any] | None = None) -> Any:
        """Logits of the clean text with hooks, once for each sender; or the values at some sites, as far as needed."""
        self.forwards += 1
        given = self.last if keep is None else {"names_filter": keep, **self.last}
        stream = self.clean["resid_pre", layer]
        return self.batch.run_from(layer, stream, times=times, fwd_hooks=hooks, **given)


def _told(hearing: list[Receiver], heard: Any) -> list[Any]:
    """Hooks of run 2: receivers get what they heard in run 1."""

    def tell(layer: int, head: int, kind: str) -> Any:
        def put(value: Tensor, hook: Any) -> None:  # noqa: ARG001
            value[:, :, head] = heard[kind, layer][:, :, head]

        return (kind, layer), put

    return [tell(*one) for one in hearing]


def _points(model: Any, kind: str) -> list[Any]:
    """The hook points of a kind, of those blocks that have it."""
    names = [f"blocks.{layer}.{kind}" for layer in range(len(model.blocks))]
    return [model.hook_dict[name] for name in names if name in model.sites]


def _layers(model: Any) -> range:
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


def _known(model: Any, heads: Sequence[Head], kind: str = "z") -> list[Head]:
    """Heads that there are, negative layers counted from the end."""
    layers = len(model.blocks)
    shared = model.cfg.n_key_value_heads if kind in ("k", "v") else None
    count = shared or model.cfg.n_heads
    for layer, head in heads:
        if not (-layers <= layer < layers and 0 <= head < count):
            what = "key-value heads" if kind in ("k", "v") else "heads"
            raise IndexError(
                f"no head {layer}.{head}: layers are 0 to {layers - 1}, {what} 0 to {count - 1}."
            )
    return [(layer % layers, head) for layer, head in heads]


def _senders(model: Any, senders: Sequence[Head]) -> list[Head]:
    if not senders or any(not isinstance(one, (tuple, list)) or len(one) != 2 for one in senders):
        raise ValueError(f"senders are heads as (layer, head): [(5, 1), (5, 3)]; got {senders!r}.")
    return _known(model, senders)


def _hearing(model: Any, receivers: str | Sequence[Receiver]) -> list[Receiver]:
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
