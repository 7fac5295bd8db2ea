"""A real result of every public class, each as its function returns it, small."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import interpose as ip
from tests.models import tiny

EIFFEL, TREVI = "The Eiffel Tower is in", "The Trevi Fountain is in"
ENDS = (EIFFEL, TREVI)
LEAD = ip.metrics.logit_difference(" Paris", " Rome")
PARIS: dict[str, Any] = {"answer": " Paris", "instead": " Rome"}
NOUNS = ["key", "dog", "car", "tree"]
TEXTS = [f"The {noun}{ending} near the door" for noun in NOUNS for ending in ("", "s")]
QUIET: dict[str, Any] = {"progress": False}


@functools.cache
def pocket() -> Any:
    return ip.load("pocket", device="cpu").requires_grad_(False)


@functools.cache
def edges() -> ip.EdgeScores:
    return ip.edge_attribution(pocket(), *ENDS, metric=LEAD, **QUIET)


def sweep(**words: Any) -> ip.SweepResult:
    given = {"metric": LEAD, "layer": [2, 5], "pos": [1, 4]}
    return ip.sweep(pocket(), *ENDS, **given | words, **QUIET)


def in_16_bits() -> ip.SweepResult:
    half = ip.load("pocket", device="cpu", dtype=torch.bfloat16)
    return ip.sweep(half, *ENDS, metric=LEAD, layer=[2], pos=[1, 4], **QUIET)


def aligned() -> ip.Alignment:
    base = ["The key near the dogs", "The keys near the dog"]
    goals: dict[str, Any] = {"answer": [" are", " is"], "instead": [" is", " are"]}
    words = {"layer": 4, "pos": -1, "steps": 1, "placebo": False}
    return ip.alignment_search(pocket(), base * 4, base[::-1] * 4, **_four(goals), **words)


def _four(goals: dict[str, Any]) -> dict[str, Any]:
    return {name: value * 4 for name, value in goals.items()}


def task() -> ip.FunctionVector:
    said = ["The capital of France is", "The capital of Japan is"]
    corrupt = ["The currency of France is", "The currency of Japan is"]
    return ip.function_vector(pocket(), said, corrupt, answer=[" Paris", " Tokyo"], head=2)


def steering() -> ip.SteeringVector:
    return ip.steering_vector(pocket(), TEXTS[::2], TEXTS[1::2], layer=[2, 4], **QUIET)


def steered() -> ip.SteeringCurve:
    words = {"strength": [0.5, 2.0], "other": [EIFFEL], "answer": " is"}
    return ip.steer(pocket(), steering(), TEXTS[1::2], **words, **QUIET)


def probed() -> ip.ProbeScores:
    labels = ["singular", "plural"] * 4
    return ip.probe(pocket(), TEXTS, labels, layer=[2, 4], folds=2, **QUIET)


def net() -> torch.nn.Module:
    layers = torch.nn.Conv2d(1, 3, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(48, 2)
    return torch.nn.Sequential(*layers)


def images() -> torch.Tensor:
    return torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))


def shapes() -> ip.ShapeLog:
    log = ip.ShapeLog()
    ip.wrap(net()).run_with_hooks(images(), hooks=[log])
    return log


MADE: dict[str, Callable[[], ip.Result]] = {
    "Scores": lambda: ip.ablation(
        pocket(), list(ENDS), metric=LEAD, layer=[4, 5], replace_by="zero", **QUIET
    ),
    "SweepResult": sweep,
    "SweepResult of several metrics": lambda: sweep(
        metric={"lead": LEAD, "rank": ip.metrics.rank(" Paris")}
    ),
    "SweepResult in 16 bits": in_16_bits,
    "SweepResult of ablation": lambda: sweep(
        edit=ip.zero, site="z", over=("layer", "head"), pos=None
    ),
    "Measured": lambda: ip.measure(
        pocket(), list(ENDS), LEAD, edits=[ip.zero("z", layer=5)], **QUIET
    ),
    "Measured without edits": lambda: ip.measure(
        pocket(),
        pocket().to_tokens(EIFFEL),
        {"lead": LEAD, "rank": ip.metrics.rank(" Paris")},
        **QUIET,
    ),
    "Report": lambda: ip.wrap(tiny.build("gpt2", layers=1)).check(layer=0),
    "Circuit": lambda: edges().circuit(edges=12),
    "EdgeScores": edges,
    "Faithfulness": lambda: ip.faithfulness(
        pocket(), *ENDS, metric=LEAD, scores=edges(), sizes=[10, 30], **QUIET
    ),
    "Alignment": aligned,
    "AttentionPatterns": lambda: ip.attention_patterns(pocket(), EIFFEL, layer=[4, 5]),
    "AttributionPatching": lambda: ip.attribution_patching(
        pocket(), *ENDS, metric=LEAD, over=("layer", "head"), verify=3, **QUIET
    ),
    "PromptComparison": lambda: ip.compare_prompts(pocket(), *ENDS, **PARIS, **QUIET),
    "DirectLogitAttribution": lambda: ip.direct_logit_attribution(
        pocket(), EIFFEL, by="head", **PARIS
    ),
    "FunctionVector": task,
    "Attribution": lambda: ip.saliency(pocket(), EIFFEL, metric=LEAD, **QUIET),
    "IntegratedGradients": lambda: ip.integrated_gradients(
        pocket(), EIFFEL, metric=LEAD, baseline=TREVI, steps=2, **QUIET
    ),
    "LogitLens": lambda: ip.logit_lens(pocket(), EIFFEL, answer=" Paris", layer=[3, 6], **QUIET),
    "MaxActivating": lambda: ip.max_activating(
        pocket(), [*ENDS, "The"], layer=4, neuron=[8, 20], k=15, context=2, **QUIET
    ),
    "Patchscope": lambda: ip.patchscope(
        pocket(), EIFFEL, TREVI, source_pos=1, into_pos=1, answer=" Paris"
    ),
    "SteeringVector": steering,
    "SteeringCurve": steered,
    "SideBySide": lambda: ip.side_by_side(
        pocket(), list(ENDS), steering().add(3.0, layer=4), max_new_tokens=2
    ),
    "Probe": lambda: probed().best,
    "ProbeScores": probed,
    "TunedLens": lambda: ip.TunedLens.fit(pocket(), TEXTS[:2], steps=1, **QUIET),
    "Features": lambda: ip.features(
        pocket(), TEXTS, site="post", layer=3, neuron=[4, 20], k=3, sample=4, context=2, **QUIET
    ),
    "Concepts": lambda: ip.Concepts.of({4: "old things", 20: "doors"}, {4: 0.75}),
    "FeatureMaps": lambda: ip.feature_maps(net(), images(), "0"),
    "GradientHealth": lambda: ip.gradient_health(net(), images(), loss=torch.sum),
    "ActivationStatistics": lambda: ip.activation_statistics(
        net(), [images()], ["0", "3"], **QUIET
    ),
    "ShapeLog": shapes,
    "SAEEvaluation": lambda: ip.evaluate_sae(
        list(ENDS), ip.TopKSAE(192, 16, k=2), ("resid_post", 3), model=pocket(), **QUIET
    ),
    "SAETraining": lambda: ip.train_sae(
        torch.randn(64, 4), ip.TopKSAE(4, 8, k=2), steps=3, batch_size=16, device="cpu", **QUIET
    ),
}


@functools.cache
def made(name: str) -> ip.Result:
    """One of them, made once."""
    torch.manual_seed(0)
    return MADE[name]()
