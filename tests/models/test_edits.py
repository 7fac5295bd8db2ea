"""Edits inside transformers models reach all that comes after them; so do gradients.

Where an edit has a formula, it is written out here with the model's own modules and weights, called
one by one outside of interpose.
"""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import interpose as ip
from tests.bounds import are_near, assert_near
from tests.leftovers import same_state, state_of
from tests.models import tiny
from tests.models.wired import of

pytestmark = pytest.mark.bits

Edit = Callable[[Tensor, Any], Tensor | None]

# Every mechanism once: attention by the interface, by a kernel call, by a softmax of its own; groups
# of heads, windows, experts, soft caps, sinks, parallel blocks, norms after, two towers.
NAMES = """
    gpt2 llama gemma2 gpt_oss mistral mixtral deepseek_v3 olmo2 opt phi3 cohere gpt_neox granite
    bloom gptj falcon mpt gpt_neo codegen bert t5
"""
TYPES = NAMES.split()
EXPLICIT = ("attn_scores", "pattern")
EDITED = ("resid_mid", "pattern", "attn_scores", "q", "k", "v", "z", "post")


def given(model_type: str) -> dict[str, Any]:
    inputs = tiny.inputs(of(model_type).module)  # type: ignore[arg-type]
    return inputs if model_type == "bert" else {**inputs, "use_cache": False}


def run(model_type: str, *hooks: tuple[Any, Edit]) -> Tensor:
    with torch.no_grad():
        return tiny.outputs(of(model_type).run_with_hooks(**given(model_type), fwd_hooks=[*hooks]))


def cached(model_type: str, names: Any, *hooks: tuple[Any, Edit]) -> Any:
    with torch.no_grad():
        return of(model_type).run_with_cache(
            **given(model_type), names_filter=names, fwd_hooks=[*hooks]
        )[1]


@functools.cache
def bare(model_type: str) -> Tensor:
    with torch.no_grad():
        return tiny.outputs(of(model_type).module(**given(model_type)))


def noise_like(value: Tensor, seed: int = 3) -> Tensor:
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)).to(value)


def changed(value: Tensor, hook: Any) -> Tensor:
    """Another value of the same kind."""
    if hook.canonical.endswith("hook_pattern"):
        return random_pattern(value)
    if hook.canonical.endswith("hook_attn_scores"):
        return torch.where(value > -1e4, value + noise_like(value), value)
    return value + 0.5 * noise_like(value)


def random_pattern(value: Tensor) -> Tensor:
    """Rows that add up to one, over every key, masked or not."""
    return noise_like(value).softmax(-1)


def identity(value: Tensor, hook: Any) -> Tensor:
    return value.clone()


def written(value: Tensor, hook: Any) -> None:
    value.copy_(changed(value.clone(), hook))


def written_and_returned(value: Tensor, hook: Any) -> Tensor:
    written(value, hook)
    return value


def sites_of(model_type: str, *kinds: str) -> list[str]:
    return [name for name, site in of(model_type).sites.items() if site.kind in kinds]


# Causality.


@pytest.mark.parametrize("model_type", TYPES)
def test_edits_by_return_and_in_place_are_the_same_and_have_an_effect(model_type: str) -> None:
    names = sites_of(model_type, *EDITED)
    assert len(names) >= 10
    for name in names:
        plain = run(model_type, (name, identity))
        returned = run(model_type, (name, changed))
        assert torch.equal(run(model_type, (name, written)), returned), name
        assert torch.equal(run(model_type, (name, written_and_returned)), returned), name
        effect = (returned - plain).abs().max() / plain.abs().max()
        assert effect > 1e-3, (name, float(effect))


@pytest.mark.parametrize("model_type", TYPES)
def test_edits_leave_everything_before_them_alone(model_type: str) -> None:
    for name in sites_of(model_type, *EDITED):
        at = name[: name.rindex("blocks.") + len("blocks.0.")]
        before = f"{at}hook_resid_pre"
        plain = cached(model_type, [before], (name, identity))
        edited = cached(model_type, [before], (name, changed))
        assert torch.equal(plain[before], edited[before]), name


