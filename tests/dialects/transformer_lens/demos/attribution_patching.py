"""Gradients times differences, in place of a run for every patch."""

from typing import Any

import torch

import interpose.dialects.transformer_lens.patching as patching
from interpose.dialects.transformer_lens import ActivationCache, HookedTransformer

FORMAT = "When {} and {} went to the store, {} gave a drink to"
NAMES = [("Mary", "John"), ("John", "Mary")]


def demo() -> dict[str, Any]:
    model = HookedTransformer.from_pretrained("gpt2-small")
    model.set_use_attn_result(True)
    clean = model.to_tokens([FORMAT.format("Mary", "John", subject) for subject, _ in NAMES])
    corrupt = clean[[1, 0]]
    answers = torch.tensor(
        [[model.to_single_token(" " + name) for name in pair[::-1]] for pair in NAMES]
    )

    def difference(logits: Any) -> Any:
        chosen = logits[:, -1].gather(-1, answers)
        return (chosen[:, 0] - chosen[:, 1]).mean()

    with torch.no_grad():
        best, worst = difference(model(clean)).item(), difference(model(corrupt)).item()

    def metric(logits: Any) -> Any:
        return (difference(logits) - worst) / (best - worst)

    value, cache, _ = forwards_and_backwards(model, clean, metric)
    low, other, gradients = forwards_and_backwards(model, corrupt, metric)
    found: dict[str, Any] = {
        "values": [best, worst, value, low],
        "names": sorted(name for name in gradients if not name.startswith("unembed")),
    }

    def attribute(clean_stack: Any, other_stack: Any, gradient_stack: Any) -> Any:
        return ((clean_stack - other_stack) * gradient_stack).sum((1, 3))

    caches = (cache, other, gradients)
    found["stream"] = attribute(*(each.accumulated_resid(-1, incl_mid=True) for each in caches))[
        :, 8:
    ]
    found["parts"] = attribute(*(each.decompose_resid(-1) for each in caches))[:, 10]
    found["heads"] = attribute(*(each.stack_head_results(-1) for each in caches)).sum(-1)
    with torch.no_grad():
        truth = patching.get_act_patch_attn_head_out_all_pos(model, corrupt, cache, metric)
    estimate = [
        ((cache["z", layer] - other["z", layer]) * gradients["z", layer]).sum((0, 1, 3))
        for layer in range(model.cfg.n_layers)
    ]
    found["truth"] = truth
    found["estimate"] = torch.stack(estimate)
    found["patterns"] = [
        ((cache["pattern", layer] - other["pattern", layer]) * gradients["pattern", layer]).sum(
            (0, 2, 3)
        )
        for layer in (3, 5)
    ]
    found["neurons"] = ((cache["post", 2] - other["post", 2]) * gradients["post", 2]).sum((0, 1))[
        :6
    ]
    found["hooks left"] = sum(len(point.fwd_hooks) for point in model.hook_dict.values())
    return found


def forwards_and_backwards(model: Any, tokens: Any, metric: Any) -> tuple[float, Any, Any]:
    """The metric, activations and gradients of a run."""
    model.reset_hooks()
    forward, backward = {}, {}

    def wanted(name: str) -> bool:
        return "_input" not in name and "attn_in" not in name and "mlp_in" not in name

    def keep(value: Any, hook: Any) -> None:
        forward[hook.name] = value.detach()

    def keep_gradient(value: Any, hook: Any) -> None:
        backward[hook.name] = value.detach()

    model.add_hook(wanted, keep, "fwd")
    model.add_hook(wanted, keep_gradient, "bwd")
    value = metric(model(tokens))
    value.backward()
    model.reset_hooks()
    return value.item(), ActivationCache(forward, model), ActivationCache(backward, model)
