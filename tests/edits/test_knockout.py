"""Edges cut in attention, against attention written by hand with the edges masked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from tests.edits.models import heads_of, ids, talking, wrapped

KINDS = ["gpt2", "llama"]
TEXTS = ["the cat sat on the mat", "a dog saw the cat and ran"]


def attended(cache: ip.Cache, layer: int, cut: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Pattern and z from queries, keys and values, with edges [batch, head, query, key] cut."""
    q, k, v = (cache[f"blocks.{layer}.attn.hook_{name}"] for name in ("rot_q", "rot_k", "v"))
    q, k, v = (x.movedim(2, 1) for x in (q, k, v))
    groups = cut.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * scale
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~causal | cut, float("-inf"))
    pattern = scores.softmax(-1)
    return pattern, (pattern @ v).movedim(1, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("where", "edges"),
    [
        ({"query": -1, "key": [0, 2]}, lambda b, h, q, k: q == 5 and k in (0, 2)),
        ({"key": 1, "head": [1, 2]}, lambda b, h, q, k: k == 1 and h in (1, 2) and q != 1),
        (
            {"query": slice(3, None), "key": slice(0, 2), "rows": [0, 2]},
            lambda b, h, q, k: q >= 3 and k < 2 and b != 1,
        ),
        (
            {"query": [4, 5], "key": 3, "exclude": {"head": 0, "rows": 1}},
            lambda b, h, q, k: q >= 4 and k == 3 and not (h == 0 and b == 1),
        ),
    ],
)
def test_a_knockout_is_attention_by_hand_without_these_edges(
    kind: str, where: Any, edges: Any
) -> None:
    model = wrapped(kind)
    heads = heads_of(model.module)
    if where == {"key": 1, "head": [1, 2]}:
        where = {**where, "query": [0, 2, 3, 4, 5]}
    names = [f"blocks.1.attn.hook_{n}" for n in ("rot_q", "rot_k", "v", "z", "pattern")]
    with torch.no_grad():
        _, plain = model.run_with_cache(ids(), names_filter=names)
        _, found = model.run_with_cache(ids(), names_filter=names, hooks=[ip.knockout(1, **where)])
    cut = torch.zeros(3, heads, 6, 6, dtype=torch.bool)
    for b, h, q, k in torch.cartesian_prod(*(torch.arange(n) for n in cut.shape)).tolist():
        cut[b, h, q, k] = edges(b, h, q, k)
    scale = (32 // heads) ** -0.5
    pattern, _ = attended(plain, 1, torch.zeros_like(cut), scale)
    assert torch.allclose(pattern, plain[names[-1]], atol=1e-5), (
        "the hand's attention is the model's"
    )
    pattern, z = attended(plain, 1, cut, scale)
    assert (pattern - plain[names[-1]]).abs().max() > 1e-2
    assert torch.allclose(found[names[-1]], pattern, atol=1e-5)
    assert torch.allclose(found[names[3]], z, atol=1e-5)
    assert found[names[-1]][cut].abs().max() == 0


def test_gradients_of_a_knockout_are_finite_and_flow_past_the_edges() -> None:
    model = wrapped("llama")
    for strength in (None, torch.tensor([1.0, 0.5, 0.0], requires_grad=True)):
        edit = ip.knockout("all", query=-1, key=[0, 1], strength=strength)
        _, cache = model.run_with_cache(
            ids(), names_filter="attn_scores", hooks=[edit], incl_bwd=lambda out: out.square().sum()
        )
        for layer in range(3):
            grad = cache.grad["attn_scores", layer]
            assert grad.isfinite().all()
            assert grad.abs().max() > 0
    model.run_with_hooks(ids(), hooks=[edit]).square().sum().backward()
    model.module.zero_grad()
    assert strength.grad.isfinite().all()
    assert strength.grad[1].abs() > 0


def test_a_strength_takes_that_share_of_the_weight() -> None:
    model = wrapped("gpt2")
    name = ("pattern", 1)
    with torch.no_grad():
        _, plain = model.run_with_cache(ids(), names_filter=name)
        edit = ip.knockout(1, query=4, key=[1, 2], strength=torch.tensor([0.0, 0.25, 1.0]))
        _, found = model.run_with_cache(ids(), names_filter=name, hooks=[edit])
    weights = plain[name][:, :, 4].clone()
    weights[1, :, [1, 2]] *= 0.75
    weights[2, :, [1, 2]] = 0
    weights /= weights.sum(-1, keepdim=True)
    assert torch.allclose(found[name][:, :, 4], weights, atol=1e-6)
    with pytest.raises(ValueError, match="a strength above 1 would make weights negative"):
        model.run_with_hooks(ids(), hooks=[ip.knockout(1, query=4, key=1, strength=1.5)])


def test_nobody_is_left_without_a_key_and_nothing_is_cut_for_nothing() -> None:
    model = wrapped("llama")

    def error(edit: ip.Edit) -> str:
        with pytest.raises((ip.InterposeError, ValueError, TypeError)) as caught:
            model.run_with_hooks(ids(), hooks=[edit])
        return str(caught.value)

    assert error(ip.knockout(1, query=3, key=slice(0, 4))) == (
        "knockout(1, query=3, key=slice(0, 4, None)) leaves position 3 (row 0, head 0) of "
        "'blocks.1.attn.hook_attn_scores' with no key to look at. Leave it one: a query sees itself, "
        "unless key=... has it too."
    )
    assert "leaves position 0" in error(ip.knockout(1, key=0))
    assert error(ip.knockout(1, query=[0, 1], key=[3, 4])) == (
        "knockout(1, query=[0, 1], key=[3, 4]): no query that it selects sees a key that it selects at "
        "'blocks.1.attn.hook_attn_scores' (a later position is never seen)."
    )
    assert "cuts edges between queries and keys; 'blocks.1.hook_resid_post' is" in error(
        ip.knockout(1, query=1, key=0, site="resid_post")
    )
    with pytest.raises(TypeError, match="say query"):
        ip.knockout(1, query=1, pos=2, key=0)
    with pytest.raises(TypeError, match="no index"):
        ip.knockout(1, query=1, key=0, at=(0,))


@pytest.mark.parametrize("use_cache", [True, False])
def test_texts_are_hidden_from_what_is_generated(use_cache: bool) -> None:
    model = talking()
    options = {
        "max_new_tokens": 4,
        "do_sample": False,
        "use_cache": use_cache,
        "return_type": "tokens",
    }
    edit = ip.knockout("all", key=" cat", phase="generated")
    with model.record("pattern", hooks=[edit]) as cache:
        tokens = model.generate(TEXTS, **options)
    strings = [model.to_str_tokens(row) for row in tokens]
    places = [row.index(" cat") for row in strings]
    assert places[0] != places[1]
    prompt = tokens.shape[1] - 4
    for layer in range(3):
        pattern = cache["pattern", layer]
        for row, place in enumerate(places):
            assert pattern[row, :, prompt:, place].abs().max() == 0
            assert pattern[row, :, place:prompt, place].min() > 0
    plain = model.generate(TEXTS, **options)
    with torch.no_grad():
        mask = model.prepare(TEXTS, padding_side="left")["attention_mask"]
    assert (mask == 0).any(), "one of the texts is padded"
    assert plain.shape == tokens.shape


def test_padded_rows_stay_finite() -> None:
    model = talking()
    with torch.no_grad():
        given = model.prepare(TEXTS, padding_side="left")
        pad = int(
            (given["attention_mask"][0] == 0).sum() or (given["attention_mask"][1] == 0).sum()
        )
        assert pad > 0
        logits = model.run_with_hooks(
            **given, hooks=[ip.knockout("all", query=-1, key=slice(0, -1))]
        ).logits
        plain = model(**given).logits
    assert logits.isfinite().all()
    text = given["attention_mask"][:, :-1] == 1
    assert torch.allclose(logits[:, :-1][text], plain[:, :-1][text], atol=1e-4)
    assert not torch.allclose(logits[:, -1], plain[:, -1], atol=1e-2)
