"""Function vectors: a task as one vector, the summed output of the heads that carry it (Todd et al., 2024).

Each head's output at the last token is averaged over prompts that show a task. A head matters as far as this mean, put
into prompts that do not show it, brings the answer back; what the heads that matter most write is the vector:

    effect[layer, head] = mean over corrupted prompts of metric(z[head, last] := mean z[head, last]) - metric(as it is)
    vector = sum over the strongest heads of mean z[head, last] W_O[head]

Where a norm or a multiplier stands between attention and the stream, the vector is what arrives in the stream, with the
norm's divisor of each prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.batches import batches_to_read
from interpose.methods.layers import sites_in
from interpose.progress import ShowProgress


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class FunctionVector(ip.Scores):
    """How much each head carries of a task, [layer, head], and the vector that the strongest ones write.

    Attributes:
        heads: the heads in the vector, pairs (layer, head), the strongest first.
        parts: the mean output of each in the stream, [head, d_model].
    """

    heads: list[list[int]]
    parts: Tensor

    @property
    def vector(self) -> Tensor:
        """The sum of the heads' mean outputs, [d_model]."""
        return self.parts.sum(0)

    def edit(
        self, layer: int, strength: float = 1.0, *, pos: Any = -1, phase: Any = None
    ) -> ip.add:
        """The edit that adds the vector to the stream after a layer, at the prompt's last token."""
        return ip.add(
            "resid_post", self.vector, layer=layer, pos=pos, phase=phase, strength=strength
        )

    def lines(self) -> list[str]:
        """What is said above the numbers."""
        chosen = ", ".join(f"{layer}.{head}" for layer, head in self.heads)
        size = (
            f"the vector has norm {float(self.vector.norm()):.4g} and is written by heads {chosen}"
        )
        return [*ip.Scores.lines(self), size]