@pytest.mark.parametrize("model_type", TYPES)
def test_what_an_edit_leaves_is_what_later_hooks_and_the_cache_see(model_type: str) -> None:
    for name in sites_of(model_type, *EDITED):
        shown: list[Tensor] = []

        def show(value: Tensor, hook: Any, shown: list[Tensor] = shown) -> None:
            shown.append(value.clone())

        cache = cached(model_type, [name], (name, changed), (name, show))
        assert torch.equal(cache[name], shown[0]), name


@pytest.mark.parametrize("model_type", TYPES)
def test_reading_everything_but_scores_and_patterns_leaves_every_bit(model_type: str) -> None:
    model = of(model_type)
    names = [name for name, site in model.sites.items() if site.kind not in EXPLICIT]
    with torch.no_grad():
        output, cache = model.run_with_cache(**given(model_type), names_filter=names)
    assert torch.equal(tiny.outputs(output), bare(model_type))
    assert_near(run(model_type, *((name, identity) for name in names)), bare(model_type))
    assert set(cache) == set(names)


@pytest.mark.parametrize("model_type", TYPES)
def test_reading_patterns_moves_the_output_by_rounding_only(model_type: str) -> None:
    output = run(model_type, *((name, identity) for name in sites_of(model_type, *EXPLICIT)))
    assert_near(output, bare(model_type))


# An edited pattern R gives z = R @ v.


