"""TransformerLens's words for how text is generated, in those of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SAME = ("do_sample", "top_k", "top_p", "repetition_penalty", "stop_strings", "stopping_criteria")
_LEFT_OUT = {
    "return_cache": "run_with_cache on the finished text does the same; model.record keeps the steps themselves",
    "names_filter": "it goes with return_cache",
}


def options_for(given: dict[str, Any]) -> dict[str, Any]:
    """Options for `TransformerModel.generate` from those of `HookedTransformer.generate`."""
    given = dict(given)
    for name, instead in _LEFT_OUT.items():
        if given.pop(name, False):
            raise NotImplementedError(f"generate has no {name}: {instead}.")
    for name in ("verbose", "device"):  # the model is where it is
        given.pop(name, None)
    if given.get("return_type") == "tensor":
        given["return_type"] = "tokens"
    made: dict[str, Any] = {"do_sample": True, "use_cache": given.pop("use_past_kv_cache", True)}
    made |= {name: given.pop(name) for name in _SAME if given.get(name) is not None}
    for name in _SAME:
        given.pop(name, None)
    criteria = made.get("stopping_criteria")
    if callable(criteria) and not isinstance(criteria, list):
        made["stopping_criteria"] = [criteria]
    if given.pop("output_logits", False):
        made |= {"output_logits": True, "return_dict_in_generate": True}
    temperature = given.pop("temperature", 1.0)
    if temperature == 0:
        made["do_sample"] = False
    elif made["do_sample"]:
        made["temperature"] = temperature
        made.setdefault("top_k", 0)  # transformers' own default is 50
    penalty = given.pop("freq_penalty", 0.0)
    if penalty:
        made["logits_processor"] = [FrequencyPenalty(penalty)]
    if given.pop("stop_at_eos", True) is False:
        made["eos_token_id"] = None
    return {**made, **given}


class FrequencyPenalty:
    """Takes a number off each token's logit for every time it has occurred."""

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [batch, d_vocab] of the next token, after texts [batch, pos]."""
        counts = torch.zeros_like(scores)
        counts.scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
        return scores - self.penalty * counts
