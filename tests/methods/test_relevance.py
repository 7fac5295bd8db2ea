"""RelP's rules against raw torch hooks that write each of them out, with the modules' own weights."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from interpose.dialects.transformer_lens import HookedTransformer, HookedTransformerConfig
from tests.leftovers import hooks_on
from tests.sweeps import oracle

ALL = ("norm", "activation", "gate", "attention")
# Where raw hooks find the parts that the rules are about: activation, last projection, queries and keys.
PARTS = {
    "gpt2": ("mlp.act", "mlp.c_proj", ()),
    "llama": ("mlp.act_fn", "mlp.down_proj", ("self_attn.q_proj", "self_attn.k_proj")),
    "gemma2": ("mlp.act_fn", "mlp.down_proj", ("self_attn.q_proj", "self_attn.k_proj")),
    "gpt_neox": ("mlp.act", "mlp.dense_4h_to_h", ()),
}
GATED = {"llama", "gemma2"}


@functools.cache
def wrapped(name: str) -> Any:
    return ip.wrap(oracle.build(name))


def lead(logits: Tensor) -> Tensor:
    return logits[:, -1, 5] - logits[:, -1, 9]


def straight(value: Tensor, path: Tensor) -> Tensor:
    """A value with the gradient of another."""
    return value.detach() + path - path.detach()


def norm(module: Any, args: Any, output: Tensor) -> Tensor:
    """A norm whose scale is a constant, by its formula."""
    (x,) = args
    centred = isinstance(module, nn.LayerNorm)
    core = x - x.mean(-1, keepdim=True) if centred else x
    eps = (
        module.eps if centred else getattr(module, "variance_epsilon", getattr(module, "eps", None))
    )
    scale = (core.square().mean(-1, keepdim=True) + eps).sqrt().detach()
    factor = 1 + module.weight if type(module).__name__.startswith("Gemma") else module.weight
    return straight(output, core / scale * factor.detach())


def activation(module: Any, args: Any, output: Tensor) -> Tensor:
    return straight(output, args[0] * (output / args[0]).detach())


def half(module: Any, args: Any) -> Any:
    return (straight(args[0], 0.5 * args[0]), *args[1:])


def by_hand(module: nn.Module, name: str, rules: tuple[str, ...], tokens: Tensor) -> list[Tensor]:
    """The gradient at every block's input under some rules."""
    act, last, attention = PARTS[name]
    leaves: list[Tensor] = []

    def watch(value: Tensor) -> Tensor:
        leaves.append(value if value.requires_grad else value.requires_grad_())
        return leaves[-1].clone() if value.is_leaf else value

    with ExitStack() as stack:
        for part in module.modules():
            if "norm" in rules and "Norm" in type(part).__name__:
                stack.callback(part.register_forward_hook(norm).remove)
        for layer, block in enumerate(oracle.blocks(module)):
            if "activation" in rules:
                stack.callback(block.get_submodule(act).register_forward_hook(activation).remove)
            if "gate" in rules and name in GATED:
                stack.callback(block.get_submodule(last).register_forward_pre_hook(half).remove)
            for path in attention if "attention" in rules else ():
                cut: Callable[..., Tensor] = lambda _, __, out: out.detach()  # noqa: E731
                stack.callback(block.get_submodule(path).register_forward_hook(cut).remove)
            place = oracle.spot(module, name, "resid_pre", layer)
            assert place is not None
            stack.enter_context(place.through(watch))
        metric = lead(module(input_ids=tokens).logits).sum()
    return list(torch.autograd.grad(metric, leaves))


def grads(model: Any, tokens: Tensor, hooks: Any) -> list[Tensor]:
    _, cache = model.run_with_cache(
        tokens, names_filter="resid_pre", hooks=hooks, incl_bwd=lambda logits: lead(logits).sum()
    )
    return [cache.grad["resid_pre", layer] for layer in range(oracle.LAYERS)]


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(
    "rules", [("norm",), ("activation",), ("gate",), ("norm", "activation", "gate"), ALL]
)
def test_gradients_follow_the_rules(name: str, rules: tuple[str, ...]) -> None:
    if not PARTS[name][2]:
        rules = tuple(
            rule for rule in rules if rule != "attention"
        )  # fused projections: tested by agreement below
    model, tokens = wrapped(name), oracle.pair()[0]
    plain = grads(model, tokens, [])
    ruled = grads(model, tokens, ip.relp(model, rules=rules))
    for found, expected, true in zip(ruled, by_hand(model.module, name, rules, tokens), plain):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(
            found, expected, rtol=2e-3, atol=2e-5 * float(expected.abs().max())
        )
        moved = float((found - true).norm() / true.norm())
        assert moved < 1e-6 if rules == ("gate",) and name not in GATED else moved > 0.01


MORE = [
    "gpt2",
    "llama",
    "gemma2",
    "gpt_neox",
    "granite",
    "olmo2",
    "mixtral",
    "mamba",
    "bloom",
    "opt",
]


