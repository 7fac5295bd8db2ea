"""What singular vectors of weights write: words."""

from typing import Any

import torch

from interpose.dialects.transformer_lens import HookedTransformer, SVDInterpreter


def demo() -> dict[str, Any]:
    model = HookedTransformer.from_pretrained("gpt2-small")
    interpreter = SVDInterpreter(model)
    found: dict[str, Any] = {}
    for kind, options in (("OV", {"head_index": 2}), ("w_in", {}), ("w_out", {})):
        vectors = interpreter.get_singular_vectors(kind, num_vectors=4, layer_index=5, **options)
        vectors = vectors.reshape(len(vectors), -1)
        centred = vectors - vectors.mean(0)
        found[kind] = [list(vectors.shape), centred.abs()[:60:20], centred.norm(dim=0)]
        best = centred[:, :2].abs().topk(4, dim=0).indices
        found[f"{kind}, words"] = [model.to_str_tokens(column) for column in best.T]
    circuit = model.OV[5, 2]
    found["values"] = [circuit.S[:4], torch.linalg.svdvals(model.W_out[5])[:3]]
    found["even"] = [
        circuit.make_even().A.norm(),
        circuit.collapse_l().norm(),
        circuit.collapse_r().norm(),
    ]
    return found
