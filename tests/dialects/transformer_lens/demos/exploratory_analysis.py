"""Which heads solve indirect objects: logits by layer and head, patterns, patching, and heads that stand in."""

from functools import partial
from typing import Any

import torch

import interpose.dialects.transformer_lens.utils as utils
from interpose.dialects.transformer_lens import ActivationCache, HookedTransformer

FORMAT = "When {} and {} went to the store, {} gave a drink to"
PAIRS = [(" Mary", " John"), (" Tom", " James")]


def demo() -> dict[str, Any]:
    torch.set_grad_enabled(False)
    try:
        model = HookedTransformer.from_pretrained(
            "gpt2-small",
            center_unembed=True,
            center_writing_weights=True,
            fold_ln=True,
            refactor_factored_attn_matrices=True,
        )
        model.set_use_attn_result(True)
        prompts, answers = [], []
        for first, second in PAIRS:
            for subject, other in ((first, second), (second, first)):
                prompts.append(FORMAT.format(first.strip(), second.strip(), subject.strip()))
                answers.append([model.to_single_token(other), model.to_single_token(subject)])
        tokens, answers = model.to_tokens(prompts), torch.tensor(answers)
        logits, cache = model.run_with_cache(tokens)
        found = {"differences": difference(logits, answers, each=True)}
        found |= attributed(model, cache, answers)
        found |= patched(model, tokens, cache, answers)
        return found | ablated(model, tokens, cache, answers)
    finally:
        torch.set_grad_enabled(True)


def difference(logits: Any, answers: Any, each: bool = False) -> Any:
    chosen = logits[:, -1].gather(-1, answers)
    found = chosen[:, 0] - chosen[:, 1]
    return found if each else found.mean()


def onto(model: Any, cache: ActivationCache, stack: Any, answers: Any) -> Any:
    """How far parts of the stream at the last position point to the answers."""
    way = model.tokens_to_residual_directions(answers)
    way = way[:, 0] - way[:, 1]
    scaled = cache.apply_ln_to_stack(stack, layer=-1, pos_slice=-1)
    return torch.einsum("...bd,bd->...", scaled, way) / len(answers)


def attributed(model: Any, cache: ActivationCache, answers: Any) -> dict[str, Any]:
    final = cache["resid_post", -1][:, -1]
    summed, names = cache.accumulated_resid(
        layer=-1, incl_mid=True, pos_slice=-1, return_labels=True
    )
    parts, part_names = cache.decompose_resid(layer=-1, pos_slice=-1, return_labels=True)
    heads, head_names = cache.stack_head_results(layer=-1, pos_slice=-1, return_labels=True)
    by_head = onto(model, cache, heads, answers)
    best = head_names[int(by_head.argmax())]
    layer, head = int(best[1]), int(best[3])
    return {
        "from the stream": onto(model, cache, final, answers),
        "accumulated": onto(model, cache, summed, answers),
        "names": [*names, *part_names, *head_names],
        "parts": onto(model, cache, parts, answers),
        "heads": by_head.reshape(model.cfg.n_layers, model.cfg.n_heads),
        "best": [best, cache["pattern", layer][:, head, -1].mean(0)],
        "attributed": cache.logit_attrs(parts, answers[:, 0], pos_slice=-1)[:, 0],
    }


def patched(model: Any, tokens: Any, cache: ActivationCache, answers: Any) -> dict[str, Any]:
    swapped = tokens[[1, 0, 3, 2]]
    logits, _ = model.run_with_cache(swapped, return_type="logits")
    best, worst = difference(model(tokens), answers), difference(logits, answers)

    def put(value: Any, hook: Any, pos: int) -> Any:
        value[:, pos] = cache[hook.name][:, pos]
        return value

    def put_head(value: Any, hook: Any, head: int) -> Any:
        value[:, :, head] = cache[hook.name][:, :, head]
        return value

    def effect(name: str, layer: int, function: Any) -> Any:
        hooks = [(utils.get_act_name(name, layer), function)]
        patched_logits = model.run_with_hooks(swapped, fwd_hooks=hooks, return_type="logits")
        return (difference(patched_logits, answers) - worst) / (best - worst)

    where = [2, 10, 14]
    found: dict[str, Any] = {"corrupted": worst}
    for name in ("resid_pre", "attn_out", "mlp_out"):
        found[name] = [
            [effect(name, layer, partial(put, pos=pos)) for pos in where] for layer in (1, 3, 5)
        ]
    for name, kind in (("z", "attn"), ("v", "attn"), ("pattern", "attn"), ("q", "attn")):
        del kind
        found[f"patched {name}"] = [
            effect(
                name, 5, partial(put_head, head=head) if name != "pattern" else _rows(cache, head)
            )
            for head in range(model.cfg.n_heads)
        ]
    return found


def _rows(cache: ActivationCache, head: int) -> Any:
    def put(pattern: Any, hook: Any) -> Any:
        pattern[:, head] = cache[hook.name][:, head]
        return pattern

    return put


def ablated(model: Any, tokens: Any, cache: ActivationCache, answers: Any) -> dict[str, Any]:
    def no_head(z: Any, hook: Any, head: int) -> Any:
        z[:, -1, head] = z[:, :-1, head].mean(1)
        return z

    hook = partial(no_head, head=2)
    with model.hooks(fwd_hooks=[(utils.get_act_name("z", 5), hook)]):
        logits, after = model.run_with_cache(tokens)
    before, now = (
        onto(model, each, each.stack_head_results(layer=-1, pos_slice=-1), answers)
        for each in (cache, after)
    )
    again = model(tokens)
    return {
        "without it": difference(logits, answers),
        "others": now - before,
        "again": difference(again, answers),
        "corner": utils.get_corner(logits[0, -2:], 2),
    }