@pytest.mark.parametrize("name", MORE)
def test_every_value_of_the_forward_pass_is_bit_equal(name: str) -> None:
    model, tokens = wrapped(name), oracle.pair()[0]
    plain, values = model.run_with_cache(tokens)
    ruled, others = model.run_with_cache(tokens, hooks=ip.relp(model, rules=ALL))
    assert torch.equal(plain, ruled)
    assert all(torch.equal(values[site], others[site]) for site in values)


def test_what_no_rule_reaches_is_named() -> None:
    found = ip.relp(wrapped("mixtral"))
    assert found.rules == {"norm": 7}
    assert found.left[0].startswith("blocks.0.mlp.hook_post: this layer is a mixture of experts")
    assert ip.relp(wrapped("mamba")).left[0] == "blocks.0.hook_mixer_out: no rule for a mixer"
    assert ip.relp(wrapped("llama")).left == []
    assert ip.relp(wrapped("qwen3")).left == [
        "blocks.*.self_attn.q_norm: a norm without a site",
        "blocks.*.self_attn.k_norm: a norm without a site",
    ]
    assert ip.relp(wrapped("qwen3"), rules="gate").left == []
    assert ip.relp(wrapped("gpt2")).rules == {"norm": 7, "activation": 3}


def test_fused_queries_and_keys_are_held_still() -> None:
    for name in ("gpt2", "gpt_neox"):
        model, tokens = wrapped(name), oracle.pair()[0]
        _, cache = model.run_with_cache(tokens, names_filter="pattern")
        fixed = [
            (f"blocks.{n}.attn.hook_pattern", lambda _, kept=cache["pattern", n]: kept)
            for n in range(3)
        ]
        for found, expected in zip(
            grads(model, tokens, ip.relp(model, rules="attention")), grads(model, tokens, fixed)
        ):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["LN", "RMS", None])
def test_models_from_scratch_follow_them_too(kind: str | None) -> None:
    config = HookedTransformerConfig(
        n_layers=2,
        d_model=16,
        n_ctx=32,
        d_head=4,
        n_heads=4,
        d_mlp=32,
        act_fn="gelu",
        d_vocab=80,
        normalization_type=kind,
    )
    model = HookedTransformer(config)
    for p in model.parameters():
        nn.init.normal_(p, std=0.4)
    model.eval()
    tokens = oracle.pair()[0]
    found = ip.relp(model)
    assert found.rules == ({"norm": 5, "activation": 2} if kind else {"activation": 2})
    plain, _ = model.run_with_cache(tokens)
    ruled, cache = model.run_with_cache(
        tokens, names_filter="resid_post", hooks=found, incl_bwd=lambda logits: lead(logits).sum()
    )
    assert torch.equal(plain, ruled)
    if kind is not None:  # by the formula, at the last norm
        _, last = model.run_with_cache(tokens, names_filter=["resid_post", "ln_final.hook_scale"])
        x, scale = last["resid_post", 1].clone().requires_grad_(), last["ln_final.hook_scale"]
        core = x - x.mean(-1, keepdim=True) if kind == "LN" else x
        (expected,) = torch.autograd.grad(
            lead(model.unembed(core / scale * model.ln_final.w)).sum(), x
        )
        torch.testing.assert_close(cache.grad["resid_post", 1], expected, rtol=1e-4, atol=1e-5)


def test_two_threads_share_the_hooks() -> None:
    model, tokens = wrapped("llama"), oracle.pair(batch=6)[0]
    hooks = ip.relp(model)
    alone = [grads(model, rows, hooks)[0] for rows in tokens.split(2)]
    found: dict[int, Tensor] = {}

    def work(at: int) -> None:
        for _ in range(5):
            found[at] = grads(model, tokens.split(2)[at], hooks)[0]

    threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(torch.equal(found[at], alone[at]) for at in range(3))


def test_nothing_is_left_behind_and_16_bits_work() -> None:
    module = oracle.build("llama").to(torch.float16)
    model, tokens = ip.wrap(module), oracle.pair()[0]
    _ = len(model.sites)
    before = hooks_on(module)
    with model.hooks(ip.relp(model)):
        assert torch.equal(model(tokens), module(input_ids=tokens).logits)
    found = grads(model, tokens, ip.relp(model))[0]
    assert found.dtype == torch.float16
    assert torch.isfinite(found).all()
    wide = grads(ip.wrap(module.float()), tokens, ip.relp(ip.wrap(module)))[0]
    assert torch.nn.functional.cosine_similarity(found.flatten().float(), wide.flatten(), 0) > 0.98
    assert hooks_on(module) == before


def test_wrong_rules_and_models_are_refused() -> None:
    with pytest.raises(ValueError, match="no rule 'layernorm'"):
        ip.relp(wrapped("gpt2"), rules=("layernorm",))
    with pytest.raises(
        ip.Unsupported, match="relp finds norms, activations and attention by their sites"
    ):
        ip.relp(ip.wrap(nn.Sequential(nn.Linear(2, 2))))
    model = wrapped("gpt2")
    with pytest.raises(ip.NeverFired, match="The loss does not depend on it"):
        model.run_with_cache(
            oracle.pair()[0],
            names_filter="blocks.0.mlp.hook_pre",
            hooks=ip.relp(model),
            incl_bwd=lambda logits: lead(logits).sum(),
        )
