"""Read what a model computes on the way to its answer: one value, one head's attention, all layers at once.

Run: python examples/read_activation.py
"""

import torch

import interpose as ip

PROMPT = "When Mary and John went to the store, John gave a drink to"


@torch.no_grad()
def main() -> None:
    """Ask, keep what was computed, look at it."""
    model = ip.load("pocket")
    logits, cache = model.run_with_cache(PROMPT, names_filter=["resid_post", "pattern"])
    print(f"{PROMPT!r} -> {model.to_string([int(logits[0, -1].argmax())])!r}\n")

    # A value by what it means and where: the stream after block 3, [batch, pos, d_model].
    stream = cache["resid_post", 3]
    print("stream after block 3:", tuple(stream.shape))

    # All layers: how fast the stream grows at the last position.
    for layer in range(len(model.blocks)):
        norm = cache["resid_post", layer][0, -1].norm().item()
        print(f"after block {layer}: {'#' * round(norm)} {norm:.1f}")

    # Where each head of the last three blocks looks from the last token, [batch, head, query, key].
    tokens = model.to_str_tokens(PROMPT)
    print("\nfrom the last token the heads look at")
    for layer in range(len(model.blocks) - 3, len(model.blocks)):
        looks = cache["pattern", layer][0, :, -1]
        for head, (weight, place) in enumerate(zip(*looks.max(-1))):
            print(f"  {layer}.{head}: {weight:.0%} at {tokens[place]!r}, position {place}")


if __name__ == "__main__":
    main()
