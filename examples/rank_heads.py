"""An exercise of TransformerLens's guides, finished: which heads, and which layers, does a target token need?

Run: python examples/rank_heads.py
"""

from functools import partial

import torch
from torch import Tensor

import interpose.dialects.transformer_lens.utils as utils
from interpose.dialects.transformer_lens import HookedTransformer
from interpose.dialects.transformer_lens.hook_points import HookPoint

PROMPT, TARGET = "When Mary and John went to the store, John gave a drink to", " Mary"


def ablate_head(z: Tensor, hook: HookPoint, head: int | slice) -> Tensor:
    """Switch a head off, or several, as the guides write it."""
    z[:, :, head, :] = 0.0
    return z


@torch.no_grad()
def main() -> None:
    """Ablate every head, rank them, then add up by layer."""
    model = HookedTransformer.from_pretrained("pocket")
    tokens, target = model.to_tokens(PROMPT), model.to_single_token(TARGET)
    base = model(tokens)[0, -1].log_softmax(-1)[target]
    drop = torch.zeros(model.cfg.n_layers, model.cfg.n_heads)
    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            hook = (utils.get_act_name("z", layer), partial(ablate_head, head=head))
            logits = model.run_with_hooks(tokens, fwd_hooks=[hook])
            drop[layer, head] = base - logits[0, -1].log_softmax(-1)[target]

    print(f"log P({TARGET!r}) is {base:.2f}; what it loses without a head:")
    for place in drop.flatten().argsort(descending=True)[:8].tolist():
        layer, head = divmod(place, model.cfg.n_heads)
        print(f"  head {layer}.{head}: {drop[layer, head]:+.3f}")
    print("and without all heads of a layer:")
    for layer in range(model.cfg.n_layers):
        hook = (utils.get_act_name("z", layer), partial(ablate_head, head=slice(None)))
        logits = model.run_with_hooks(tokens, fwd_hooks=[hook])
        lost = float(base - logits[0, -1].log_softmax(-1)[target])
        print(f"  layer {layer}: {lost:+6.2f} {'#' * round(max(lost, 0) * 4)}")


if __name__ == "__main__":
    main()
