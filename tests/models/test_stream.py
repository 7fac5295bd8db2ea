"""What blocks read and add to the stream is what sums written out by hand say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from interpose.dialects.transformer_lens import HookedTransformer, HookedTransformerConfig
from tests.bounds import assert_near
from tests.models import tiny
from tests.sweeps import oracle

TOKENS = torch.randint(10, 60, (2, 7), generator=torch.Generator().manual_seed(3))


def built(name: str, **options: Any) -> Any:
    return ip.wrap(tiny.build(name, **options).requires_grad_(False))


def rms(x: Tensor, eps: float) -> Tensor:
    return (x.double().square().mean(-1, keepdim=True) + eps).sqrt().to(x.dtype)


def inputs_of(module: nn.Module, part: nn.Module) -> Tensor:
    """What a part is given in a raw run."""
    kept: list[Tensor] = []
    handle = part.register_forward_pre_hook(lambda _, args: kept.append(args[0].clone()))
    with torch.no_grad():
        module(TOKENS)
    handle.remove()
    return kept[0]


# Where the output projection is, its bias, and what is done to what it returns, each by hand.


def gpt2(module: Any, at: int) -> tuple[nn.Module, Tensor, Any]:
    projection = module.transformer.h[at].attn.c_proj
    return projection, projection.weight, lambda whole, part: part


def llama(module: Any, at: int) -> tuple[nn.Module, Tensor, Any]:
    projection = module.model.layers[at].self_attn.o_proj
    return projection, projection.weight.T, lambda whole, part: part


def gemma2(module: Any, at: int) -> tuple[nn.Module, Tensor, Any]:
    block = module.model.layers[at]
    norm = block.post_attention_layernorm
    projection = block.self_attn.o_proj
    return (
        projection,
        projection.weight.T,
        lambda whole, part: part / rms(whole, norm.eps) * (1 + norm.weight),
    )


def olmo2(module: Any, at: int) -> tuple[nn.Module, Tensor, Any]:
    block = module.model.layers[at]
    norm = block.post_attention_layernorm
    projection = block.self_attn.o_proj
    return (
        projection,
        projection.weight.T,
        lambda whole, part: part / rms(whole, norm.variance_epsilon) * norm.weight,
    )


def granite(module: Any, at: int) -> tuple[nn.Module, Tensor, Any]:
    projection = module.model.layers[at].self_attn.o_proj
    times = module.config.residual_multiplier
    return projection, projection.weight.T, lambda whole, part: part * times


def cohere(module: Any, at: int) -> tuple[nn.Module, Tensor, Any]:
    return llama(module, at)


def falcon(module: Any, at: int) -> tuple[nn.Module, Tensor, Any]:
    projection = module.transformer.h[at].self_attention.dense
    return projection, projection.weight.T, lambda whole, part: part


def gptj(module: Any, at: int) -> tuple[nn.Module, Tensor, Any]:
    projection = module.transformer.h[at].attn.out_proj
    return projection, projection.weight.T, lambda whole, part: part


def mixtral(module: Any, at: int) -> tuple[nn.Module, Tensor, Any]:
    return llama(module, at)


BY_HAND = {
    each.__name__: each
    for each in (gpt2, llama, gemma2, olmo2, granite, cohere, falcon, gptj, mixtral)
}


CASES = [(name, torch.float32) for name in BY_HAND]
CASES += [(name, torch.float64) for name in BY_HAND if name != "mixtral"]  # it runs in no float64


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_heads_are_what_raw_weights_make_and_add_up_with_the_rest(
    name: str, dtype: torch.dtype
) -> None:
    model = ip.wrap(tiny.build(name).requires_grad_(False).to(dtype))
    for layer in range(2):
        projection, weight, onwards = BY_HAND[name](model.module, layer)
        z = inputs_of(model.module, projection)  # [batch, pos, head * d_head]
        bias = getattr(projection, "bias", None)
        whole = z @ weight if bias is None else z @ weight + bias
        branch = model.blocks[layer].branches["attn"]
        _, cache = model.run_with_cache(TOKENS, names_filter=[branch.site, *branch.sites])
        parts, rest = branch.parts(cache), branch.rest(cache)
        heads = parts.shape[-2]
        assert heads > 1
        each = z.unflatten(-1, (heads, -1))
        rows = weight.unflatten(0, (heads, -1))
        for head in range(heads):
            made = onwards(whole, each[..., head, :] @ rows[head])
            assert made.abs().max() > 1e-3
            assert_near(parts[..., head, :], made, cache[branch.site])
        assert parts.dtype == dtype
        assert_near(parts.sum(-2) + rest, onwards(whole, whole), cache[branch.site])
        # Some norms compute in float32, whatever they are given.
        assert_near((parts.sum(-2) + rest).float(), cache[branch.site].float())


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "olmo2", "granite", "falcon", "gptj"])
def test_neurons_and_heads_along_a_direction_add_up_to_what_is_added(name: str) -> None:
    model = built(name)
    direction = torch.randn(32, generator=torch.Generator().manual_seed(0))
    for branch in model.stream.branches:
        _, cache = model.run_with_cache(TOKENS, names_filter=[branch.site, *branch.sites])
        units, rest = branch.along(cache, direction.expand(2, 7, -1))
        assert units.shape[:-1] == (2, 7)
        assert_near(units, branch.parts(cache) @ direction, times=4)
        assert_near(rest, (branch.rest(cache) @ direction).expand_as(rest), times=4)
        assert_near(units.sum(-1) + rest, cache[branch.site] @ direction, units, times=4)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "granite", "cohere", "falcon", "mamba2"])
def test_embeddings_and_branches_add_up_to_the_last_stream_and_the_logits(name: str) -> None:
    model = built(name)
    stream = model.stream
    last = f"blocks.{len(model.blocks) - 1}.hook_resid_post"
    names = [*stream.embeddings, last, stream.end.scale_site, "unembed.hook_out"]
    _, cache = model.run_with_cache(
        TOKENS, names_filter=[*names, *(branch.site for branch in stream.branches)]
    )
    parts = [stream.embedding_multiplier * cache[site] for site in stream.embeddings]
    parts += [cache[branch.site] for branch in stream.branches]
    assert_near(sum(part.expand_as(cache[last]) for part in parts), cache[last])
    end = stream.end
    scale = end.scale_in(cache)
    normed = sum(end.through(part, scale) for part in parts) + end.summand
    with torch.no_grad():
        wanted = model.module(TOKENS).logits
    unembedded = normed @ model.W_U + model.b_U
    assert_near(unembedded, cache["unembed.hook_out"], times=4)
    assert_near(stream.logits(unembedded), wanted, times=4)
    some = end.before(model.W_U.T[5], scale)
    assert_near(
        (cache[last] * some).sum(-1) + model.b_U[5] + (model.W_U.T[5] * end.summand).sum(),
        cache["unembed.hook_out"][..., 5],
        times=8,
    )


def test_numbers_between_the_parts_are_those_of_the_config() -> None:
    granite, cohere, gemma, minicpm = map(built, ("granite", "cohere", "gemma2", "minicpm3"))
    config = granite.module.config
    assert granite.stream.embedding_multiplier == pytest.approx(config.embedding_multiplier)
    assert granite.stream.logit_multiplier == pytest.approx(1 / config.logits_scaling)
    assert {b.multiplier for b in granite.stream.branches} == {config.residual_multiplier}
    assert cohere.stream.logit_multiplier == pytest.approx(cohere.module.config.logit_scale)
    assert gemma.stream.soft_cap == gemma.module.config.final_logit_softcapping
    assert gemma.stream.logit_multiplier is None
    assert built("gpt2").stream.soft_cap is None
    config = minicpm.module.config
    times = config.scale_depth / config.num_hidden_layers**0.5
    assert minicpm.stream.branches[0].multiplier == pytest.approx(times, rel=1e-5)
    scale = torch.as_tensor(minicpm.stream.end.factor) / minicpm.ln_final.factor
    assert_near(scale, config.dim_model_base / config.hidden_size, 1.0)


def test_branches_of_one_step_read_the_same_stream() -> None:
    steps = {
        name: [branch.step for branch in built(name).stream.branches] for name in ("gpt2", "gptj")
    }
    assert steps == {"gpt2": [0, 1, 0, 1], "gptj": [0, 0, 0, 0]}
    kinds = [branch.kind for branch in built("jamba").stream.branches]
    assert {"attn", "mixer", "mlp"} == set(kinds)
    model = built("gptj")
    assert len(model.stream) == 2
    branch = model.stream.branch(1, "attn")
    assert torch.equal(branch.named("W_K"), model.blocks[1].attn.W_K)
    with pytest.raises(ip.Unsupported, match=r"no W_gate belongs to blocks\.1\.hook_attn_out"):
        branch.named("W_gate")
    with pytest.raises(
        ip.Unsupported, match="adds no 'mixer' to the stream; it adds 'attn', 'mlp'"
    ):
        model.stream.branch(1, "mixer")
    with pytest.raises(IndexError, match="there is no block 2: the model has 2"):
        model.stream.branch(2, "attn")


NORMS: dict[str, tuple[str, Any, bool]] = {
    "gpt2": ("ln1", lambda norm: (norm.weight, norm.bias), True),
    "llama": ("ln2", lambda norm: (norm.weight, torch.zeros(32)), False),
    "gemma2": ("ln1_post", lambda norm: (1 + norm.weight, torch.zeros(32)), False),
    "olmo": ("ln1", lambda norm: (torch.ones(32), torch.zeros(32)), True),  # without weights
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_says_its_factor_and_summand_as_they_are(name: str, dtype: torch.dtype) -> None:
    at, by_hand, centred = NORMS[name]
    model = ip.wrap(tiny.build(name).requires_grad_(False).to(dtype))
    norm = getattr(model.blocks[1], at)
    with torch.no_grad():
        for parameter in norm.module.parameters():
            parameter.add_(torch.randn(32, generator=torch.Generator().manual_seed(1)).to(dtype))
    factor, summand = by_hand(norm.module)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    if name == "gemma2":
        factor = 1 + norm.module.weight.to(exact)
    assert torch.equal(norm.factor, factor.to(exact))
    assert torch.equal(norm.summand, summand.to(exact))
    assert norm.centred is centred
    assert norm.factor.dtype == exact
    assert norm.formula.exact


def test_a_nan_in_a_weight_is_one_feature_of_the_factor() -> None:
    for name in ("gpt2", "llama", "gemma2"):
        model = built(name)
        norm = model.blocks[0].ln1
        before = norm.factor
        with torch.no_grad():
            norm.module.weight[3] = torch.nan
        after = norm.factor
        assert after.isnan().nonzero().tolist() == [[3]]
        assert torch.equal(after[4:], before[4:])
        assert norm.centred is (name == "gpt2")


class DoubledNorm(nn.Module):
    """A norm that multiplies with twice its weight, which no parameter says."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = inner.weight, inner.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


