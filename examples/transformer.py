"""Look into a transformer: read sites, ablate heads, patch one prompt into another, prove that it holds.

Run: python examples/transformer.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import interpose as ip


def main() -> None:
    """Do it with a tiny GPT-2 of random weights; `ip.load("gpt2")` gives the trained one."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 100, "n_positions": 64}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.3)
    model = ip.wrap(GPT2LMHeadModel(config).eval().requires_grad_(False))
    print(model.sites.select("blocks.0.attn.*"))

    # Read: the stream before every block, and where attention looks in the last one.
    clean = torch.randint(0, 100, (1, 8))
    logits, cache = model.run_with_cache(clean, names_filter=["resid_pre", ("pattern", -1)])
    token = logits[0, -1].argmax()
    print("\n", cache, sep="")

    # Ablate: each head in turn. Axes of z are [batch, pos, head, d_head].
    print("\nthe answer's logit without each head, by layer")
    for layer in range(model.cfg.n_layers):
        without = []
        for head in range(model.cfg.n_heads):
            ablation = ip.zero("z", layer=layer, head=head)
            without.append(model.run_with_hooks(clean, hooks=[ablation])[0, -1, token].item())
        print(layer, [round(logit, 2) for logit in without])

    # Patch: put the clean stream into a run on a corrupted prompt, one position at a time.
    corrupt = clean.clone()
    corrupt[0, 3] += 1
    print("\nhow much of the answer each position brings back, by layer")
    best, worst = (model(prompt)[0, -1, token] for prompt in (clean, corrupt))
    for layer in range(model.cfg.n_layers):
        row = []
        for pos in range(8):
            patch = ip.fill("resid_pre", cache["resid_pre", layer], layer=layer, pos=pos)
            patched = model.run_with_hooks(corrupt, hooks=[patch])[0, -1, token]
            row.append(round(((patched - worst) / (best - worst)).item(), 2) + 0.0)
        print(layer, row)

    # Prove: every promise on this very model, here for the sites of the first block.
    print("\n", model.check(layers=[0]), sep="")


if __name__ == "__main__":
    main()
