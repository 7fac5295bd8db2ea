"""A tour: caches, hooks, ablation, patching, induction heads, factored matrices, generation, hooks in own modules."""

from functools import partial
from typing import Any

import torch

import interpose.dialects.transformer_lens.utils as utils
from interpose.dialects.transformer_lens import FactoredMatrix, HookedTransformer
from interpose.dialects.transformer_lens.hook_points import HookedRootModule, HookPoint

TEXT = "When Mary and John went to the store, John gave a drink to Mary."
CLEAN = "After John and Mary went to the store, Mary gave a bottle of milk to"
CORRUPT = "After John and Mary went to the store, John gave a bottle of milk to"


class Squares(HookedRootModule):
    """A module of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(1, 1)
        self.hook_mid = HookPoint()
        self.setup()

    def forward(self, x: Any) -> Any:
        return self.hook_mid(self.first(x)) ** 2


def demo() -> dict[str, Any]:
    torch.set_grad_enabled(False)
    try:
        model = HookedTransformer.from_pretrained("gpt2-small")
        found = {"loss": model(TEXT, return_type="loss")}
        found |= caching(model) | ablating(model) | patching(model) | induction(model)
        return found | circuits(model) | own_module() | tokens(model)
    finally:
        torch.set_grad_enabled(True)


def caching(model: Any) -> dict[str, Any]:
    logits, cache = model.run_with_cache(model.to_tokens(TEXT), remove_batch_dim=True)
    _, few = model.run_with_cache(TEXT, names_filter=lambda name: name.endswith("hook_z"))
    _, last = model.run_with_cache(TEXT, pos_slice=-1, stop_at_layer=2)
    return {
        "words": model.to_str_tokens(TEXT),
        "pattern": cache["pattern", 0, "attn"][2, -1],
        "names": sorted(name for name in cache if not name.startswith("unembed")),
        "logits": logits[0, -1, :5],
        "few": sorted(few.keys()),
        "last": [list(last["resid_post", 1].shape), last["resid_post", 1][0, 0, :4]],
        "early": model(TEXT, stop_at_layer=1)[0, 3, :4],
        "mlp": cache["mlp_out", 2][5, :4],
    }


def ablating(model: Any) -> dict[str, Any]:
    def no_head(value: Any, hook: Any, head: int) -> Any:
        value[:, :, head, :] = 0.0
        return value

    hooks = [(utils.get_act_name("v", 4), partial(no_head, head=3))]
    return {
        "without a head": model.run_with_hooks(TEXT, return_type="loss", fwd_hooks=hooks),
        "each token": model(TEXT, return_type="loss", loss_per_token=True),
        "and logits": model(TEXT, return_type="both")[1],
    }


def patching(model: Any) -> dict[str, Any]:
    clean, corrupt = model.to_tokens(CLEAN), model.to_tokens(CORRUPT)
    _, cache = model.run_with_cache(clean)
    john, mary = model.to_single_token(" John"), model.to_single_token(" Mary")

    def difference(logits: Any) -> Any:
        return logits[0, -1, john] - logits[0, -1, mary]

    def patch(resid: Any, hook: Any, position: int) -> Any:
        resid[:, position, :] = cache[hook.name][:, position, :]
        return resid

    rows = []
    for layer in (0, 3, 6):
        name = utils.get_act_name("resid_pre", layer)
        row = [
            difference(
                model.run_with_hooks(corrupt, fwd_hooks=[(name, partial(patch, position=pos))])
            )
            for pos in range(9, clean.shape[1])
        ]
        rows.append(torch.stack(row))
    return {"differences": [difference(model(clean)), difference(model(corrupt))], "patched": rows}


def induction(model: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    half = torch.randint(100, 1000, (3, 12))
    scores = torch.zeros(model.cfg.n_layers, model.cfg.n_heads)

    def score(pattern: Any, hook: Any) -> None:
        stripe = pattern.diagonal(dim1=-2, dim2=-1, offset=1 - half.shape[1])
        scores[hook.layer()] = stripe.mean((0, -1))

    def is_pattern(name: str) -> bool:
        return name.endswith("pattern")

    repeated = torch.cat([half, half], dim=1)
    model.run_with_hooks(repeated, return_type=None, fwd_hooks=[(is_pattern, score)])
    losses = model.loss_fn(model(repeated), repeated, per_token=True)
    return {"induction": scores, "losses": [losses[:, :11].mean(), losses[:, 11:].mean()]}


def circuits(model: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(5, 2, generator=generator)
    product = FactoredMatrix(a, torch.randn(2, 5, generator=generator))
    values = model.OV.eigenvalues
    full = model.embed.W_E @ model.OV[5] @ model.unembed.W_U
    sums = full.eigenvalues.sum(-1).real / full.eigenvalues.abs().sum(-1)
    return {
        "norm": [product.norm(), product.AB.norm(), product.S],
        "product": (product @ product.T).AB[0],
        "copying": values.sum(-1).real / values.abs().sum(-1),
        "copying words": sums,
    }


def own_module() -> dict[str, Any]:
    model = Squares()
    model.first.weight.data.fill_(2.0)
    model.first.bias.data.fill_(0.5)
    x = torch.tensor([[1.0], [3.0]])
    out, cache = model.run_with_cache(x)
    edited = model.run_with_hooks(x, fwd_hooks=[("hook_mid", lambda value, hook: value + 1)])
    return {"own": [out, cache["hook_mid"], edited], "own names": list(cache.keys())}


def tokens(model: Any) -> dict[str, Any]:
    text = "The capital of France is"
    ways = [model(text, prepend_bos=begin)[0, -1, :3] for begin in (True, False)]
    return {
        "prepended or not": ways,
        "position": model.get_token_position(" France", text),
        "positions": model.get_token_position(" John", TEXT, mode="last"),
        "again": model.to_string(model.to_tokens(text)),
        "alone": model.to_single_token(" Paris"),
        "generated": model.generate(text, max_new_tokens=4, temperature=0, verbose=False),
        "shapes": [list(model.W_Q.shape), list(model.W_in.shape), list(model.b_O.shape)],
        "directions": model.tokens_to_residual_directions(" Paris")[:4],
    }
