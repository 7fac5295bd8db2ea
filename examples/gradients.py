"""Ask for gradients at any place: which positions, and which heads, would change the answer most?

Run: python examples/gradients.py
"""

from torch import Tensor

import interpose as ip

CLEAN = "The Eiffel Tower is in"
CORRUPT = "The Trevi Fountain is in"


def main() -> None:
    """Gradient times activation, and an estimate of patching from one backward run, against real patching."""
    model = ip.load("pocket")
    paris, rome = model.to_single_token(" Paris"), model.to_single_token(" Rome")

    def lead(logits: Tensor) -> Tensor:
        return logits[0, -1, paris] - logits[0, -1, rome]

    # Gradients go to activations only; no parameter's .grad is touched.
    _, cache = model.run_with_cache(CLEAN, names_filter=["embed", "resid_pre"], incl_bwd=lead)
    saliency = (cache["embed"] * cache.grad["embed"]).sum(-1)[0]
    for token, value in zip(model.to_str_tokens(CLEAN), saliency):
        print(f"gradient x embedding at {token!r:>10}: {value:+.3f}")

    # Attribution patching: (clean - corrupt) x gradient in the corrupted run estimates a patch.
    logits, corrupt = model.run_with_cache(CORRUPT, names_filter="resid_pre", incl_bwd=lead)
    worst = lead(logits).item()
    print("\npatched at ' Eiffel':  estimate   real")
    for layer in range(len(model.blocks)):
        change = (cache["resid_pre", layer] - corrupt["resid_pre", layer])[0, 1]
        estimate = (change * corrupt.grad["resid_pre", layer][0, 1]).sum().item()
        patch = ip.fill("resid_pre", cache["resid_pre", layer], layer=layer, pos=1)
        real = lead(model.run_with_hooks(CORRUPT, hooks=[patch])).item() - worst
        print(f"    before block {layer}:    {estimate:+8.2f} {real:+6.2f}")


if __name__ == "__main__":
    main()
