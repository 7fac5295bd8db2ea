"""Steer a model while it generates, and record every step as one sequence.

Run: python examples/generate.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import interpose as ip


def main() -> None:
    """Generate from a tiny llama of random weights: plainly, steered, and recorded."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, initializer_range=0.2, eos_token_id=None)
    model = ip.wrap(LlamaForCausalLM(config).eval().requires_grad_(False))
    prompt = torch.tensor([[11, 22, 33, 44]])
    options = {"max_new_tokens": 8, "do_sample": False}

    print("plain     ", model.generate(prompt, **options)[0].tolist())

    # The same direction, added to the prompt, to what is generated, and to one position.
    direction = 5 * torch.randn(32)
    for where in ({"phase": "prompt"}, {"phase": "generated"}, {"pos": 6}):
        steer = ip.add(("resid_post", 1), direction, **where)
        with model.hooks([steer]):
            cached = model.generate(prompt, **options)
            whole = model.generate(prompt, use_cache=False, **options)
        assert torch.equal(cached, whole)  # positions mean the same with and without a KV cache
        print(f"{next(iter(where.values()))!s:10}", cached[0].tolist())

    # All steps as one sequence: the stream of every token that was fed to the model.
    with model.record(["resid_post", "pattern"]) as cache:
        tokens = model.generate(prompt, **options)
    print(cache)
    strongest = cache["pattern", -1][0, 0].argmax(-1)  # of [batch, head, query, key]
    print("tokens:               ", tokens[0].tolist())
    print("head 0 looks most at: ", tokens[0][strongest].tolist())


if __name__ == "__main__":
    main()
