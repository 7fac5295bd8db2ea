"""Sites of transformers models: their values against plain torch hooks, their names, their errors.

The tables below are written by hand from transformers' source: for each site of a block the raw
module, whether its argument or its result is meant, and how heads lie in it. Nothing of interpose
takes part in what they expect.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from interpose.errors import AmbiguousSite, NothingMatched, SiteNotFound
from tests.leftovers import living
from tests.models import tiny
from tests.models.wired import of

Cut = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Raw:
    """A value of a module, seen by a plain torch hook."""

    path: str
    port: str
    cut: Cut


def given(path: str, cut: Cut = lambda value: value) -> Raw:
    return Raw(path, "given", cut)


def made(path: str, cut: Cut = lambda value: value) -> Raw:
    return Raw(path, "made", cut)


def heads(start: int = 0, stop: int | None = None, size: int = 8) -> Cut:
    """Head after head, between two columns."""
    return lambda value: value[..., start:stop].unflatten(-1, (-1, size))


def woven(role: int) -> Cut:
    """Head after head, each with its query, key and value together: [head, 3, d_head]."""
    return lambda value: value.unflatten(-1, (4, 3, 8))[..., role, :]


def latent(start: int, stop: int) -> Cut:
    """DeepSeek's keys and values of one head side by side, and an axis of one before positions."""
    return lambda value: value.squeeze(1).unflatten(-1, (4, 16))[..., start:stop]


def by_batch(value: Tensor) -> Tensor:
    return value.unflatten(0, (2, -1))


def separate(at: str, q: str, k: str, v: str, out: str) -> dict[str, Raw]:
    return {
        "attn.hook_q": made(f"{at}.{q}", heads()),
        "attn.hook_k": made(f"{at}.{k}", heads()),
        "attn.hook_v": made(f"{at}.{v}", heads()),
        "attn.hook_z": given(f"{at}.{out}", heads()),
        "attn.hook_out": made(f"{at}.{out}"),
        "attn.hook_in": given(at),
    }


def fused(at: str, qkv: str, out: str, q: Cut, k: Cut, v: Cut) -> dict[str, Raw]:
    return {
        "attn.hook_q": made(f"{at}.{qkv}", q),
        "attn.hook_k": made(f"{at}.{qkv}", k),
        "attn.hook_v": made(f"{at}.{qkv}", v),
        "attn.hook_z": given(f"{at}.{out}", heads()),
        "attn.hook_out": made(f"{at}.{out}"),
        "attn.hook_in": given(at),
    }


def gated(at: str) -> dict[str, Raw]:
    return {
        "mlp.hook_pre": made(f"{at}.gate_proj"),
        "mlp.hook_pre_linear": made(f"{at}.up_proj"),
        "mlp.hook_post": given(f"{at}.down_proj"),
        "mlp.hook_in": given(at),
    }


def plain(up: str, down: str) -> dict[str, Raw]:
    return {"mlp.hook_pre": made(up), "mlp.hook_post": given(down), "mlp.hook_in": given(up)}


def norms(**paths: str) -> dict[str, Raw]:
    return {f"{name}.hook_normalized": made(path) for name, path in paths.items()}


def mixture(at: str, flat: Cut = by_batch) -> dict[str, Raw]:
    return {
        "mlp.hook_in": given(at),
        "mlp.hook_experts_out": made(f"{at}.experts", flat),
        "mlp.hook_router_logits": made(f"{at}.gate", lambda each: flat(each[0])),
        "mlp.hook_expert_weights": made(f"{at}.gate", lambda each: flat(each[1])),
        "mlp.hook_expert_indices": made(f"{at}.gate", lambda each: flat(each[2])),
    }


