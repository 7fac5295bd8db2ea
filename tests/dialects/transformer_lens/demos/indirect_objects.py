"""Paths between heads: freezing all but one, queries that come from earlier heads, and heads that copy names."""

from functools import partial
from typing import Any

import torch

import interpose.dialects.transformer_lens.utils as utils
from interpose.dialects.transformer_lens import HookedTransformer

CLEAN = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Tom and James went to the store, Peter gave a drink to"
NAMES = [" Mary", " John", " Tom", " James"]


def demo() -> dict[str, Any]:
    torch.set_grad_enabled(False)
    try:
        model = HookedTransformer.from_pretrained("gpt2-small")
        clean, other = model.to_tokens(CLEAN), model.to_tokens(OTHER)
        found = {"words": model.to_str_tokens(CLEAN), "other": other.shape[1]}
        found |= to_the_logits(model, clean, other)
        found |= to_queries(model, clean, other)
        return found | copying(model) | circuit(model, clean, other)
    finally:
        torch.set_grad_enabled(True)


def difference(model: Any, logits: Any) -> Any:
    right, wrong = model.to_single_token(" Mary"), model.to_single_token(" John")
    return logits[0, -1, right] - logits[0, -1, wrong]


def is_z(name: str) -> bool:
    return name.endswith("z")


def frozen(z: Any, hook: Any, before: Any, after: Any, head: tuple[int, int]) -> Any:
    """Every head as it was, and one as it is on the other text."""
    z[...] = before[hook.name][...]
    if hook.layer() == head[0]:
        z[:, :, head[1]] = after[hook.name][:, :, head[1]]
    return z


def to_the_logits(model: Any, clean: Any, other: Any) -> dict[str, Any]:
    _, before = model.run_with_cache(clean, names_filter=is_z, return_type=None)
    _, after = model.run_with_cache(other, names_filter=is_z, return_type=None)
    last = utils.get_act_name("resid_post", model.cfg.n_layers - 1)
    rows = []
    for layer in (4, 5, 6):
        row = []
        for head in range(model.cfg.n_heads):
            freeze = partial(frozen, before=before, after=after, head=(layer, head))
            model.reset_hooks()
            model.add_hook(is_z, freeze)
            _, cache = model.run_with_cache(clean, names_filter=last, return_type=None)
            model.reset_hooks()
            assert set(cache.keys()) == {last}
            row.append(difference(model, model.unembed(model.ln_final(cache[last]))))
        rows.append(torch.stack(row))
    return {"before": difference(model, model(clean)), "to the logits": rows}


def to_queries(model: Any, clean: Any, other: Any) -> dict[str, Any]:
    """From heads of layer 4 to the queries of a head of layer 6."""
    _, before = model.run_with_cache(clean, names_filter=is_z, return_type=None)
    _, after = model.run_with_cache(other, names_filter=is_z, return_type=None)
    queries = utils.get_act_name("q", 6)

    def take(q: Any, hook: Any, kept: Any, head: int) -> Any:
        q[:, :, head] = kept[hook.name][:, :, head]
        return q

    found = []
    for head in range(model.cfg.n_heads):
        freeze = partial(frozen, before=before, after=after, head=(4, head))
        with model.hooks(fwd_hooks=[(is_z, freeze)]):
            _, kept = model.run_with_cache(clean, names_filter=lambda name: name == queries)
        hook = (queries, partial(take, kept=kept, head=4))
        found.append(difference(model, model.run_with_hooks(clean, fwd_hooks=[hook])))
    return {"to queries": found}


def copying(model: Any) -> dict[str, Any]:
    """How high a name's own logit is behind its way through each head."""
    names = model.to_tokens(NAMES, prepend_bos=False)[:, 0]
    embedded = model.W_E[names]
    through = embedded + model.blocks[0].mlp(model.blocks[0].ln2(embedded[None]))[0]
    ranks = []
    for layer in (5, 6):
        for head in range(model.cfg.n_heads):
            logits = through @ model.W_V[layer, head] @ model.W_O[layer, head] @ model.W_U
            own = logits.gather(-1, names[:, None])
            ranks.append((logits > own).sum(-1).float().mean())
    return {"ranks": ranks}


def circuit(model: Any, clean: Any, other: Any) -> dict[str, Any]:
    """Heads outside a few are given the mean over texts."""
    both = torch.cat([clean, other])
    _, cache = model.run_with_cache(both, return_type=None, names_filter=is_z)
    keep = {3: [0, 1], 4: [2, 3], 5: [0, 2], 6: [0, 3]}
    for name, point in model.hook_dict.items():
        if is_z(name):
            point.add_hook(partial(only, means=cache[name].mean(0), heads=keep), is_permanent=True)
    model.reset_hooks()
    left = difference(model, model(clean))
    model.reset_hooks(including_permanent=True)
    scores = detect(model, clean)
    return {"circuit": [left, difference(model, model(clean))], "scores": scores}


def only(z: Any, hook: Any, means: Any, heads: dict[int, list[int]]) -> Any:
    for head in range(z.shape[2]):
        if head not in heads.get(hook.layer(), []):
            z[:, :, head] = means[:, head]
    return z


def detect(model: Any, clean: Any) -> Any:
    """How much each head of a layer looks from the last token at the two names."""
    _, cache = model.run_with_cache(clean, remove_batch_dim=True)
    return cache["pattern", 5][:, -1, [2, 4, 10]]
