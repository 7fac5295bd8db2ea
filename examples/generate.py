"""Let the model write, change it while it writes, and record every step as one sequence.

Run: python examples/generate.py
"""

from typing import Any

import torch

import interpose as ip

PROMPT = "Mary and John went to the park. Then Mary"
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


@torch.no_grad()
def main() -> None:
    """Generate plainly, with a head switched off in what is generated, and recorded."""
    model = ip.load("pocket")
    print("plain:            ", model.generate(PROMPT, **OPTIONS))

    # `phase` and `pos` count in the whole text, with a KV cache and without.
    layers = len(model.blocks)
    for layer in range(layers - 3, layers):
        off = ip.zero("z", layer=layer, phase="generated")
        with model.hooks([off]):
            cached = model.generate(PROMPT, **OPTIONS)
            whole = model.generate(PROMPT, use_cache=False, **OPTIONS)
        assert cached == whole
        print(f"no heads, block {layer}:", cached)

    # All steps as one sequence: where the heads of one block look, token by token.
    with model.record(("pattern", layers - 2)) as cache:
        text = model.generate(PROMPT, **OPTIONS)
    tokens = model.to_str_tokens(text)
    pattern = cache["pattern", layers - 2][0]  # [head, query, key]
    print(f"\nblock {layers - 2}, what each head looks at most")
    for place in range(len(tokens) - 5, pattern.shape[1]):
        looks = [tokens[at] for at in pattern[:, place].argmax(-1)]
        print(f"  at {tokens[place]!r:>10}: {looks}")


if __name__ == "__main__":
    main()
