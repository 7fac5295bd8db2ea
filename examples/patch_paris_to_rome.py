"""An exercise of TransformerLens's guides, finished: at which layer does a patch turn Rome back into Paris?

Run: python examples/patch_paris_to_rome.py
"""

from functools import partial

import torch
from torch import Tensor

import interpose.dialects.transformer_lens.utils as utils
from interpose.dialects.transformer_lens import ActivationCache, HookedTransformer
from interpose.dialects.transformer_lens.hook_points import HookPoint

CLEAN, CORRUPT = "The Eiffel Tower is in", "The Trevi Fountain is in"


def restore(resid: Tensor, hook: HookPoint, cache: ActivationCache, pos: int) -> Tensor:
    """Put the clean stream back at one position, as the guides write it."""
    resid[:, pos, :] = cache[hook.name][:, pos, :]
    return resid


@torch.no_grad()
def main() -> None:
    """Patch each layer's output at each position into the corrupted run, and see how much comes back."""
    model = HookedTransformer.from_pretrained("pocket")
    clean, corrupt = model.to_tokens(CLEAN), model.to_tokens(CORRUPT)
    paris, rome = model.to_single_token(" Paris"), model.to_single_token(" Rome")
    clean_logits, cache = model.run_with_cache(clean)

    def lead(logits: Tensor) -> float:
        return float(logits[0, -1, paris] - logits[0, -1, rome])

    best, worst = lead(clean_logits), lead(model(corrupt))
    print(f"' Paris' over ' Rome': {best:.2f} for {CLEAN!r}, {worst:.2f} for {CORRUPT!r}\n")
    words = model.to_str_tokens(CLEAN)
    print("after layer" + "".join(f"{word!r:>17}" for word in words))
    recovery = torch.zeros(model.cfg.n_layers, len(words))
    for layer in range(model.cfg.n_layers):
        for pos in range(len(words)):
            hook = (utils.get_act_name("resid_post", layer), partial(restore, cache=cache, pos=pos))
            patched = lead(model.run_with_hooks(corrupt, fwd_hooks=[hook]))
            recovery[layer, pos] = (patched - worst) / (best - worst)
        print(f"{layer:>11}" + "".join(f"{value:>17.2f}" for value in recovery[layer]))
    first = int((recovery[:, -1] > 0.5).nonzero()[0])
    print(f"\nAt the last token, layer {first} is the first whose output brings ' Paris' back.")


if __name__ == "__main__":
    main()
