"""A transformer learns to add modulo a prime, and does it with waves: a few frequencies carry the answer.

Run: python examples/modular_addition.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from interpose.dialects.transformer_lens import HookedTransformer

P = 59  # the tokens 0 to 58 are numbers, 59 is "="
PAIRS = torch.cartesian_prod(torch.arange(P), torch.arange(P))
TOKENS, SUMS = F.pad(PAIRS, (0, 1), value=P), PAIRS.sum(1) % P
SEEN, UNSEEN = torch.randperm(P * P, generator=torch.Generator().manual_seed(0)).split([2088, 1393])
SHAPE = {"n_layers": 1, "d_model": 64, "n_heads": 4, "d_head": 16, "d_mlp": 256, "act_fn": "relu"}
SHAPE |= {"n_ctx": 3, "d_vocab": P + 1, "d_vocab_out": P, "normalization_type": None}


def train_model(seed: int = 0, steps: int = 300) -> HookedTransformer:
    """Learn all seen sums in every step, with much weight decay."""
    model = HookedTransformer(SHAPE | {"seed": seed, "device": "cpu"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=2.0, betas=(0.9, 0.98))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.01 * min(1.0, 2 - 2 * step / steps)
        F.cross_entropy(model(TOKENS[SEEN])[:, -1], SUMS[SEEN]).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"after {steps} steps:")
    return model


def accuracy(model: HookedTransformer, vectors: Tensor) -> float:
    """How many unseen sums are right when the numbers are embedded as these vectors."""
    swap = ("hook_embed", lambda embed, **_: torch.cat([vectors[PAIRS[UNSEEN]], embed[:, 2:]], 1))
    answers = model.run_with_hooks(TOKENS[UNSEEN], fwd_hooks=[swap])[:, -1].argmax(-1)
    return float((answers == SUMS[UNSEEN]).float().mean())


@torch.no_grad()
def find_waves(model: HookedTransformer) -> dict[str, float]:
    """The five strongest frequencies of the embedding, and the unseen sums with them and without."""
    numbers, mean = model.W_E[:P], model.W_E[:P].mean(0)
    waves = torch.fft.rfft(numbers - mean, dim=0)
    share = waves.abs().square().sum(1) / waves.abs().square().sum()
    top = share.topk(5).indices
    five = torch.fft.irfft(torch.zeros_like(waves).index_copy(0, top, waves[top]), P, dim=0)
    found = {f"embedding, {k} waves": float(share[k]) for k in top}
    found["embedding, all five"] = float(share[top].sum())
    ways = {"whole": numbers, "five alone": mean + five, "without the five": numbers - five}
    found |= {f"right, {way}": accuracy(model, ways[way]) for way in ways}
    print("\n".join(f"  {name:23} {value:6.1%}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    found = {steps: find_waves(train_model(steps=steps)) for steps in (0, 300)}
