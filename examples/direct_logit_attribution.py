"""Split the lead of one answer over another into what every head, MLP and embedding wrote into the stream.

Run: python examples/direct_logit_attribution.py
"""

import torch

import interpose as ip

PROMPT = "When Mary and John went to the store, John gave a drink to"


@torch.no_grad()
def main() -> None:
    """The final norm is a division by a known scale, so the parts add up to the lead exactly."""
    model = ip.load("pocket")
    mary, john = model.to_single_token(" Mary"), model.to_single_token(" John")
    kinds = ["embed", "pos_embed", "z", "mlp_out", "ln_final.hook_scale"]
    logits, cache = model.run_with_cache(PROMPT, names_filter=kinds)

    # The direction in the stream that the lead reads, through the norm's weight and its centring.
    direction = (model.W_U[:, mary] - model.W_U[:, john]) * model.ln_final.w
    direction = (direction - direction.mean()) / cache["ln_final.hook_scale"][0, -1]

    parts = {
        "embeddings": (cache["embed"] + cache["pos_embed"])[0, -1] @ direction,
        "final norm's bias": (model.W_U[:, mary] - model.W_U[:, john]) @ model.ln_final.b,
    }
    layers, heads = model.W_Q.shape[:2]
    for layer in range(layers):
        for head in range(heads):
            written = cache["z", layer][0, -1, head] @ model.W_O[layer, head]
            parts[f"head {layer}.{head}"] = written @ direction
        parts[f"bias of block {layer}"] = model.b_O[layer] @ direction
        parts[f"mlp {layer}"] = cache["mlp_out", layer][0, -1] @ direction

    lead, total = logits[0, -1, mary] - logits[0, -1, john], sum(parts.values())
    print(f"' Mary' leads by {lead:.4f}; the {len(parts)} parts add up to {total:.4f}\n")
    for name in sorted(parts, key=lambda name: -abs(parts[name]))[:12]:
        print(f"{name:>18} {parts[name].item():+.2f}")
    torch.testing.assert_close(total, lead, atol=1e-3, rtol=1e-4)


if __name__ == "__main__":
    main()