@pytest.mark.parametrize("model_type", TYPES)
def test_z_is_the_edited_pattern_times_values(model_type: str) -> None:
    for name in sites_of(model_type, "pattern"):
        at = name.removesuffix("hook_pattern")
        names = [f"{at}hook_v", f"{at}hook_z", name]
        cache = cached(model_type, names, (name, lambda value, hook: random_pattern(value)))
        pattern, v, z = cache[name], cache[f"{at}hook_v"], cache[f"{at}hook_z"]
        assert torch.equal(pattern, random_pattern(pattern))
        v = v.repeat_interleave(pattern.shape[1] // v.shape[2], dim=2)
        expected = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
        torch.testing.assert_close(z, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_type", TYPES)
def test_edited_scores_give_their_own_softmax(model_type: str) -> None:
    if model_type == "gpt_oss":  # its sink takes a part of every row
        return
    for name in sites_of(model_type, "attn_scores"):
        pattern = name.replace("attn_scores", "pattern")
        cache = cached(model_type, [name, pattern], (name, changed))
        torch.testing.assert_close(cache[pattern], cache[name].softmax(-1), rtol=1e-5, atol=1e-6)


def test_a_sink_takes_its_part_of_every_row() -> None:
    module: Any = of("gpt_oss").module
    cache = cached("gpt_oss", sites_of("gpt_oss", *EXPLICIT, "rot_q", "rot_k"))
    distance = torch.arange(7)[:, None] - torch.arange(7)
    for layer, window in ((0, 4), (1, 7)):
        at = f"blocks.{layer}.attn."
        q, k = cache[f"{at}hook_rot_q"], cache[f"{at}hook_rot_k"].repeat_interleave(2, dim=2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
        scores = scores.masked_fill((distance < 0) | (distance >= window), -1e30)
        sinks = module.model.layers[layer].self_attn.sinks.detach()
        column = sinks.view(1, -1, 1, 1).expand(2, -1, 7, 1)
        whole = torch.cat([scores, column], dim=-1)
        pattern = cache[f"{at}hook_pattern"]
        torch.testing.assert_close(pattern, whole.softmax(-1)[..., :-1], rtol=1e-5, atol=1e-6)
        # gpt_oss takes the greatest of each row away before its softmax.
        shifted = (whole - whole.amax(-1, keepdim=True))[..., :-1]
        seen = cache[f"{at}hook_attn_scores"]
        torch.testing.assert_close(seen.clamp_min(-1e4), shifted.clamp_min(-1e4))


# An edited resid_mid reaches the MLP and the skip path.


def gemma(block: Any, x: Tensor) -> Tensor:
    return x + block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(x)))


def llama(block: Any, x: Tensor) -> Tensor:
    return x + block.mlp(block.post_attention_layernorm(x))


def opt(block: Any, x: Tensor) -> Tensor:
    return x + block.fc2(block.activation_fn(block.fc1(block.final_layer_norm(x))))


def t5(at: int) -> Callable[[Any, Tensor], Tensor]:
    return lambda block, x: x + block.layer[at].DenseReluDense(block.layer[at].layer_norm(x))


Rest = Callable[[Any, Tensor], Tensor]
# type -> resid_mid of its last block, that block, and what it makes of resid_mid.
MID: dict[str, tuple[str, str, Rest]] = {
    "gpt2": ("", "transformer.h.1", lambda b, x: x + b.mlp(b.ln_2(x))),
    "llama": ("", "model.layers.1", llama),
    "mistral": ("", "model.layers.1", llama),
    "mixtral": ("", "model.layers.1", llama),
    "deepseek_v3": ("", "model.layers.1", llama),
    "phi3": ("", "model.layers.1", llama),
    "gemma2": ("", "model.layers.1", gemma),
    "olmo2": ("", "model.layers.1", lambda b, x: x + b.post_feedforward_layernorm(b.mlp(x))),
    "granite": (
        "",
        "model.layers.1",
        lambda b, x: x + b.mlp(b.post_attention_layernorm(x)) * 0.5,
    ),
    "opt": ("", "model.decoder.layers.1", opt),
    "bloom": ("", "transformer.h.1", lambda b, x: b.mlp(b.post_attention_layernorm(x), x)),
    "mpt": ("", "transformer.blocks.1", lambda b, x: b.ffn(b.norm_2(x), x)),
    "gpt_neo": ("", "transformer.h.1", lambda b, x: x + b.mlp(b.ln_2(x))),
    "bert": ("", "bert.encoder.layer.1", lambda b, x: b.output(b.intermediate(x), x)),
    "t5 encoder": ("encoder.", "encoder.block.1", t5(1)),
    "t5 decoder": ("decoder.", "decoder.block.1", t5(2)),
}


@pytest.mark.parametrize("case", MID)
def test_a_block_goes_on_from_the_edited_resid_mid(case: str) -> None:
    prefix, path, rest = MID[case]
    model_type = case.split()[0]
    kind = "resid_mid_cross" if case == "t5 decoder" else "resid_mid"
    mid, post = f"{prefix}blocks.1.hook_{kind}", f"{prefix}blocks.1.hook_resid_post"
    cache = cached(model_type, [mid, post], (mid, changed))
    with torch.no_grad():
        expected = rest(of(model_type).module.get_submodule(path), cache[mid])
    torch.testing.assert_close(cache[post], expected, rtol=1e-6, atol=1e-6)
    clean = cached(model_type, [mid])[mid]
    assert (cache[mid] - clean).abs().mean() > 0.1


def test_edits_of_both_mids_and_of_a_branch_add_up() -> None:
    def in_branch(value: Tensor, hook: Any) -> Tensor:
        return value + noise_like(value, seed=9)

    hooks = [("blocks.1.hook_resid_mid", changed), ("blocks.1.hook_mlp_in", in_branch)]
    names = ["blocks.1.hook_resid_mid", "blocks.1.hook_mlp_in", "blocks.1.hook_resid_post"]
    block: Any = of("llama").module.get_submodule("model.layers.1")
    for order in (hooks, hooks[::-1]):
        cache = cached("llama", names, *order)
        mid, mlp_in, post = (cache[name] for name in names)
        assert torch.equal(mlp_in, in_branch(mid, None))
        with torch.no_grad():
            expected = mid + block.mlp(block.post_attention_layernorm(mlp_in))
        torch.testing.assert_close(post, expected, rtol=1e-6, atol=1e-6)


# type -> the attention and the MLP branch of a block, from what they read of the stream.
BRANCHES: dict[str, tuple[str, Rest]] = {
    "gpt2": ("transformer.h.1", lambda b, x: b.mlp(b.ln_2(x))),
    "llama": ("model.layers.1", lambda b, x: b.mlp(b.post_attention_layernorm(x))),
    "gemma2": ("model.layers.1", lambda b, x: gemma(b, x) - x),
    "gpt_neox": ("gpt_neox.layers.1", lambda b, x: b.mlp(b.post_attention_layernorm(x))),
    "bert": ("bert.encoder.layer.1", lambda b, x: b.output.dense(b.intermediate(x))),
    "opt": ("model.decoder.layers.1", lambda b, x: opt(b, x) - x),
    "olmo2": ("model.layers.1", lambda b, x: b.post_feedforward_layernorm(b.mlp(x))),
}


@pytest.mark.parametrize("model_type", BRANCHES)
def test_an_edited_mlp_in_reaches_the_whole_mlp_and_nothing_else(model_type: str) -> None:
    path, branch = BRANCHES[model_type]
    names = ["blocks.1.hook_mlp_in", "blocks.1.hook_mlp_out"]
    cache = cached(model_type, names, (names[0], changed))
    with torch.no_grad():
        expected = branch(of(model_type).module.get_submodule(path), cache[names[0]])
    torch.testing.assert_close(cache[names[1]], expected, rtol=1e-5, atol=1e-5)
    stream = cached(model_type, "blocks.1.hook_attn_out", (names[0], changed))
    assert torch.equal(
        stream["blocks.1.hook_attn_out"],
        cached(model_type, "blocks.1.hook_attn_out")["blocks.1.hook_attn_out"],
    )


# Experts.


def test_edited_routing_gives_what_those_experts_give() -> None:
    module: Any = of("mixtral").module
    experts = module.model.layers[1].mlp.experts
    at = "blocks.1."
    indices = torch.tensor([[3, 1]]).expand(2, 7, 2)
    weights = torch.tensor([[0.7, -0.4]]).expand(2, 7, 2)
    cache = cached(
        "mixtral",
        [f"{at}ln2.hook_normalized", f"{at}hook_mlp_out", f"{at}mlp.hook_experts_out"],
        (f"{at}mlp.hook_expert_indices", lambda value, hook: indices.clone()),
        (f"{at}mlp.hook_expert_weights", lambda value, hook: weights.clone()),
    )
    x = cache[f"{at}ln2.hook_normalized"]
    expected = torch.zeros_like(x)
    for expert, weight in ((3, 0.7), (1, -0.4)):
        gate, up = (x @ experts.gate_up_proj[expert].detach().T).chunk(2, dim=-1)
        expected += weight * (functional.silu(gate) * up) @ experts.down_proj[expert].detach().T
    torch.testing.assert_close(cache[f"{at}hook_mlp_out"], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(cache[f"{at}mlp.hook_experts_out"], cache[f"{at}hook_mlp_out"])


def test_what_each_expert_adds_can_be_seen_and_edited() -> None:
    at = "blocks.1."
    experts: Any = of("mixtral").module.get_submodule("model.layers.1.mlp.experts")
    names = ["expert_out", "expert_indices", "expert_weights", "experts_out"]
    names = [f"{at}mlp.hook_{kind}" for kind in names]
    cache = cached("mixtral", [*names, f"{at}ln2.hook_normalized"])
    each, indices, weights, together = (cache[name] for name in names)
    x = cache[f"{at}ln2.hook_normalized"]
    by_expert = []
    for up_proj, down_proj in zip(experts.gate_up_proj.detach(), experts.down_proj.detach()):
        gate, up = (x @ up_proj.T).chunk(2, dim=-1)
        by_expert.append((functional.silu(gate) * up) @ down_proj.T)
    every = torch.stack(by_expert, dim=-2)
    chosen = every.gather(-2, indices[..., None].expand(-1, -1, -1, 32)) * weights[..., None]
    torch.testing.assert_close(each, chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(each.sum(-2), together, rtol=1e-5, atol=1e-5)

    def without_the_second(value: Tensor, hook: Any) -> None:
        value[:, :, 1] = 0

    edited = cached("mixtral", [names[3]], (names[0], without_the_second))
    torch.testing.assert_close(edited[names[3]], each[:, :, 0], rtol=1e-5, atol=1e-5)


def test_edited_router_logits_choose_other_experts() -> None:
    at = "blocks.0.mlp."

    def prefer_the_last(value: Tensor, hook: Any) -> Tensor:
        return torch.tensor([0.0, 0.0, 1.0, 2.0]).expand(2, 7, 4).clone()

    names = [f"{at}hook_expert_indices", f"{at}hook_expert_weights"]
    cache = cached("mixtral", names, (f"{at}hook_router_logits", prefer_the_last))
    assert (cache[names[0]] == torch.tensor([3, 2])).all()
    expected = torch.tensor([2.0, 1.0]).softmax(-1).expand(2, 7, 2)
    torch.testing.assert_close(cache[names[1]], expected)


def test_edited_experts_leave_the_shared_expert_alone() -> None:
    at = "blocks.1."
    cache = cached(
        "deepseek_v3",
        [f"{at}hook_mlp_out", f"{at}ln2.hook_normalized"],
        (f"{at}mlp.hook_experts_out", lambda value, hook: torch.zeros_like(value)),
    )
    shared: Any = of("deepseek_v3").module.get_submodule("model.layers.1.mlp.shared_experts")
    with torch.no_grad():
        expected = shared(cache[f"{at}ln2.hook_normalized"])
    torch.testing.assert_close(cache[f"{at}hook_mlp_out"], expected, rtol=1e-6, atol=1e-6)


# Derived values.


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "bloom", "opt", "bert"])
def test_an_edited_result_moves_the_output_projection_by_that_head(model_type: str) -> None:
    def without_head_2(value: Tensor, hook: Any) -> Tensor:
        value[:, :, 2] = 0
        return value

    names = ["blocks.0.attn.hook_out", "blocks.0.attn.hook_z"]
    cache = cached(model_type, names, ("blocks.0.attn.hook_result", without_head_2))
    site = of(model_type).tree.site("blocks.0.attn.hook_out")
    weight: Tensor = site.module.weight.detach()  # type: ignore[assignment, union-attr]
    weight = weight if type(site.module).__name__ == "Conv1D" else weight.T
    z = cache["blocks.0.attn.hook_z"].clone()
    z[:, :, 2] = 0
    expected = z.flatten(-2) @ weight
    bias: Tensor | None = getattr(site.module, "bias", None)
    expected = expected if bias is None else expected + bias.detach()
    torch.testing.assert_close(cache["blocks.0.attn.hook_out"], expected, rtol=1e-5, atol=1e-5)


INPUTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "gpt2": lambda b, x: b.attn.c_attn(b.ln_1(x))[..., :32],
    "llama": lambda b, x: b.self_attn.q_proj(b.input_layernorm(x)),
    "gemma2": lambda b, x: b.self_attn.q_proj(b.input_layernorm(x)),
    "olmo2": lambda b, x: b.self_attn.q_proj(x),
    "opt": lambda b, x: b.self_attn.q_proj(b.self_attn_layer_norm(x)),
    "bert": lambda b, x: b.attention.self.query(x),
}


