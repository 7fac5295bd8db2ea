"""`ip.causal_tracing`: where a model keeps what it knows of a subject (the tracing of ROME).

Noise on the embeddings of the subject's tokens makes the model forget. Then one clean value at a time is put back:

    effect(layer, pos) = mean over noises of [metric(noisy run with the clean value there) - metric(noisy run)]

With a window, the clean values of that many layers around the layer are put back together.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.batches import floor_of, work_of
from interpose.methods.layers import Layers, around, chosen_layers
from interpose.progress import Progress, ShowProgress

_EVIDENCE = (
    "Evidence that what the metric needs of the subject passes through a place, for noise of this size; not that it is "
    "stored there or that an edit there is best, and windows show stretches of layers rather than single ones."
)
_TOKENS = 8192  # of noises that run together


@torch.no_grad()
def causal_tracing(
    model: ip.TransformerModel,
    texts: Any,
    *,
    subject: str | int | Sequence[int] | Sequence[str],
    answer: str | int | None = None,
    metric: Any = None,
    site: str = "resid_post",
    window: int = 1,
    samples: int = 10,
    noise: float = 3.0,
    seed: int = 0,
    layer: Layers = None,
    pos: Sequence[int] | None = None,
    max_rows: int | None = None,
    prepend_bos: bool | None = None,
    progress: ShowProgress = True,
) -> ip.Scores:
    """How much of the answer comes back when one clean value is restored: [layer, pos], the mean over noises.

    ```python
    model = ip.load("pocket")
    text = "The Eiffel Tower is in"
    ip.causal_tracing(model, text, subject="Eiffel Tower", answer=" Paris")
    ip.causal_tracing(model, text, subject="Eiffel Tower", site="mlp_out", window=3)
    ```

    Each noise is the same for all places. Places before the subject are exact zeros, and are not run. The protocol of
    the result has the metric of the clean run and of the noisy ones; ``errors`` are standard errors over noises.

    Args:
        model: a causal model of transformers, in eval mode.
        texts: one text, or its tokens.
        subject: what is blurred: a text (every place where it is), texts, or positions.
        answer: the token whose probability is measured; by default the model's own.
        metric: one of `ip.metrics`, or a function of logits, instead of the answer's probability.
        site: the kind of site whose value is restored: ``resid_post``, ``mlp_out``, ``attn_out``, or any other of a
            block that has positions.
        window: how many layers are restored together, around the layer; the paper takes 10 for ``mlp_out`` and
            ``attn_out`` of a model of 48 layers.
        samples: how many noises.
        noise: their size, in standard deviations of the embedding matrix.
        seed: of the noises.
        layer: which layers are in the middle of windows; by default all.
        pos: which; by default all.
        max_rows: how many rows (places times noises) run together, at most; by default as many as fit in memory.
        prepend_bos: as in ``to_tokens``, for texts.
        progress: as in `ip.sweep`.
    """
    if samples < 1 or window < 1:
        raise ValueError(f"samples and window are at least 1; got {samples} and {window}.")
    one = _alone(ip.batches(model, texts, prepend_bos=prepend_bos))
    (blurred,) = one.positions(subject)
    if not blurred:
        raise ValueError(f"the subject has no positions: {subject!r}.")
    there = _layers(model, site)
    layers = chosen_layers(layer, there, len(model.blocks), repr(site))
    (positions,) = one.positions(range(one.clean.shape[1]) if pos is None else pos)
    measured, said = _metric(model, one, answer, metric)
    trace = _Trace(model, one, measured, site, blurred)
    moved = [at for at, place in enumerate(positions) if place >= min(blurred)]
    cells = list(itertools.product(range(len(layers)), moved))
    variants = [
        trace.restoring([n for n in around(layers[row], window) if n in there], positions[at])
        for row, at in cells
    ]
    each = torch.zeros(len(layers), len(positions), samples, device="cpu")
    each[:, moved] = torch.nan
    every: list[ip.VariantRuns] = []
    with Progress(progress, len(cells) * samples, keeps=True) as advance:
        for some, drawn in trace.noises(samples, noise, seed):
            every.append(trace.runs(drawn, variants, max_rows=max_rows, progress=advance))
            noisy = every[-1].base.measured
            for run in every[-1]:
                each[(*cells[run.number], some)] = (run.measured - noisy).cpu()
    noise_floor = floor_of(every, advance)
    found = ip.Scores.averaged(
        each,
        title=f"Causal tracing: {site} restored, {samples} noises on {subject!r}",
        axes={"layer": list(layers), "pos": positions},
        unit="change of the metric",
        protocol={
            **said,
            "window": window,
            "seed": seed,
            "noise": f"{noise:g} x {trace.std:.3g}",
            "subject at": blurred,
            "clean": trace.clean,
            "noisy": float(torch.cat([runs.base.measured for runs in every]).mean()),
            **work_of(every, *[one.clean] * (2 if answer is None and metric is None else 1)),
        },
        evidence=_EVIDENCE,
        tokens=one.str_tokens,
        noise_floor=noise_floor,
    )
    return advance.whole(found)


class _Trace:
    """One text, its clean values, and noisy runs that they are put back into."""

    def __init__(
        self, model: ip.TransformerModel, text: ip.Batch, metric: Any, site: str, blurred: list[int]
    ) -> None:
        self.model, self.text, self.metric = model, text, metric
        self.site, self.blurred = site, blurred
        last = text.last_logits(metric)
        self.logits, self.kept = model.run_with_cache(text.clean, names_filter=site, **last)
        self.clean = float(text.measure(metric, self.logits)(self.logits)[0])
        self.std = float(model.W_E.float().std())

    def noises(self, samples: int, size: float, seed: int) -> Iterator[tuple[slice, Tensor]]:
        """Noises [sample, blurred, d_model] that run together, with their numbers."""
        draw = torch.Generator("cpu").manual_seed(seed)
        shape = (samples, len(self.blurred), self.model.W_E.shape[-1])
        drawn = self.std * size * torch.randn(shape, generator=draw, device="cpu")
        together = max(1, _TOKENS // self.text.clean.shape[1])
        for at in range(0, samples, together):
            yield slice(at, at + together), drawn[at : at + together]

    def restoring(self, layers: Sequence[int], pos: int) -> ip.Variant:
        """The clean values at a position of some layers."""

        def restore(value: Tensor, hook: Any) -> None:
            value[:, pos] = self.kept[self.site, hook.layer()][0, pos].to(value)

        return ip.Variant([((self.site, layer), restore) for layer in layers])

    def runs(self, noise: Tensor, variants: Sequence[ip.Variant], **more: Any) -> ip.VariantRuns:
        """Variants of the text, with each noise."""
        count = len(noise)

        def blur(embed: Tensor, hook: Any) -> None:  # noqa: ARG001
            embed[:, self.blurred] += noise.to(embed)

        # The same text again and again: one answer is for all of them.
        same, numbers = self.text.clean.expand(count, -1), self.text.numbers * count
        return ip.run_variants(
            self.model,
            dataclasses.replace(self.text, clean=same, numbers=numbers),
            variants,
            metric=self.metric,
            return_type=None,
            clean_logits=self.logits.expand(count, -1, -1),
            hooks=[("hook_embed", blur)],
            **more,
        )


def _alone(batches: Sequence[Any]) -> Any:
    count = sum(map(len, batches))
    if count != 1:
        raise ValueError(f"causal tracing is of one text and its subject; got {count} texts.")
    return batches[0]


def _layers(model: ip.TransformerModel, site: str) -> list[int]:
    """The layers that have a kind of site."""
    points = [model.hook_dict[name] for name in model.sites.select([site])]
    for point in points:
        if point.pos_axis != 1 or point.layer() is None:
            raise ValueError(
                f"a value is restored at a layer and a position; {point.name!r} is {point.axes}. Choose another kind "
                "of site, such as 'mlp_out' or 'attn_out'."
            )
    return [point.layer() for point in points]


def _metric(
    model: ip.TransformerModel, one: Any, answer: str | int | None, metric: Any
) -> tuple[Any, dict[str, str]]:
    """What is measured, and how it is written."""
    if metric is not None and answer is not None:
        raise ValueError("give answer=... or metric=..., not both.")
    if metric is not None:
        return metric, {"metric": ip.metrics.label(metric)}
    if answer is None:
        answer = int(model(one.clean)[0, -1].argmax())
    word = answer
    if isinstance(answer, int) and one.str_tokens is not None:
        word = model.to_single_str_token(answer)
    return ip.metrics.probability(answer), {"metric": f"probability({word!r})"}