class CubedNorm(DoubledNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) ** 3


def test_what_no_parameter_says_is_measured_and_what_is_no_norm_is_refused() -> None:
    model = built("llama")
    block = model.module.model.layers[0]
    plain = model.blocks[0].ln1.factor
    block.input_layernorm = DoubledNorm(block.input_layernorm)
    assert_near(model.blocks[0].ln1.factor, 2 * plain)
    assert not model.blocks[0].ln1.formula.exact
    block.input_layernorm.__class__ = CubedNorm
    with pytest.raises(
        ip.Unsupported, match=r"input_layernorm \(CubedNorm\) is not a norm of the usual"
    ):
        model.blocks[0].ln1.factor  # noqa: B018


def test_values_follow_a_model_that_changes() -> None:
    model = ip.wrap(oracle.build("granite"))
    norm, old = model.blocks[0].ln1, model.blocks[0].ln1.factor
    with torch.no_grad():
        norm.module.weight.mul_(3)
    assert_near(norm.factor, 3 * old)
    for part in oracle.blocks(model.module):
        part.residual_multiplier = 0.9
    assert {branch.multiplier for branch in model.stream.branches} == {0.9}
    assert model.blocks[1].branches["mlp"].multiplier == 0.9
    model.module.config.logits_scaling = 5.0
    if hasattr(model.module, "logits_scaling"):
        model.module.logits_scaling = 5.0
    with torch.no_grad():
        logits = model.module(TOKENS).logits
    _, cache = model.run_with_cache(TOKENS, names_filter="unembed.hook_out")
    assert_near(model.stream.logits(cache["unembed.hook_out"]), logits)


