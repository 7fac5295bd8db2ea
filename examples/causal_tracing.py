"""Blur a prompt's subject with noise, then find the values that bring the fact back (the method of ROME).

Run: python examples/causal_tracing.py
"""

import torch

import interpose as ip

PROMPT, SUBJECT = "The Eiffel Tower is in", [1, 2]  # positions of " Eiffel" and " Tower"
SAMPLES = 8


@torch.no_grad()
def main() -> None:
    """Noise on the subject's embeddings; one clean value restored at a time; mean over several noises."""
    model = ip.load("pocket")
    paris = model.to_single_token(" Paris")
    logits, cache = model.run_with_cache(PROMPT, names_filter=["resid_post", "embed"])
    clean = logits[0, -1].softmax(-1)[paris]
    strength = 3 * float(cache["embed"].std())
    blurs = [ip.noise("embed", strength, seed=seed, pos=SUBJECT) for seed in range(SAMPLES)]

    def chance(*hooks: ip.Hook) -> float:
        return float(model.run_with_hooks(PROMPT, hooks=hooks)[0, -1].softmax(-1)[paris])

    blurred = sum(chance(blur) for blur in blurs) / SAMPLES
    print(f"P(' Paris') is {clean:.1%}, and {blurred:.1%} with the subject blurred\n")

    tokens = model.to_str_tokens(PROMPT)
    print("with one value restored after a block:")
    print(f"{'block':>6}" + "".join(f"{token!r:>11}" for token in tokens))
    for layer in range(len(model.blocks)):
        row = []
        for pos in range(len(tokens)):
            restore = ip.fill("resid_post", cache["resid_post", layer], layer=layer, pos=pos)
            row.append(sum(chance(blur, restore) for blur in blurs) / SAMPLES)
        print(f"{layer:>6}" + "".join(f"{value:>11.1%}" for value in row))


if __name__ == "__main__":
    main()
