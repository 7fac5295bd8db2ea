"""Edge attribution against the gradient of a forward pass in which every edge has a mask."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import interpose as ip
from interpose.dialects.transformer_lens import HookedTransformer, HookedTransformerConfig
from interpose.methods import wiring as wirings
from tests.leftovers import same_state, state_of
from tests.methods.masked_edges import masked_gpt2, masked_run, sites, written
from tests.models import tiny
from tests.pages import loads_nothing

METRIC = ip.metrics.logit_difference(5, 6)
TYPES = ["gpt2", "llama", "gemma2", "gpt_neox", "granite", "olmo2"]


def model_of(name: str) -> Any:
    return ip.wrap(tiny.build(name, layers=2).requires_grad_(False))


def pair(batch: int = 2, length: int = 7) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    clean = torch.randint(10, 60, (batch, length), generator=draw)
    corrupt = clean.clone()
    corrupt[:, 2] = torch.randint(60, 70, (batch,), generator=draw)
    return clean, corrupt


def lead(logits: Tensor) -> Tensor:
    return (logits[:, -1, 5] - logits[:, -1, 6]).mean()


@pytest.mark.parametrize("name", TYPES)
def test_scores_are_the_gradient_of_a_mask_over_all_edges(name: str) -> None:
    model, (clean, corrupt) = model_of(name), pair()
    scores = ip.edge_attribution(model, clean, corrupt, metric=METRIC)
    _, cache = model.run_with_cache(corrupt, names_filter=sites(model))
    other = written(model, {site: cache[site] for site in sites(model)})
    cut = torch.zeros(scores.values.shape, requires_grad=True)
    (expected,) = torch.autograd.grad(
        lead(masked_run(model, clean, cut, other, scores.graph)), [cut]
    )
    possible = scores.graph.possible
    assert expected[possible].abs().max() > 0.05
    assert (expected[possible].abs() > 1e-5).double().mean() > 0.5
    torch.testing.assert_close(scores.values, expected, atol=1e-5, rtol=1e-3)
    assert bool((scores.values[~possible] == 0).all())


def test_scores_of_gpt2_agree_with_one_that_is_written_out() -> None:
    model, (clean, corrupt) = ip.wrap(tiny.build("gpt2", layers=2)), pair()
    scores = ip.edge_attribution(model, clean, corrupt, metric=METRIC)
    with torch.no_grad():
        _, other = masked_gpt2(model.module, corrupt)
    cut = torch.zeros(scores.values.shape, requires_grad=True)
    logits, _ = masked_gpt2(model.module, clean, cut, other)
    torch.testing.assert_close(logits, model(clean), atol=1e-4, rtol=1e-4)
    (expected,) = torch.autograd.grad(lead(logits), [cut])
    assert expected.abs().max() > 0.05
    torch.testing.assert_close(scores.values, expected, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["gptj", "cohere", "falcon", "mixtral"])
def test_an_mlp_that_shares_the_norm_of_attention_and_experts_are_readers_too(name: str) -> None:
    model, (clean, corrupt) = model_of(name), pair()
    scores = ip.edge_attribution(model, clean, corrupt, metric=METRIC)
    nodes = scores.nodes()
    for layer in range(2):
        _, other = model.run_with_cache(corrupt, names_filter=("mlp_out", layer))
        _, run = model.run_with_cache(
            clean, names_filter=("mlp_out", layer), incl_bwd=lambda logits: lead(logits)
        )
        moved = other["mlp_out", layer] - run["mlp_out", layer]
        expected = float((moved * run.grad["mlp_out", layer]).sum())
        assert nodes.at(node=f"m{layer}") == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "output"), [("gpt2", "attn.c_proj"), ("llama", "self_attn.o_proj")]
)
@pytest.mark.parametrize("steps", [1, 3])
def test_nodes_are_attribution_patching_by_raw_hooks(name: str, output: str, steps: int) -> None:
    module = tiny.build(name, layers=2).requires_grad_(False)
    model, (clean, corrupt) = ip.wrap(module), pair()
    places = [p for path, p in module.named_modules() if path.endswith(output)]
    embed = module.get_input_embeddings()

    def run(embeddings: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        kept: list[Tensor] = []
        handles = [
            p.register_forward_pre_hook(lambda _, args: kept.append(args[0])) for p in places
        ]
        number = lead(module(inputs_embeds=embeddings.requires_grad_()).logits)
        for handle in handles:
            handle.remove()
        return [value.detach() for value in kept], list(torch.autograd.grad(number, kept))

    first, last = embed(corrupt).detach(), embed(clean).detach()
    z_corrupt, z_clean = run(first.clone())[0], run(last.clone())[0]
    expected = torch.zeros(2, 4)
    for step in range(1, steps + 1):
        for layer, grad in enumerate(run(first + step / steps * (last - first))[1]):
            product = (z_corrupt[layer] - z_clean[layer]) * grad / steps
            expected[layer] += product.unflatten(-1, (4, -1)).sum((0, 1, 3))
    nodes = ip.edge_attribution(model, clean, corrupt, metric=METRIC, steps=steps).nodes()
    found = [[nodes.at(node=f"a{layer}.h{head}") for head in range(4)] for layer in range(2)]
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=1e-3)


def test_steps_and_texts_in_any_batches_give_the_same() -> None:
    model, (clean, corrupt) = model_of("llama"), pair(batch=3)
    whole = ip.edge_attribution(model, clean, corrupt, metric=METRIC, steps=4, batch_size=99)
    for size in (1, 3, 6):
        part = ip.edge_attribution(model, clean, corrupt, metric=METRIC, steps=4, batch_size=size)
        torch.testing.assert_close(part.values, whole.values, atol=1e-5, rtol=1e-4)
    assert whole.protocol["forwards"] == 2
    assert whole.protocol["backwards"] == 1
    assert part.protocol["forwards"] == 3 * (1 + 1)
    single = [
        ip.edge_attribution(model, a[None], b[None], metric=METRIC, steps=4).values
        for a, b in zip(clean, corrupt)
    ]
    torch.testing.assert_close(torch.stack(single).mean(0), whole.values, atol=1e-5, rtol=1e-4)


def test_many_tokens_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (clean, corrupt) = model_of("gemma2"), pair()
    whole = ip.edge_attribution(model, clean, corrupt, metric=METRIC, steps=2)
    monkeypatch.setattr("interpose.methods.edge_attribution._MOST", 32 * 60 * 3)
    part = ip.edge_attribution(model, clean, corrupt, metric=METRIC, steps=2)
    torch.testing.assert_close(part.values, whole.values, atol=1e-5, rtol=1e-4)


def test_kl_needs_steps_and_compares_with_the_clean_run() -> None:
    model, (clean, corrupt) = model_of("gpt2"), pair()
    with pytest.raises(ValueError, match="its gradient is zero: give steps=5"):
        ip.edge_attribution(model, clean, corrupt, metric=ip.metrics.kl())
    scores = ip.edge_attribution(
        model, clean, corrupt, metric=ip.metrics.kl(), steps=5, batch_size=4
    )
    change = ip.metrics.function(
        lambda logits: (p * (p.log() - logits[:, -1].log_softmax(-1))).sum(-1)
    )
    p = model(clean)[:, -1].softmax(-1)
    expected = ip.edge_attribution(model, clean, corrupt, metric=change, steps=5)
    assert scores.values.abs().max() > 1e-3
    torch.testing.assert_close(scores.values, expected.values, atol=1e-6, rtol=1e-3)


def test_gpt2_small_has_32491_edges() -> None:
    sizes = {"n_layer": 12, "n_head": 12, "n_embd": 24, "vocab_size": 90, "n_positions": 16}
    graph = wirings.wiring(ip.wrap(GPT2LMHeadModel(GPT2Config(**sizes)).eval())).graph
    assert (len(graph.writers), len(graph.readers), len(graph)) == (157, 445, 32491)
    assert int(graph.possible.sum()) == 32491


def test_names_say_layer_head_and_role_and_groups_read_keys_together() -> None:
    graph = wirings.wiring(model_of("llama")).graph
    assert graph.writers[:6] == ("input", "a0.h0", "a0.h1", "a0.h2", "a0.h3", "m0")
    assert graph.readers[2:10] == (
        *("a0.h2.q", "a0.h3.q", "a0.kv0.k", "a0.kv1.k", "a0.kv0.v", "a0.kv1.v"),
        *("m0", "a1.h0.q"),
    )
    assert graph.nodes_of("a1.kv1.v") == ["a1.h2", "a1.h3"]
    assert graph.nodes_of("a1.h3.q") == ["a1.h3"]
    assert graph.nodes_of("m1") == ["m1"]
    parallel = wirings.wiring(model_of("gpt_neox")).graph
    m1, a1 = (parallel.readers.index(name) for name in ("m1", "a1.h0.q"))
    assert parallel.reach[m1] == parallel.reach[a1]


def test_a_norm_that_is_not_as_it_seems_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (clean, corrupt) = ip.wrap(tiny.build("llama", layers=2)), pair()
    true = ip.Stream.norm

    def wrong(stream: ip.Stream, path: str) -> Any:
        norm = true(stream, path)
        return replace(norm, factor=norm.factor * 1.01)

    monkeypatch.setattr(ip.Stream, "norm", wrong)
    with pytest.raises(ip.Unsupported, match=r"do not add up at 'blocks.0.hook_attn_in'"):
        ip.edge_attribution(model, clean, corrupt, metric=METRIC)


def test_models_and_arguments_that_do_not_fit_are_refused() -> None:
    clean, corrupt = pair()
    with pytest.raises(
        ip.Unsupported, match=r"no 'blocks.0.attn.hook_q': this block has no attention"
    ):
        ip.edge_attribution(model_of("mamba2"), clean, corrupt, metric=METRIC)
    with pytest.raises(ip.Unsupported, match="does not read the stream itself"):
        ip.edge_attribution(model_of("deepseek_v3"), clean, corrupt, metric=METRIC)
    model = model_of("gpt2")
    with pytest.raises(
        ValueError, match="steps is 1 or more, the number of gradients to average; got 0"
    ):
        ip.edge_attribution(model, clean, corrupt, metric=METRIC, steps=0)
    with pytest.raises(ValueError, match="give corrupt, as long as clean"):
        ip.edge_attribution(model, clean, None, metric=METRIC)
    with pytest.raises(ValueError, match="has no gradient: ranks jump"):
        ip.edge_attribution(model, clean, corrupt, metric=ip.metrics.rank(5))
    scores = ip.edge_attribution(model, clean, corrupt, metric=METRIC, steps=2)
    assert scores.protocol["score"] == "(corrupt - clean) . mean gradient on the way"
    with torch.no_grad():  # gradients are switched on where they are needed
        again = ip.edge_attribution(model, clean, corrupt, metric=METRIC, steps=2)
    assert torch.equal(again.values, scores.values)


@pytest.mark.parametrize("norm", ["LN", None])
def test_models_built_in_the_transformer_lens_dialect_without_mlps_have_edges(norm: Any) -> None:
    sizes = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_head": 8, "n_ctx": 16, "d_vocab": 100}
    config = HookedTransformerConfig(**sizes, attn_only=True, normalization_type=norm, seed=0)
    model, (clean, corrupt) = HookedTransformer(config).eval(), pair()
    scores = ip.edge_attribution(model, clean, corrupt, metric=METRIC)
    assert scores.values.shape == (9, 25)
    _, other = model.run_with_cache(corrupt, names_filter="blocks.0.attn.hook_z")
    _, run = model.run_with_cache(clean, names_filter="blocks.0.attn.hook_z", incl_bwd=lead)
    site = "blocks.0.attn.hook_z"
    expected = ((other[site] - run[site]) * run.grad[site]).sum((0, 1, 3))
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(scores.values[1:5].sum(1), expected, atol=1e-6, rtol=1e-3)
    curve = ip.faithfulness(
        model, clean, corrupt, metric=METRIC, scores=scores, sizes=[len(scores.graph)]
    )
    assert float(curve.values) == pytest.approx(1, abs=1e-4)


def test_a_model_from_scratch_with_shared_keys_has_edges_to_them() -> None:
    sizes = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_head": 8, "n_ctx": 16, "d_vocab": 100}
    config = HookedTransformerConfig(
        **sizes,
        n_key_value_heads=2,
        act_fn="silu",
        gated_mlp=True,
        normalization_type="RMS",
        seed=0,
    )
    model, (clean, corrupt) = HookedTransformer(config).eval(), pair()
    assert len(model.blocks[1].attn.W_K) == 4  # repeated
    scores = ip.edge_attribution(model, clean, corrupt, metric=METRIC)
    written, read = "blocks.0.hook_mlp_out", "blocks.1.hook_k_input"
    _, other = model.run_with_cache(corrupt, names_filter=written)
    _, run = model.run_with_cache(clean, names_filter=[written, read], incl_bwd=lead)
    moved = (other[written] - run[written])[:, :, None]
    expected = (moved * run.grad[read]).sum((0, 1, 3))
    assert expected.abs().max() > 1e-5
    found = [scores.at(writer="m0", reader=f"a1.kv{group}.k") for group in range(2)]
    assert found == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-8)


@pytest.mark.parametrize("wrong", [False, True])
def test_nothing_is_left_behind(wrong: bool) -> None:
    module = tiny.build("gpt2", layers=2)
    model, (clean, corrupt) = ip.wrap(module), pair()
    model.cfg  # noqa: B018 - the probe
    before = state_of(module)

    def metric(logits: Tensor) -> Tensor:
        return logits[0] if wrong else logits[:, -1, 5]

    if wrong:
        with pytest.raises(ValueError, match="one number for each example"):
            ip.edge_attribution(model, clean, corrupt, metric=metric, steps=2)
    else:
        ip.edge_attribution(model, clean, corrupt, metric=metric, steps=2)
    assert same_state(before, state_of(module))
    assert all(p.requires_grad and p.grad is None for p in module.parameters())


def test_results_are_data_and_pages(tmp_path: Path) -> None:
    model, (clean, corrupt) = model_of("llama"), pair()
    scores = ip.edge_attribution(model, clean, corrupt, metric=METRIC)
    again = ip.EdgeScores.from_dict(json.loads(json.dumps(scores.to_dict())))
    assert torch.equal(again.values, scores.values)
    assert again.graph == scores.graph
    strongest = scores.top(3)[0]
    assert abs(strongest["value"]) == scores.values.abs().max()
    assert scores.at(writer=strongest["writer"], reader=strongest["reader"]) == strongest["value"]
    assert len(scores.top(10**6)) == len(scores.graph)
    page = scores.save(tmp_path / "scores.html").read_text()
    assert strongest["writer"] in page
    loads_nothing(page)
    assert "logits" in scores.svg()
    assert "a0" in repr(scores)


def test_shuffled_scores_are_the_same_numbers_at_other_edges() -> None:
    model, (clean, corrupt) = model_of("gpt2"), pair()
    scores = ip.edge_attribution(model, clean, corrupt, metric=METRIC)
    state = torch.get_rng_state()
    one, two, other = scores.shuffled(), scores.shuffled(), scores.shuffled(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.values, two.values)
    assert not torch.equal(one.values, other.values)
    possible = scores.graph.possible
    assert torch.equal(one.values[possible].sort()[0], scores.values[possible].sort()[0])
    assert not one.values[~possible].any()
