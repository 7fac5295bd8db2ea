"""Finds what the latents of the pocket model's autoencoder respond to: `python -m training.latents --out docs/latents`.

It writes the pages of those that docs/concepts.md speaks of, or of all with ``--all``.
"""

import argparse
from pathlib import Path

import interpose as ip
from training.corpus import documents

NAMES = {
    22: "a word of praise or blame comes next",
    38: "something bad has happened: a sad word comes next",
    46: "in the ...: a container comes next",
    59: "the hundreds of a year: its last digits come next",
    109: "the second of two people: what they did comes next",
    111: "of ...: a country comes next",
}
"""Latents, and what their strongest and their random texts have in common, as read from their pages."""


def main() -> None:
    """Look at texts, write pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the pages")
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument(
        "--all", action="store_true", help="all latents, not only those with a name"
    )
    asked = parser.parse_args()
    model = ip.load("pocket", device="cpu")
    found = ip.features(
        model,
        list(documents("features", asked.texts)),
        sae=ip.SAE.from_pretrained("pocket"),
        skip_first=True,
        k=10,
        sample=20,
    )
    print(found.lines()[0])  # noqa: T201
    names = ip.Concepts.of(NAMES)
    found.save_pages(asked.out, neuron=None if asked.all else sorted(NAMES), concepts=names)
    names.save(asked.out / "concepts.csv")


if __name__ == "__main__":
    main()
