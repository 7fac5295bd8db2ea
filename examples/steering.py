"""Find a direction for a feeling as a difference of means, add it, and the model feels otherwise.

Run: python examples/steering.py
"""

import torch

import interpose as ip

GOOD = ["wonderful", "great", "lovely", "fantastic", "perfect"]
BAD = ["terrible", "awful", "horrible", "ugly", "useless"]
LAYER = 4


@torch.no_grad()
def main() -> None:
    """Mean stream of good sentences minus that of bad ones; added in three strengths."""
    model = ip.load("pocket")

    def stream(words: list[str]) -> torch.Tensor:
        prompts = [f"The film was {word}, so Anna felt" for word in words]
        _, cache = model.run_with_cache(prompts, names_filter=("resid_post", LAYER))
        return cache["resid_post", LAYER][:, -1].mean(0)

    good_to_bad = stream(BAD) - stream(GOOD)
    prompt = "The concert was amazing, so Peter felt"  # neither word nor name was used above
    feelings = [" happy", " glad", " sad", " angry"]
    ids = [model.to_single_token(word) for word in feelings]
    print(" strength " + "".join(f"{word:>9}" for word in feelings))
    for strength in (0.0, 0.5, 1.0, 1.5):
        steer = ip.add("resid_post", strength * good_to_bad, layer=LAYER, pos=-1)
        chance = model.run_with_hooks(prompt, hooks=[steer])[0, -1].softmax(-1)[ids]
        print(f"{strength:>9} " + "".join(f"{value:>9.1%}" for value in chance))

    # The same while generating: only what the prompt says is steered.
    with model.hooks([ip.add("resid_post", 1.5 * good_to_bad, layer=LAYER, phase="prompt")]):
        print("\nsteered:", model.generate(prompt, max_new_tokens=2, do_sample=False))
    print("plain:  ", model.generate(prompt, max_new_tokens=2, do_sample=False))


if __name__ == "__main__":
    main()
