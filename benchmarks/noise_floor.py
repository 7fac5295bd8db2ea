"""Whether a sweep's noise floor in 16 bits is true: ``python -m benchmarks.noise_floor [--device cuda] [MODEL ...]``.

Sweeps in bfloat16 and float16, against a sweep in float32 of the same weights. An effect whose sign is wrong should be
within the noise floor. Of each precision of the logits a line says: the floor, how many of the effects that are not
zero are within it, how many signs are wrong within and beyond it, the largest effect of a wrong sign, how far those
within it are off, and how far apart plans are (of the first pair of texts). Then the same of methods that are variants
of one run. A model is ``pocket`` or a folder.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch

import interpose as ip

STORY = "When {} and {} went to the store, {} gave a drink to"
NAMES = ["Mary", "John", "Anna", "Tom", "Kate", "Paul", "Lucy", "Mark"]
PAIRS: dict[str, list[tuple[str, str, Any, Any]]] = {
    # clean, corrupt, answer, instead; tokens of None are the two that the model finds likeliest
    "pocket": [
        *(
            (STORY.format(a, b, b), STORY.format(a, b, a), f" {a}", f" {b}")
            for a, b in zip(NAMES[::2], NAMES[1::2])
        ),
        ("The Eiffel Tower is in", "The Trevi Fountain is in", " Paris", " Rome"),
    ],
    "other": [
        (f"{start} {clean} {end}", f"{start} {corrupt} {end}", None, None)
        for (start, end), (clean, corrupt) in itertools.product(
            [
                ("Once upon a time there was a little", "who went to the park with a big"),
                ("Tom and Anna were in the garden with a", ". It was very big and"),
            ],
            [("girl", "boy"), ("dog", "cat"), ("tree", "house"), ("bird", "man")],
        )
    ],
}
SITES = {"resid_pre": "pos", "attn_out": "pos", "mlp_out": "pos", "z": "head"}
METHODS = ("paths", "knockouts", "tracing")
PLANS = ("wavefront", "batches", "one per cell")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("models", nargs="*", default=["pocket"])
    words.add_argument("--device", default="cpu")
    given = words.parse_args()
    for name, dtype in itertools.product(given.models, (torch.bfloat16, torch.float16)):
        model = ip.load(name)
        short = copy.deepcopy(model.module).to(given.device, dtype).eval()
        exact = copy.deepcopy(short).float()
        tokenizer = model.tokenizer
        both = [ip.wrap(one, tokenizer=tokenizer) for one in (short, exact)]
        found = list(_effects(*both, name))
        for precision in dict.fromkeys(line[0] for line in found):
            print(f"{name}, {str(dtype).removeprefix('torch.')}, logits in {precision}:")
            mine = [line[1:] for line in found if line[0] == precision]
            for site in SITES:
                _line(site, [line[1:] for line in mine if line[0] == site])
        print(f"{name}, {str(dtype).removeprefix('torch.')}, methods:")
        for method in METHODS:
            _line(method, list(_of_method(*both, name, method)))


def _effects(short: Any, exact: Any, name: str) -> Iterator[tuple[Any, ...]]:
    """Of each precision, site and pair: floor, effects, those in float32, how far plans are apart."""
    for number, (clean, corrupt, answer, instead) in enumerate(PAIRS.get(name, PAIRS["other"])):
        if answer is None:
            with torch.no_grad():
                answer, instead = exact(clean)[0, -1].topk(2).indices.tolist()
        metric = ip.metrics.logit_difference(answer, instead)
        for site, axis in SITES.items():
            words = {"site": site, "over": ("layer", axis), "metric": metric, "progress": False}
            wanted = ip.sweep(exact, clean, corrupt, plan="batches", **words).effect.flatten()
            first, *others = (
                ip.sweep(short, clean, corrupt, plan=plan, **words)
                for plan in PLANS[: 1 if number else 3]
            )
            for one, *more in zip(*((each, each.own) for each in (first, *others))):
                if one is not None:
                    apart = [float((one.effect - two.effect).abs().max()) for two in more]
                    there = wanted != 0
                    effects = one.effect.flatten()[there]
                    yield (
                        one.logits,
                        site,
                        one.noise_floor,
                        effects,
                        wanted[there],
                        max(apart, default=0.0),
                    )


def _of_method(short: Any, exact: Any, name: str, method: str) -> Iterator[tuple[Any, ...]]:
    """Of each pair: floor, effects, those in float32."""
    for clean, corrupt, answer, instead in PAIRS.get(name, PAIRS["other"]):
        if answer is None:
            with torch.no_grad():
                answer, instead = exact(clean)[0, -1].topk(2).indices.tolist()
        said = {"metric": ip.metrics.logit_difference(answer, instead), "progress": False}
        found, wanted = (
            ip.path_patching(model, clean, corrupt, **said)
            if method == "paths"
            else ip.attention_knockout(model, clean, query=-1, over=("layer", "key"), **said)
            if method == "knockouts"
            else ip.causal_tracing(model, clean, subject=[1, 2], samples=4, **said)
            for model in (short, exact)
        )
        there = wanted.values.flatten() != 0
        effects = [scores.values.flatten()[there] for scores in (found, wanted)]
        yield found.noise_floor, *effects, 0.0


def _line(site: str, found: list[tuple[float, torch.Tensor, torch.Tensor, float]]) -> None:
    floors = [floor for floor, *_ in found]
    within = torch.cat([effects.abs() <= floor for floor, effects, _, _ in found])
    wrong = torch.cat([effects * wanted < 0 for _, effects, wanted, _ in found])
    sizes = torch.cat([effects.abs() for _, effects, _, _ in found])
    off = torch.cat([effects - wanted for _, effects, wanted, _ in found])[within]
    largest = float(sizes[wrong].max()) if wrong.any() else 0.0
    print(
        f"  {site:10} floor {min(floors):.4f} to {max(floors):.4f}; {int(within.sum())} of {len(within)} within it; "
        f"wrong signs: {int((wrong & within).sum())} within, {int((wrong & ~within).sum())} beyond, the largest "
        f"{largest:.4f}; error {float(off.square().mean().sqrt()):.4f}, at most "
        f"{float(off.abs().max()):.4f}; plans apart by {max(apart for *_, apart in found):.4f}"
    )


if __name__ == "__main__":
    main()