@pytest.mark.parametrize("model_type", INPUTS)
def test_an_edited_q_input_reaches_that_head_alone(model_type: str) -> None:
    path = MID[model_type][1].replace(".1", ".0")
    block = of(model_type).module.get_submodule(path)

    def edit_head_1(value: Tensor, hook: Any) -> None:
        value[:, :, 1] += noise_like(value[:, :, 1])

    names = ["blocks.0.attn.hook_q", "blocks.0.attn.hook_k", "blocks.0.hook_resid_pre"]
    clean = cached(model_type, names)
    cache = cached(model_type, names, ("blocks.0.hook_q_input", edit_head_1))
    q, stream = cache[names[0]], cache[names[2]]
    with torch.no_grad():
        expected = INPUTS[model_type](block, stream + noise_like(stream)).unflatten(-1, (4, 8))
    torch.testing.assert_close(q[:, :, 1], expected[:, :, 1], rtol=1e-5, atol=1e-5)
    for head in (0, 2, 3):
        assert torch.equal(q[:, :, head], clean[names[0]][:, :, head])
    assert torch.equal(cache[names[1]], clean[names[1]])
    assert torch.equal(stream, clean[names[2]])


SCALES: dict[str, tuple[str, Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "gpt2": (
        "transformer.h.1.ln_2",
        lambda n, x, s: (x - x.mean(-1, keepdim=True)) / s * n.weight + n.bias,
    ),
    "llama": ("model.layers.1.post_attention_layernorm", lambda n, x, s: x / s * n.weight),
    "gemma2": ("model.layers.1.pre_feedforward_layernorm", lambda n, x, s: x / s * (1 + n.weight)),
}


@pytest.mark.parametrize("model_type", SCALES)
def test_an_edited_scale_is_what_the_norm_divides_by(model_type: str) -> None:
    path, formula = SCALES[model_type]
    names = ["blocks.1.hook_mlp_in", "blocks.1.ln2.hook_normalized"]
    scales: list[Tensor] = []

    def double(value: Tensor, hook: Any) -> Tensor:
        scales.append(2 * value + 0.3)
        return scales[-1]

    cache = cached(model_type, names, ("blocks.1.ln2.hook_scale", double))
    with torch.no_grad():
        norm = of(model_type).module.get_submodule(path)
        expected = formula(norm, cache[names[0]], scales[0])
    torch.testing.assert_close(cache[names[1]], expected, rtol=1e-5, atol=1e-5)


DERIVED = ["attn.hook_result", "ln1.hook_scale", "hook_q_input", "hook_v_input"]


@pytest.mark.parametrize("site", DERIVED)
def test_later_hooks_and_the_cache_see_an_edited_derived_value(site: str) -> None:
    name = f"blocks.0.{site}"
    shown: list[Tensor] = []

    def show(value: Tensor, hook: Any) -> None:
        shown.append(value.clone())

    edit = (name, lambda value, hook: torch.full_like(value, 2.0))
    cache = cached("llama", [name], edit, (name, show))
    assert (shown[0] == 2).all()
    assert (cache[name] == 2).all()


def test_two_edits_of_results_follow_one_another() -> None:
    name, out = "blocks.0.attn.hook_result", "blocks.0.attn.hook_out"
    ones = (name, lambda value, hook: torch.ones_like(value))
    thrice = (name, lambda value, hook: 3 * value)
    found = cached("llama", [out], ones, thrice)[out]
    expected = torch.full_like(found, 12.0)  # four heads, three each
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_granite_adds_is_edited_after_its_multiplier() -> None:
    names = ["blocks.0.hook_resid_pre", "blocks.0.hook_attn_out", "blocks.0.hook_resid_mid"]
    cache = cached("granite", names, (names[1], changed))
    pre, added, mid = (cache[name] for name in names)
    torch.testing.assert_close(mid, pre + added, rtol=1e-6, atol=1e-6)
    raw = cached("granite", ["model.layers.0.self_attn.output[0]", names[1]])
    torch.testing.assert_close(raw["model.layers.0.self_attn.output[0]"] * 0.5, raw[names[1]])


# Gradients.

GRADIENTS = ["gpt2", "llama", "gemma2", "bloom", "falcon", "mixtral", "bert", "t5", "gpt_oss"]


def loss_of(output: Any) -> Tensor:
    logits = tiny.outputs(output)
    weights = torch.linspace(-1, 1, logits.numel()).view(logits.shape)
    return (logits * weights).sum() / 10


def gradient(model_type: str, name: str) -> Tensor:
    return (
        of(model_type)
        .run_with_cache(**given(model_type), names_filter=name, incl_bwd=loss_of)[1]
        .grad[name]
    )


@pytest.mark.parametrize("model_type", GRADIENTS)
def test_gradients_are_those_of_a_leaf_in_the_values_place(model_type: str) -> None:
    for name in sites_of(model_type, "resid_mid", "z", "pattern"):
        leaves: list[Tensor] = []

        def inject(value: Tensor, hook: Any, leaves: list[Tensor] = leaves) -> Tensor:
            leaves.append(value.detach().clone().requires_grad_())
            return leaves[-1]

        output = of(model_type).run_with_hooks(**given(model_type), fwd_hooks=[(name, inject)])
        (true,) = torch.autograd.grad(loss_of(output), leaves)
        assert torch.equal(gradient(model_type, name), true), name


@pytest.mark.parametrize("model_type", GRADIENTS)
def test_gradients_are_central_differences(model_type: str) -> None:
    for name in sites_of(model_type, "resid_mid", "z", "pattern"):
        grad = gradient(model_type, name)
        steps = 2e-3 * grad / grad.norm()

        def loss(step: Tensor, name: str = name) -> float:
            return float(loss_of((run(model_type, (name, lambda v, hook: v + step)),)))

        slope = (loss(steps) - loss(-steps)) / 4e-3
        assert slope == pytest.approx(float(grad.norm()), rel=0.05), name


ENDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "gpt2": lambda m, x: m.lm_head(m.transformer.ln_f(x)),
    "llama": lambda m, x: m.lm_head(m.model.norm(x)),
    "mixtral": lambda m, x: m.lm_head(m.model.norm(x)),
    "olmo2": lambda m, x: m.lm_head(m.model.norm(x)),
    "bloom": lambda m, x: m.lm_head(m.transformer.ln_f(x)),
    "bert": lambda m, x: m.cls(x),
}


