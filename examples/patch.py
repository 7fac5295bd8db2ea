"""Put one value from one run into another, and see the answer change.

Run: python examples/patch.py
"""

import torch

import interpose as ip

CLEAN = "The capital of France is"
CORRUPT = "The capital of Germany is"


@torch.no_grad()
def main() -> None:
    """Carry the stream of one prompt into the run on the other, at the country and at the end."""
    model = ip.load("pocket")
    paris, berlin = model.to_single_token(" Paris"), model.to_single_token(" Berlin")
    _, cache = model.run_with_cache(CLEAN, names_filter="resid_pre")
    tokens = model.to_str_tokens(CLEAN)
    country, end = 3, 4  # " France" and " is"

    print(f"{'patched before':>15} {'at':>10}  P(Paris)  P(Berlin)")
    for pos in (country, end):
        for layer in range(len(model.blocks)):
            patch = ip.fill("resid_pre", cache["resid_pre", layer], layer=layer, pos=pos)
            logits = model.run_with_hooks(CORRUPT, hooks=[patch])
            chance = logits[0, -1].softmax(-1)
            print(
                f"{f'block {layer}':>15} {tokens[pos]!r:>10}  {chance[paris]:>8.1%}  {chance[berlin]:>9.1%}"
            )

    # Patching everything is the clean run itself.
    everything = ip.fill("resid_pre", cache["resid_pre", 0], layer=0)
    same = model.run_with_hooks(CORRUPT, hooks=[everything])
    print(
        f"\nall positions before block 0: same logits as clean: {torch.equal(same, model(CLEAN))}"
    )


if __name__ == "__main__":
    main()
