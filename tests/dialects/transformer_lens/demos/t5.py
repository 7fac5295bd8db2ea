"""An encoder and a decoder."""

from typing import Any

import torch

from interpose.dialects.transformer_lens import HookedEncoderDecoder

TEXT = "translate english to german: the house is wonderful"


def demo() -> dict[str, Any]:
    torch.set_grad_enabled(False)
    try:
        model = HookedEncoderDecoder.from_pretrained("t5-small")
        tokens = model.tokenizer(TEXT, return_tensors="pt")["input_ids"]
        begin = torch.tensor(
            [[model.cfg.decoder_start_token_id]]
        )  # more of them see each other there
        logits, cache = model.run_with_cache(tokens, decoder_input=begin)

        def no_head(z: Any, hook: Any) -> Any:
            z[:, :, 1] = 0
            return z

        found: dict[str, Any] = {
            "logits": logits.log_softmax(-1)[0, :, :4],
            "of text": model(TEXT, decoder_input=begin).log_softmax(-1)[0, -1, :4],
            "generated": model.generate(TEXT, do_sample=False, max_new_tokens=5),
        }
        for name in (
            "encoder.0.attn.hook_pattern",
            "decoder.1.attn.hook_pattern",
            "decoder.1.cross_attn.hook_pattern",
        ):
            found[name] = cache[name][0, 1]
            site = name.replace("hook_pattern", "hook_z")
            edited = model.run_with_hooks(tokens, decoder_input=begin, fwd_hooks=[(site, no_head)])
            found[site] = edited.log_softmax(-1)[0, -1, :4]
        for name in (
            "encoder.1.hook_resid_post",
            "decoder.0.hook_resid_mid",
            "decoder.1.hook_mlp_out",
        ):
            found[name] = cache[name][0, -1, :4]
        return found
    finally:
        torch.set_grad_enabled(True)
