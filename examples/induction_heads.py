"""Two layers of attention learn to repeat: a head that looks one token back, and heads that use what it wrote.

Run: python examples/induction_heads.py
"""

from typing import Any

import torch
from torch import Tensor

from interpose.dialects.transformer_lens import HookedTransformer
from interpose.dialects.transformer_lens.train import HookedTransformerTrainConfig, train

T = 16  # how many tokens a row says before it says them again
SHAPE: dict[str, Any] = {"n_layers": 2, "d_model": 128, "n_heads": 4, "d_head": 16, "n_ctx": 2 * T}
SHAPE |= {"attn_only": True, "d_vocab": 64, "normalization_type": None}


def said_again(rows: int, shortest: int = T) -> Tensor:
    """Rows of random tokens, all different, said again and again."""
    period = torch.randint(shortest, T + 1, (rows, 1))
    return torch.rand(rows, 64).argsort(1).gather(1, torch.arange(2 * T) % period)


def train_model(seed: int = 0, steps: int = 600) -> HookedTransformer:
    """Learn to say the next token; the tokens come again after 4 to 16, so counting does not help."""
    torch.manual_seed(seed)
    model = HookedTransformer(SHAPE | {"seed": seed, "device": "cpu"})
    rows = [{"tokens": row} for row in said_again(64 * steps, shortest=4)]
    config = HookedTransformerTrainConfig(num_epochs=1, batch_size=64, lr=0.01, print_every=None)
    if steps:
        train(model, config, rows)
    print(f"after {steps} steps:")
    return model


@torch.no_grad()
def find_heads(model: HookedTransformer) -> dict[str, Tensor]:
    """Where the heads look, which of them compose, and the loss without those that look back."""
    tokens = said_again(256)
    losses, cache = model.run_with_cache(tokens, return_type="loss", loss_per_token=True)
    found = {"loss, said first": losses[:, : T - 1].mean(), "loss, again": losses[:, T:].mean()}
    back = cache["pattern", 0][:, :, :T, :T].diagonal(-1, 2, 3).mean((0, 2))
    behind = cache["pattern", 1].diagonal(1 - T, 2, 3)[..., 1:].mean((0, 2))
    found |= {"0.h looks one back": back, "1.h looks behind the same token": behind}
    found["K-composition of 0.h with the 1.h"] = model.all_composition_scores("K")[0, :, 1].mean(1)
    for name, off in {"that look back": back > 0.5, "that do not": back <= 0.5}.items():
        hook = ("blocks.0.attn.hook_z", lambda z, off=off, **_: z * ~off[:, None])
        with model.hooks(fwd_hooks=[hook]):
            losses = model(tokens, return_type="loss", loss_per_token=True)
        found[f"loss, again, without the 0.h {name}"] = losses[:, T:].mean()
    print("\n".join(f"  {what:44} {x.double().numpy().round(2)}" for what, x in found.items()))
    return found


if __name__ == "__main__":
    found = {steps: find_heads(train_model(steps=steps)) for steps in (0, 600)}
