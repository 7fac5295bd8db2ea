"""A NaN or an Inf in a weight hides no site and gives no wrong one: what parts a model has does not hang on it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.errors import NonFinite, SiteNotFound
from tests.models import tiny

NAN, INF = float("nan"), float("inf")

# Which weight of which model; block 1 of those that have one.
PLANTED = {
    "pocket": (
        "transformer.wte.weight",
        "transformer.h.1.attn.c_attn.weight",
        "transformer.h.1.mlp.c_fc.weight",
        "transformer.h.1.ln_1.weight",
        "transformer.ln_f.bias",
    ),
    "llama": (
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "lm_head.weight",
    ),
    "gpt_neox": (
        "gpt_neox.layers.1.attention.query_key_value.weight",
        "gpt_neox.layers.0.mlp.dense_4h_to_h.bias",
    ),
}
CASES = [(name, weight) for name, weights in PLANTED.items() for weight in weights]


def build(name: str) -> Any:
    return ip.load("pocket", device="cpu").module if name == "pocket" else tiny.build(name)


def described(model: Any) -> dict[str, Any]:
    """Every site with its axes and where in its module it lies."""
    return {
        name: (site.axes, site.primary, repr(site.lens).partition(" object at ")[0])
        for name, site in model.sites.items()
    }


@functools.cache
def clean(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    model: Any = ip.wrap(build(name))
    return described(model), model.sites.absent


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN where NaN is."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize(
    ("name", "weight", "number"),
    [
        (*case, number)
        for case in CASES
        for number in (NAN, INF)
        if (case[0], number) != ("pocket", INF)
    ],
)
def test_the_sites_are_those_of_the_sound_model(name: str, weight: str, number: float) -> None:
    module = build(name)
    broken = module.get_parameter(weight)
    # In a token that the probe has, or in one row of a projection.
    broken.data.view(len(broken), -1)[: len(broken) // 2, 0] = number
    before = {key: (value.clone(), value._version) for key, value in module.state_dict().items()}
    model: Any = ip.wrap(module)
    sites, absent = clean(name)
    assert described(model) == sites
    assert model.sites.absent == absent
    after = module.state_dict()
    assert all(
        same(after[key], value) and after[key]._version == version
        for key, (value, version) in before.items()
    )


def test_a_model_whose_numbers_are_all_broken_says_so_where_nothing_can_be_told() -> None:
    module = build("llama")
    module.get_parameter("model.layers.1.post_attention_layernorm.weight").data.fill_(NAN)
    module.get_parameter("model.layers.0.self_attn.v_proj.weight").data.fill_(NAN)
    model: Any = ip.wrap(module)
    sites, absent = clean("llama")
    scale = "blocks.1.ln2.hook_scale"
    assert described(model) == {name: about for name, about in sites.items() if name != scale}
    assert model.sites.absent == absent | {scale: "no weight of its LlamaRMSNorm is finite"}


def test_values_of_a_broken_model_are_what_plain_hooks_see() -> None:
    module = build("pocket")
    module.get_parameter("transformer.h.1.attn.c_attn.weight").data[3, 70] = NAN  # in head 1 of q
    model: Any = ip.wrap(module)
    seen: list[Tensor] = []
    tokens = torch.arange(20, 32).view(2, 6)
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=["q", "k", "resid_post"])
        projection = module.transformer.h[1].attn.c_attn
        handle = projection.register_forward_hook(lambda m, args, made: seen.append(made.clone()))
        module(tokens)
        handle.remove()
    heads, size = module.config.n_head, module.config.n_embd // module.config.n_head
    width = module.config.n_embd
    q = cache["blocks.1.attn.hook_q"]
    assert q.shape[2:] == (heads, size)
    assert same(q, seen[0][..., :width].unflatten(-1, (heads, size)))
    assert same(
        cache["blocks.1.attn.hook_k"], seen[0][..., width : 2 * width].unflatten(-1, (heads, size))
    )
    broken = q.isnan().all(1)[0].any(-1)
    assert broken.tolist() == [head == 70 // size for head in range(heads)]
    assert cache["blocks.0.hook_resid_post"].isfinite().all()


def test_a_guard_over_semantic_sites_finds_where_it_begins() -> None:
    module = build("llama")
    module.get_parameter("model.layers.1.self_attn.q_proj.weight").data[5, 5] = NAN
    model: Any = ip.wrap(module)
    names = [name for name in model.sites if name not in ("unembed.hook_in",)]
    with pytest.raises(NonFinite, match=r"the value at 'blocks\.1\.attn\.hook_q' has"):
        model.run_with_hooks(hooks=[ip.NaNGuard(names)], **tiny.inputs(module))


def test_blocks_that_overflow_without_a_broken_weight_say_that_they_could_not_be_read() -> None:
    module = build("llama")
    module.get_parameter("model.layers.1.mlp.down_proj.weight").data.fill_(3e38)
    model: Any = ip.wrap(module)
    sites = {name for name in model.sites if name.startswith("blocks.1.")}
    assert sites == {"blocks.1.hook_resid_pre", "blocks.1.hook_resid_post"}
    usual = {name for name in clean("llama")[0] if name.startswith("blocks.0.")}
    assert {name for name in model.sites if name.startswith("blocks.0.")} == usual
    with pytest.raises(SiteNotFound, match="the probe's values are not finite here"):
        model.run_with_cache(names_filter=("q", 1), **tiny.inputs(module))


def test_a_check_of_a_broken_model_says_so_and_withdraws_nothing() -> None:
    module = build("llama")
    module.get_parameter("model.layers.1.mlp.up_proj.weight").data[0, 0] = INF
    model: Any = ip.wrap(module)
    report = model.check(tiny.inputs(module))
    assert not report.passed
    assert "the bare output has NaN or Inf" in report.failures()[""]
    assert set(model.sites) == set(clean("llama")[0])