@pytest.mark.parametrize("model_type", ENDS)
def test_the_gradient_at_resid_mid_counts_the_skip_path(model_type: str) -> None:
    """The rest of the model by hand, from the last block's resid_mid on."""
    _, path, rest = MID[model_type]
    module: Any = of(model_type).module
    leaf = cached(model_type, "resid_mid")["blocks.1.hook_resid_mid"].requires_grad_()
    logits = ENDS[model_type](module, rest(module.get_submodule(path), leaf))
    (true,) = torch.autograd.grad(loss_of((logits,)), leaf)
    found = gradient(model_type, "blocks.1.hook_resid_mid")
    torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "bloom", "falcon"])
def test_the_gradient_at_z_is_that_of_a_raw_leaf(model_type: str) -> None:
    site = of(model_type).tree.site("blocks.0.attn.hook_z")
    leaves: list[Tensor] = []

    def inject(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        leaves.append(args[0].detach().clone().requires_grad_())
        return (leaves[-1],)

    handle = site.module.register_forward_pre_hook(inject)
    try:
        output = of(model_type).module(**given(model_type))
    finally:
        handle.remove()
    (true,) = torch.autograd.grad(loss_of(output), leaves)
    assert torch.equal(gradient(model_type, "blocks.0.attn.hook_z"), true.unflatten(-1, (4, 8)))


@pytest.mark.parametrize("model_type", ["llama", "bloom", "t5"])
def test_gradients_of_a_frozen_model_are_the_same(model_type: str) -> None:
    frozen: Any = ip.wrap(copy.deepcopy(of(model_type).module).requires_grad_(False))
    for name in sites_of(model_type, "resid_mid", "z", "pattern"):
        _, cache = frozen.run_with_cache(**given(model_type), names_filter=name, incl_bwd=loss_of)
        torch.testing.assert_close(
            cache.grad[name], gradient(model_type, name), rtol=1e-5, atol=1e-6
        )


# Isolation.


def explicit_differs(model_type: str) -> bool:
    names = sites_of(model_type, *EXPLICIT)
    return not torch.equal(run(model_type, *((n, identity) for n in names)), bare(model_type))


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "falcon"])
def test_a_thread_that_reads_patterns_leaves_another_its_kernel(model_type: str) -> None:
    model = of(model_type)
    names = sites_of(model_type, "pattern")
    if not explicit_differs(model_type):
        pytest.skip(
            "on this CPU eager attention gives the kernel's bits, so they tell nothing apart"
        )
    read = cached(model_type, names)
    done = threading.Event()
    wrong: list[str] = []
    turns = [0, 0]

    def reads_patterns() -> None:
        while not done.is_set():
            cache = cached(model_type, names)
            turns[0] += 1
            if not all(torch.equal(cache[name], read[name]) for name in names):
                wrong.append("patterns")

    def runs_bare() -> None:
        with torch.no_grad():
            for _ in range(40):
                output = tiny.outputs(model.module(**given(model_type)))
                turns[1] += 1
                if not torch.equal(output, bare(model_type)):
                    wrong.append("kernel")
                if not are_near(run(model_type, ("blocks.1.attn.hook_z", identity)), output):
                    wrong.append("kernel under a hook")
        done.set()

    threads = [threading.Thread(target=each) for each in (reads_patterns, runs_bare)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert min(turns) > 3


@pytest.mark.parametrize("model_type", TYPES)
def test_nothing_is_left_on_the_module(model_type: str) -> None:
    model = of(model_type)
    every = list(model.sites)
    before = state_of(model.module)
    with torch.no_grad():
        model.run_with_cache(**given(model_type), names_filter=every)
    run(model_type, *((name, identity) for name in every))
    assert same_state(before, state_of(model.module))

    class Surprise(Exception):
        pass

    def fail(value: Tensor, hook: Any) -> None:
        raise Surprise

    for name in sites_of(model_type, *EDITED, "result", "scale", "router_logits")[-8:]:
        with pytest.raises(Surprise):
            run(model_type, *((each, identity) for each in every[:9]), (name, fail))
        assert same_state(before, state_of(model.module)), name
    assert torch.equal(run(model_type), bare(model_type))


def test_a_gradient_run_leaves_nothing_on_the_module() -> None:
    for model_type in ("llama", "bloom"):
        before = state_of(of(model_type).module)
        for name in sites_of(model_type, "resid_mid", "pattern", "result"):
            gradient(model_type, name)
        assert same_state(before, state_of(of(model_type).module))


def by_pickle(module: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(module))
    return copied


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "opt", "bloom", "falcon", "gptj", "t5"])
@pytest.mark.parametrize("copied_by", [copy.deepcopy, by_pickle])
def test_copies_of_a_hooked_module_are_bare(
    model_type: str, copied_by: Callable[[nn.Module], nn.Module]
) -> None:
    model, expected = of(model_type), bare(model_type)  # before there are hooks
    hooks: list[Any] = [(name, changed) for name in sites_of(model_type, *EDITED)]
    others = ("result", "scale", "q_input", "router_logits", "expert_weights")
    hooks += [(name, identity) for name in sites_of(model_type, *others)]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        twin = copied_by(model.module)
        assert_near(tiny.outputs(twin(**given(model_type))), expected)
        hooked = tiny.outputs(model.module(**given(model_type)))
    assert (hooked - expected).abs().max() > 0.1
    with torch.no_grad():
        assert_near(tiny.outputs(twin(**given(model_type))), expected)
        # A copy can be looked into as any module can.
        again = tiny.outputs(ip.wrap(twin).run_with_hooks(**given(model_type), fwd_hooks=hooks))
    assert_near(again, hooked)