def test_what_cannot_be_taken_apart_says_why() -> None:
    mixture = built("mixtral").blocks[0].branches["mlp"]
    with pytest.raises(ip.Unsupported, match=r"hook_mlp_out cannot be taken apart: .* mixture of"):
        mixture.sites  # noqa: B018
    assert mixture.units == ""
    model = built("gpt2")
    model.anatomy.towers[0].prefix = "vision."
    with pytest.raises(ip.Unsupported, match="has no one stack of blocks"):
        model.stream.branches  # noqa: B018
    with pytest.raises(ip.Unsupported, match="norms the stream itself"):
        ip.wrap(oracle.build(oracle.OPT_POST_NORM)).stream.must_add_up()
    with pytest.raises(ip.Unsupported, match=r"model.sites.absent"):
        built("olmo").stream.end  # noqa: B018


def test_another_tower_has_branches_of_its_own() -> None:
    model = ip.wrap(tiny.build("whisper", "encoder_decoder"))
    given = tiny.inputs(model.module)
    for part in (model.encoder.blocks[1], model.decoder.blocks[1]):
        for branch in part.branches.values():
            _, cache = model.run_with_cache(names_filter=[branch.site, *branch.sites], **given)
            assert_near(branch.parts(cache).sum(-2) + branch.rest(cache), cache[branch.site])
    assert {"attn", "cross_attn", "mlp"} == set(model.decoder.blocks[0].branches)
    assert [branch.site[:7] for branch in model.stream.branches] == ["decoder"] * 6