@torch.no_grad()
def function_vector(
    model: ip.TransformerModel,
    texts: Any,
    corrupt: Any = None,
    *,
    answer: Any = None,
    metric: Any = None,
    head: int | Sequence[tuple[int, int]] = 10,
    batch_size: int = 16,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> FunctionVector:
    """What each head carries of a task that prompts show, and the vector that the strongest heads write.

    ```python
    task = ip.function_vector(model, prompts, corrupt, answer=[" Paris", " Tokyo"])
    model.run_with_hooks(other, hooks=[task.edit(layer=5)])
    ```

    Args:
        model: a model of transformers, in eval mode.
        texts: texts that show the task, of any lengths; only their last tokens are looked at. Or a store of them
            (`ip.open_store`) with ``z``, ``attn.hook_out`` and ``hook_attn_out`` of each layer; ``pos=-1`` is enough.
        corrupt: texts that do not show it, such as the same with shuffled answers, of any lengths and any number.
            None measures nothing, and goes with ``head`` given as pairs.
        answer: the right answers to ``corrupt``, one token for all or one for each; their probability is measured.
        metric: what to measure of ``corrupt`` instead: one of `ip.metrics`, or a function of logits.
        head: how many of the strongest heads write the vector, or which, as pairs (layer, head).
        batch_size: how many texts run together, at most.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    if corrupt is None and isinstance(head, int):
        raise ValueError(
            f"head={head} are chosen by their effect on corrupted prompts, and there are none. Give corrupt and "
            "answer, or the heads themselves: head=[(5, 0), (5, 2)]."
        )
    if corrupt is not None and (answer is None) == (metric is None):
        raise ValueError("say what to measure of the corrupted prompts: answer=... or metric=...")
    parts = batches_to_read(
        model, texts, batch_size=batch_size, prepend_bos=prepend_bos, runs=corrupt is not None
    )
    means, written = _averages(model, parts)
    layers, count = list(written), len(next(iter(written.values())))
    effects, noise_floor = torch.full((len(layers), count), torch.nan, device="cpu"), 0.0
    protocol: dict[str, Any] = {"prompts": parts[0].total, "forwards": 0}
    protocol["forwards"] += len(parts) if parts[0].rows is None else 0
    if corrupt is not None:
        swept = ip.sweep(
            model,
            corrupt,
            site="z",
            over=("layer", "head"),
            edit=lambda site, **head: ip.fill(site, means, pos=-1, **head),
            # one alone: a mapping of several is refused
            metric={"metric": ip.metrics.probability(answer) if metric is None else metric},
            batch_size=batch_size,
            prepend_bos=prepend_bos,
            progress=progress,
        )
        effects, noise_floor = swept.effect[0].cpu(), swept.noise_floor
        protocol["forwards"] += swept.tally.forwards
        protocol["plan"] = swept.tally.protocol["plan"]
        protocol["corrupt"] = swept.examples
        protocol["metric"] = (
            "probability of the answers" if metric is None else ip.metrics.label(metric)
        )
        protocol["baseline"] = float(swept.baseline.mean())
    chosen = _chosen(head, effects, layers, len(model.blocks))
    return FunctionVector(
        title=f"What each head carries of a task, and the vector of {len(chosen)} heads",
        values=effects,
        axes={"layer": layers, "head": list(range(count))},
        unit="effect on the metric",
        protocol=protocol,
        evidence="These mean outputs are enough to move the answer; not that the model does the task through them: "
        "heads that stand in for each other are undercounted, and a vector may name answers outright.",
        noise_floor=noise_floor,
        heads=chosen,
        parts=torch.stack([written[layer][head] for layer, head in chosen]),
    )


def _chosen(
    heads: int | Sequence[tuple[int, int]], effects: Tensor, layers: list[int], blocks: int
) -> list[list[int]]:
    """The heads in the vector, as pairs: those that are named, or the strongest."""
    count = effects.shape[1]
    if isinstance(heads, int):
        best = effects.flatten().topk(min(max(heads, 0), effects.numel())).indices.tolist()
        found = [[layers[place // count], place % count] for place in best]
    else:
        found = [[int(layer) + blocks * (layer < 0), int(head)] for layer, head in heads]
    wrong = [pair for pair in found if pair[0] not in layers or not 0 <= pair[1] < count]
    if wrong or not found:
        raise IndexError(
            f"head={heads!r}: give at least one, of layers {layers[0]} to {layers[-1]} and heads 0 to {count - 1}."
        )
    return found


def _averages(
    model: ip.TransformerModel, parts: Sequence[Any]
) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """Each head's mean over prompts at the last token.

    As it is handed to the output projection, by site [1, 1, head, d_head]; and as it arrives in the stream, by layer
    [head, d_model].
    """
    means, written = {}, {}
    rows = [_last_tokens(model, part) for part in parts]
    for layer, name in sites_in(model, "z", None, "heads").items():
        z, out, added, divisor = (torch.cat([row[layer][at] for row in rows]) for at in range(4))
        means[name] = z.mean(0)[None, None]
        # What the stream gets is out / divisor * gain: a norm's weights, a multiplier, or 1. Least squares finds it.
        normed = out / divisor
        gain = (normed * added).sum(0) / normed.square().sum(0).clamp_min(1e-30)  # [d_model]
        if (added - normed * gain).norm() > 0.03 * added.norm():
            raise ip.Unsupported(
                f"what {name.replace('hook_z', 'hook_out')} returns reaches the stream through more than a norm "
                "without a bias and a multiplier, so that the heads' parts of it cannot be told apart."
            )
        heads = (z / divisor[..., None]).mean(0)  # [head, d_head]
        weight = model.blocks[layer].attn.W_O.to(heads)  # [head, d_head, d_model]
        written[layer] = (torch.einsum("hd,hdm->hm", heads, weight) * gain).float().cpu()
    return means, written


def _last_tokens(model: ip.TransformerModel, batch: ip.Batch) -> dict[int, list[Tensor]]:
    """What is needed of the last tokens, by layer.

    z [example, head, d_head]; what the output projection returns, and what of it reaches the stream,
    [example, d_model]; what a norm between these two divides by, [example, 1].
    """
    names = {}
    for layer, name in sites_in(model, "z", None, "heads").items():
        norm = f"blocks.{layer}.ln1_post.hook_scale"
        names[layer] = [
            name,
            name.replace("hook_z", "hook_out"),
            f"blocks.{layer}.hook_attn_out",
        ]
        names[layer] += [norm] if norm in model.sites else []
    wanted = ip.at([name for several in names.values() for name in several], pos=-1)
    cache = batch.read(wanted)
    found = {
        layer: [cache[name][:, 0].float() for name in several] for layer, several in names.items()
    }
    return {
        layer: [*values, torch.ones_like(values[1][:, :1])][:4] for layer, values in found.items()
    }
