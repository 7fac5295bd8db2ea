"""Switch every attention head off in turn and see which ones the answer needs.

Run: python examples/ablate_head.py
"""

import torch

import interpose as ip

PROMPT = "When Mary and John went to the store, John gave a drink to"


@torch.no_grad()
def main() -> None:
    """Rank the heads by what their absence costs, then switch the three most needed off together."""
    model = ip.load("pocket")
    mary, john = model.to_single_token(" Mary"), model.to_single_token(" John")

    def lead(*hooks: ip.Hook) -> float:
        logits = model.run_with_hooks(PROMPT, hooks=hooks)[0, -1]
        return float(logits[mary] - logits[john])

    whole = lead()
    print(f"' Mary' leads ' John' by {whole:.2f} in logits\n")
    layers, heads = model.W_Q.shape[:2]
    cost = {
        (layer, head): whole - lead(ip.zero("z", layer=layer, head=head))
        for layer in range(layers)
        for head in range(heads)
    }
    ranked = sorted(cost, key=cost.__getitem__, reverse=True)
    for layer, head in ranked[:6]:
        print(f"without head {layer}.{head} the lead falls by {cost[layer, head]:.2f}")

    def together(some: list[tuple[int, int]]) -> float:
        return lead(*(ip.zero("z", layer=layer, head=head) for layer, head in some))

    middle = len(ranked) // 2
    others = ranked[middle - 1 : middle + 2]
    print(f"\nwithout the first three together: {together(ranked[:3]):.2f}")
    print(f"without three from the middle of the list: {together(others):.2f}")


if __name__ == "__main__":
    main()