def test_values_that_do_not_fit_name_the_edit_and_the_site() -> None:
    model = ip.load("pocket", device="cpu")
    for edit in (
        ip.add("resid_pre", torch.ones(100), layer=2),
        ip.scale("resid_pre", torch.ones(3, 100), layer=2),
    ):
        with pytest.raises(
            ip.EditShapeError,
            match=r"what it selects of 'blocks\.2\.hook_resid_pre' is \(1, 5, 192\)",
        ):
            model.run_with_hooks("The capital of France is", hooks=[edit])
    with pytest.raises(TypeError, match="layer is a number, several, a slice or 'all'; got 'some'"):
        ip.zero("z", layer="some")
    with pytest.raises(ip.NothingSelected, match="' Paris' is not in row 0, whose tokens are"):
        model.run_with_hooks(
            "The capital of France is", hooks=[ip.zero("z", layer=4, pos=" Paris")]
        )


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
def test_a_gradient_at_a_norms_scale_leaves_every_bit_and_is_right(kind: str) -> None:
    module = tiny.build(kind)
    model, ids = ip.wrap(module), tiny.inputs(module)["input_ids"]
    name = "blocks.1.ln1.hook_scale"

    def total(logits: Tensor) -> Tensor:
        return logits.square().sum()

    logits, cache = model.run_with_cache(ids, names_filter=[name], incl_bwd=total)
    assert torch.equal(logits, model(ids))
    direction = torch.randn(cache[name].shape, generator=torch.Generator().manual_seed(0))
    step = 1e-2 * direction / direction.norm()
    with torch.no_grad():
        up, down = (
            total(model.run_with_hooks(ids, fwd_hooks=[(name, lambda s, hook, by=by: s + by)]))
            for by in (step, -step)
        )
    wanted = float((up - down) / 2)
    assert abs(wanted) > 1e-3
    assert float((cache.grad[name] * step).sum()) == pytest.approx(wanted, rel=0.03)
