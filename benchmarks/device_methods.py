"""Every method gives on the accelerator what it gives on the CPU: ``python -m benchmarks.device_methods``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import interpose as ip

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
LEAD = ip.metrics.logit_difference(" Mary", " John")
PLURAL = [f"The {noun} near the house" for noun in ("dogs", "cats", "boys", "girls", "kings")]
SINGLE = [text.replace("s near", " near") for text in PLURAL]


def methods() -> dict[str, Callable[[Any], Any]]:
    """Each with small arguments; what is compared are the numbers of its result."""
    pair, many = (CLEAN, CORRUPT), ([CLEAN, CORRUPT], [CORRUPT, CLEAN])
    named = {"answer": " Mary", "instead": " John"}
    return {
        "logit_lens": lambda m: ip.logit_lens(m, CLEAN, answer=" Mary"),
        "logits_of": lambda m: ip.logit_lens(m, CLEAN, logits_of=[" Mary", " John"]),
        "TunedLens": lambda m: ip.TunedLens.fit(m, [CLEAN, CORRUPT], steps=3)(m, CLEAN),
        "direct_logit_attribution": lambda m: ip.direct_logit_attribution(
            m, CLEAN, by="head", **named
        ),
        "compare_prompts": lambda m: ip.compare_prompts(m, *pair, **named),
        "ablation": lambda m: ip.ablation(m, many[0], metric=LEAD, replace_by="mean"),
        "activation_patching": lambda m: ip.activation_patching(m, *pair, metric=LEAD),
        "causal_tracing": lambda m: ip.causal_tracing(
            m, CLEAN, subject="John", answer=" Mary", samples=2
        ),
        "path_patching": lambda m: ip.path_patching(
            m, *pair, metric=LEAD, receivers=[(6, 0, "v"), (6, 4, "k")]
        ),
        "attention_knockout": lambda m: ip.attention_knockout(
            m, CLEAN, metric=LEAD, query=-1, key=9
        ),
        "attention_patterns": lambda m: ip.attention_patterns(m, CLEAN, layer=[5]),
        "head_scores": lambda m: ip.head_scores(m, "induction", batch=2),
        "attribution_patching": lambda m: ip.attribution_patching(m, *many, metric=LEAD, verify=3),
        "gradient": lambda m: ip.attribution_patching(m, *pair, metric=LEAD, rule="gradient"),
        "edge_attribution": lambda m: ip.edge_attribution(m, *pair, metric=LEAD, steps=3),
        "faithfulness": lambda m: ip.faithfulness(
            m,
            *pair,
            metric=LEAD,
            scores=ip.edge_attribution(m, *pair, metric=LEAD, steps=3),
            sizes=[50],
        ),
        "integrated_gradients": lambda m: ip.integrated_gradients(m, CLEAN, metric=LEAD, steps=4),
        "saliency": lambda m: ip.saliency(m, CLEAN, metric=LEAD),
        "gradient_times_activation": lambda m: ip.gradient_times_activation(m, CLEAN, metric=LEAD),
        "probe": lambda m: ip.probe(
            m, PLURAL + SINGLE, [1] * 5 + [0] * 5, groups=list(range(5)) * 2, control=False
        ),
        "alignment_search": lambda m: ip.alignment_search(
            m,
            [CLEAN, CORRUPT] * 4,
            [CORRUPT, CLEAN] * 4,
            answer=[" John", " Mary"] * 4,
            layer=3,
            pos=9,
            steps=3,
        ),
        "max_activating": lambda m: ip.max_activating(
            m, [CLEAN, CORRUPT], layer=3, neuron=[1, 2], progress=False
        ),
        "function_vector": lambda m: ip.function_vector(
            m, ["The capital of France is"], ["The currency of France is"], answer=[" Paris"]
        ),
        "patchscope": lambda m: ip.patchscope(
            m, CLEAN, CORRUPT, source_pos=9, into_pos=9, answer=" Mary"
        ),
    }


def main() -> None:
    """Print how far apart they are."""
    there = ip.load("pocket")
    here = ip.load("pocket", device="cpu")
    for name, method in methods().items():
        found = [torch.as_tensor(method(model).values).cpu().double() for model in (here, there)]
        apart = float((found[0] - found[1]).nan_to_num().abs().max())
        most = float(found[0].nan_to_num().abs().max())
        print(f"{name:28} {apart:.1e} apart, on numbers up to {most:.3g}, {there.device}")


if __name__ == "__main__":
    main()