@pytest.mark.parametrize("norm", [None, "LN", "RMSPre"])
def test_models_from_scratch_have_a_stream(norm: str | None) -> None:
    sizes = {"n_layers": 2, "d_model": 15, "d_head": 5, "n_ctx": 16, "d_vocab": 30, "n_heads": 3}
    config = HookedTransformerConfig(
        **sizes, act_fn="gelu", normalization_type=norm, seed=0, output_logits_soft_cap=3.0
    )
    model = HookedTransformer(config).eval().requires_grad_(False)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            draw = torch.Generator().manual_seed(number)
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=draw))
    assert model.stream.soft_cap == 3
    tokens = TOKENS % 30
    for branch in model.stream.branches:
        _, cache = model.run_with_cache(tokens, names_filter=[branch.site, *branch.sites])
        assert_near(branch.parts(cache).sum(-2) + branch.rest(cache), cache[branch.site])
    if norm == "LN":
        found, norm = model.stream.norm("blocks.0.ln1"), model.module.blocks[0].ln1
        assert_near(found.factor, norm.w)
        assert_near(found.summand, norm.b)
        assert found.centred


def test_looking_leaves_nothing_behind_and_no_hook_hears_it() -> None:
    model = built("gemma2")
    heard: list[str] = []
    with model.hooks(
        fwd_hooks=[("blocks.0.ln1.hook_scale", lambda value, hook: heard.append("."))]
    ):
        model.blocks[0].ln1.factor  # noqa: B018
        model.stream.branches  # noqa: B018
        assert heard == []
        model(TOKENS)
    assert heard == ["."]


def test_a_stream_that_is_multiplied_is_no_sum() -> None:
    """MiniMax: ``keeps * stream + multiplier * branch``, in every block."""
    model = built("minimax")
    config = model.module.config
    for branch in model.stream.branches:
        if branch.kind == "mlp":
            factors = config.mlp_alpha_factor, config.mlp_beta_factor
        elif branch.kind == "attn":
            factors = config.full_attn_alpha_factor, config.full_attn_beta_factor
        else:
            factors = config.linear_attn_alpha_factor, config.linear_attn_beta_factor
        assert (branch.keeps, branch.multiplier) == pytest.approx(factors, rel=1e-5)
    with pytest.raises(ip.Unsupported, match=r"multiplies the stream itself in model\.layers\.0"):
        model.stream.must_add_up()


@pytest.mark.parametrize(("name", "cap"), [("roformer", None), ("xlstm", 30.0)])
def test_embeddings_of_another_width_and_caps_of_other_names_are_no_trouble(
    name: str, cap: float | None
) -> None:
    stream = built(name).stream
    assert stream.branches
    assert stream.soft_cap == cap
    assert stream.embedding_multiplier == (None if cap is None else 1.0)