STREAM = {"hook_resid_pre": given(""), "hook_resid_post": made("")}
LLAMA_ATTENTION = separate("self_attn", "q_proj", "k_proj", "v_proj", "o_proj")
LLAMA_NORMS = norms(ln1="input_layernorm", ln2="post_attention_layernorm")
LLAMA = {
    **STREAM,
    **LLAMA_ATTENTION,
    **LLAMA_NORMS,
    "hook_attn_in": given("input_layernorm"),
    "hook_attn_out": made("self_attn"),
    "hook_mlp_in": given("post_attention_layernorm"),
    "hook_mlp_out": made("mlp"),
}
POSTS = {
    "hook_attn_out": made("post_attention_layernorm"),
    "hook_mlp_out": made("post_feedforward_layernorm"),
    **norms(ln1_post="post_attention_layernorm", ln2_post="post_feedforward_layernorm"),
}
DEEPSEEK = {
    **LLAMA,
    "attn.hook_q": made("self_attn.q_b_proj", heads(size=16)),
    "attn.hook_k": made("self_attn.kv_b_proj", latent(0, 8)),
    "attn.hook_v": made("self_attn.kv_b_proj", latent(8, 16)),
}
BLOOM_LIKE = {
    **STREAM,
    **norms(ln1="input_layernorm", ln2="post_attention_layernorm"),
    "hook_attn_in": given("input_layernorm"),
    "hook_mlp_in": given("post_attention_layernorm"),
    **plain("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
}


def t5(self_attention: str, feed_forward: str) -> dict[str, Raw]:
    return {
        **STREAM,
        **separate(f"{self_attention}.SelfAttention", "q", "k", "v", "o"),
        **norms(ln1=f"{self_attention}.layer_norm", ln2=f"{feed_forward}.layer_norm"),
        "hook_attn_in": given(f"{self_attention}.layer_norm"),
        "hook_attn_out": made(f"{self_attention}.SelfAttention"),
        "hook_mlp_in": given(f"{feed_forward}.layer_norm"),
        "hook_mlp_out": made(f"{feed_forward}.DenseReluDense"),
        **plain(f"{feed_forward}.DenseReluDense.wi", f"{feed_forward}.DenseReluDense.wo"),
    }


# type -> where its blocks are, and the sites of each block.
BLOCKS: dict[str, list[tuple[str, str, dict[str, Raw]]]] = {}
for layer in range(2):
    at = f"blocks.{layer}."
    BLOCKS.setdefault("gpt2", []).append(
        (
            at,
            f"transformer.h.{layer}",
            {
                **STREAM,
                **fused("attn", "c_attn", "c_proj", heads(0, 32), heads(32, 64), heads(64, 96)),
                **norms(ln1="ln_1", ln2="ln_2"),
                **plain("mlp.c_fc", "mlp.c_proj"),
                "hook_attn_in": given("ln_1"),
                "hook_attn_out": made("attn"),
                "hook_mlp_in": given("ln_2"),
                "hook_mlp_out": made("mlp"),
            },
        )
    )
    for name in ("llama", "mistral", "qwen2"):
        BLOCKS.setdefault(name, []).append((at, f"model.layers.{layer}", {**LLAMA, **gated("mlp")}))
    BLOCKS.setdefault("gemma2", []).append(
        (
            at,
            f"model.layers.{layer}",
            {
                **LLAMA,
                **POSTS,
                **gated("mlp"),
                **norms(ln1="input_layernorm", ln2="pre_feedforward_layernorm"),
                "hook_mlp_in": given("pre_feedforward_layernorm"),
            },
        )
    )
    BLOCKS.setdefault("olmo2", []).append(
        (
            at,
            f"model.layers.{layer}",
            {
                **STREAM,
                **LLAMA_ATTENTION,
                **POSTS,
                **gated("mlp"),
                "hook_attn_in": given("self_attn"),
                "hook_mlp_in": given("mlp"),
            },
        )
    )
    BLOCKS.setdefault("mixtral", []).append(
        (at, f"model.layers.{layer}", {**LLAMA, **mixture("mlp")})
    )
    BLOCKS.setdefault("deepseek_v3", []).append(
        (at, f"model.layers.{layer}", {**DEEPSEEK, **(mixture("mlp") if layer else gated("mlp"))})
    )
    BLOCKS.setdefault("bloom", []).append(
        (
            at,
            f"transformer.h.{layer}",
            {
                **BLOOM_LIKE,
                **fused("self_attention", "query_key_value", "dense", *map(woven, range(3))),
                "hook_attn_out": made("self_attention.dense"),
                "hook_mlp_out": made("mlp.dense_4h_to_h"),
            },
        )
    )
    BLOCKS.setdefault("gpt_neox", []).append(
        (
            at,
            f"gpt_neox.layers.{layer}",
            {
                **BLOOM_LIKE,
                **fused("attention", "query_key_value", "dense", *map(woven, range(3))),
                "hook_attn_out": made("post_attention_dropout"),
                "hook_mlp_out": made("post_mlp_dropout"),
            },
        )
    )
    BLOCKS.setdefault("falcon", []).append(
        (
            at,
            f"transformer.h.{layer}",
            {
                **STREAM,
                **fused(
                    "self_attention",
                    "query_key_value",
                    "dense",
                    heads(0, 32),
                    heads(32, 40),
                    heads(40, 48),
                ),
                **norms(ln1="input_layernorm"),
                **plain("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
                "hook_attn_in": given("input_layernorm"),
                "hook_attn_out": made("self_attention"),
                "hook_mlp_out": made("mlp"),
            },
        )
    )
    BLOCKS.setdefault("opt", []).append(
        (
            at,
            f"model.decoder.layers.{layer}",
            {
                **STREAM,
                **separate("self_attn", "q_proj", "k_proj", "v_proj", "out_proj"),
                "ln1.hook_normalized": made("self_attn_layer_norm"),
                "ln2.hook_normalized": made("final_layer_norm", by_batch),
                "mlp.hook_pre": made("fc1", by_batch),
                "mlp.hook_in": given("fc1", by_batch),
                "mlp.hook_post": given("fc2", by_batch),
                "hook_attn_in": given("self_attn_layer_norm"),
                "hook_attn_out": made("self_attn"),
                "hook_mlp_in": given("final_layer_norm", by_batch),
                "hook_mlp_out": made("fc2", by_batch),
            },
        )
    )
    BLOCKS.setdefault("bert", []).append(
        (
            at,
            f"bert.encoder.layer.{layer}",
            {
                **STREAM,
                **separate("attention.self", "query", "key", "value", "value"),
                "attn.hook_z": given("attention.output.dense", heads()),
                "attn.hook_out": made("attention.output.dense"),
                **norms(ln1="attention.output.LayerNorm", ln2="output.LayerNorm"),
                **plain("intermediate.dense", "output.dense"),
                "hook_attn_in": given("attention"),
                "hook_attn_out": made("attention.output.dense"),
                "hook_mlp_in": given("intermediate"),
                "hook_mlp_out": made("output.dense"),
            },
        )
    )
    BLOCKS.setdefault("t5", []).append(
        (f"encoder.{at}", f"encoder.block.{layer}", t5("layer.0", "layer.1"))
    )
    cross = separate("layer.1.EncDecAttention", "q", "k", "v", "o")
    BLOCKS["t5"].append(
        (
            f"decoder.{at}",
            f"decoder.block.{layer}",
            {
                **t5("layer.0", "layer.2"),
                **{name.replace("attn.", "cross_attn."): raw for name, raw in cross.items()},
                **norms(ln_cross="layer.1.layer_norm"),
                "hook_cross_attn_in": given("layer.1.layer_norm"),
                "hook_cross_attn_out": made("layer.1.EncDecAttention"),
            },
        )
    )

TYPES = list(BLOCKS)
# Sites that no raw hook can see; other tests below compute them.
INSIDE = {"attn.hook_rot_q", "attn.hook_rot_k", "attn.hook_attn_scores", "attn.hook_pattern"}
DERIVED = {
    "attn.hook_result",
    "hook_q_input",
    "hook_k_input",
    "hook_v_input",
    "mlp.hook_expert_out",
}


def first(value: Any) -> Any:
    """The one tensor that a module gives; a router's tuple stays whole."""
    if isinstance(value, tuple) and not all(isinstance(part, Tensor) for part in value):
        return next(part for part in value if isinstance(part, Tensor))
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


class Seen:
    """What plain torch hooks see in one forward: copies of arguments and results by module path."""

    def __init__(self, module: nn.Module, inputs: dict[str, Any]) -> None:
        self.given: dict[str, Tensor] = {}
        self.made: dict[str, Any] = {}
        handles = []
        for path, part in module.named_modules():
            handles.append(part.register_forward_pre_hook(self._before(path), with_kwargs=True))
            handles.append(part.register_forward_hook(self._after(path)))
        with torch.no_grad():
            self.output = tiny.outputs(module(**inputs))
        for handle in handles:
            handle.remove()

    def _before(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            floats = [x for x in tensors if x.is_floating_point()]
            if floats:
                self.given.setdefault(path, floats[0].clone())

        return hook

    def _after(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            value = first(output)
            if isinstance(value, tuple):
                value = tuple(part.clone() for part in value)
            self.made.setdefault(path, value.clone() if isinstance(value, Tensor) else value)

        return hook

    def value(self, block: str, raw: Raw) -> Tensor:
        path = f"{block}.{raw.path}" if raw.path else block
        value = (self.given if raw.port == "given" else self.made)[path]
        if raw.path == "" or "experts" in raw.path or not raw.path.endswith("gate"):
            value = value[0] if isinstance(value, tuple) else value
        return raw.cut(value)


@functools.cache
def seen(model_type: str) -> Seen:
    module: Any = of(model_type).module
    return Seen(module, tiny.inputs(module))


@functools.cache
def kept(model_type: str) -> Any:
    """Every site but scores and patterns."""
    model = of(model_type)
    names = [name for name, site in model.sites.items() if site.kind not in EXPLICIT]
    with torch.no_grad():
        return model.run_with_cache(**tiny.inputs(model.module), names_filter=names)  # type: ignore[arg-type]


EXPLICIT = ("attn_scores", "pattern")


def places(model_type: str) -> Iterator[tuple[str, str, str, Raw]]:
    for prefix, block, table in BLOCKS[model_type]:
        for name, raw in table.items():
            yield prefix, block, name, raw


# Values.


@pytest.mark.parametrize("model_type", TYPES)
def test_values_are_those_that_plain_torch_hooks_see(model_type: str) -> None:
    output, cache = kept(model_type)
    assert torch.equal(tiny.outputs(output), seen(model_type).output)
    for prefix, block, name, raw in places(model_type):
        expected = seen(model_type).value(block, raw)
        assert torch.equal(cache[prefix + name], expected), prefix + name


@pytest.mark.parametrize("model_type", TYPES)
def test_the_tables_here_leave_no_site_of_a_block_out(model_type: str) -> None:
    known = {prefix + name for prefix, _, name, _ in places(model_type)}
    others = {
        re.sub(r".*blocks\.\d\.", "", name).replace("cross_attn", "attn")
        for name in of(model_type).sites
        if "blocks." in name and name not in known
    }
    assert others <= INSIDE | DERIVED | {
        "hook_resid_mid",
        "hook_resid_mid_cross",
        *(f"{norm}.hook_scale" for norm in ("ln1", "ln2", "ln1_post", "ln2_post", "ln_cross")),
    }


@pytest.mark.parametrize("model_type", TYPES)
def test_resid_mid_is_the_stream_plus_what_attention_adds(model_type: str) -> None:
    _, cache = kept(model_type)
    for prefix, block, table in BLOCKS[model_type]:
        raw = functools.partial(seen(model_type).value, block)
        if model_type in ("gpt_neox", "falcon"):  # parallel: there is nothing between
            assert f"{prefix}hook_resid_mid" not in of(model_type).sites
            continue
        expected = raw(table["hook_resid_pre"]) + raw(table["hook_attn_out"])
        if model_type == "bert":  # the norm stands in the stream
            norm: Any = of(model_type).module.get_submodule(f"{block}.attention.output.LayerNorm")
            with torch.no_grad():
                expected = norm(expected)
        torch.testing.assert_close(cache[f"{prefix}hook_resid_mid"], expected, rtol=1e-6, atol=1e-6)
        if "hook_cross_attn_out" in table:
            expected = expected + raw(table["hook_cross_attn_out"])
            torch.testing.assert_close(
                cache[f"{prefix}hook_resid_mid_cross"], expected, rtol=1e-6, atol=1e-6
            )
        if model_type == "bert":
            continue
        expected = expected + raw(table["hook_mlp_out"])
        torch.testing.assert_close(
            cache[f"{prefix}hook_resid_post"], expected, rtol=1e-6, atol=1e-6
        )


CENTRED = {"gpt2", "bloom", "gpt_neox", "falcon", "opt", "bert"}


@pytest.mark.parametrize("model_type", TYPES)
def test_scales_are_what_norms_divide_by(model_type: str) -> None:
    _, cache = kept(model_type)
    count = 0
    for prefix, block, name, raw in places(model_type):
        if not name.endswith("hook_normalized"):
            continue
        x = seen(model_type).given[f"{block}.{raw.path}"]
        x = by_batch(x) if x.ndim == 2 else x
        norm: Any = of(model_type).module.get_submodule(f"{block}.{raw.path}")
        eps = next(getattr(norm, n) for n in ("eps", "variance_epsilon") if hasattr(norm, n))
        if model_type in CENTRED:
            x = x - x.mean(-1, keepdim=True)
        expected = (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        scale = cache[prefix + name.replace("normalized", "scale")]
        torch.testing.assert_close(scale, expected, rtol=1e-6, atol=1e-6)
        count += 1
    assert count >= 2


@pytest.mark.parametrize("model_type", TYPES)
def test_results_are_what_each_head_adds(model_type: str) -> None:
    _, cache = kept(model_type)
    for prefix, block, name, raw in places(model_type):
        if not name.endswith("attn.hook_z"):
            continue
        z = seen(model_type).value(block, raw)
        out: Any = of(model_type).module.get_submodule(f"{block}.{raw.path}")
        weight = out.weight.detach()
        weight = weight if type(out).__name__ == "Conv1D" else weight.T  # [in, out]
        by_head = weight.unflatten(0, (4, 8))
        expected = torch.stack([z[..., h, :] @ by_head[h] for h in range(4)], dim=-2)
        result = cache[prefix + name.replace("hook_z", "hook_result")]
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
        bias = 0 if out.bias is None else out.bias.detach()
        whole = seen(model_type).made[f"{block}.{raw.path}"]
        torch.testing.assert_close(result.sum(-2) + bias, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", TYPES)
def test_heads_read_the_stream(model_type: str) -> None:
    _, cache = kept(model_type)
    for prefix, block, table in BLOCKS[model_type]:
        if model_type == "deepseek_v3":  # projections that read a latent, not the stream
            assert f"{prefix}hook_q_input" not in of(model_type).sites
            continue
        stream = seen(model_type).value(block, table["hook_resid_pre"])
        for role in "qkv":
            count = cache[f"{prefix}attn.hook_{role}"].shape[-2]
            repeated = stream[:, :, None, :].expand(-1, -1, count, -1)
            assert torch.equal(cache[f"{prefix}hook_{role}_input"], repeated)


ENDS = {
    "gpt2": ("transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"),
    "llama": ("model.embed_tokens", None, "model.norm", "lm_head"),
    "bloom": ("transformer.word_embeddings", None, "transformer.ln_f", "lm_head"),
    "gpt_neox": ("gpt_neox.embed_in", None, "gpt_neox.final_layer_norm", "lm_head"),
    "opt": (
        "model.decoder.embed_tokens",
        "model.decoder.embed_positions",
        "model.decoder.final_layer_norm",
        "lm_head",
    ),
    "bert": (
        "bert.embeddings.word_embeddings",
        "bert.embeddings.position_embeddings",
        None,
        "cls.predictions.decoder",
    ),
}


@pytest.mark.parametrize("model_type", ENDS)
def test_ends_are_embeddings_final_norm_and_logits(model_type: str) -> None:
    names = ("hook_embed", "hook_pos_embed", "ln_final.hook_normalized", "unembed.hook_out")
    short = ("embed", "pos_embed", "normalized", "logits")
    _, cache = kept(model_type)
    for name, also, path in zip(names, short, ENDS[model_type]):
        if path is None:
            assert name not in of(model_type).sites
        else:
            assert torch.equal(cache[name], seen(model_type).made[path]), name
            assert cache[also] is cache[name]
    unembed = ENDS[model_type][3]
    assert torch.equal(cache["unembed.hook_in"], seen(model_type).given[str(unembed)])


PATTERNS = {
    "attentions": "blocks.{}.attn.hook_pattern",
    "encoder_attentions": "encoder.blocks.{}.attn.hook_pattern",
    "decoder_attentions": "decoder.blocks.{}.attn.hook_pattern",
    "cross_attentions": "decoder.blocks.{}.cross_attn.hook_pattern",
}


OTHERS = ["gptj", "mpt", "gpt_neo", "codegen", "cohere", "granite"]


@pytest.mark.parametrize("model_type", [*TYPES, *OTHERS])
def test_patterns_are_those_of_eager_attention(model_type: str) -> None:
    model = of(model_type)
    module: Any = model.module
    inputs = tiny.inputs(module)
    config = copy.deepcopy(module.config)
    eager = type(module)._from_config(config, attn_implementation="eager").eval()
    eager.load_state_dict(module.state_dict())
    with torch.no_grad():
        shown = eager(**inputs, output_attentions=True, use_cache=False)
        names = [name for name, site in model.sites.items() if site.kind == "pattern"]
        _, cache = model.run_with_cache(**inputs, use_cache=False, names_filter=names)
    compared = []
    for field, name in PATTERNS.items():
        for number, pattern in enumerate(getattr(shown, field, None) or ()):
            # Falcon calls the kernel itself, so what stands for it rounds otherwise than its own.
            atol = 1e-6 if model_type == "falcon" else 0
            torch.testing.assert_close(cache[name.format(number)], pattern, rtol=0, atol=atol)
            compared.append(name.format(number))
    assert sorted(compared) == sorted(names)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral", "qwen2", "opt", "gpt_neox"])
def test_scores_are_queries_times_keys_and_patterns_their_softmax(model_type: str) -> None:
    model = of(model_type)
    with torch.no_grad():
        _, cache = model.run_with_cache(
            **tiny.inputs(model.module),  # type: ignore[arg-type]
            names_filter=re.compile(r"blocks\.1\.attn\.hook_"),
        )
    q, k = (  # where nothing turns them, the kernel gets what was projected
        cache[f"blocks.1.attn.hook_{'rot_' * (f'blocks.1.attn.hook_rot_{role}' in cache)}{role}"]
        for role in "qk"
    )
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    scores = scores if model_type == "opt" else scores / 8**0.5  # OPT scales its queries
    seen_scores = cache["blocks.1.attn.hook_attn_scores"]
    positions = torch.arange(7)
    reach = 4 if model_type == "mistral" else 7  # its window
    distance = positions[:, None] - positions
    looks = (distance >= 0) & (distance < reach)
    torch.testing.assert_close(seen_scores[..., looks], scores[..., looks], rtol=1e-5, atol=1e-5)
    assert (seen_scores[..., ~looks] < -1e30).all()
    pattern = cache["blocks.1.attn.hook_pattern"]
    assert torch.equal(pattern, seen_scores.softmax(-1))
    assert (pattern[..., ~looks] == 0).all()


def test_rotary_queries_are_projected_ones_turned_by_position() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = of("llama")
    _, cache = kept("llama")
    module: Any = model.module
    x = cache["blocks.1.hook_resid_pre"]
    cos, sin = module.model.rotary_emb(x, torch.arange(7)[None])
    q, k = (cache[f"blocks.1.attn.hook_{role}"].transpose(1, 2) for role in "qk")
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    assert torch.equal(cache["blocks.1.attn.hook_rot_q"], q.transpose(1, 2))
    assert torch.equal(cache["blocks.1.attn.hook_rot_k"], k.transpose(1, 2))


# Parts whose role is not in doubt, by transformers' own names.
ROLES: dict[str, dict[str, str]] = {
    "jamba": {"blocks.1.hook_mixer_out": "model.layers.1.mamba"},
    "qwen3_next": {
        "blocks.0.hook_mixer_out": "model.layers.0.linear_attn",
        "blocks.0.hook_mlp_out": "model.layers.0.mlp",
    },
    "nemotron_h": {"blocks.0.hook_mixer_out": "model.layers.0.mixer"},
    "rwkv": {
        "blocks.1.hook_mixer_out": "rwkv.blocks.1.attention",
        "blocks.1.hook_mlp_out": "rwkv.blocks.1.feed_forward",
        "blocks.0.hook_mlp_out": "rwkv.blocks.0.feed_forward",
    },
    "minimax": {
        "blocks.1.hook_mlp_out": "model.layers.1.mlp",
        "blocks.0.hook_resid_mid": "model.layers.0.post_attention_layernorm",
    },
    "cohere": {
        "blocks.0.hook_attn_out": "model.layers.0.self_attn",
        "blocks.0.hook_mlp_out": "model.layers.0.mlp",
    },
}
MISTAKEN: dict[str, dict[str, str]] = {
    "albert": {
        "blocks.0.hook_mlp_out": "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn_output"
    },
    "cpmant": {
        "blocks.0.hook_attn_out": "cpmant.encoder.layers.0.self_att.self_attention.attention_out"
    },
}


def assert_made_by(model_type: str, name: str, path: str) -> None:
    model = of(model_type)
    site = model.tree.site(name)
    value = cached(model_type, [name]).calls(name)[0]
    assert site.module is model.module.get_submodule(path) or torch.equal(
        value, seen(model_type).value(path, made(""))
    ), f"{name} is {site.module}"


@pytest.mark.parametrize("model_type", ROLES)
def test_sites_are_named_by_what_their_part_is(model_type: str) -> None:
    for name, path in ROLES[model_type].items():
        assert_made_by(model_type, name, path)


@pytest.mark.xfail(strict=True, reason="discovery takes one part of the block for another")
@pytest.mark.parametrize(
    ("model_type", "name"), [(each, name) for each in MISTAKEN for name in MISTAKEN[each]]
)
def test_parts_that_are_easily_mistaken_have_the_right_name(model_type: str, name: str) -> None:
    assert_made_by(model_type, name, MISTAKEN[model_type][name])


# type -> heads and sizes of queries, keys and values, from its config.
SIZES = {
    "qwen3_next": ("blocks.1", (4, 8), (2, 8), (2, 8)),  # queries and a gate in one projection
    "phi3": ("blocks.0", (4, 8), (2, 8), (2, 8)),
    "gpt_oss": ("blocks.0", (4, 8), (2, 8), (2, 8)),
    "codegen": ("blocks.0", (4, 8), (4, 8), (4, 8)),
    "deepseek_v3": ("blocks.0", (4, 16), (4, 8), (4, 8)),
    "diffllama": ("blocks.0", (4, 8), (2, 8), (2, 8)),
    "axk2": ("blocks.0", (4, 16), (4, 8), (4, 8)),
}
TOO_FEW = {
    "diffllama": "each of its two kernel calls gets half of the values; the first one's are found",
}


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(t, marks=pytest.mark.xfail(strict=True, reason=TOO_FEW[t]))
        if t in TOO_FEW
        else t
        for t in SIZES
    ],
)
def test_no_head_and_no_column_is_left_out(model_type: str) -> None:
    at, *sizes = SIZES[model_type]
    names = [f"{at}.attn.hook_{role}" for role in "qkv"]
    cache = cached(model_type, names)
    assert [tuple(cache[name].shape[-2:]) for name in names] == sizes


# Names.

BRIDGE = {
    "blocks.1.hook_in": "blocks.1.hook_resid_pre",
    "blocks.1.hook_out": "blocks.1.hook_resid_post",
    "blocks.1.ln1.hook_in": "blocks.1.hook_attn_in",
    "blocks.1.ln1.hook_out": "blocks.1.ln1.hook_normalized",
    "blocks.1.ln2.hook_in": "blocks.1.hook_resid_mid",
    "blocks.1.ln2.hook_out": "blocks.1.ln2.hook_normalized",
    "blocks.1.attn.q.hook_out": "blocks.1.attn.hook_q",
    "blocks.1.attn.k.hook_out": "blocks.1.attn.hook_k",
    "blocks.1.attn.v.hook_out": "blocks.1.attn.hook_v",
    "blocks.1.attn.o.hook_in": "blocks.1.attn.hook_z",
    "blocks.1.attn.o.hook_out": "blocks.1.attn.hook_out",
    "blocks.1.attn.hook_attention_weights": "blocks.1.attn.hook_pattern",
    "blocks.1.mlp.hook_out": "blocks.1.hook_mlp_out",
    "blocks.1.mlp.gate.hook_out": "blocks.1.mlp.hook_pre",
    "blocks.1.mlp.in.hook_out": "blocks.1.mlp.hook_pre_linear",
    "blocks.1.mlp.out.hook_in": "blocks.1.mlp.hook_post",
    "embed.hook_out": "hook_embed",
    "ln_final.hook_out": "ln_final.hook_normalized",
}
SHORT = {
    ("resid_pre", 1): "blocks.1.hook_resid_pre",
    ("resid_mid", 0): "blocks.0.hook_resid_mid",
    ("resid_post", -1): "blocks.1.hook_resid_post",
    ("resid_post", -2): "blocks.0.hook_resid_post",
    ("hook_resid_post", 1): "blocks.1.hook_resid_post",
    ("attn_out", 1): "blocks.1.hook_attn_out",
    ("mlp_out", 1): "blocks.1.hook_mlp_out",
    ("q", 1): "blocks.1.attn.hook_q",
    ("k", 1, "attn"): "blocks.1.attn.hook_k",
    ("v", -1, "a"): "blocks.1.attn.hook_v",
    ("z", 0): "blocks.0.attn.hook_z",
    ("result", 0): "blocks.0.attn.hook_result",
    ("pattern", 1): "blocks.1.attn.hook_pattern",
    ("attn", 1): "blocks.1.attn.hook_pattern",
    ("attn_scores", 1): "blocks.1.attn.hook_attn_scores",
    ("attn_logits", 1): "blocks.1.attn.hook_attn_scores",
    ("pre", 1): "blocks.1.mlp.hook_pre",
    ("mlp_post", 1): "blocks.1.mlp.hook_post",
    ("post", 1, "mlp"): "blocks.1.mlp.hook_post",
    ("post", 1, "m"): "blocks.1.mlp.hook_post",
    ("normalized", 1): "blocks.1.ln1.hook_normalized",
    ("normalized", 1, "ln2"): "blocks.1.ln2.hook_normalized",
    ("scale", -1, "ln2"): "blocks.1.ln2.hook_scale",
    ("scale", None): "ln_final.hook_scale",
    ("embed", None): "hook_embed",
    ("lm.layer.pre", 1): "blocks.1.hook_resid_pre",
    ("lm.layer.post", 1): "blocks.1.hook_resid_post",
    ("lm.layer.post", -2): "blocks.0.hook_resid_post",
    ("lm.attn.out", 1): "blocks.1.hook_attn_out",
    ("lm.attn.pattern", 1): "blocks.1.attn.hook_pattern",
    ("lm.mlp.out", 1): "blocks.1.hook_mlp_out",
}
SPECTRA = {
    "lm.blocks.1.hook_resid_post": "blocks.1.hook_resid_post",
    "lm.blocks.-1.attn.hook_z": "blocks.1.attn.hook_z",
    "blocks.-2.hook_resid_pre": "blocks.0.hook_resid_pre",
    "lm.hook_embed": "hook_embed",
}
ALIASES: dict[Any, str] = {**BRIDGE, **SHORT, **SPECTRA}
RAW = {
    "model.layers.1": "blocks.1.hook_resid_post",
    "model.layers.1.input.hidden_states": "blocks.1.hook_resid_pre",
    "model.layers.1.input_layernorm": "blocks.1.ln1.hook_normalized",
    "model.layers.1.input_layernorm.input": "blocks.1.hook_attn_in",
    "model.layers.1.self_attn.output[0]": "blocks.1.hook_attn_out",
    "model.layers.1.self_attn": "blocks.1.hook_attn_out",
    "model.layers.1.mlp": "blocks.1.hook_mlp_out",
    "model.layers.1.mlp.down_proj.input": "blocks.1.mlp.hook_post",
    "model.layers.1.self_attn.o_proj": "blocks.1.attn.hook_out",
    "model.embed_tokens": "hook_embed",
    "model.norm": "ln_final.hook_normalized",
    "lm_head": "unembed.hook_out",
    "lm_head.input": "unembed.hook_in",
}


def cached(model_type: str, names: Any, **options: Any) -> Any:
    model = of(model_type)
    with torch.no_grad():
        _, cache = model.run_with_cache(
            **tiny.inputs(model.module),  # type: ignore[arg-type]
            names_filter=names,
            **options,
        )
    return cache


def name_of(alias: Any) -> str:
    """What a cache is indexed with after an alias was asked for."""
    return alias if isinstance(alias, str) else ALIASES[alias]


@pytest.mark.parametrize(("alias", "canonical"), ALIASES.items(), ids=str)
def test_every_spelling_means_the_same_site_and_value(alias: Any, canonical: str) -> None:
    assert of("llama").tree.spelling(alias) == canonical
    cache = cached("llama", [alias])
    assert list(cache) == [name_of(alias)]
    both = cached("llama", [canonical])
    assert alias in both
    assert canonical in cache
    assert torch.equal(cache[name_of(alias)], both[alias])
    assert torch.equal(cache[canonical], both[canonical])


@pytest.mark.parametrize(("path", "canonical"), RAW.items())
def test_a_raw_path_has_the_value_of_its_site(path: str, canonical: str) -> None:
    cache = cached("llama", [path, canonical])
    assert list(cache) == [path, canonical] or list(cache) == [canonical, path]
    assert torch.equal(cache[path], cache[canonical])


def raw_names(model_type: str) -> Iterator[tuple[str, str]]:
    """Sites with a raw path that discovery found for them."""
    for name, site in of(model_type).tree.table.sites.items():
        if site.kind not in EXPLICIT:
            yield from ((name, path) for path in site.aliases)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bloom", "bert", "t5"])
def test_what_a_cache_kept_by_meaning_is_there_by_raw_path(model_type: str) -> None:
    _, cache = kept(model_type)
    found = list(raw_names(model_type))
    assert len(found) > 20
    for name, path in found:
        assert path in cache, (name, path)
        assert torch.equal(cache[path], cache[name]), (name, path)


def test_what_a_cache_kept_by_raw_path_is_there_by_meaning() -> None:
    assert "blocks.1.hook_mlp_out" in cached("llama", "model.layers.1.mlp")


def test_raw_paths_of_sites_can_be_asked_by() -> None:
    model = of("llama")
    for name, path in raw_names("llama"):
        found, site = model.tree.site(path), model.tree.site(name)
        assert (found.module, found.tail.port) == (site.module, site.tail.port), name


def test_the_aliases_that_a_site_shows_can_be_asked_by() -> None:
    model = of("llama")
    shown = [path for site in model.sites.values() for path in site.aliases]
    assert "model.layers.1.mlp" in shown
    assert all(model.tree.leads_somewhere(path) for path in shown)


def test_every_alias_can_be_hooked_and_a_string_is_the_hooks_name() -> None:
    model = of("llama")
    # Scores and patterns run eager attention, whose modules return more than one tensor.
    asked = [*ALIASES, *(path for path in RAW if path != "model.layers.1.self_attn")]
    heard: list[tuple[str, str]] = []

    def hear(value: Tensor, hook: Any) -> None:
        heard.append((hook.name, hook.canonical))

    with torch.no_grad():
        model.run_with_hooks(**tiny.inputs(model.module), fwd_hooks=[(a, hear) for a in asked])  # type: ignore[arg-type]
    expected = [(name_of(alias), canonical) for alias, canonical in ALIASES.items()]
    semantic = [pair for pair in heard if pair[0] not in RAW]
    assert sorted(semantic) == sorted(expected)
    assert {name for name, _ in heard} >= set(asked) & set(RAW)


def test_looking_at_patterns_changes_no_other_modules_output() -> None:
    cached("llama", ["model.layers.1.self_attn", "blocks.1.attn.hook_pattern"])


def test_a_filters_hook_has_the_canonical_name() -> None:
    model = of("llama")
    filters = [
        re.compile(r"attn\.hook_z$"),
        lambda name: name.endswith("attn.hook_z"),
        "blocks.*.attn.hook_z",
        "blocks.*.attn.o.hook_in",
        "**.hook_z",
        "z",
    ]
    for wanted in filters:
        heard: list[str] = []
        with torch.no_grad():
            model.run_with_hooks(
                **tiny.inputs(model.module),  # type: ignore[arg-type]
                fwd_hooks=[(wanted, lambda value, hook: heard.append(hook.name))],  # noqa: B023
            )
        assert heard == ["blocks.0.attn.hook_z", "blocks.1.attn.hook_z"]


def test_views_of_one_site_share_their_scratch_space() -> None:
    points = of("llama").hook_dict
    points["blocks.1.attn.hook_q"].ctx["seen"] = 1
    try:
        assert points["blocks.1.attn.q.hook_out"].ctx == {"seen": 1}
        assert points["lm.blocks.-1.attn.hook_q"].ctx == {"seen": 1}
        assert points["blocks.0.attn.hook_q"].ctx == {}
    finally:
        points["blocks.1.attn.hook_q"].clear_context()


def test_none_keeps_the_primary_sites_and_no_large_ones() -> None:
    model = of("llama")
    cache = cached("llama", None)
    assert set(cache) == {name for name, site in model.sites.items() if site.primary}
    for kind in ("result", "q_input", "k_input", "v_input", "attn_in", "mlp_in", "out"):
        assert not any(name.endswith(f"hook_{kind}") for name in cache), kind
    mixture = cached("mixtral", None)
    assert "blocks.0.mlp.hook_experts_out" not in mixture
    assert "blocks.0.mlp.hook_expert_weights" in mixture
    assert "blocks.0.mlp.hook_experts_out" in cached("mixtral", "blocks.*.mlp.hook_experts_out")


def test_a_callable_is_asked_once_for_each_canonical_name() -> None:
    asked: list[str] = []

    def wanted(name: str) -> bool:
        asked.append(name)
        return name == "blocks.0.attn.hook_q"

    assert list(cached("llama", wanted)) == ["blocks.0.attn.hook_q"]
    assert asked == list(of("llama").sites)
    assert len(asked) == len(set(asked))


def test_regexes_search_and_globs_match_whole_names() -> None:
    assert list(cached("llama", re.compile("1.*hook_z"))) == ["blocks.1.attn.hook_z"]
    both = ["blocks.0.attn.hook_z", "blocks.1.attn.hook_z"]
    assert list(cached("llama", "blocks.*.attn.hook_z")) == both
    assert list(cached("llama", "**.hook_z")) == both
    assert list(cached("llama", "blocks.**.hook_z")) == both
    assert list(cached("llama", "lm.blocks.*.attn.hook_z")) == both
    for wrong in ("*.hook_z", "blocks.*.hook_z", "blocks.*.attn.hook"):
        with pytest.raises(NothingMatched):
            cached("llama", wrong)
    outputs = cached("llama", re.compile("hook_result"))
    assert list(outputs) == [name.replace("_z", "_result") for name in both]


def test_globs_reach_raw_paths_and_filters_do_not() -> None:
    cache = cached("llama", "model.layers.*.mlp")
    assert list(cache) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert torch.equal(
        cache["model.layers.1.mlp"],
        cached("llama", "blocks.1.hook_mlp_out")["blocks.1.hook_mlp_out"],
    )
    for wanted in (re.compile(r"^model\."), lambda name: name.startswith("model.")):
        with pytest.raises(NothingMatched):
            cached("llama", wanted)


def test_lists_take_everything_and_have_one_key_for_each_name() -> None:
    cache = cached(
        "llama",
        [
            "blocks.1.attn.hook_q",
            "blocks.1.attn.q.hook_out",
            ("q", 1),
            ("z", -1),
            "blocks.*.hook_resid_post",
            re.compile("embed"),
            "model.norm",
        ],
    )
    assert set(cache) == {
        "hook_embed",
        "blocks.0.hook_resid_post",
        "blocks.1.attn.hook_q",
        "blocks.1.attn.q.hook_out",
        "blocks.1.attn.hook_z",
        "blocks.1.hook_resid_post",
        "model.norm",
        "unembed.hook_in",
        "unembed.hook_out",
    }
    assert torch.equal(cache["blocks.1.attn.hook_q"], cache["blocks.1.attn.q.hook_out"])


def test_names_of_one_site_share_one_copy() -> None:
    cache = cached("llama", ["blocks.1.attn.hook_q", "blocks.1.attn.q.hook_out"])
    assert cache["blocks.1.attn.hook_q"] is cache["blocks.1.attn.q.hook_out"]


def test_towers_have_names_of_their_own() -> None:
    model = of("t5")
    assert {name.split(".")[0] for name in model.sites} == {"encoder", "decoder", "unembed"}
    cache = cached("t5", ["encoder.blocks.-1.hook_out", "decoder.blocks.0.attn.q.hook_out"])
    assert "encoder.blocks.1.hook_resid_post" in cache
    assert "decoder.blocks.0.attn.hook_q" in cache


def test_a_cache_accepts_gradients_by_any_alias() -> None:
    model = of("llama")
    cache = model.run_with_cache(
        **tiny.inputs(model.module),  # type: ignore[arg-type]
        names_filter="blocks.1.attn.hook_q",
        incl_bwd=lambda output: output.logits.square().sum(),
    )[1]
    grad = cache["blocks.1.attn.hook_q_grad"]
    assert cache.grad["blocks.1.attn.q.hook_out"] is grad
    assert cache.grad[("q", -1)] is grad  # type: ignore[index]
    assert cache["lm.blocks.1.attn.hook_q_grad"] is grad


# Errors.


def text_of(kind: type[Exception], model_type: str, name: Any) -> str:
    with pytest.raises(kind) as caught:
        cached(model_type, name)
    return str(caught.value)


BLOCK_1 = (
    "hook_resid_pre, hook_attn_in, hook_mlp_in, hook_attn_out, hook_resid_mid, hook_mlp_out, "
    "hook_resid_post, attn, hook_q_input, hook_k_input, hook_v_input, mlp, ... (14)"
)


def test_a_misspelt_segment_says_what_is_there() -> None:
    assert text_of(SiteNotFound, "llama", "blocks.1.atn.hook_z") == (
        "no site 'blocks.1.atn.hook_z' in LlamaForCausalLM.\n"
        f"  'blocks.1' has: {BLOCK_1}\n"
        "  did you mean 'blocks.1.attn.hook_z'?   (list them: model.sites)"
    )
    assert text_of(SiteNotFound, "llama", "blocks.1.attn.hook_zz") == (
        "no site 'blocks.1.attn.hook_zz' in LlamaForCausalLM.\n"
        "  'blocks.1.attn' has: hook_q, hook_k, hook_v, hook_rot_q, hook_rot_k, hook_attn_scores, "
        "hook_pattern, hook_in, hook_z, hook_out, hook_result\n"
        "  did you mean 'blocks.1.attn.hook_z'?   (list them: model.sites)"
    )
    assert text_of(SiteNotFound, "llama", ("rsid_post", 1)) == (
        "no site 'blocks.1.hook_rsid_post' in LlamaForCausalLM.\n"
        f"  'blocks.1' has: {BLOCK_1}\n"
        "  did you mean 'blocks.1.hook_resid_post'?   (list them: model.sites)"
    )


PARALLEL = "attention and MLP are added to the stream at once (a parallel block)"
MIXTURE = "this layer is a mixture of experts, each with neurons of its own"
ABSENT = [
    ("gpt_neox", "blocks.1.hook_resid_mid", "GPTNeoXForCausalLM", PARALLEL),
    ("falcon", ("resid_mid", 0), "FalconForCausalLM", PARALLEL),
    ("mixtral", "blocks.0.mlp.hook_pre", "MixtralForCausalLM", MIXTURE),
    ("gpt2", ("pre_linear", 1), "GPT2LMHeadModel", "this MLP has no gate"),
    (
        "bloom",
        "blocks.0.attn.hook_rot_q",
        "BloomForCausalLM",
        "its scores are multiplied out without an attention kernel",
    ),
    (
        "llama",
        "hook_pos_embed",
        "LlamaForCausalLM",
        "positions are not embedded by a module of their own",
    ),
    (
        "deepseek_v3",
        ("k_input", 0),
        "DeepseekV3ForCausalLM",
        "the projection that makes its keys does not read the stream itself",
    ),
]


@pytest.mark.parametrize(("model_type", "name", "label", "reason"), ABSENT, ids=str)
def test_an_absent_site_gives_its_reason(
    model_type: str, name: Any, label: str, reason: str
) -> None:
    spelled = of(model_type).tree.spelling(name)
    assert text_of(SiteNotFound, model_type, name) == f"{label} has no {spelled!r}: {reason}."
    assert of(model_type).sites.absent[spelled] == reason


def test_a_kind_without_a_layer_must_say_which() -> None:
    with pytest.raises(AmbiguousSite) as caught:
        of("llama").hook_dict["z"]
    assert str(caught.value) == (
        "'z' is in every block; say which: ('z', 5), or for all of them 'blocks.*.attn.hook_z'."
    )


def test_a_layer_out_of_range_says_how_many_there_are() -> None:
    for name in ("blocks.7.hook_resid_pre", ("resid_pre", 7)):
        assert text_of(SiteNotFound, "llama", name) == (
            "no site 'blocks.7.hook_resid_pre' in LlamaForCausalLM.\n"
            "  'blocks' has: 2 entries (0..1)\n"
            "  did you mean 'blocks.1.hook_resid_pre'?   (list them: model.sites)"
        )
    assert text_of(SiteNotFound, "t5", "decoder.blocks.2.cross_attn.hook_z") == (
        "no site 'decoder.blocks.2.cross_attn.hook_z' in T5ForConditionalGeneration.\n"
        "  'decoder.blocks' has: 2 entries (0..1)\n"
        "  did you mean 'decoder.blocks.1.cross_attn.hook_z'?   (list them: model.sites)"
    )


@pytest.mark.parametrize("name", ["blocks.-3.hook_resid_pre", ("resid_pre", -3)], ids=str)
def test_a_layer_too_far_from_the_end_is_an_error(name: Any) -> None:
    text_of(SiteNotFound, "llama", name)


def test_a_cache_without_a_short_form_says_so() -> None:
    cache = cached("llama", "blocks.1.attn.hook_q")
    assert ("z", 1) not in cache
    with pytest.raises(SiteNotFound, match="is not in this cache"):
        cache[("z", 1)]


def test_half_a_name_says_what_it_has() -> None:
    text = text_of(SiteNotFound, "llama", "blocks.1.attn")
    assert "'blocks.1.attn' has: hook_q, hook_k, hook_v" in text


def test_a_misspelt_raw_path_gets_a_raw_suggestion() -> None:
    assert "'model.layers.0.mlp'" in text_of(SiteNotFound, "llama", "model.layers.0.mpl")


def test_a_filter_that_matches_nothing_is_an_error() -> None:
    some = ", ".join(list(of("llama").sites)[1:6])
    assert text_of(NothingMatched, "llama", "blocks.*.hook_zz") == (
        "the glob 'blocks.*.hook_zz' matches no site in LlamaForCausalLM.\n"
        f"  sites are: hook_embed, ln_final.hook_normalized, ln_final.hook_scale, {some}, "
        "... (63 in all)\n"
        "  `*` stays within one dotted segment and `**` spans many.   (list them: model.sites)"
    )


def test_nothing_runs_when_one_of_several_names_is_wrong() -> None:
    model = of("llama")
    ran: list[int] = []
    handle = model.module.register_forward_hook(lambda *_: ran.append(1))
    try:
        with pytest.raises(SiteNotFound):
            cached("llama", ["blocks.1.attn.hook_z", "blocks.1.attn.hook_zz"])
    finally:
        handle.remove()
    assert ran == []


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "gpt_neox"])
def test_a_model_in_64_bits_has_every_site_that_it_has_in_32(kind: str) -> None:
    module = tiny.build(kind)
    wanted = set(ip.wrap(module).sites)
    model = ip.wrap(module.double())
    assert set(model.sites) == wanted
    with torch.no_grad():
        _, cache = model.run_with_cache(tiny.inputs(module)["input_ids"])
    assert cache["resid_pre", 1].dtype == torch.float64
    added = cache["resid_mid", 1] if ("resid_mid", 1) in cache else cache["resid_pre", 1]
    added = added + cache["mlp_out", 1]
    if kind == "gpt_neox":  # attention and MLP side by side
        added = added + cache["attn_out", 1]
    assert (added - cache["resid_post", 1]).abs().max() < 1e-12


@pytest.mark.parametrize(
    "kind", ["gpt2", "bloom"]
)  # attention seen by its interface, by its softmax
def test_a_probe_leaves_no_tensors_behind(kind: str) -> None:
    before = living()  # held, so that no other tensor gets the id of one of them
    model = ip.wrap(tiny.build(kind))
    assert "blocks.1.attn.hook_z" in model.sites
    assert living().keys() - before.keys()
    del model
    assert [tuple(left.shape) for key, left in living().items() if key not in before] == []
