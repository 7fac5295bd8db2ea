"""Read the stream after every block as if it were the last: what would the model say if it stopped there?

Run: python examples/logit_lens.py
"""

import torch

import interpose as ip

PROMPTS = ["The Eiffel Tower is in", "The capital of Japan is"]


@torch.no_grad()
def main() -> None:
    """Final norm and unembedding on each stream, as the model itself applies them to the last one."""
    model = ip.load("pocket")
    for prompt in PROMPTS:
        logits, cache = model.run_with_cache(prompt, names_filter="resid_post")
        answer = int(logits[0, -1].argmax())
        print(f"{prompt!r}")
        for layer in range(len(model.blocks)):
            stream = cache["resid_post", layer][:, -1]
            early = model.unembed(model.ln_final(stream))[0]
            chance = early.softmax(-1)
            best = int(early.argmax())
            rank = int((early > early[answer]).sum())
            print(
                f"  after block {layer}: {model.to_string([best])!r:>14} {chance[best]:>6.1%}"
                f"    {model.to_string([answer])!r} {chance[answer]:>6.1%}, place {rank + 1}"
            )
        # After the last block the lens is the model itself.
        torch.testing.assert_close(early, logits[0, -1])


if __name__ == "__main__":
    main()
