"""Which layers, positions and heads tell Mary from John: sweeps over the indirect object's circuit.

Run: python examples/sweep_ioi.py [folder for the pages]
"""

import sys
from pathlib import Path

import interpose as ip

NAMES = [("Mary", "John"), ("Anna", "Tom"), ("Kate", "Paul"), ("Lucy", "Mark")]
STORY = "When {} and {} went to the store, {} gave a drink to"


def main(folder: Path) -> None:
    """The stream on one pair of texts, then every head on several, with intervals."""
    model = ip.load("pocket")
    clean, corrupt = STORY.format("Mary", "John", "John"), STORY.format("Mary", "John", "Mary")
    stream = ip.sweep(
        model,
        clean,
        corrupt,
        site=("attn_out", "mlp_out"),
        over=("site", "layer", "pos"),
        metric=ip.metrics.logit_difference(" Mary", " John"),
        progress=False,
    )
    print(stream)

    heads = ip.sweep(
        model,
        [STORY.format(a, b, b) for a, b in NAMES],
        [STORY.format(a, b, a) for a, b in NAMES],
        site="z",
        over=("layer", "head"),
        metric=ip.metrics.logit_difference(
            [f" {a}" for a, _ in NAMES], [f" {b}" for _, b in NAMES]
        ),
        progress=False,
    )
    low, high = heads.interval(of="normalised")
    print(f"\nshare of the answer that one head brings back, over {heads.examples} pairs of names:")
    for place in heads.top(5):
        at = place["layer"], place["head"]
        print(
            f"  head {at[0]}.{at[1]}: {place['normalised']:.2f} ({low[at]:.2f} to {high[at]:.2f})"
        )
    print(heads.tally)
    for name, result in (("stream", stream), ("heads", heads)):
        print(f"{name}: {result.save(folder / f'sweep_{name}.html')}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
