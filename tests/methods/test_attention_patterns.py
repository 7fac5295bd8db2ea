"""Patterns are the model's own eager attention, only in the layers asked for, and the page shows them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.methods.attention_patterns import AttentionPatterns
from tests.leftovers import same_state, state_of
from tests.models import tiny
from tests.pages import loads_nothing

TYPES = ["gpt2", "llama", "gemma2", "gpt_neox", "granite"]
PROMPT = "When Mary and John went to the store, John gave a drink to"
TOKENS = torch.randint(10, 60, (1, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def pocket() -> Any:
    return ip.load("pocket").requires_grad_(False)


@pytest.fixture(scope="module")
def patterns(pocket: Any) -> AttentionPatterns:
    return ip.attention_patterns(pocket, PROMPT)


def own_attention(module: Any, tokens: Tensor) -> Tensor:
    """What transformers returns with eager attention: [layer, head, query, key]."""
    kernel = module.config._attn_implementation
    module.set_attn_implementation("eager")
    with torch.no_grad():
        output = module(tokens, output_attentions=True)
    module.set_attn_implementation(kernel)
    return torch.stack(output.attentions)[:, 0]


@pytest.mark.parametrize("name", TYPES)
def test_values_are_the_models_own_eager_attention(name: str) -> None:
    module = tiny.build(name)
    before = state_of(module)
    found = ip.attention_patterns(ip.wrap(module), TOKENS)
    assert same_state(before, state_of(module))
    assert found.axes == {
        "layer": [0, 1], "head": [0, 1, 2, 3], "query": list(range(9)), "key": list(range(9)),
    }  # fmt: skip
    torch.testing.assert_close(found.values, own_attention(module, TOKENS), rtol=0, atol=1e-6)
    assert found.values.std() > 0.05  # not the same everywhere
    assert (found.values.triu(1) == 0).all()
    torch.testing.assert_close(found.values.sum(-1), torch.ones(2, 4, 9))


def test_only_the_layers_asked_for_leave_the_fused_kernel(
    pocket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ip.attention_patterns(
        pocket, PROMPT
    )  # after it, runs may end with the last layer asked
    fused, plain = 0, torch.nn.functional.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal fused
        fused += 1
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    some = ip.attention_patterns(pocket, PROMPT, layer=[2, 4], head=[5, -2])
    assert fused in (3, 5)  # layers 0, 1, 3, and 5, 6 unless the run ends before them
    assert some.axes["layer"] == [2, 4]
    assert some.axes["head"] == [5, 4]
    torch.testing.assert_close(some.values, whole.values[[2, 4]][:, [5, 4]])
    fused = 0
    ip.attention_patterns(pocket, PROMPT)
    assert fused == 0


def test_one_head_by_number(patterns: AttentionPatterns) -> None:
    one = patterns.head(5, 0)
    assert type(one) is ip.Scores
    assert one.title == "Attention of head 5.0"
    assert torch.equal(one.values, patterns.values[5, 0])
    assert one.labels["key"][1] == "1 ' Mary'"
    assert one.at(query=13, key=1) == pytest.approx(0.998, abs=1e-3)
    assert "13 ' to'" in repr(one)
    with pytest.raises(KeyError, match="no layer 9 among"):
        patterns.head(9, 0)


def test_what_each_query_looks_at_most(patterns: AttentionPatterns) -> None:
    for layer, head in ((5, 0), (3, 4)):
        found = patterns.strongest(layer, head)
        for query, said in enumerate(found):
            row = patterns.values[layer, head, query].tolist()
            assert said["query"] == query
            assert row[said["key"]] == said["value"] == max(row)
    assert patterns.strongest(5, 0)[-1]["looks_at"] == " Mary"


def test_entropy_is_that_of_its_definition(patterns: AttentionPatterns) -> None:
    found = patterns.entropy()
    rows = patterns.values[4, 2].double()
    by_hand = [-(row[row > 0] * row[row > 0].log2()).sum() for row in rows]
    assert found.at(layer=4, head=2) == pytest.approx(float(torch.stack(by_hand).mean()), abs=1e-5)
    assert found.unit == "bits"
    even = AttentionPatterns(
        title="", values=torch.full((1, 1, 2, 4), 0.25), unit="",
        axes={"layer": [0], "head": [0], "query": [0, 1], "key": [0, 1, 2, 3]},
    )  # fmt: skip
    assert even.entropy().values.item() == 2


def test_the_page_has_every_head_and_loads_nothing(patterns: AttentionPatterns, tmp_path: Any) -> None:  # fmt: skip
    page = patterns.save(tmp_path / "patterns.html").read_text()
    loads_nothing(page)
    assert page.count("<details") == page.count("</details>") == 42
    assert all(f">layer {layer}</div>" in page for layer in range(7))
    assert "head 5.0: 13 &#x27; to&#x27; looks at 1 &#x27; Mary&#x27; with 1.00" in page
    assert page.count("data:image/png") == 42 * (
        1 + 14
    )  # one small picture, and one for each query
    assert len(page) < 800_000


def test_long_texts_have_small_pictures_only() -> None:
    values = torch.rand(1, 1, 200, 200)
    places = list(range(200))
    made = AttentionPatterns(
        title="long", values=values, unit="",
        axes={"layer": [3], "head": [1], "query": places, "key": places},
    )  # fmt: skip
    assert "<details" not in made.html()
    assert "head 3.1:" in made.html()


def test_tokens_on_the_page_are_escaped() -> None:
    made = AttentionPatterns(
        title="t", values=torch.eye(2)[None, None], unit="", tokens=["<b>", '"'],
        axes={"layer": [0], "head": [0], "query": [0, 1], "key": [0, 1]},
    )  # fmt: skip
    assert "<b>'" not in made.html()
    assert "0 &#x27;&lt;b&gt;&#x27;" in made.html()


def test_it_prints_a_line_for_each_head_and_is_saved(patterns: AttentionPatterns, pocket: Any) -> None:  # fmt: skip
    some = ip.attention_patterns(pocket, PROMPT, layer=5)
    lines = repr(some).splitlines()
    assert lines[0] == "Attention patterns of 1 layers, 14 tokens"
    assert lines[4].split("  ")[0] == "head"
    assert lines[5].split() == ["5.0", "1", "'", "Mary'", "1.00", "0.90"]
    assert len(repr(patterns).splitlines()) < 42
    again = AttentionPatterns.from_dict(some.to_dict())
    assert torch.equal(again.values, some.values)
    assert repr(again) == repr(some)


def test_tokens_may_be_given_in_any_shape(pocket: Any, patterns: AttentionPatterns) -> None:
    tokens = pocket.to_tokens(PROMPT)
    for given in (tokens, tokens[0], tokens[0].tolist(), tokens.tolist()):
        found = ip.attention_patterns(pocket, given)
        assert torch.equal(found.values, patterns.values)
        assert found.tokens == patterns.tokens


def test_wrong_questions_are_refused(pocket: Any) -> None:
    with pytest.raises(ValueError, match="draws one text; got 2"):
        ip.attention_patterns(pocket, [PROMPT, PROMPT])
    with pytest.raises(IndexError, match="the model has heads 0 to 5"):
        ip.attention_patterns(pocket, PROMPT, head=6)
    with pytest.raises(IndexError, match=r"layer 7 is not there: attention has"):
        ip.attention_patterns(pocket, PROMPT, layer=[7])
    with pytest.raises(ip.NothingMatched):
        ip.attention_patterns(ip.wrap(tiny.build("mamba")), TOKENS)
    pocket.train()
    with pytest.raises(ip.Unsupported, match="training mode"):
        ip.attention_patterns(pocket, PROMPT)
    pocket.eval()


def test_blocks_without_attention_are_left_out() -> None:
    found = ip.attention_patterns(ip.wrap(tiny.build("jamba")), TOKENS)
    assert found.axes["layer"] == [0]
