"""`ip.causal_tracing`: where a model keeps what it knows of a subject (the tracing of ROME).

Noise on the embeddings of the subject's tokens makes the model forget. Then one clean value at a time is put back:

    effect(layer, pos) = mean over noises of [metric(noisy run with the clean value there) - metric(noisy run)]

With a window, the clean values of that many layers around the layer are put back together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.methods.layers import Layers, chosen_layers

_EVIDENCE = (
    "Evidence that what the metric needs of the subject passes through a place, for noise of this size; not that it is "
    "stored there or that an edit there is best, and windows show stretches of layers rather than single ones."
)


@torch.no_grad()
def causal_tracing(
    model: Any,
    text: Any,
    *,
    subject: str | int | Sequence[int] | Sequence[str],
    answer: str | int | None = None,
    metric: Any = None,
    site: str = "resid_post",
    window: int = 1,
    samples: int = 10,
    noise: float = 3.0,
    seed: int = 0,
    layers: Layers = None,
    positions: Sequence[int] | None = None,
    max_rows: int = 128,
    prepend_bos: bool | None = None,
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
        text: one text, or its tokens.
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
        layers: which layers are in the middle of windows; by default all.
        positions: which; by default all.
        max_rows: how many rows (positions times noises) run together, at most; the noises of a position always do.
        prepend_bos: as in ``to_tokens``, for texts.
    """
    if samples < 1 or window < 1:
        raise ValueError(f"samples and window are at least 1; got {samples} and {window}.")
    one = _alone(ip.batches(model, text, prepend_bos=prepend_bos))
    (blurred,) = one.positions(subject)
    if not blurred:
        raise ValueError(f"the subject has no positions: {subject!r}.")
    there = _layers(model, site)
    layers = chosen_layers(layers, there, len(model.blocks), repr(site))
    (positions,) = one.positions(range(one.clean.shape[1]) if positions is None else positions)
    guessed = answer is None and metric is None
    if guessed:
        answer = int(model(one.clean)[0, -1].argmax())
    metric, said = _metric(model, one, answer, metric)
    batch = dataclasses.replace(  # the same text again and again: one answer is for all of them
        one, clean=one.clean.expand(samples, -1), numbers=one.numbers * samples
    )
    trace = _Trace(model, batch, metric, site, blurred, noise, seed)
    trace.forwards += guessed
    changed = [place for place, pos in enumerate(positions) if pos >= min(blurred)]
    each = torch.zeros(len(layers), len(positions), samples, device="cpu")
    for row, layer in enumerate(layers):
        around = [other for other in _window(layer, window) if other in there]
        for some in _chunks(changed, max(1, max_rows // samples)):
            found = trace.restored(around, [positions[place] for place in some])
            each[row, some] = (found - trace.noisy).cpu()
    return ip.Scores.averaged(
        each,
        title=f"Causal tracing: {site} restored, {samples} noises on {subject!r}",
        axes={"layer": list(layers), "pos": positions},
        unit="change of the metric",
        protocol={**said, "window": window, "seed": seed, **trace.protocol()},
        evidence=_EVIDENCE,
        tokens=one.str_tokens,
    )


class _Trace:
    """One text, its clean values, and the noisy runs that they are put back into."""

    def __init__(
        self,
        model: Any,
        batch: Any,
        metric: Any,
        site: str,
        blurred: list[int],
        size: float,
        seed: int,
    ) -> None:
        self.batch, self.site = batch, site
        self.last = batch.last_logits(metric)
        sites = [site, "resid_pre"]
        logits, self.kept = model.run_with_cache(batch.clean[:1], names_filter=sites, **self.last)
        self.measure = batch.measure(metric, logits.expand(len(batch), -1, -1))
        self.clean = float(self.measure(logits.expand(len(batch), -1, -1))[0])
        self.blurred, self.size, self.std = blurred, size, float(model.W_E.float().std())
        generator = torch.Generator("cpu").manual_seed(seed)
        shape = (len(batch), len(blurred), model.W_E.shape[-1])
        # [sample, blurred, d_model]
        noise = self.std * size * torch.randn(shape, generator=generator, device="cpu")

        def blur(embed: Tensor, hook: Any) -> None:  # noqa: ARG001
            embed[:, blurred] += noise.to(embed).repeat(len(embed) // len(noise), 1, 1)

        self.blur = ("hook_embed", blur)
        logits, self.streams = model.run_with_cache(
            batch.clean, names_filter="resid_pre", fwd_hooks=[self.blur], **self.last
        )
        self.noisy = self.measure(logits)  # [sample]
        self.forwards = 2

    def restored(self, layers: Sequence[int], positions: Sequence[int]) -> Tensor:
        """The metric of noisy runs with clean values back in some layers, at each position: [pos, sample]."""
        samples, times = len(self.batch), len(positions)
        places = torch.tensor(positions, device="cpu").repeat_interleave(samples)
        rows = torch.arange(times * samples, device="cpu")  # position by position

        def restore(value: Tensor, hook: Any) -> None:
            value[rows, places] = self.kept[self.site, hook.layer()][0, places].to(value)

        hooks = [((self.site, layer), restore) for layer in layers]
        self.forwards += 1
        stream = self.streams["resid_pre", layers[0]]
        given = {"times": times, "fwd_hooks": hooks, "before": [self.blur], **self.last}
        logits = self.batch.run_from(layers[0], stream, **given)
        return torch.stack([self.measure(part) for part in logits.split(samples)])

    def protocol(self) -> dict[str, Any]:
        """What is said of the runs."""
        return {
            "noise": f"{self.size:g} x {self.std:.3g}",
            "subject at": self.blurred,
            "clean": self.clean,
            "noisy": float(self.noisy.mean()),
            "forwards": self.forwards,
        }


def _alone(batches: Sequence[Any]) -> Any:
    count = sum(map(len, batches))
    if count != 1:
        raise ValueError(f"causal tracing is of one text and its subject; got {count} texts.")
    return batches[0]


def _layers(model: Any, site: str) -> list[int]:
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
    model: Any, one: Any, answer: str | int | None, metric: Any
) -> tuple[Any, dict[str, str]]:
    """What is measured, and how it is written."""
    if metric is not None and answer is not None:
        raise ValueError("give answer=... or metric=..., not both.")
    if metric is not None:
        return metric, {"metric": ip.metrics.label(metric)}
    assert answer is not None
    known = isinstance(answer, int) and one.str_tokens is not None
    word = model.to_single_str_token(answer) if known else answer
    return ip.metrics.probability(answer), {"metric": f"probability({word!r})"}


def _window(layer: int, size: int) -> range:
    """So many layers around one; of an even number, one more is before it."""
    return range(layer - size // 2, layer + (size + 1) // 2)


def _chunks(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (numbers[at : at + size] for at in range(0, len(numbers), size))
