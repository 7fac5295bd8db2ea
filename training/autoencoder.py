"""Trains the pocket model's autoencoder: `python -m training.autoencoder --out build/pocket/sae`.

It is of the stream after layer 3, in the middle, of every position but the first. Texts are those of the corpus;
what it explains is measured on texts that it has not seen.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

import interpose as ip
from training.corpus import documents

SITE = ("resid_post", 3)
NOT_FIRST = slice(1, None)
LATENTS, K = 768, 12


def main() -> None:
    """Harvest, train, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the autoencoder")
    parser.add_argument("--texts", type=int, default=30_000)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    model = ip.load("pocket", device=asked.device)
    with tempfile.TemporaryDirectory() as folder:
        before = time.process_time()
        texts = list(documents("autoencoder", asked.texts))
        store = ip.harvest(model, texts, SITE, store=f"{folder}/train")
        harvested = time.process_time()
        found = ip.train_sae(
            store,
            ip.TopKSAE(192, LATENTS, k=K, about={"model_name": "pocket"}),
            steps=asked.steps,
            batch_size=1024,
            pos=NOT_FIRST,
            recipe=ip.SAERecipe(learning_rate=2e-3),
            device=asked.device,
        )
        trained = time.process_time()
        took = f"CPU seconds: harvest {harvested - before:.0f}, training {trained - harvested:.0f}"
        held_out = list(documents("autoencoder/held-out", 3000))
        fresh = ip.harvest(model, held_out, SITE, store=f"{folder}/held-out")
        print(found, took, measured(found.sae, fresh), sep="\n")  # noqa: T201
    found.sae.cpu().save(asked.out)


def measured(sae: ip.SAE, store: ip.Store) -> str:
    """What an autoencoder explains of a store, and at how many latents."""
    name = store.site(SITE)
    vectors = torch.cat([batch[name] for batch in store.batches(SITE, pos=NOT_FIRST)])
    error, firing, fired = 0.0, 0, torch.zeros(sae.d_sae, dtype=torch.long)
    with torch.no_grad():
        for x in vectors.split(4096):
            codes = sae.codes(x)
            error += float((sae.decode(codes, x) - x).square().sum())
            firing += int(codes.counts.sum())
            fired += codes.fired
    variance = float((vectors - vectors.mean(0)).square().sum())
    return (
        f"{len(vectors):,} vectors of held-out texts: explained variance {1 - error / variance:.4f}, "
        f"L0 {firing / len(vectors):.2f}, dead latents {float((fired == 0).float().mean()):.1%}"
    )


if __name__ == "__main__":
    main()
